"""A proposal for the posterior of shared parameters, made along its scales.

The posterior of a hierarchy is a funnel: narrow where a scale, such as the standard deviation of
sites' effects, is small. So the mode and precision of all other parameters are found at nodes of
the logarithm of each scale. The proposal draws

1. each scale's logarithm from its own marginal, interpolated between its nodes; several scales have
   the correlation at the mode;
2. the other parameters given these: their mean and the logarithm of their covariance are those at
   the mode plus a term for each scale, interpolated between its nodes.

Source: Rue, Martino, Chopin, "Approximate Bayesian inference for latent Gaussian models by using
integrated nested Laplace approximations", J. Royal Statistical Society B 71, 2009, for nodes along
hyperparameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from scipy.interpolate import PchipInterpolator
from torch import Tensor

from bayesfl.posteriors.importance import DEGREES, WIDER, log_student, student
from bayesfl.stats.density.modes import LOW, MOST_MOVE, Modes, Target, climb, inverted

OFFSETS = (-3.5, -2.0, -1.0, 1.0, 2.0, 3.5)
"""Nodes along a scale, in standard deviations from the mode."""
WIDENED = 4
"""Maximum number of moves of a scale's end nodes outwards while the posterior is high there."""
ROUGH = 1e-4
"""Converged at a node when the expected gain of a step is below this value, in nats."""


def nodes_along(
    target: Target, best: Modes, scales: Sequence[int], names: Sequence[str]
) -> dict[int, Modes]:
    """Return nodes along each scale until the posterior is low: the modes of the other parameters
    with the scale held fixed. The overall mode is one of them.

    Args:
        target: The log posterior.
        best: The mode.
        scales: Places of scales' logarithms.
        names: Names of the parameters.

    Raises:
        ValueError: The posterior does not fall along a scale.
    """
    q, covariance = best.theta.shape[1], best.covariance()
    sd, top = covariance.diagonal().sqrt(), best.evidence()
    unit = sd.clamp(max=MOST_MOVE)
    places = torch.arange(q)
    found = {
        place: Modes(best.theta, best.value, best.precision, (places == place)[None])
        for place in scales
    }
    offsets = {place: list(OFFSETS) for place in scales}
    for _ in range(1 + WIDENED):
        if not offsets:
            break
        at = torch.tensor([place for place, steps in offsets.items() for _ in steps])
        steps = torch.tensor([step for steps in offsets.values() for step in steps]).double()
        start = best.theta + (steps * unit[at] / covariance[at, at])[:, None] * covariance[at]
        nodes = climb(target, start, places == at[:, None], places < 0, ROUGH)
        offsets = {}
        for place in dict.fromkeys(at.tolist()):
            more = nodes[(at == place) & nodes.value.isfinite()]
            whole = Modes.together([found[place], more])
            whole = found[place] = whole[whole.theta[:, place].argsort()]
            density = whole.evidence()
            height = torch.cat([top - sd[place].log() - 1, density]).max() - LOW
            high = [density[end] > height for end in (0, -1)]
            out = 1.6 * (whole.theta[[0, -1], place] - best.theta[0, place]) / unit[place]
            if any(high):
                offsets[place] = [step for step, so in zip(out.tolist(), high, strict=True) if so]
    for place in offsets:
        ends = found[place].theta[[0, -1], place].exp()
        raise ValueError(
            f"the posterior does not fall along {names[place]!r}, from {float(ends[0]):.3g} to "
            f"{float(ends[1]):.3g}: give it a prior that falls on both sides, as HalfNormal"
        )
    return found


