"""What the accountant of differential privacy says, against integrals and closed forms; where its
noise comes from.
"""

import math
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import kstest, norm

from bayesfl.base.random import keyed
from bayesfl.federation.private.privacy import epsilon, epsilon_own, normals, uniforms
from tests.federation.made import SECRET

pytest.importorskip("dp_accounting", reason="dp-accounting is an extra")


def exact(sigma: float, p: float, delta: float) -> float:
    """Epsilon of one Poisson-sampled release, from the two hockey-stick divergences of N(0, s^2)
    and its mixture with N(1, s^2).
    """

    def excess(eps: float) -> float:
        without, with_ = norm(0, sigma).pdf, norm(1, sigma).pdf

        def mixture(x):
            return (1 - p) * without(x) + p * with_(x)

        reach = (-12 * sigma, 1 + 12 * sigma)

        def stick(one: Any, other: Any) -> float:
            return quad(
                lambda x: max(0.0, one(x) - math.exp(eps) * other(x)),
                *reach,
                limit=500,
                epsabs=1e-13,
            )[0]

        return max(stick(mixture, without), stick(without, mixture)) - delta

    return brentq(excess, 0, 50)


def analytic(sigma: float, delta: float) -> float:
    """Epsilon of the Gaussian mechanism (Balle and Wang, ICML 2018, theorem 8)."""

    def beyond(e):
        return norm.cdf(0.5 / sigma - e * sigma) - math.exp(
            e + norm.logcdf(-0.5 / sigma - e * sigma)
        )

    return brentq(lambda e: beyond(e) - delta, 0, 1000)


def test_known_values():
    """By PLD 1.83 where Renyi moments give 2.10."""
    import dp_accounting
    from dp_accounting import rdp

    found = epsilon(noise_multiplier=1, participation=0.01, releases=1000, delta=1e-5)
    assert type(found) is float
    assert found == pytest.approx(1.828, abs=0.002)
    accountant = rdp.RdpAccountant()
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0)), 1000
    )
    assert accountant.get_epsilon(1e-5) == pytest.approx(2.10, abs=0.01)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("releases", [1, 10])
def test_without_sampling_it_is_the_gaussian_mechanism(sigma: float, releases: int):
    """k releases at sigma are one at sigma / sqrt(k); never below, and above by no more than the
    grid lets it.
    """
    wanted = analytic(sigma / math.sqrt(releases), 1e-5)
    for found in (
        epsilon(noise_multiplier=sigma, participation=1, releases=releases, delta=1e-5),
        epsilon_own(noise_multiplier=sigma, releases=releases, delta=1e-5),
    ):
        assert -1e-6 <= found - wanted <= 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sigma", "p", "delta"), [(0.6, 0.1, 1e-5), (1.0, 0.3, 1e-4), (2.0, 0.02, 1e-6)]
)
def test_one_sampled_release(sigma: float, p: float, delta: float):
    """By quadrature: a client is added, or taken away, whichever is worse."""
    found = epsilon(noise_multiplier=sigma, participation=p, releases=1, delta=delta)
    assert -1e-6 <= found - exact(sigma, p, delta) <= 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sigma", "p", "releases"), [(2.0, 1e-3, 100), (1.0, 1e-3, 10_000), (1.0, 0.3, 60)]
)
def test_the_grid_is_fine_enough(sigma: float, p: float, releases: int):
    """However little a release tells: within a fiftieth of what a much finer grid gives, and not
    below.
    """
    import dp_accounting
    from dp_accounting import pld

    accountant = pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=2e-5
    )
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(p, dp_accounting.GaussianDpEvent(sigma)), releases
    )
    wanted = accountant.get_epsilon(1e-6)
    assert (
        0.999
        < epsilon(noise_multiplier=sigma, participation=p, releases=releases, delta=1e-6) / wanted
        < 1.02
    )


@pytest.mark.slow
def test_more_rounds_cost_more_and_a_draw_helps():
    """Nothing for none, everything without noise."""
    given = {"noise_multiplier": 1.0, "delta": 1e-5}
    by_rounds = [epsilon(**given, participation=0.1, releases=k) for k in (0, 1, 2, 20)]
    assert by_rounds[0] == 0
    assert np.all(np.diff(by_rounds) > 0)
    assert by_rounds[2] < epsilon_own(**given, releases=2)
    assert epsilon(noise_multiplier=0, participation=0.1, releases=1, delta=1e-5) == math.inf
    assert epsilon(noise_multiplier=0.01, participation=0.5, releases=5, delta=1e-5) > 1000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_multiplier": -1}, r"noise_multiplier .*0.* got -1"),
        ({"noise_multiplier": math.inf}, r"noise_multiplier .*got inf"),
        ({"participation": 0}, r"participation .*\(0, 1\], got 0"),
        ({"participation": 1.5}, "participation must lie within"),
        ({"releases": -1}, r"releases .*0.* got -1"),
        ({"releases": 1.5}, r"releases .*got 1\.5"),
        ({"delta": 0}, "delta must lie within"),
        ({"delta": math.nan}, "delta must lie within"),
    ],
)
def test_numbers_of_the_accountant(change: dict[str, float], words: str):
    """Outside their range."""
    with pytest.raises(ValueError, match=words):
        epsilon(
            **{
                "noise_multiplier": 1.0,
                "participation": 0.1,
                "releases": 1,
                "delta": 1e-5,
                **change,
            }
        )


def test_words_are_those_of_the_hash():
    """Secret and address told apart wherever one ends, and never a short key's repetition."""
    assert keyed(b"a", b"bc", size=3).tolist() == keyed(b"a", b"bc", size=9)[:3].tolist()
    drawn = [
        tuple(keyed(*parts, size=2))
        for parts in (
            (b"a", b"bc"),
            (b"ab", b"c"),
            (b"abc",),
            (b"a", b"b", b"c"),
            (b"a", b"bc", b""),
        )
    ]
    assert len(set(drawn)) == 5
    assert keyed(b"a", size=1).dtype == np.uint64
    assert keyed(b"a", size=0).shape == (0,)


def test_uniforms_and_normals():
    """By Kolmogorov and Smirnov; tails of the normal are there, odd sizes too, and neighbours don't
    depend on each other.
    """
    u, z = uniforms(SECRET, b"u", size=100_001), normals(SECRET, b"z", size=100_001)
    assert 0 <= u.min() <= u.max() < 1
    assert kstest(u, "uniform").pvalue > 1e-3
    assert kstest(z, "norm").pvalue > 1e-3
    assert len(z) == 100_001
    assert np.abs(z).max() > 4
    # The two halves of Box and Muller's pairs.
    assert abs(np.corrcoef(z[:50_000], z[50_001:])[0, 1]) < 0.02
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.02
