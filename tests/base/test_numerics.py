"""Softplus and its inverse stay exact from a scale of 1e-12 to one of 1e4, and so do their
derivatives.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from bayesfl.base.numerics import apart, finite, inverse_softplus, levelled, log_softplus, same

SCALES = torch.logspace(-12, 4, 129, dtype=torch.float64)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
precisions = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@precisions
def test_inverse_softplus_is_undone_by_softplus(dtype):
    """softplus(inverse_softplus(s)) is s, relatively, whatever its size."""
    scales = SCALES.to(dtype)
    assert_close(F.softplus(inverse_softplus(scales)), scales, rtol=TOLERANCES[dtype], atol=0)


@precisions
def test_log_softplus_of_an_inverse_softplus_is_the_logarithm(dtype):
    """log_softplus(inverse_softplus(s)) is log s."""
    scales = SCALES.to(dtype)
    assert_close(
        log_softplus(inverse_softplus(scales)),
        scales.log(),
        rtol=TOLERANCES[dtype],
        atol=TOLERANCES[dtype],
    )


def test_known_values():
    """log(e^s - 1), where that does not overflow."""
    scales = torch.linspace(0.1, 20, 50, dtype=torch.float64)
    assert_close(inverse_softplus(scales), scales.expm1().log(), rtol=1e-13, atol=1e-13)


def test_log_softplus_on_both_sides_of_its_switch():
    """The series below -15 is log(log1p(e^rho)) to rounding, and meets the plain form there."""
    rho = torch.tensor(
        [-30.0, -20.0, -15.5, -15.0 - 1e-9, -15.0, -15.0 + 1e-9, -14.5, -5.0, 0.0, 5.0, 15.0]
    ).double()
    assert_close(log_softplus(rho), rho.exp().log1p().log(), rtol=0, atol=1e-13)


def test_log_softplus_where_softplus_underflows():
    """At rho = -500 float32's softplus is 0, and its logarithm still rho."""
    rho = torch.tensor([-500.0, -120.0])
    assert (F.softplus(rho) == 0).all()
    assert_close(log_softplus(rho), rho, rtol=0, atol=0)


@precisions
def test_derivative_of_log_softplus(dtype):
    """It is sigmoid / softplus, which tends to 1 on the left; no NaN leaks through the branch that
    is not taken.
    """
    rho = (
        torch.cat([torch.linspace(-1000, 1000, 401), torch.tensor([-15.0, -104.0, -89.0, 1e4])])
        .to(dtype)
        .requires_grad_()
    )
    (slope,) = torch.autograd.grad(log_softplus(rho).sum(), rho)
    assert slope.isfinite().all()
    wide = rho.detach().double()
    # below -700 the quotient itself is 0 / 0, and 1 to every digit
    expected = torch.where(
        wide < -30, torch.ones(()).double(), wide.sigmoid() / wide.clamp(min=-30).exp().log1p()
    )
    expected = torch.where(wide > 500, 1 / wide, expected)
    assert_close(slope.double(), expected, rtol=TOLERANCES[dtype] * 10, atol=0)


@precisions
def test_derivative_of_inverse_softplus(dtype):
    """It is 1 / (1 - e^-s), finite over the whole range."""
    scales = SCALES.to(dtype).requires_grad_()
    (slope,) = torch.autograd.grad(inverse_softplus(scales).sum(), scales)
    assert slope.isfinite().all()
    assert_close(
        slope.double(), -1 / torch.expm1(-scales.detach().double()), rtol=TOLERANCES[dtype], atol=0
    )


def test_finite():
    """Sums that overflow, empty tensors and whole numbers are finite; NaN and infinity anywhere are
    not.
    """
    for t in (torch.full((9,), 3e38), torch.empty(0), torch.tensor(2), torch.ones(2, 3)):
        assert finite(t)
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not finite(torch.tensor([[1.0, bad], [2.0, 3.0]]))
    assert not finite(torch.tensor([float("inf"), -float("inf")]))


