"""Exact bounds of shares, against sums of the binomial distribution."""

import numpy as np
import pytest
from scipy.stats import binom

from bayesfl.evaluation.binomial import clopper_pearson, lower_bound, upper_bound, worst_by_chance


def test_an_end_is_where_the_tail_has_its_probability():
    """P(X >= k | lower end) = P(X <= k | upper end) = delta / 2, the definition."""
    k, n = np.array([3, 17, 40]), np.array([20, 20, 50])
    low, high = clopper_pearson(k, n, 0.1).T
    np.testing.assert_allclose(binom.sf(k - 1, n, low), 0.05, rtol=1e-10)
    np.testing.assert_allclose(binom.cdf(k, n, high), 0.05, rtol=1e-10)


def test_ends_without_successes_or_failures():
    """(1 - high)^n = delta in closed form; nothing is known without trials."""
    assert lower_bound(np.array([0]), np.array([10]), 0.05) == 0
    np.testing.assert_allclose(
        upper_bound(np.array([0]), np.array([10]), 0.05), 1 - 0.05 ** (1 / 10), rtol=1e-12
    )
    np.testing.assert_allclose(
        lower_bound(np.array([10]), np.array([10]), 0.05), 0.05 ** (1 / 10), rtol=1e-12
    )
    assert upper_bound(np.array([10]), np.array([10]), 0.05) == 1
    assert clopper_pearson(np.array([0]), np.array([0]), 0.05).tolist() == [[0, 1]]


def test_the_worst_of_several_by_enumeration():
    """E min over all outcomes of three units, and by draws for twenty."""
    n, share = np.array([2, 3, 3]), 0.7
    expected = 0.0
    for k in np.ndindex(3, 4, 4):
        expected += binom.pmf(k, n, share).prod() * (k / n).min()
    assert worst_by_chance(n, share) == pytest.approx(expected, rel=1e-12)
    drawn = np.random.default_rng(0).binomial(50, 0.9, (20_000, 20)) / 50
    assert worst_by_chance(np.full(20, 50), 0.9) == pytest.approx(drawn.min(1).mean(), abs=1e-3)
    assert worst_by_chance(np.array([4, 0]), 0.9) == pytest.approx(0.9)  # the only unit with trials
    assert np.isnan(worst_by_chance(np.array([0, 0]), 0.9))


@pytest.mark.parametrize("n", [[1500, 1499, 1501], [4001]])
def test_the_worst_of_many_units_is_exact_to_a_step(n: list[int]):
    """Where more shares can be seen than are summed: against sums over all of them."""
    share = 0.9
    seen = np.unique(np.concatenate([np.arange(m + 1) / m for m in n]))
    above = np.prod([binom.sf(np.floor(seen[:-1] * m + 1e-9), m, share) for m in n], 0)
    expected = float((np.diff(seen) * above).sum())
    assert -1e-12 <= worst_by_chance(np.array(n), share) - expected <= 1 / 4000


def test_a_bad_delta():
    with pytest.raises(ValueError, match=r"^delta must lie within"):
        clopper_pearson(np.array([1]), np.array([2]), 1.0)
