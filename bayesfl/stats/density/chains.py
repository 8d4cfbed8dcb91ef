"""Hamiltonian chains in lockstep: a step of all chains is one question."""

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.random import Purpose, generator
from bayesfl.stats.density.modes import Target

CHAINS, TRAJECTORIES, LEAPS, STEP = 64, 24, 8, 0.4
"""Number of chains, of trajectories, of steps in each, and maximum length of a step."""


def chains(target: Target, begin: Tensor, around: Tensor, seed: int) -> Tensor:
    """Return states of Hamiltonian chains in lockstep, [T C, q]; a step of all is one question.

    Args:
        target: The log posterior.
        begin: Their starts, [C, q].
        around: Approximate covariance of the posterior, [q, q], whose root is the unit of steps.
        seed: Seed of momenta, of lengths of steps, and of acceptance.

    Source: Neal, "MCMC using Hamiltonian dynamics", Handbook of MCMC, 2011, section 5.3.
    """
    rng, root = generator(seed, Purpose.NOISE), torch.linalg.cholesky(around)

    def look(phi: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = target(phi, 1)
        return value, slope @ root

    phi, kept = begin, []
    value, slope = look(phi)
    for trajectory in range(TRAJECTORIES):
        step = STEP * rng.uniform(0.5, 1.0)
        momentum = torch.from_numpy(rng.standard_normal(tuple(phi.shape)))
        at, energy = phi, value - momentum.square().sum(1) / 2
        found, pull = value, slope
        for _ in range(LEAPS):
            momentum = momentum + step / 2 * pull
            at = at + step * momentum @ root.T
            found, pull = look(at)
            momentum = momentum + step / 2 * pull
        gain = found - momentum.square().sum(1) / 2 - energy
        taken = torch.from_numpy(np.log(rng.random(len(phi)))) < gain
        phi = torch.where(taken[:, None], at, phi)
        value, slope = torch.where(taken, found, value), torch.where(taken[:, None], pull, slope)
        if trajectory >= TRAJECTORIES // 3:
            kept.append(phi)
    return torch.cat(kept)
