"""QLSD: the quantiser's mean and error, a round by a plain loop, and chains whose law is known."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from tests.algorithms.made import DIM, moments
from tests.cases import run

PRECISION, STEP = 2.0, 1e-2


def slopes(data: FederatedData, w: Tensor) -> Tensor:
    """The gradients [J, D] of all U_j at weights [D], where noise has variance 1."""
    square, cross = moments(data)
    return square @ w - cross + PRECISION / data.clients * w


def made(inputs: int, **options: Any) -> bf.Algorithm:
    given: Any = {"step": STEP, "prior_precision": PRECISION, "likelihood": Gaussian(), **options}
    return bf.algorithms.qlsd(nn.Linear(inputs, 1, bias=False), **given)


def noise(result: Any, *shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(int(result.server["noise"]))
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def quantised(method: bf.Algorithm, data: FederatedData, j: int, normals: Tensor) -> Any:
    """What client j sends of one chain at the start's weights, by the method's own phases."""
    start = method.init(data.clients, seed=2, dtype=torch.float64)["w"]["loc"]
    n = torch.tensor(float(data.train.counts[j]), dtype=torch.float64)
    slope = slopes(data, start[0])[j]
    view = {"start": start, "w": {"loc": start - slope / n}, "n": n}
    return method.phases[2].fn(method, {}, view, {"normals": {"w": normals}}), slope


def test_the_quantiser_has_the_gradient_as_its_mean(regressions: FederatedData):
    """Within the bound of its error: E |Q - v|^2 <= min(D / s^2, D^(1/2) / s) |v|^2."""
    for levels in (1, 3, 100):
        method, draws = made(DIM, chains=1, levels=levels), 4000
        normals = torch.randn(draws, 1, DIM, generator=torch.Generator().manual_seed(0))
        sent, slope = quantised(method, regressions, 1, normals.double())
        assert sent["levels"].abs().max() <= levels
        assert_close(sent["unit"], slope.norm()[None, None] / levels)
        q = (sent["levels"] * sent["unit"])[:, 0]
        error = (q.mean(0) - slope) / (q.std(0) / draws**0.5)
        assert float(error.abs().max()) < 4
        far = (q - slope).square().sum(1).mean() / slope.square().sum()
        assert far <= 1.05 * min(DIM / levels**2, DIM**0.5 / levels)
        exact = levels * slope.abs() / slope.norm()
        shares = (q.abs() * levels / slope.norm() - exact.floor()).mean(0)
        assert_close(shares, exact - exact.floor(), atol=4 * 0.5 / draws**0.5, rtol=0)


def test_a_client_sends_a_byte_for_each_weight(regressions: FederatedData):
    """And the weights that it received are as they were."""
    sent, _ = quantised(made(DIM, chains=1), regressions, 0, torch.zeros(1, DIM).double())
    assert sent["levels"].dtype == torch.int8
    start = made(DIM, chains=1).init(4, seed=2, dtype=torch.float64)["w"]["loc"]
    assert torch.equal(sent["w"]["loc"], start)
    result = run(made(DIM, chains=2), regressions, rounds=1)
    row = result.history[-1]
    assert row["bytes_up"] == 4 * (2 * DIM + 2 * 8)
    assert row["bytes_down"] == 4 * 8 * (2 * DIM + 1 + 1)


def test_the_highest_level_is_not_exceeded_by_rounding():
    """|v| / (|v| / 127) may be above 127, and 128 is no number of a signed byte."""
    start, zero = torch.rand(1000, 1, 1).double(), torch.zeros(1000, 1, 1).double()
    view = {"start": start, "w": {"loc": zero}, "n": torch.tensor(3.0)}
    low = {"normals": {"w": zero - 10.0}}
    method: Any = made(1, chains=1, levels=127)
    assert (method.phases[2].fn(method, {}, view, low)["levels"] == 127).all()


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_round_is_a_langevin_step(regressions: FederatedData, participation: float):
    """Of one weight, which the quantiser leaves as it is; a cohort's sum counts J / C times."""
    data = regressions.transformed(lambda x: x[:, :1])
    method = made(1, chains=3)
    start = method.init(4, seed=2, dtype=torch.float64)["w"]["loc"]
    result = run(method, data, rounds=1, participation=participation)
    names = result.took_part(1)
    cohort = [data.client_names.index(name) for name in names]
    each = torch.stack([slopes(data, w) for w in start])[:, cohort]  # [M, C, 1]
    drift = 4 / len(cohort) * each.sum(1)
    wanted = start - STEP * drift + (2 * STEP) ** 0.5 * noise(result, 3, 1)
    assert_close(result.server["w"]["loc"], wanted, atol=1e-9, rtol=0)


def test_chains_have_the_law_of_langevin_steps_on_the_posterior(regressions: FederatedData):
    """On a Gaussian posterior of precision P: its mean, and the variance 1 / (P (1 - step P / 2)).
    Predictions average over the chains.
    """
    chains, data = 1000, regressions.transformed(lambda x: x[:, :1])
    square, cross = (t.sum(0) for t in moments(data))
    precision = float(square) + PRECISION
    step = 0.3 / precision
    result = run(made(1, chains=chains, step=step), data, rounds=30)
    w = result.server["w"]["loc"][:, 0]
    variance = 1 / (precision * (1 - 0.15))
    assert abs(float(w.mean() - cross / precision)) < 4 * (variance / chains) ** 0.5
    assert abs(float(w.var()) / variance - 1) < 4 * (2 / chains) ** 0.5
    x = data.test.client(0)[0].double()
    assert_close(result.predict().client(0).mean, (x * w.mean()), atol=1e-9, rtol=0)
