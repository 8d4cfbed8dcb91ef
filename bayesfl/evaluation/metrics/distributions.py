"""Predictive distributions from moments: normal, and negative binomial for counts."""

import math
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

DistributionName: TypeAlias = Literal["normal", "counts"]
"""Kinds of distributions that a mean and a variance determine."""

# of a quadrature; scores are right to 1e-9 where the variance is at most ten times the mean
NODES = 128
POISSON = (
    1e-7  # excess of the variance over the mean, as a share of it, below which counts are Poisson
)


class NormalDistribution:
    """Normal distributions.

    Args:
        mean: Means.
        variance: Variances, > 0.
    """

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        self.mean, self.variance, self.scale = mean, variance, variance.sqrt()

    def nll(self, y: Tensor) -> Tensor:
        """Return the negative log density, in nats."""
        return 0.5 * (
            (y - self.mean).square() / self.variance + (2 * math.pi * self.variance).log()
        )

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y <= y)."""
        return torch.special.ndtr((y - self.mean) / self.scale)

    below = cdf

    def quantile(self, p: float) -> Tensor:
        """Return the y with P(Y <= y) = p."""
        return self.mean + self.scale * torch.special.ndtri(torch.tensor(p, dtype=torch.float64))

    def crps(self, y: Tensor) -> Tensor:
        """Return the score s (z (2 Phi(z) - 1) + 2 phi(z) - pi^(-1/2)) with z = (y - m) / s;
        Gneiting et al. (2005), eq. 5.
        """
        z = (y - self.mean) / self.scale
        density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        return self.scale * (
            z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi)
        )


class Counts:
    """Represent negative binomial distributions with these moments; Poisson if the variance equals
    the mean.

    Counts have this distribution if their Poisson rate has a gamma distribution; the excess of the
    variance over the mean is then the variance of the rate.

    Args:
        mean: Means, > 0.
        variance: Variances; smaller ones are raised to the mean.
    """

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        self._m = mean.numpy()
        excess = np.maximum(variance.numpy() - self._m, 0.0)
        self._v, self._spread_out = self._m + excess, excess > POISSON * self._m
        self._size = np.divide(self._m**2, excess, out=np.ones_like(excess), where=self._spread_out)

    def _either(self, function: str, *given: Any, more: int = 0) -> np.ndarray:
        """Evaluate a function of scipy's Poisson or negative binomial distributions; `more` is
        added to the size of the latter.
        """
        from scipy import stats

        spread, m, v, size, *parts = np.broadcast_arrays(
            self._spread_out, self._m, self._v, self._size, *given
        )
        out = np.empty(spread.shape)
        for at in (spread, ~spread):
            if at.any():
                one = (
                    stats.nbinom(size[at] + more, m[at] / v[at])
                    if at is spread
                    else stats.poisson(m[at])
                )
                out[at] = getattr(one, function)(*(part[at] for part in parts))
        return out

    def nll(self, y: Tensor) -> Tensor:
        """Return the negative log probability, in nats; infinite unless y is a count."""
        return -torch.from_numpy(self._either("logpmf", y.numpy()))

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y <= y)."""
        return torch.from_numpy(self._either("cdf", y.numpy()))

    def below(self, y: Tensor) -> Tensor:
        """Return P(Y < y)."""
        return self.cdf(y.ceil() - 1)

    def quantile(self, p: float) -> Tensor:
        """Return the smallest count y with P(Y <= y) >= p."""
        return torch.from_numpy(self._either("ppf", p))

    def crps(self, y: Tensor) -> Tensor:
        """Return the score E|Y - y| - E|Y - Y'| / 2, where Y' is a copy of Y; Gneiting and Raftery
        (2007), eq. 21.
        """
        x = y.numpy()
        # E[Y 1(Y <= y)] is m times the probability of at most y - 1 under Poisson, or under the
        # negative binomial of one more in its size.
        upto = self._m * self._either("cdf", x - 1, more=1)
        apart = x * (2 * self.cdf(y).numpy() - 1) + self._m - 2 * upto
        # Rounding may make it negative where the spread is extreme.
        return torch.from_numpy(apart - 0.5 * self._apart()).clamp_min(0)

    def _apart(self) -> np.ndarray:
        """Return E|Y - Y'|: under Poisson 2 m exp(-2 m) (I_0(2 m) + I_1(2 m)), else 1 / pi times
        the integral of (1 - |f(t)|^2) / (1 - cos t) over (0, pi), where f is the characteristic
        function.

        With t = sinh(u) / sqrt(v) the integrand is smooth at all scales, as Gauss-Legendre
        quadrature requires.
        """
        from scipy.special import ive

        out = 2 * self._m * (ive(0, 2 * self._m) + ive(1, 2 * self._m))
        at = self._spread_out
        if not at.any():
            return out
        v, size = self._v[at], self._size[at]
        scale, total = 1 / np.sqrt(v), np.zeros_like(v)
        end = np.arcsinh(math.pi / scale)
        for node, weight in zip(*np.polynomial.legendre.leggauss(NODES), strict=True):
            u = 0.5 * end * (node + 1)
            step = 2 * np.sin(0.5 * scale * np.sinh(u)) ** 2  # 1 - cos t
            power = size * np.log1p(2 * v / size * step)
            total -= weight * np.expm1(-power) / step * scale * np.cosh(u)
        out[at] = 0.5 * end * total / math.pi
        return out


Distribution: TypeAlias = NormalDistribution | Counts
"""A predictive distribution, elementwise over tensors of any shape, in float64."""
DISTRIBUTIONS: dict[DistributionName, type[Distribution]] = {
    "normal": NormalDistribution,
    "counts": Counts,
}
