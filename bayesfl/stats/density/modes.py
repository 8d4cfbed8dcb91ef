"""Maxima of the log posterior of shared parameters, by Newton's steps; each is a question."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from bayesfl.base.random import Purpose, generator
from bayesfl.stats import newton
from bayesfl.stats.density.parameters import Parameter, constrained, entries

MOST_MOVE = 2.0
"""Longest step of a scale's logarithm towards the mode."""
STEPS = 60
"""Maximum number of Newton's steps."""
LOW = 7.0
"""A density this far below the mode, in nats, is ignored."""
STARTS = 4
"""Number of starts; the first is the prior's middle."""
APART = 3.0
"""Minimum distance of two maxima within `LOW` nats, in standard deviations."""
Target: TypeAlias = Callable[[Tensor, int], list[Tensor]]
"""The log posterior [N], its slopes [N, q] and its Hessians [N, q, q] at phi [N, q] by an order."""


@dataclass(frozen=True)
class Modes:
    """Maxima of the log posterior over the parameters that are not held fixed.

    Args:
        theta: Their places, [N, q].
        value: The log posterior there, [N]; minus infinity if the search has failed.
        precision: The negative Hessian, [N, q, q].
        held: Whether a parameter was held fixed, [N, q].
    """

    theta: Tensor
    value: Tensor
    precision: Tensor
    held: Tensor

    def __getitem__(self, at: Tensor) -> "Modes":
        """Return some of them."""
        return Modes(self.theta[at], self.value[at], self.precision[at], self.held[at])

    @classmethod
    def together(cls, parts: Sequence["Modes"]) -> "Modes":
        """Return several as one."""
        each = ((t.theta, t.value, t.precision, t.held) for t in parts)
        return cls(*map(torch.cat, zip(*each, strict=True)))

    def evidence(self) -> Tensor:
        """Return Laplace's log integral over the parameters that were not held, [N]."""
        pairs = ~self.held[:, :, None] & ~self.held[:, None, :]
        inner = torch.where(pairs, self.precision, torch.eye(self.theta.shape[1]).double())
        free = (~self.held).sum(-1)
        volume = torch.linalg.eigvalsh(inner).abs().clamp_min(1e-20).log().sum(-1)
        return self.value + free * math.log(2 * math.pi) / 2 - volume / 2

    def covariance(self) -> Tensor:
        """Return the covariance [q, q] of the Gaussian at the first maximum; nothing is held."""
        return inverted(self.precision[0])


def inverted(precision: Tensor) -> Tensor:
    """Return covariances [..., d, d] of precisions, with the moduli of their eigenvalues."""
    values, vectors = torch.linalg.eigh(precision)
    return (vectors / values.abs().clamp_min(1e-20)[..., None, :]) @ vectors.mT


def climb(
    target: Target, begin: Tensor, held: Tensor, scales: Tensor, enough: float = newton.ENOUGH
) -> Modes:
    """Find maxima from several starts at once, by Newton's steps.

    Args:
        target: The log posterior.
        begin: The starts, [N, q].
        held: Whether a parameter is held fixed, [N, q].
        scales: Whether a parameter is a scale's logarithm, [q].
        enough: Converged when the expected gain of a step is below this value, in nats.
    """
    states = [newton.begin(one) for one in begin]
    full = torch.zeros(len(begin), begin.shape[1], begin.shape[1], dtype=torch.float64)
    live = torch.ones(len(begin), dtype=torch.bool)
    for _ in range(STEPS):
        at = live.nonzero().flatten().tolist()
        if not at:
            break
        value, slope, second = target(torch.stack([states[n]["theta"] for n in at]), 2)
        for place, n in enumerate(at):
            full[n] = -second[place]
            away = torch.where(held[n], 0.0, -slope[place])
            pairs = ~held[n][:, None] & ~held[n]
            inner = torch.where(pairs, full[n], torch.eye(len(away), dtype=torch.float64))
            try:
                states[n], done = newton.step(states[n], -value[place], away, inner)
            except ValueError:  # the sum does not fall: this start leads to no maximum
                states[n] |= {"loss": torch.tensor(torch.inf, dtype=torch.float64)}
                done = True
            move = states[n]["theta"] - states[n]["best"]
            most = move[scales].abs().amax() if scales.any() else move.new_zeros(())
            short = (MOST_MOVE / most).clamp(max=1.0)
            states[n] |= {"theta": states[n]["best"] + short * move}
            live[n] = not done and float(states[n]["promised"]) >= enough
    theta = torch.stack([one["best"] for one in states])
    value = torch.stack([-one["loss"] for one in states])
    return Modes(theta, torch.where(live, -torch.inf, value), full, held)


def mode(
    target: Target, begin: Tensor, scales: Tensor, parameters: Sequence[Parameter], seed: int
) -> Modes:
    """Return the maximum of the log posterior.

    Raises:
        ValueError: There is none, or a second one of similar height.
    """
    away = torch.from_numpy(generator(seed, Purpose.START).standard_normal((STARTS, len(begin))))
    away[0] = 0
    free = torch.zeros(STARTS, len(begin), dtype=torch.bool)
    found = climb(target, begin + 2 * away, free, scales)
    found = found[found.value.isfinite()]
    if not len(found.theta):
        raise ValueError(
            "Newton's steps find no maximum of the posterior: a shared parameter may have neither "
            "a prior nor rows that inform it, or the density may grow without bound, as when a "
            "scale goes to zero: write a parameter with this scale as the scale times a standard "
            "one"
        )
    best = found[found.value.argmax()[None]]
    away = found.theta - best.theta
    apart = torch.einsum("ni,nij,nj->n", away, best.precision.expand(len(away), -1, -1), away)
    others = (apart.abs() > APART**2) & (found.evidence() > best.evidence() - LOW)
    if others.any():
        two = torch.cat([best.theta, found.theta[others][:1]])
        values = entries(vmap(lambda phi: constrained(parameters, phi)[0])(two))
        told = ", ".join(f"{name} {a:.4g} or {b:.4g}" for name, (a, b) in values.items())
        raise ValueError(
            f"the posterior has two maxima, {told}, and no useful summary: order exchangeable "
            "parameters, or give priors that prefer one"
        )
    return best
