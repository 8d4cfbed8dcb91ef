"""Importance sampling of the parameters of a hierarchy: draws around a mode, and a diagnostic of
the reliability of their weights.

Parameters are (beta, psi): coefficients, and the parameters psi of the standard deviations tau of
the effects of n groups, and others. The larger tau, the less is known about the coefficients with
these effects, because they are estimated from n groups: their variance given psi grows as
$tau^2 / n$. A Gaussian around the mode ignores this and proposes no draws where tau and beta are
both far out, while the weights of its draws still look good. Therefore psi is drawn from a Student
t, and beta given psi from another one, whose covariance depends on psi.

Source: Vehtari, Simpson, Gelman, Yao, Gabry, "Pareto smoothed importance sampling", JMLR 25, 2024,
for the weights' smoothing and k-hat.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from bayesfl.base.random import Purpose, generator

MOVES = 3
"""Maximum number of times that the proposal is moved to the weighted draws."""
MOST_K = 0.7
"""If k-hat exceeds this value, the weighted mean is unreliable."""
RESAMPLED = 4000
"""Number of equally weighted draws for summaries."""
DEGREES, WIDER = 5.0, 1.2
"""Degrees of freedom of the Student t, and its scale relative to the Gaussian's."""


@dataclass(frozen=True)
class Proposal:
    """Describe a distribution of (beta, psi) around a centre.

    Args:
        centre: Its centre, [q].
        covariance: Covariance of the Gaussian around it, [q, q].
        coefficients: Number p of coefficients.
        given: Function from draws of psi [K, q - p] to covariances of beta given these, [K, p, p].
    """

    centre: Tensor
    covariance: Tensor
    coefficients: int
    given: Callable[[Tensor], Tensor]

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return K draws [K, q] with their log densities [K].

        They are the points of a scrambled Halton sequence, which fills space evenly, so that
        weighted means vary less than with random draws.

        Args:
            count: Number K of draws.
            rng: Generator that scrambles the sequence.
        """
        p, q = self.coefficients, len(self.centre)
        points = stats.qmc.Halton(q + 2, rng=int(rng.integers(2**32))).random(count)
        below, above = self.covariance[:p, p:], self.covariance[p:, p:]
        root = WIDER * torch.linalg.cholesky(above)
        standard, log_psi = student(points[:, 1 : q - p + 1], points[:, 0], root)
        psi = self.centre[p:] + standard @ root.T
        slope = torch.linalg.solve(above, below.T).T
        roots = WIDER * torch.linalg.cholesky(self.given(psi))
        apart, log_beta = student(points[:, q - p + 2 :], points[:, q - p + 1], roots)
        shift = (psi - self.centre[p:]).clamp(-1, 1) @ slope.T  # where the Gaussian is accurate
        beta = self.centre[:p] + shift + (roots @ apart[..., None])[..., 0]
        return torch.cat([beta, psi], 1), log_psi + log_beta


def student(points: np.ndarray, first: np.ndarray, root: Tensor) -> tuple[Tensor, Tensor]:
    """Return draws of a standard Student t, [K, d], and the log densities [K] after multiplication
    by a root [..., d, d].

    Args:
        points: Uniform numbers, [K, d].
        first: Further ones, [K].
        root: The root of the scale.
    """
    d = points.shape[1]
    chi2 = stats.chi2.ppf(first, DEGREES)[:, None]
    found = torch.from_numpy(stats.norm.ppf(points) / np.sqrt(chi2 / DEGREES))
    return found, log_student(found.square().sum(-1), d, root)


def log_student(squares: Tensor, d: int, root: Tensor) -> Tensor:
    """Return log densities of a standard Student t multiplied by a root [..., d, d], for these
    squared lengths before the multiplication, [..., K] if the root has leading dimensions.
    """
    constant = (
        math.lgamma((DEGREES + d) / 2)
        - math.lgamma(DEGREES / 2)
        - d / 2 * math.log(DEGREES * math.pi)
    )
    volume = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    volume = volume.reshape(volume.shape + (1,) * (squares.ndim - volume.ndim))
    return constant - volume - (DEGREES + d) / 2 * torch.log1p(squares / DEGREES)


def weights_of(log_ratios: Tensor) -> tuple[np.ndarray, float]:
    """Return the normalised weights of draws [K], smoothed by Pareto's distribution, and k-hat;
    weighted means are reliable if it is below .7.

    Args:
        log_ratios: Logarithms of target over proposal, [K].
    """
    import arviz

    smooth, k = arviz.psislw(log_ratios.numpy())
    weights = np.exp(smooth - smooth.max())
    return weights / weights.sum(), float(k)


def resampled(weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the indices of equally weighted draws, [count], by systematic resampling, in random
    order.
    """
    k = len(weights)
    # every second point of a Halton sequence, as of 8,000 draws, has one half of the numbers
    order = rng.permutation(k) if k > count else np.arange(k)
    at = (np.arange(count) + rng.random()) / count
    return rng.permutation(order[np.searchsorted(weights[order].cumsum(), at).clip(max=k - 1)])


@dataclass(frozen=True)
class Weighted:
    """Hold weighted draws.

    Args:
        phi: The draws, [K, q].
        weights: Their weights, [K], which sum to 1.
        k_hat: Pareto's k-hat; weighted means are reliable if it is below .7.
        evidence: Log of the integral of the target density, in nats.
        seed: Seed of the draws.
    """

    phi: Tensor
    weights: np.ndarray
    k_hat: float
    evidence: float
    seed: int

    @property
    def effective(self) -> float:
        """Return the effective number of draws."""
        return 1 / float((self.weights**2).sum())

    def chosen(self) -> Tensor:
        """Return the indices of equally weighted draws, [S]."""
        rng = generator(self.seed, Purpose.POSTERIOR, index=MOVES + 1)
        return torch.from_numpy(resampled(self.weights, RESAMPLED, rng))


def weighted(
    proposal: Any,
    value: Callable[[Tensor], Tensor],
    moved: Callable[[Any, Tensor, Tensor], Any],
    *,
    count: int,
    seed: int,
    remedy: str,
) -> Weighted:
    """Return draws with reliable weights, after moving the proposal as often as needed.

    Args:
        proposal: A `Proposal`, or an object with its `draw`.
        value: Log density of the target, [K] at draws [K, q], in nats.
        moved: Function from a proposal, and mean [q] and covariance [q, q] of its weighted draws,
            to the next proposal.
        count: Number K of draws.
        seed: Seed of the draws.
        remedy: Remedy for the error message.

    Raises:
        ValueError: k-hat stays above `MOST_K`.
    """
    k_hat = math.inf
    for move in range(1 + MOVES):
        rng = generator(seed, Purpose.POSTERIOR, index=move)
        phi, log_density = proposal.draw(count, rng)
        ratio = value(phi) - log_density
        weights, k_hat = weights_of(ratio)
        if k_hat <= MOST_K:
            evidence = float(ratio.logsumexp(0)) - math.log(count)
            return Weighted(phi, weights, k_hat, evidence, seed)
        mass = torch.from_numpy(weights)
        centre = mass @ phi
        around = (phi - centre).T @ (mass[:, None] * (phi - centre))
        # a few draws may have all the weight, and then their covariance is singular
        around += 1e-6 * phi.var(0).diag()
        proposal = moved(proposal, centre, around)
    raise ValueError(
        f"the draws' weights have k-hat {k_hat:.2f}, above {MOST_K}, after {MOVES} moves, so their "
        f"means are unreliable: {remedy}"
    )
