"""Predictive distributions by their moments, against scipy's, sums over counts, and integrals."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from bayesfl.evaluation.metrics.distributions import Counts, NormalDistribution


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def of_counts(mean: float, variance: float) -> stats.rv_discrete:
    return (
        stats.nbinom(mean**2 / (variance - mean), mean / variance)
        if variance > mean
        else stats.poisson(mean)
    )


@pytest.mark.parametrize("y", [-3.0, 0.4, 2.0])
def test_normal_is_scipys(y: float):
    """Density, distribution and quantiles; the score is the integral of the squared distance of
    distributions.
    """
    found, wanted = NormalDistribution(one(0.3), one(1.44)), stats.norm(0.3, 1.2)
    assert found.nll(one(y)).item() == pytest.approx(-wanted.logpdf(y), abs=1e-12)
    assert (
        found.cdf(one(y)).item()
        == found.below(one(y)).item()
        == pytest.approx(wanted.cdf(y), abs=1e-12)
    )
    assert found.quantile(0.1).item() == pytest.approx(wanted.ppf(0.1), abs=1e-12)
    left, _ = integrate.quad(lambda t: wanted.cdf(t) ** 2, -20, y)
    right, _ = integrate.quad(lambda t: wanted.sf(t) ** 2, y, 20)
    assert found.crps(one(y)).item() == pytest.approx(left + right, abs=1e-7)


@pytest.mark.parametrize("mean", [0.01, 0.3, 5.0, 200.0, 20_000.0])
@pytest.mark.parametrize("excess", [0.0, 1e-8, 1e-6, 1e-2, 1.0, 10.0])
def test_counts_are_scipys(mean: float, excess: float):
    """Negative binomial of the same moments, Poisson without an excess; the score is a sum over
    counts.
    """
    variance = mean * (1 + excess)
    found = Counts(one(mean), one(variance))
    wanted = of_counts(mean, variance if excess > 1e-7 else mean)
    assert wanted.mean() == pytest.approx(mean)
    k = np.arange(int(wanted.ppf(1 - 1e-12)) + int(4 * mean) + 40)
    for y in (0.0, float(int(mean)), float(int(3 * mean) + 2)):
        assert found.nll(one(y)).item() == pytest.approx(-wanted.logpmf(y), rel=1e-6, abs=1e-6)
        assert found.cdf(one(y)).item() == pytest.approx(wanted.cdf(y), abs=1e-6)
        assert found.below(one(y)).item() == pytest.approx(wanted.cdf(y - 1), abs=1e-6)
        assert found.crps(one(y)).item() == pytest.approx(
            ((wanted.cdf(k) - (y <= k)) ** 2).sum(), rel=1e-6, abs=1e-7
        )
    assert found.quantile(0.9).item() == wanted.ppf(0.9)


def test_less_variance_than_poisson_is_poisson():
    """As of rounding."""
    assert Counts(one(3.0), one(2.0)).nll(one(2.0)).item() == pytest.approx(
        -stats.poisson(3.0).logpmf(2), abs=1e-12
    )
