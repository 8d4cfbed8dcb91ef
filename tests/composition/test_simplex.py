"""Quadratic programs over the simplex: closed cases, the optimality conditions, scipy's SLSQP as
the slow reference.
"""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.testing import assert_close

from bayesfl.composition import simplex


def kkt(quadratic: Tensor, linear: Tensor, weights: Tensor) -> Tensor:
    """The worst violation of a minimum's conditions, [C], in units of Q's mean diagonal: with g = Q
    a - b and nu = a' g these are g - nu >= 0, with equality where a > 0, and a on the simplex.
    """
    slope = weights @ quadratic - linear
    multipliers = slope - (weights * slope).sum(-1, keepdim=True)
    worst = torch.maximum((-multipliers).amax(-1), (weights * multipliers).abs().amax(-1))
    off = torch.maximum((weights.sum(-1) - 1).abs(), (-weights).amax(-1))
    return torch.maximum(worst / quadratic.diagonal().mean(), off)


def problems(count: int, groups: int, width: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Q and b of FedPAC's programs: heads of `groups` kinds, min sum a_j^2 V_j + |h_i - sum a_j
    h_j|^2.
    """
    rng = torch.Generator().manual_seed(seed)
    base = 0.3 * torch.randn(groups, width, generator=rng, dtype=torch.float64)
    h = base[torch.arange(count) % groups] + 0.05 * torch.randn(
        count, width, generator=rng, dtype=torch.float64
    )
    v = (0.5 + torch.rand(count, generator=rng, dtype=torch.float64)) * width / 600
    return h @ h.T + torch.diag(v), h @ h.T


@pytest.mark.parametrize(("count", "groups"), [(1, 1), (2, 1), (5, 5), (20, 4), (40, 40)])
def test_optimality(count: int, groups: int):
    """On the simplex, and the conditions hold to 1e-10 of the mean diagonal."""
    q, b = problems(count, groups)
    a = simplex.minimise(q, b)
    assert float(kkt(q, b, a).max()) < 1e-10
    assert bool((a >= 0).all())
    assert_close(a.sum(-1), torch.ones(count, dtype=torch.float64))


def test_scipy():
    """SLSQP, a program at a time."""
    q, b = problems(12, 3)
    a = simplex.minimise(q, b).numpy()
    for i in range(12):
        found = minimize(
            lambda w, i=i: w @ q.numpy() @ w - 2 * b[i].numpy() @ w,
            np.full(12, 1 / 12),
            jac=lambda w, i=i: 2 * (q.numpy() @ w - b[i].numpy()),
            bounds=[(0, 1)] * 12,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 1000},
        )
        assert np.abs(found.x - a[i]).max() < 1e-6


def test_closed_cases():
    """Equal features: weights as 1 / V; two at a squared distance d: V_1 / (V_1 + V_2 + d) on the
    other; far apart: each its own.
    """
    v, h = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), torch.ones(3, 2).double()
    a = simplex.minimise(h @ h.T + torch.diag(v), h @ h.T)
    assert_close(a, (1 / v / (1 / v).sum()).expand(3, 3), atol=1e-12, rtol=0)
    for distance in (0.0, 0.7, 3.0):
        h = torch.tensor([[0.0], [distance**0.5]], dtype=torch.float64)
        a = simplex.minimise(h @ h.T + torch.diag(v[:2]), h @ h.T)
        assert_close(a[0, 1], v[0] / (v[0] + v[1] + distance), atol=1e-12, rtol=0)
    h = 1e4 * torch.eye(3, dtype=torch.float64)
    assert_close(
        simplex.minimise(h @ h.T + torch.diag(v), h @ h.T),
        torch.eye(3, dtype=torch.float64),
        atol=1e-7,
        rtol=0,
    )


def test_scale_does_not_matter():
    """Variances of the size 1 / n: the same weights."""
    q, b = problems(15, 3)
    assert_close(simplex.minimise(1e-9 * q, 1e-9 * b), simplex.minimise(q, b), atol=1e-9, rtol=0)


def test_projection():
    """The nearest point: inside it stays, far along an axis it is the corner; against a search on
    three weights.
    """
    inside = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    assert_close(simplex.project(inside), inside)
    assert simplex.project(torch.tensor([9.0, 1.0, -3.0])).tolist() == [1.0, 0.0, 0.0]
    point = torch.tensor([0.9, 0.4, -0.2], dtype=torch.float64)
    steps = torch.linspace(0, 1, 401, dtype=torch.float64)
    mesh = torch.cartesian_prod(steps, steps)
    mesh = torch.cat([mesh, 1 - mesh.sum(1, keepdim=True)], 1)[mesh.sum(1) <= 1]
    best = mesh[(mesh - point).square().sum(1).argmin()]
    assert_close(simplex.project(point), best, atol=3e-3, rtol=0)


@pytest.mark.parametrize("block", [1, 2**26])
@pytest.mark.parametrize("steps", [0, 3])
def test_every_start_ends_at_the_minimum(block: int, steps: int, monkeypatch: pytest.MonkeyPatch):
    """From far away, one program at a time, or many: the same."""
    rng = torch.Generator().manual_seed(3)
    # Of rank 3: supports are small, and many exchanges are wrong.
    h = torch.randn(40, 3, generator=rng, dtype=torch.float64)
    quadratic = h @ h.T + torch.diag(
        1e-3 + 1e-2 * torch.rand(40, generator=rng, dtype=torch.float64)
    )
    wanted = simplex.minimise(quadratic, h @ h.T)
    assert float(kkt(quadratic, h @ h.T, wanted).max()) < 1e-12
    for name, value in (("BYTES", block), ("MOST_STEPS", steps)):
        monkeypatch.setattr(simplex, name, value)
    found = simplex.minimise(quadratic, h @ h.T)
    assert_close(found, wanted, atol=1e-10, rtol=0)
    assert float(kkt(quadratic, h @ h.T, found).max()) < 1e-12
    assert bool((found >= 0).all())


def test_a_program_that_does_not_settle_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simplex, "EXCHANGES", 0)
    with pytest.raises(RuntimeError, match="2 programs of 2 weights did not settle"):
        simplex.minimise(torch.eye(2), torch.eye(2))
