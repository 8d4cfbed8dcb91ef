"""A deployment that begins where another ended is the simulation that does so: known clients with their states, new ones adapted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.trees import flatten
from bayesfl.data import FederatedData
from bayesfl.federation.errors import CheckpointError
from bayesfl.flower import load
from tests.cases import CASES, Case
from tests.flower.made import OPTIONS, deploy, grid_of, private, simulated

LATER: dict[str, Any] = {"rounds": 2, "seed": 9}


@pytest.mark.filterwarnings("ignore:the run before has 5 clients")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_simulation(case: Case, model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Five clients at half participation, so that some never trained; then all seven, of whom two are new."""
    algorithm, few = case(model), clients.select(range(5))
    half: dict[str, Any] = {"participation": 0.5, "rounds": 1, "train": "cohort"}
    told = simulated(algorithm, few, **half)
    found = deploy(algorithm, few, tmp_path, checkpoint=tmp_path / "first", **half)
    later_told = simulated(algorithm, clients, start=told, **LATER)
    for start in (found, tmp_path / "first"):
        later = deploy(algorithm, clients, tmp_path, start=start, **LATER)
        assert_close(flatten(later.server), flatten(later_told.server), atol=1e-6, rtol=0)
        if later_told.private:
            assert_close(private(later, tmp_path), flatten(later_told.private), atol=1e-6, rtol=0)
        assert later.experiment != found.experiment


def test_a_server_that_goes_on_knows_where_it_began(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Stopped after its first round, at which half of the clients trained: the others still begin from the run before."""
    algorithm = bf.algorithms.ditto(model, epochs=1, batch_size=10)
    before = deploy(algorithm, clients, tmp_path, rounds=1)
    told = simulated(algorithm, clients, start=simulated(algorithm, clients, rounds=1), participation=0.4, **LATER)
    options: dict[str, Any] = {"participation": 0.4, "seed": 9, "checkpoint": tmp_path / "server", "start": before}
    deploy(algorithm, clients, tmp_path, rounds=2, on_round=[lambda run: run.round == 1], **options)
    assert load(tmp_path / "server", algorithm).before is not None
    found = deploy(algorithm, clients, tmp_path, rounds=2, **options)
    assert_close(flatten(found.server), flatten(told.server), atol=1e-6, rtol=0)
    assert_close(flatten(found.server), flatten(told.server), atol=1e-6, rtol=0)


def test_a_node_that_lost_its_state_is_left_out(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """It says so, and is not taken for a new client."""
    algorithm = bf.algorithms.ditto(model, epochs=1, batch_size=10)
    before = deploy(algorithm, clients, tmp_path, rounds=1)
    for file in (tmp_path / "node-102" / before.experiment).rglob("state-*.safetensors"):
        file.unlink()
    found = deploy(algorithm, clients, tmp_path, start=before, **{**LATER, "rounds": 1})
    assert found.history["rejected"][-1] == 1
    assert found.base[2] == ""


def test_what_does_not_fit_is_refused(model: nn.Module, clients: FederatedData, tmp_path: Path):
    algorithm = bf.algorithms.fedavg(model, epochs=1)
    before = deploy(algorithm, clients, tmp_path, rounds=1, checkpoint=tmp_path / "first")
    with pytest.raises(TypeError, match=r"start .*Deployed.*got int"):
        deploy(algorithm, clients, tmp_path, start=3)
    with pytest.raises(ValueError, match=r"float64.*dtype="):
        deploy(algorithm, clients, tmp_path, start=before, dtype=torch.float32)
    with pytest.warns(UserWarning, match=r"^seed 3 "):
        deploy(algorithm, clients, tmp_path, start=before, rounds=1)
    wide = bf.algorithms.fedavg(bf.models.mlp(8, hidden=5, outputs=3), epochs=1)
    smooth = bf.algorithms.fedavg(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), epochs=1)
    for other in (wide, smooth):
        for start, what in ((before, "start"), (tmp_path / "first", "first'")):
            with pytest.raises(CheckpointError, match=rf"{what} has the state of another network.* layers\."):
                deploy(other, clients, tmp_path, grid_of(other, clients, tmp_path), start=start, **{**OPTIONS, **LATER})
