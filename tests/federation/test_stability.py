"""Limits of stable steps, against the eigenvalues of their linear maps, and curvatures, against whole matrices."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.curvature import Curvature
from bayesfl.data import FederatedData
from bayesfl.federation import stability
from bayesfl.optim import SGD
from tests.cases import run


def radius(rate: float, momentum: float, curvature: float, precision: float, *, prox: bool) -> float:
    """Return the spectral radius of one step of velocity and weight, about the minimum of a quadratic with its centre there."""
    pull = 0.0 if prox else precision
    shrink = 1 / (1 + rate / (1 - momentum) * precision) if prox else 1.0
    velocity = np.array([momentum, curvature + pull])
    weight = (np.array([0.0, 1.0]) - rate * velocity) * shrink
    return float(np.abs(np.linalg.eigvals(np.stack([velocity, weight]))).max())


@pytest.mark.parametrize("prox", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("curvature", "precision"), [(30.0, 0.5), (500.0, 3.0), (40.0, 0.0)])
def test_the_limit_is_that_of_the_linear_map(prox: bool, momentum: float, curvature: float, precision: float):
    """Below it the map contracts, above it does not."""
    most = stability.limit(curvature, precision, momentum, prox=prox)
    assert most < torch.inf
    assert radius(0.999 * most, momentum, curvature, precision, prox=prox) < 1
    assert radius(1.001 * most, momentum, curvature, precision, prox=prox) > 1


def test_a_tie_that_is_solved_may_be_of_any_strength():
    """Where it outweighs the curvature, no rate diverges."""
    assert stability.limit(3.0, 2.0, 0.5, prox=True) == torch.inf
    assert all(radius(rate, 0.5, 3.0, 2.0, prox=True) < 1 for rate in (0.1, 10.0, 1000.0))


@pytest.mark.parametrize("scale", ["sum", "mean"])
def test_the_curvature_is_that_of_the_heads_matrix(clients: FederatedData, scale: Any):
    """The largest eigenvalue of the GGN of the head's weights, summed over the data or tempered by 1 / n."""
    model = bf.models.mlp(8, hidden=6, outputs=3, seed=3)
    algorithm = bf.algorithms.pfedmap(model, likelihood_scale=scale)
    x, y = clients.train.client(1)
    batch = {"x": x.double(), "y": y, "weight": torch.ones(len(x), dtype=torch.float64)}
    phase = algorithm.phases[0]
    server = algorithm.init(2, dtype=torch.float64)
    given = algorithm.given({name: server[name] for name in server}, 0, 1)
    view = {name: {"loc": server[name]["loc"]} for name in ("body", "head")} | {"n": torch.tensor(float(len(x)), dtype=torch.float64)}
    found = stability.largest(algorithm, phase, given, view, batch) * phase.energy.scales(view["n"])[0]
    ggn = Curvature(model.double(), pattern="head.*").ggn(x.double())
    expected = torch.linalg.eigvalsh(ggn).max() / (1 if scale == "sum" else len(x))
    assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["pfedmap", "pfedvem"])
def test_unstable_steps_are_warned_of(model: nn.Module, clients: FederatedData, kind: str):
    """With the client's name and a rate that fits, which is then silent; only in rounds 1, 2, 4 and so on."""
    make = getattr(bf.algorithms, kind)
    with pytest.warns(UserWarning, match=r"round 1: .*'head' of client.*rate 1 .*below 0\.") as caught:
        run(make(model, head_lr=1.0, **({"precision": 0.1} if kind == "pfedmap" else {"init_scale": 3.0})), clients, rounds=4)
    text = [str(one.message) for one in caught if "unstable" in str(one.message)]
    assert {"round 1"} <= {part.split(":")[0] for part in text} <= {"round 1", "round 2", "round 4"}
    fits = float(text[0].split("below ")[1].split(",")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(make(model, head_lr=fits / 10), clients, rounds=2)


def test_what_is_not_looked_at(model: nn.Module):
    """Steps on other blocks, in mini-batches, by other optimisers, without a tie, or in a model whose head is no linear layer."""
    method = bf.algorithms.pfedmap(model)
    head, body = method.phases
    assert stability.watched(method, head)
    assert not stability.watched(method, body)
    assert not stability.watched(method, replace(head, batch_size=10))
    assert not stability.watched(method, replace(head, optimiser=bf.optim.Adam()))
    assert not stability.watched(bf.algorithms.fedrep(model), replace(bf.algorithms.fedrep(model).phases[0], batch_size=None))
    deep = bf.models.SplitModel(nn.Flatten(), nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)))
    made = bf.algorithms.pfedmap(bf.models.SplitModel(nn.Linear(8, 8), deep.head))
    assert not stability.watched(made, made.phases[0])
    assert [round for round in range(20) if stability.looked_at(round)] == [0, 1, 3, 7, 15]
    assert isinstance(head.optimiser, SGD)
