"""Gradient steps of a chunk: optimisers that persist, for clients that took different numbers of steps."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

import bayesfl as bf
from bayesfl.composition.block import Block
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend
from bayesfl.composition.priors import Normal, server_mean
from bayesfl.data import FederatedData
from bayesfl.engine.plan import PhasePlan
from bayesfl.optim import SGD, Adam
from tests.cases import run


@pytest.mark.parametrize("kernel", ["reference", "layers", "live", "vmap"])
@pytest.mark.parametrize("optimiser", [SGD(0.05), SGD(0.03, momentum=0.9), Adam(0.01, weight_decay=1e-2)], ids=str)
def test_an_optimiser_that_persists(model: nn.Module, clients: FederatedData, optimiser: Any, kernel: str):
    """A client alone goes through three rounds of two steps as through one of six; without, momentum starts anew."""

    def phase(epochs: int, persist: str | None) -> bf.Algorithm:
        step = Descend(Energy("w", ("w",), likelihood="mean"), optimiser=optimiser, epochs=epochs, persist=persist)
        return bf.Algorithm(model, {"w": Block(pool=None, keep=True)}, (step,), parts=("w",))

    kept, anew = (run(phase(2, name), clients, kernel=kernel, rounds=3).private["w"]["loc"] for name in ("velocity", None))
    once = run(phase(6, None), clients, kernel=kernel).private["w"]["loc"]
    assert_close(kept, once, atol=1e-12, rtol=0)
    assert torch.equal(anew, kept) == (optimiser == SGD(0.05))


@pytest.mark.parametrize("prox", [False, True])
def test_clients_that_took_different_numbers_of_steps(model: nn.Module, clients: FederatedData, prox: bool):
    """Adam corrects each client's moments by its own number of steps, whoever shares its chunk."""
    prior = Normal(centre=server_mean("w"), variance=lambda given, view: torch.full_like(view["n"], 0.5)[..., None])
    energy = Energy("w", ("w",), likelihood="mean")
    step = Descend(energy, optimiser=Adam(0.01), epochs=2, batch_size=10, persist="moments", prox=prox)
    algorithm = bf.Algorithm(model, {"w": Block(prior=prior)}, (step,), parts=("w",))
    options: dict[str, Any] = {"rounds": 3, "participation": 0.5}
    reference = run(algorithm, clients, kernel="reference", **options)
    steps = reference.private["moments"]["steps"]
    assert len(set(steps.tolist())) > 2
    for kernel in ("layers", "live", "vmap"):
        found = run(algorithm, clients, kernel=kernel, **options)
        assert_close(found.server["w"]["loc"], reference.server["w"]["loc"], atol=1e-10, rtol=0)
        assert torch.equal(found.private["moments"]["steps"], steps)


def test_a_state_that_persists_is_not_written_into(model: nn.Module, clients: FederatedData):
    """A kernel returns a new one: what the view held is the client's until its round is accepted."""
    step = Descend(Energy("w", ("w",), likelihood="mean"), optimiser=Adam(0.05), persist="moments")
    algorithm = bf.Algorithm(model, {"w": Block()}, (step,), parts=("w",))
    server = algorithm.init(7, dtype=torch.float64)
    rows = tree_map(lambda t: t.expand(7, *t.shape).clone(), algorithm.rows(server))
    before = tree_map(torch.clone, rows)
    data = clients.to("cpu", torch.float64)
    given = algorithm.given(server, 0, 1)
    views = algorithm.views(given, {}, rows, torch.from_numpy(data.train.counts).double())
    plan = PhasePlan(step, data.train, np.arange(7), dtype=torch.float64)
    after, _ = bf.Engine("layers").run(algorithm, step, given, views, plan)
    assert_close(rows, before, atol=0, rtol=0)
    assert float(after["moments"]["steps"].sum()) == 7
