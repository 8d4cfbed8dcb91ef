"""Over a network: every algorithm's numbers are the simulation's, and what goes wrong on the way costs the others nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl import checkpoint
from bayesfl.blocks import flatten
from bayesfl.data import FederatedData
from bayesfl.flower import Deployed, client_app, serve
from tests.cases import CASES, Case
from tests.flower.grid import LocalGrid

OPTIONS: dict[str, Any] = {"rounds": 3, "seed": 3, "dtype": torch.float64}


def grid_of(algorithm: bf.Algorithm, clients: FederatedData, folder: Path, **options: Any) -> LocalGrid:
    """A node for each client, numbered from 100."""

    def data_of(context: Any) -> FederatedData:
        return clients.select([int(context.node_config["client-id"])])

    app = client_app(algorithm, data_of, engine=bf.Engine(workers=1))
    return LocalGrid({100 + client: app for client in range(clients.clients)}, folder, **options)


def deploy(algorithm: bf.Algorithm, clients: FederatedData, folder: Path, grid: LocalGrid | None = None, **options: Any) -> Deployed:
    grid = grid or grid_of(algorithm, clients, folder)
    return serve(grid, algorithm, clients=clients.clients, timeout=5.0, **{**OPTIONS, **options})


def private(deployed: Deployed, folder: Path) -> dict[str, Tensor]:
    """The states of all clients as the server knows them, [J, ...]."""
    rows = []
    for client, base in enumerate(deployed.base.tolist()):
        if base:
            file = folder / f"node-{100 + client}" / deployed.experiment / f"client-{client}" / f"state-{base:06d}.safetensors"
            rows.append(flatten(checkpoint.read_file(file)[1]))
        else:
            rows.append({name: t[None] for name, t in flatten(deployed.start).items()})
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def predictions(deployed: Deployed, folder: Path, client: int) -> dict[str, Tensor]:
    """What a client predicted for its test data."""
    file = folder / f"node-{100 + client}" / deployed.experiment / f"client-{client}" / "predictions.safetensors"
    return checkpoint.read_file(file)[1]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("participation", "train"), [(1.0, None), (0.5, "cohort"), (0.5, "all")])
def test_a_deployment_is_the_simulation(
    case: Case, model: nn.Module, clients: FederatedData, tmp_path: Path, participation: float, train: Any
):
    """Server, private states and predictions, for every algorithm and every way of taking part."""
    algorithm = case(model)
    options = {"participation": participation, "train": train}
    told = bf.simulate(algorithm, clients, evaluate_every=None, progress=False, **OPTIONS, **options)
    found = deploy(algorithm, clients, tmp_path, **options)
    assert_close(flatten(found.server), flatten(told.server), atol=1e-6, rtol=0)
    if told.private:
        assert_close(private(found, tmp_path), flatten(told.private), atol=1e-6, rtol=0)
    expected = told.predict()
    for client in range(clients.clients):
        assert_close(predictions(found, tmp_path, client)["probs"], expected.client(client).probs, atol=1e-6, rtol=0)
    row = found.history.rows[-1]
    assert row["personal_accuracy"] == pytest.approx(expected.summary(clients.test)["accuracy"], abs=1e-12)