@pytest.mark.parametrize(
    ("one", "other", "size", "expected"),
    [
        ([1.0, 100.0], [1.09, 100.0], 0.0, False),
        ([1.0, 100.0], [1.11, 100.0], 0.0, True),
        ([1.0], [1.09], 0.0, True),
        ([1.0], [1.09], 100.0, False),
        ([math.nan, 1.0, math.inf], [math.nan, 1.0, math.inf], 0.0, False),
        ([math.nan, 1.0], [1.0, 1.0], 0.0, True),
        ([1.0, 1.0], [math.nan, 1.0], 0.0, True),
        ([1.0, math.inf], [1.0, -math.inf], 0.0, True),
        ([1.0, math.inf], [1.1, math.inf], 0.0, True),
        ([1.0], [1.0, 1.0], 0.0, True),
        ([], [], 0.0, False),
    ],
)
def test_numbers_that_are_apart(one, other, size, expected):
    """By a thousandth of the largest finite number; NaN and infinities are so where they differ."""
    assert apart(torch.tensor(one), torch.tensor(other), 1e-3, size) == expected


def test_the_same_numbers_may_be_nan():
    """NaN is what it was; any other number in its place, or it in place of one, is another."""
    one = torch.tensor([1.0, math.nan, math.inf])
    assert same(one, one.clone())
    for place in range(3):
        other = one.clone()
        other[place] = 2.0
        assert not same(one, other)
        assert not same(other, one)
    assert not same(one, one[None])
    assert same(torch.tensor([True, False]), torch.tensor([True, False]))


def exact_groups(scores: list[Fraction]) -> list[int]:
    """The rank of each score among the different ones, in rational numbers."""
    known = sorted(set(scores))
    return [known.index(one) for one in scores]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_levelled_scores_rank_as_rational_numbers(dtype: torch.dtype):
    """Products of whole numbers with thirds and sevenths, summed in any order, in blocks or one
    by one, and in any order of rows.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (300, 9))
    w = [
        Fraction(int(n), int(d))
        for n, d in zip(rng.integers(1, 9, 9), [3, 7] * 4 + [5], strict=True)
    ]
    wanted = exact_groups([sum(int(a) * b for a, b in zip(row, w, strict=True)) for row in x])
    design, weights = torch.tensor(x, dtype=dtype), torch.tensor([float(b) for b in w], dtype=dtype)
    terms = float((design.abs() @ weights.abs()).max())
    for permutation in (
        torch.arange(9),
        torch.randperm(9, generator=torch.Generator().manual_seed(1)),
    ):
        whole = design[:, permutation] @ weights[permutation]
        single = torch.stack(
            [row[permutation].flip(0) @ weights[permutation].flip(0) for row in design]
        )
        mixed = torch.where(torch.arange(300) % 2 == 0, whole, single)
        order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
        found = levelled(mixed[order], terms)
        _, groups = found.unique(return_inverse=True)
        assert groups.tolist() == [wanted[i] for i in order.tolist()]


@pytest.mark.parametrize(
    ("scores", "kind", "groups"),
    [
        ([0.3, 0.1 + 0.2, 0.4], torch.float64, [0, 0, 1]),
        ([1.0, 1 + 1e-9, 1 + 2e-9], torch.float64, [0, 1, 2]),  # apart in float64
        ([1e-30, 1.1e-30, 0.0], torch.float64, [1, 2, 0]),  # tolerances are relative
        ([-0.3, -(0.1 + 0.2), 0.3], torch.float64, [0, 0, 1]),
        ([math.inf, 1.0, math.inf, -math.inf], torch.float64, [2, 1, 2, 0]),
        ([1.0 + k * 2**-49 for k in range(40)], torch.float64, list(range(40))),  # a long chain
        ([1.0 + k * 2**-23 for k in range(40)], torch.float32, list(range(40))),
        ([1.0 + k * 2**-23 for k in range(5)], torch.float32, [0] * 5),
        ([0.1, 0.2 - 0.1, 0.7], torch.float32, [0, 0, 1]),
        ([], torch.float64, []),
        ([0.5], torch.float32, [0]),
    ],
)  # fmt: skip
def test_levelled_scores(scores: list[float], kind: torch.dtype, groups: list[int]):
    """In the precision that the scores have, also where they are held as float64."""
    given = torch.tensor(scores, dtype=kind)
    found = levelled(torch.stack([given, given.flip(0)]).double())
    assert found[0].unique(return_inverse=True)[1].tolist() == groups
    assert found[1].flip(0).equal(found[0])


def test_scores_of_other_groups_are_never_one_number():
    """Neighbours that rounding parts are one in their own group, whatever stands before it."""
    scores = torch.tensor([0.9, 0.1, 0.1 + 1e-15, 0.3, 0.3 + 1e-15], dtype=torch.float64)
    among = torch.tensor([0, 1, 1, 1, 2])
    found = levelled(scores, among=among)
    assert found[1] == found[2] == scores[1]
    assert torch.equal(found[[0, 3, 4]], scores[[0, 3, 4]])
