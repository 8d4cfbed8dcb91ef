"""Heads of clients' own over a network: the simulation's, by the nodes' answers to the same
questions, on the body that another deployment has trained.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.trees import flatten
from bayesfl.composition.predictors import HIERARCHY, SCALED
from bayesfl.data import FederatedData
from bayesfl.flower import load
from bayesfl.flower.leaving import leaves
from bayesfl.posteriors import heads
from tests.flower.made import (
    asked,
    assert_predicts,
    assert_same,
    deploy,
    grid_of,
    simulated,
)


def few(count: int = 3, **options: Any) -> FederatedData:
    """Clients whose labels follow related linear rules."""
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randn(30 + 10 * j, 4, generator=rng) for j in range(count)]
    rules = [torch.tensor([1.0, -1.0, 0.5, 0.0]) + 0.5 * torch.randn(4, generator=rng) for _ in xs]
    ys = [(x @ rule > 0).long() for x, rule in zip(xs, rules, strict=True)]
    return bf.data.from_arrays(xs, ys, **options)


@pytest.fixture(scope="module")
def parted() -> FederatedData:
    return few(validation=0.2)


def method(name: str, parted: FederatedData) -> bf.Algorithm:
    model = bf.models.mlp(parted.inputs, hidden=3, outputs=2)
    return getattr(bf.algorithms, name)(model)


@pytest.mark.parametrize("name", [pytest.param("fedavg", marks=pytest.mark.slow), "fedper"])
def test_heads_are_the_simulations(name: str, parted: FederatedData, tmp_path: Path):
    """On the server, in its checkpoint, in predictions and clients' files; a server that is started
    again asks nothing twice.
    """
    trained = method(name, parted)
    sim = simulated(trained, parted).heads()
    deploy(trained, parted, tmp_path, checkpoint=tmp_path / "trained")
    algorithm = bf.with_heads(trained)
    grid = grid_of(algorithm, parted, tmp_path)
    start: dict[str, Any] = {
        "start": tmp_path / "trained",
        "rounds": 0,
        "checkpoint": tmp_path / "heads",
    }
    found = deploy(algorithm, parted, tmp_path, grid, **start)
    for one in (found, load(tmp_path / "heads", algorithm)):
        assert_same(one, tmp_path, sim, atol=1e-9)
        assert_close(one.answers, sim.answers, atol=1e-9, rtol=0)
    assert_predicts(found, tmp_path, sim, atol=1e-9)
    own = bf.load_client(tmp_path / f"node-101/{found.experiment}/client-1", algorithm)
    rows, probs = parted.test.client(1)[0], sim.predict()
    assert_close(own.predict(rows).probs, probs.client(1).probs, atol=1e-9, rtol=0)
    measured = probs.summary(parted.test)["nll"]
    assert found.history[-1]["personal_nll"] == pytest.approx(measured, abs=1e-9)
    assert not list(tmp_path.rglob("survey-*"))
    sent = len(grid.sent)
    deploy(algorithm, parted, tmp_path, grid, **start)
    kinds = {m.metadata.message_type for m in grid.sent[sent:]}
    assert kinds == {"query", "evaluate"}


@pytest.mark.filterwarnings("ignore:the earlier run has 3 clients")
def test_what_is_asked_and_what_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Questions after a survey's first go without the model and earlier answers; without validation
    rows nothing is scaled; who joins has a head under the prior that is there.
    """
    monkeypatch.setattr(heads, "KNOWN", 10.0)
    bare = few(4)
    trained = method("fedavg", bare)
    first = deploy(trained, bare.select(range(3)), tmp_path)
    algorithm = bf.with_heads(trained)
    grid = grid_of(algorithm, bare.select(range(3)), tmp_path)
    found = deploy(algorithm, bare.select(range(3)), tmp_path, grid, start=first, rounds=0)
    surveys = [m for m in grid.sent if m.metadata.message_type == "query.survey"]
    names = [asked(m, "survey") for m in surveys]
    more = len(names) - 6
    assert names == [HIERARCHY] * (3 + more) + [SCALED] * 3
    whole = [True] * 3 + [False] * more + [True] * 3
    assert [asked(m, "whole") for m in surveys] == whole
    for part in ("common", "own"):
        assert [part in m.content for m in surveys] == whole
    assert ["told" in m.content for m in surveys] == [False] * (3 + more) + [True] * 3
    assert_close(found.answers[SCALED], {"scale": torch.tensor(1.0), "width": torch.tensor(1.0)})
    grid = grid_of(algorithm, bare, tmp_path)
    later = deploy(algorithm, bare, tmp_path, grid, start=found, rounds=0, seed=9)
    assert_close(flatten(later.server), flatten(found.server))
    assert not any(m.metadata.message_type == "query.survey" for m in grid.sent)
    assert_predicts(later, tmp_path, simulated(trained, bare.select(range(3))).heads().adapt(bare))
    sizes = {one.name: one.size for one in leaves(algorithm) if "head" in one.what}
    assert sizes["information"] == 8**2
    assert sizes["pull"] == 8


def test_a_pooled_posterior_after_training(parted: FederatedData, tmp_path: Path):
    """Without a round: the same as of the method that asks as it trains."""
    trained = method("fedavg", parted)
    first = deploy(trained, parted, tmp_path)
    pooled = replace(trained, predictor=bf.predictors.PooledLaplace("full"))
    found = deploy(pooled, parted, tmp_path, start=first, rounds=0, seed=9)
    sim = simulated(trained, parted).laplace("full")
    assert_close(found.posterior.moments(), sim.posterior.moments(), rtol=1e-6, atol=1e-9)
    assert_predicts(found, tmp_path, sim)
