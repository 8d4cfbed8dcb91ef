"""The pooled posterior over a network: the simulation's, by sums of the nodes' curvatures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.predictors import POOLED, PooledLaplace
from bayesfl.data import FederatedData
from bayesfl.evaluation.calibration import Conformal, Temperature
from bayesfl.flower import load
from bayesfl.flower.leaving import leaves
from bayesfl.optim import SGD
from tests.flower.made import asked, assert_predicts, deploy, grid_of, simulated


@pytest.fixture(scope="module")
def parted() -> FederatedData:
    return bf.data.dirichlet(
        "digits", clients=4, alpha=0.5, validation=0.2, calibration=0.2, seed=1, max_size=120
    )


def method(parted: FederatedData, *options: Any) -> bf.Algorithm:
    model = bf.models.mlp(parted.inputs, hidden=8, outputs=10)
    plain = bf.algorithms.fedavg(model, epochs=5, optimiser=SGD(0.1, momentum=0.9))
    return replace(plain, predictor=PooledLaplace(*options))


@pytest.mark.parametrize("structure", ["last_layer", "diagonal", "kfac", "full"])
def test_the_posterior_is_the_simulations(parted: FederatedData, structure: Any, tmp_path: Path):
    """On the server, in its checkpoint, in the clients' predictions and in their files."""
    algorithm = method(parted, structure)
    sim = simulated(algorithm, parted)
    want, probs = sim.posterior, sim.predict()
    found = deploy(algorithm, parted, tmp_path, checkpoint=tmp_path / "server")
    for one in (found, load(tmp_path / "server", algorithm)):
        near = {"rtol": 1e-6, "atol": 1e-9}
        assert_close(one.posterior.moments(), want.moments(), **near)
        evidence = one.posterior.log_marginal_likelihood()
        assert_close(evidence, want.log_marginal_likelihood(), **near)
    assert_predicts(found, tmp_path, sim)
    own = bf.load_client(tmp_path / f"node-101/{found.experiment}/client-1", algorithm)
    rows = parted.test.client(1)[0]
    assert_close(own.predict(rows).probs, probs.client(1).probs, atol=1e-6, rtol=0)
    measured = probs.summary(parted.test)["nll"]
    assert found.history[-1]["personal_nll"] == pytest.approx(measured, abs=1e-6)


def test_it_is_asked_for_once_and_calibrated(parted: FederatedData, tmp_path: Path):
    """Further questions of calibration go without it, as without the model."""
    algorithm, steps = method(parted), (Temperature(), Conformal())
    sim = simulated(algorithm, parted).calibrate(*steps)
    grid = grid_of(algorithm, parted, tmp_path, calibration=steps)
    found = deploy(algorithm, parted, tmp_path, grid, calibration=steps)
    assert_predicts(found, tmp_path, sim)
    surveys = [m for m in grid.sent if m.metadata.message_type == "query.survey"]
    assert [asked(m, "survey") for m in surveys].count(POOLED) == 4
    later = [m for m in surveys if asked(m, "survey") != POOLED]
    assert {"told" in m.content for m in later} == {True, False}
    assert all(("told" in m.content) == asked(m, "whole") for m in later)


def test_what_leaves_a_client_is_listed(parted: FederatedData):
    algorithm = method(parted, "kfac", "evidence", "head.*")
    sizes = {one.name: one.size for one in leaves(algorithm) if "curvature" in one.what}
    assert sizes == {"n_examples": 1, "nll": 1, "outputs_0": 55, "inputs_0": 36}


def test_without_one(parted: FederatedData, tmp_path: Path):
    """A method without the predictor has none."""
    plain = replace(method(parted), predictor=None)
    found = deploy(plain, parted, tmp_path, rounds=1)
    assert found.after == ()
    with pytest.raises(ValueError, match=r"no pooled posterior; .*PooledLaplace\(\)\)$"):
        _ = found.posterior