@dataclass(frozen=True)
class Marginal:
    """A distribution of one number.

    Args:
        grid: Places in order.
        mass: The probability below each of them.
    """

    grid: np.ndarray
    mass: np.ndarray

    @classmethod
    def of(cls, at: np.ndarray, logs: np.ndarray) -> "Marginal":
        """Make the distribution from log densities at nodes, up to a constant: interpolated between
        these, and extrapolated with the first and the last slope.
        """
        width = at[-1] - at[0]
        slopes = np.diff(logs) / np.diff(at)
        out = np.linspace(0, 3 * width, 200)[1:]
        inside = np.linspace(at[0], at[-1], 400)
        grid = np.concatenate([at[0] - out[::-1], inside, at[-1] + out])
        below = logs[0] - max(slopes[0], 1 / width) * out[::-1]
        above = logs[-1] - max(-slopes[-1], 1 / width) * out
        log_density = np.concatenate([below, PchipInterpolator(at, logs)(inside), above])
        density = np.exp(log_density - log_density.max())
        mass = np.cumsum(np.diff(grid, prepend=grid[0]) * (density + np.roll(density, 1)) / 2)
        return cls(grid, mass / mass[-1])

    def below(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the cumulative probabilities and the log densities at some numbers."""
        place = np.searchsorted(self.grid, at).clip(1, len(self.grid) - 1)
        density = np.diff(self.mass)[place - 1] / np.diff(self.grid)[place - 1]
        inside = (at >= self.grid[0]) & (at <= self.grid[-1])
        with np.errstate(divide="ignore"):
            return np.interp(at, self.grid, self.mass), np.log(np.where(inside, density, 0))


@dataclass(frozen=True)
class Nodes:
    """A scale's additions to the mean and to the logarithm of the covariance of other parameters.

    Args:
        at: The scale's logarithm at its nodes, [C].
        means: Additions to the mean, [C, p].
        logs: Additions to the logarithm of the covariance, [C, p, p].
    """

    at: Tensor
    means: Tensor
    logs: Tensor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both at other values [K], interpolated; outside the nodes those of the end
        nodes.
        """
        above = torch.searchsorted(self.at, x.contiguous()).clamp(1, len(self.at) - 1)
        first, last = self.at[above - 1], self.at[above]
        share = ((x - first) / (last - first)).clamp(0, 1)
        means, logs = (
            torch.lerp(t[above - 1], t[above], share.reshape(-1, *[1] * (t.ndim - 1)))
            for t in (self.means, self.logs)
        )
        return means, logs


@dataclass(frozen=True)
class Along:
    """The proposal of this file.

    Args:
        scales: Places of scales' logarithms, [s].
        others: Places of the other parameters, [p].
        marginals: That of each scale.
        root: Root of the correlation of scales, [s, s].
        nodes: Each scale's additions for the others.
        mean: Their mean at the mode, [p].
        log_covariance: Logarithm of their covariance there, [p, p].
    """

    scales: Tensor
    others: Tensor
    marginals: list[Marginal]
    root: Tensor
    nodes: list[Nodes]
    mean: Tensor
    log_covariance: Tensor

    @classmethod
    def of(cls, best: Modes, found: dict[int, Modes]) -> "Along":
        """Make the proposal from the mode and the nodes along each scale."""
        scales = torch.tensor([*found], dtype=torch.long)
        others = torch.tensor([k for k in range(best.theta.shape[1]) if k not in found]).long()
        covariance = best.covariance()[scales][:, scales]
        sd = covariance.diagonal().sqrt()

        def log_covariance(precision: Tensor) -> Tensor:
            given = inverted(precision[..., others, :][..., others])
            values, vectors = torch.linalg.eigh(given)
            return (vectors * values.log()[..., None, :]) @ vectors.mT

        mean, middle = best.theta[0, others], log_covariance(best.precision[0])
        return cls(
            scales,
            others,
            [
                Marginal.of(one.theta[:, place].numpy(), one.evidence().numpy())
                for place, one in found.items()
            ],
            torch.linalg.cholesky(covariance / sd[:, None] / sd),
            [
                Nodes(
                    one.theta[:, place].contiguous(),
                    one.theta[:, others] - mean,
                    log_covariance(one.precision) - middle,
                )
                for place, one in found.items()
            ],
            mean,
            middle,
        )

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return K draws [K, q] with their log densities [K]; see `Proposal.draw`.

        Args:
            count: Their number K.
            rng: Scrambles the sequence.
        """
        s, q = len(self.scales), len(self.scales) + len(self.others)
        points = stats.qmc.Halton(q + 2, rng=int(rng.integers(2**32))).random(count)
        found = torch.zeros(count, q, dtype=torch.float64)
        standard, _ = student(points[:, 2 : 2 + s], points[:, 0], self.root)
        ranks = stats.t.cdf(standard @ self.root.T, DEGREES).T
        for place, one, rank in zip(self.scales, self.marginals, ranks, strict=True):
            found[:, place] = torch.from_numpy(np.interp(rank, one.mass, one.grid))
        mean, root = self._given(found[:, self.scales])
        standard, _ = student(points[:, 2 + s :], points[:, 1], root)
        found[:, self.others] = mean + (root @ standard[..., None])[..., 0]
        return found, self.log_density(found)

    def log_density(self, phi: Tensor) -> Tensor:
        """Return the log density [K] at phi [K, q]."""
        found, scales = phi.new_zeros(len(phi)), phi[:, self.scales]
        if len(self.scales):
            each = zip(self.marginals, scales.T.numpy(), strict=True)
            ranks, logs = map(np.array, zip(*(one.below(x) for one, x in each), strict=True))
            standard = stats.t.ppf(ranks.clip(1e-16, 1 - 1e-16), DEGREES)
            found = torch.from_numpy((logs - stats.t.logpdf(standard, DEGREES)).sum(0))
            found = found + _of_student(torch.from_numpy(standard.T), self.root)
        mean, root = self._given(scales)
        return found + _of_student(phi[:, self.others] - mean, root)

    def _given(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of the others given scales' logarithms [K, s], and a root."""
        mean = self.mean.expand(len(scales), -1)
        logs = self.log_covariance.expand(len(scales), -1, -1)
        for one, x in zip(self.nodes, scales.T, strict=True):
            more = one(x)
            mean, logs = mean + more[0], logs + more[1]
        return mean, WIDER * torch.linalg.cholesky(torch.linalg.matrix_exp(logs))


def _of_student(away: Tensor, root: Tensor) -> Tensor:
    """Return log densities [K] of a Student t around 0, at [K, d], by roots [..., d, d]."""
    standard = torch.linalg.solve_triangular(root, away[..., None], upper=False)[..., 0]
    return log_student(standard.square().sum(-1), away.shape[1], root)


@dataclass(frozen=True)
class Besides:
    """A mixture of a proposal and a Student t, each with half of the draws.

    Args:
        first: The proposal.
        centre: The centre of the Student t, [q].
        covariance: That of the Gaussian around it, [q, q].
    """

    first: Any
    centre: Tensor
    covariance: Tensor

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return K draws [K, q] with their log densities [K]; see `Along.draw`."""
        q, half = len(self.centre), count // 2
        points = stats.qmc.Halton(q + 1, rng=int(rng.integers(2**32))).random(half)
        standard, _ = student(points[:, 1:], points[:, 0], self.root)
        found = torch.cat(
            [self.first.draw(count - half, rng)[0], self.centre + standard @ self.root.T]
        )
        return found, self.log_density(found)

    def log_density(self, phi: Tensor) -> Tensor:
        """Return the log density [K] at phi [K, q]."""
        ours = _of_student(phi - self.centre, self.root)
        return torch.logaddexp(self.first.log_density(phi), ours) - np.log(2)

    @property
    def root(self) -> Tensor:
        """Return a root of its scale, [q, q]."""
        return WIDER * torch.linalg.cholesky(self.covariance)
