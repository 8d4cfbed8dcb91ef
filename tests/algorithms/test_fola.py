"""FOLA on linear regressions, whose rounds are linear algebra."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import DIM, linear_only, moments
from tests.cases import run

PRIOR, STRENGTH = 0.7, 1.3


def method() -> bf.Algorithm:
    return bf.algorithms.fola(
        linear_only(torch.full((1, DIM), 0.4)),
        prior_precision=PRIOR,
        strength=STRENGTH,
        epochs=200,
        batch_size=None,
        optimiser=SGD(0.3),
        likelihood=Gaussian(),
    )


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_rounds_are_those_of_the_formulas(participation: float, regressions: FederatedData):
    cohorts: list[list[int]] = []
    made = method()

    def seen(server: Any, ids: Tensor, uplink: Any) -> dict[str, Any]:
        cohorts.append(ids.tolist())
        return {}

    result = run(replace(made, combine=seen), regressions, rounds=3, participation=participation)
    a, b = moments(regressions)
    m, precision = torch.full((DIM,), 0.4).double(), torch.full((DIM,), PRIOR).double()
    for cohort in cohorts:
        pull = STRENGTH * precision / 4
        own = PRIOR / 4 + pull
        w = torch.stack([torch.linalg.solve(a[j] + own.diag(), b[j] + pull * m) for j in cohort])
        f = torch.stack([a[j].diagonal() for j in cohort])
        m = ((f + own) * w).sum(0) / (f + own).sum(0)
        precision = PRIOR + 4 / len(cohort) * f.sum(0)
    q = result.server["w"]
    assert_close(q["loc"], m, atol=1e-6, rtol=0)
    assert_close(variance(q["rho"]), 1 / precision, atol=1e-9, rtol=0)


def variance(rho: Tensor) -> Tensor:
    return torch.nn.functional.softplus(rho).square()


def test_the_fixed_point_is_the_posterior_where_curvature_is_diagonal():
    """Of all rows together, with the prior counted once."""
    rng = torch.Generator().manual_seed(2)
    xs = [
        torch.eye(DIM).repeat(k, 1) * (0.7 + torch.rand(k * DIM, 1, generator=rng))
        for k in (2, 3, 5)
    ]
    ys = [x @ torch.randn(DIM, generator=rng) + torch.randn(len(x), generator=rng) for x in xs]
    data = bf.data.from_arrays(xs, ys, test_share=0.0)
    q = run(method(), data, rounds=25).server["w"]
    a, b = (t.sum(0) for t in moments(data))
    precision = a.diagonal() + PRIOR
    assert_close(q["loc"], b / precision, atol=1e-6, rtol=0)
    assert_close(variance(q["rho"]), 1 / precision, atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("before", [[0, 1], [0, 1, 2, 3]], ids=["joins", "leaves"])
def test_the_end_does_not_depend_on_who_was_there(before: list[int]):
    """J is the number of the clients that are there, and the fixed point theirs."""
    rng = torch.Generator().manual_seed(3)
    xs = [torch.eye(DIM).repeat(k, 1) * (1 + torch.rand(k * DIM, 1, generator=rng)) for k in (2, 3)]
    ys = [x @ torch.randn(DIM, generator=rng) for x in xs]
    data = bf.data.from_arrays(xs * 2, ys * 2, test_share=0.0)
    data = replace(data, client_names=tuple("abcd"))
    now, start = data.select(range(3)), run(method(), data.select(before), rounds=2)
    q = run(method(), now, rounds=25, seed=9, start=start).server["w"]
    a, b = (t.sum(0) for t in moments(now))
    precision = a.diagonal() + PRIOR
    assert_close(q["loc"], b / precision, atol=1e-6, rtol=0)
    assert_close(variance(q["rho"]), 1 / precision, atol=1e-9, rtol=0)
