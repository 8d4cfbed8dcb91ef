"""What a node does, and whom it refuses."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.predictors import LinearisedLaplace, PooledLaplace
from bayesfl.data import FederatedData
from bayesfl.evaluation.calibration import Temperature
from bayesfl.federation.store import files
from bayesfl.flower import client_app
from bayesfl.flower.post import Refused
from tests.flower.grid import LocalGrid
from tests.flower.made import (
    asked,
    assert_same,
    deploy,
    grid_of,
    method,
    rounds_of,
    simulated,
    spoilt,
    trains,
    tuned,
    waits,
)


def test_an_acknowledgement_is_all_that_leaves(
    model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """A client that trains outside the cohort sends no tensor."""
    algorithm, sent = method("pfedvem", model), []

    def alter(client: int, message: Message, reply: Message) -> Message:
        if trains(message):
            told = tuple(sorted(reply.content)), tuple(reply.content["metrics"])
            sent.append((asked(message, "sends"), *told))
        return reply

    deploy(algorithm, clients, tmp_path, alter=alter, participation=0.5)
    assert set(sent) == {
        (True, ("config", "metrics", "up"), ("train_nll",)),
        (False, ("config", "metrics"), ()),
    }


def test_a_node_that_became_another_client(
    fedavg: bf.Algorithm, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Two nodes change places in mid-run: their replies are not taken for each other's."""
    grid = grid_of(fedavg, clients, tmp_path)

    def swap(reply: Message) -> Message:
        grid.ids = {100: 1, 101: 0}
        return reply

    grid.alter = spoilt(6, swap, round=0)
    found = deploy(fedavg, clients, tmp_path, grid)
    assert found.history["rejected"].tolist() == [0.0, 2.0, 2.0]
    assert re.search(r"client 0, .*client 1\b", caplog.text)


def test_no_order_is_for_another(tmp_path: Path):
    """Training, tuning, predicting: a node does what it is asked as the client that it is."""
    algorithm, clients = tuned()
    grid = grid_of(algorithm, clients, tmp_path)
    deploy(algorithm, clients, tmp_path, grid, rounds=1)
    orders = {
        message.metadata.message_type: message
        for message in grid.sent
        if message.metadata.dst_node_id == 100
    }
    assert orders.pop("query")
    assert orders.keys() == {"train", "evaluate", "query.survey"}
    for order in orders.values():
        with pytest.raises(Refused, match=r"client 0\b.*client 1\b.*client-id"):
            grid.apps[101](order, grid.context(101))


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({"epochs": 7}, {"epochs": 8}, "fedavg.epochs is 7 here and 8 there"),
        ({"epochs": 7}, {}, "fedavg.epochs is 7 here and its default there"),
        (
            {"predictor": PooledLaplace("diagonal", precision=1.0)},
            {"predictor": LinearisedLaplace()},
            "composed by hand.predictor.class is PooledLaplace here and LinearisedLaplace there",
        ),
        (
            {"calibration": [Temperature(split="test")]},
            {"calibration": [Temperature()]},
            "calibration[0].split is test here and its default there",
        ),
        (
            {"calibration": []},
            {"calibration": [Temperature()]},
            "calibration is [] here and [{'class': 'Temperature'}] there",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Temperature is fitted to", "ignore:clients predict with")
def test_another_method_is_refused(
    here: Any,
    there: Any,
    said: str,
    model: nn.Module,
    clients: FederatedData,
    tmp_path: Path,
    monkeypatch: Any,
    caplog: Any,
):
    """A client with other options than the server says so before anything is trained."""

    def made(predictor: Any = None, calibration: Any = (), **options: Any) -> dict[str, Any]:
        plain = bf.algorithms.fedavg(model, **options)
        algorithm = plain if predictor is None else replace(plain, predictor=predictor)
        return {"algorithm": algorithm, "calibration": calibration}

    grid = grid_of(**made(**here), clients=clients, folder=tmp_path)
    waits(grid, monkeypatch, **made(**there), clients=clients.clients, rounds=1)
    assert "runs another method" in caplog.text
    assert f"{said}: use the same app" in caplog.text
    assert not any(map(trains, grid.sent))


def test_a_client_that_lost_its_state_says_so(
    ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path, caplog: Any
):
    """It cannot go on from another one; the others do."""

    def emptied(reply: Message) -> Message:
        for file in tmp_path.rglob("client-1/state-*"):
            file.unlink()
        return reply

    found = deploy(ditto, clients, tmp_path, alter=spoilt(1, emptied, round=0))
    assert re.search(r"client 1 .*left out.*error 2", caplog.text)
    assert (
        f"has no state 000001-{found.sessions[0]}; restore the folder, or start another "
        "experiment" in caplog.text
    )
    assert rounds_of(found.base) == [3, 1, 3, 3, 3, 3, 3]
    assert found.history["cohort"].tolist() == [7.0, 6.0, 6.0]


def test_load_data_returns_one_client(
    fedavg: bf.Algorithm, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: Any
):
    """All of them would be somebody else's data."""
    grid = LocalGrid({100: client_app(fedavg, lambda context: clients)}, tmp_path)
    waits(grid, monkeypatch, algorithm=fedavg, clients=1, rounds=1)
    assert re.search(r"load_data .*got 7; data\.select\(\[0\]\)", caplog.text)


class Captions(nn.Module):
    """The body of a network of pictures and words."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.read = nn.Linear(4, 5), nn.Embedding(6, 5)

    def forward(self, picture: Tensor, words: Tensor) -> Tensor:
        return torch.tanh(self.look(picture.flatten(1)) + self.read(words).mean(1))


def scaled(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**x, "picture": x["picture"] / 255}


def mirrored(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        **x,
        "picture": torch.where(
            torch.rand(len(x["picture"]), 1, 1) < 0.5, x["picture"].flip(2), x["picture"]
        ),
    }


def test_nodes_with_several_inputs(tmp_path: Path):
    """Transformed and augmented: states and predictions are the simulation's, also of the model
    that a node has kept.
    """
    rng = np.random.default_rng(0)
    x = {
        "picture": rng.integers(0, 256, (60, 2, 2), dtype=np.uint8),
        "words": rng.integers(0, 6, (60, 3)),
    }
    data = (
        bf.data.from_arrays(x, x["words"][:, 0] % 3, client_ids=[0, 1, 2] * 20)
        .transformed(scaled)
        .augmented(mirrored)
    )
    torch.manual_seed(0)
    algorithm = method("pfedvem", bf.models.SplitModel(Captions(), nn.Linear(5, 3)))
    found, sim = deploy(algorithm, data, tmp_path, rounds=1), simulated(algorithm, data, rounds=1)
    assert_same(found, tmp_path, sim)
    (file,) = tmp_path.glob("node-101/*/client-1/predictions.safetensors")
    wanted = sim.predict().client(1).probs
    assert_close(
        files.read_file(file, files.NODE)["predictions"]["probs"], wanted, atol=1e-6, rtol=0
    )
    kept = bf.load_client(file.parent, algorithm, transform=scaled)
    assert isinstance(data.test.x, dict)
    own = {name: t[data.test.rows(1)].numpy() for name, t in data.test.x.items()}
    assert_close(kept.predict(own).probs, wanted, atol=1e-6, rtol=0)
