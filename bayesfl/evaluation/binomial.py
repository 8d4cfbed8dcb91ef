"""Exact inference on shares: Clopper-Pearson bounds, and the expected lowest of several shares."""

from typing import Annotated

import numpy as np

from bayesfl.base.options import PROBABILITY, declared

_MANY = 4000
"""Maximum number of distinct shares in an exact sum; the result for more is too large by at most 1
/ 4000.
"""


@declared
def clopper_pearson(
    successes: np.ndarray, trials: np.ndarray, delta: Annotated[float, PROBABILITY]
) -> np.ndarray:
    """Return intervals that each cover the true share with a probability of at least 1 - `delta`,
    [..., 2].

    Args:
        successes: Numbers of successes, [...].
        trials: Numbers of independent trials, [...]; 0 gives (0, 1).
        delta: Maximum probability that an interval misses, half of it on either side, in (0, 1).

    Raises:
        ValueError: `delta` is out of range.

    References:
        Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of
        the binomial", Biometrika 26, 1934.
    """
    return np.stack(
        [lower_bound(successes, trials, delta / 2), upper_bound(successes, trials, delta / 2)], -1
    )


def lower_bound(k: np.ndarray, n: np.ndarray, delta: float) -> np.ndarray:
    """Return lower bounds of the true share for k successes in n trials, [...]; each holds with a
    probability of at least 1 - `delta`; 0 without successes.
    """
    from scipy.stats import beta

    return np.where(k > 0, beta.ppf(delta, np.maximum(k, 1), n - k + 1), 0.0)


def upper_bound(k: np.ndarray, n: np.ndarray, delta: float) -> np.ndarray:
    """Return upper bounds of the true share for k successes in n trials, [...]; each holds with a
    probability of at least 1 - `delta`; 1 without failures.
    """
    from scipy.stats import beta

    return np.where(k < n, beta.ppf(1 - delta, k + 1, np.maximum(n - k, 1)), 1.0)


def worst_by_chance(trials: np.ndarray, share: float) -> float:
    """Return the expected lowest observed share among units with the same true share.

    Args:
        trials: Number of independent trials of each unit, [J]; units without trials are ignored.
        share: The true share of all units, in [0, 1].

    Returns:
        The sum over distinct possible shares of their distances times the probability that all
        units lie above, which is exact. For more than 4,000 shares, 4,000 equal steps are used, and
        the result is too large by at most 1 / 4000. NaN without trials.
    """
    from scipy.stats import binom

    n = np.unique(np.asarray(trials)[np.asarray(trials) > 0], return_counts=True)
    if not len(n[0]):
        return float("nan")
    seen = (
        np.unique(np.concatenate([np.arange(m + 1) / m for m in n[0]]))
        if n[0].sum() < _MANY
        else np.arange(_MANY + 1) / _MANY
    )
    # E min = integral over x of P(all shares > x), which is constant between two possible shares.
    log_above = sum(
        times * binom.logsf(np.floor(seen[:-1] * m + 1e-9), m, share)
        for m, times in zip(*n, strict=True)
    )
    return float(seen[0] + (np.diff(seen) * np.exp(log_above)).sum())
