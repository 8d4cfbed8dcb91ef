"""What a run warns of before it trains: a model in evaluation mode, a start that read other
inputs.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.base.archive import CheckpointError
from bayesfl.data import FederatedData
from tests.federation.made import run

ONCE: dict[str, Any] = {"rounds": 1, "evaluate_every": None}


class Dropping(nn.Module):
    """Drops by its own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(x, 0.5, self.training))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 3)
    )


def test_a_model_in_evaluation_mode_is_told(clients: FederatedData):
    """As one is that another run gave; parts that are held on purpose beside others in training
    mode are not.
    """
    for model, words in (
        (network(), r"Sequential is in evaluation mode, .*\['1', '3'\]; call model\.train\(\)"),
        (Dropping(), r"Dropping is in evaluation mode, .*\['Dropping'\]"),
    ):
        with pytest.warns(UserWarning, match=f"the model {words}"):
            run(bf.algorithms.fedavg(model.eval()), clients, **ONCE)
    held = network()
    held[1].eval()
    for model in (held, nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3)).eval()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(bf.algorithms.fedavg(model), clients, **ONCE)


def test_new_clients_have_the_same_transform(clients: FederatedData, tmp_path):
    """The rows of others would mean something else to the model; also where the run was loaded
    without its data.
    """
    old, novel = clients.hold_out(2)
    method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=4, outputs=3), epochs=1)
    result = run(method, old.transformed(lambda x: x / 2), **ONCE)
    result.save(tmp_path)
    loaded, plain = bf.load(tmp_path, method), run(method, old, **ONCE)
    other = novel.transformed(lambda x: x / 3)
    for before in (result, loaded):
        before.adapt(novel.transformed(lambda x: x / 2))
    for before, given, words in (
        *(
            (one, novel, r": saved {'name': .*, given None; give .*clients\.transformed")
            for one in (result, loaded)
        ),
        *((one, other, r"\.source: saved \w+, given \w+; give ") for one in (result, loaded)),
        (plain, other, ": saved None, given {.*}; give "),
    ):
        with pytest.raises(ValueError, match=f"^novel has other rows .*, transform{words}"):
            before.adapt(given)


def test_a_start_that_read_other_inputs_is_told(clients: FederatedData, tmp_path):
    """It may be meant; going on is refused."""
    method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=4, outputs=3), epochs=1)
    result = run(method, clients.transformed(lambda x: x / 2), **ONCE)
    result.save(tmp_path)
    for start in (result, tmp_path):
        with pytest.warns(
            UserWarning,
            match=r"another function of inputs than the run in start: transform: saved {.*}, given",
        ):
            run(method, clients, **ONCE, seed=9, start=start)
        with pytest.raises(CheckpointError, match="made on other data: transform"):
            run(method, clients, rounds=2, evaluate_every=None, resume=start)
