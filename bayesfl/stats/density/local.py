"""What a site knows of a log density: its integral, its own parameters, and the shared prior."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from bayesfl.base.protocols import Tensors
from bayesfl.base.random import Purpose, generator
from bayesfl.posteriors.importance import weights_of
from bayesfl.stats.density.integral import NUMBERS, Integral
from bayesfl.stats.density.parameters import Parameter, constrained

CANDIDATES = 16
"""A draw is chosen among so many of the normal approximation, by their weights."""
LOOKED_AT = 1000
"""So many draws of the normal approximation say how far it can be relied on."""


@dataclass(frozen=True)
class Local:
    """A site's model.

    Args:
        integral: The integral over its own parameters.
        own: These.
        begin: Where the search for the shared parameters begins, [q].
        prior: The log density of the shared parameters [q], as far as the site's model has it.
        program: The model itself, where it can predict.
    """

    integral: Integral
    own: tuple[Parameter, ...]
    begin: Tensor
    prior: Callable[[Tensor], Tensor]
    program: object = None

    def drawn(self, phi: Tensor, seed: int, place: int) -> Tensors:
        """Return draws of its own parameters by name, [S, ...], one for each of the shared ones
        [S, q]: of some draws of the normal approximation around the mode, one by their weights,
        for each part where parts have nothing in common.

        Args:
            phi: The shared parameters.
            seed: Seed of the draws.
            place: The site's number among all sites.
        """
        rng = generator(seed, Purpose.POSTERIOR, client=place + 1)
        size = self.integral.size
        units, found = self.integral.units, [torch.zeros(0, size, dtype=torch.float64)]
        for some in phi.split(max(1, NUMBERS // (CANDIDATES * max(1, size)))):
            to, logs = self._weighed(some, CANDIDATES, rng)
            best = (logs + torch.from_numpy(rng.gumbel(size=tuple(logs.shape)))).argmax(1)
            chosen = torch.zeros(len(some), size, dtype=torch.float64)
            at = best[:, None, :, None].expand(-1, 1, -1, units.shape[1])
            chosen[:, units] = to[..., units].gather(1, at)[:, 0]
            found.append(chosen)
        return vmap(lambda z: constrained(self.own, z)[0])(torch.cat(found)) if self.own else {}

    def _weighed(self, phi: Tensor, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return M draws of the normal approximation at each phi [N, q], [N, M, d], and the
        logarithms of their weights by unit, [N, M, U].
        """
        with torch.no_grad():
            z = self.integral.modes(phi)
            noise = torch.from_numpy(rng.standard_normal((len(phi), count, self.integral.size)))
            to, _ = self.integral.around(phi, z, noise)
            logs = self.integral.relative(phi, z, to)
            return to, logs + noise[..., self.integral.units].square().sum(-1) / 2

    def k_hat(self, phi: Tensor, seed: int) -> float:
        """Return the largest Pareto's k-hat of the weights of draws of the normal approximation, at
        shared parameters [q]; 0 without own ones, and where it is exact.
        """
        if not self.integral.size:
            return 0.0
        rng = generator(seed, Purpose.POSTERIOR)
        _, logs = self._weighed(phi[None], LOOKED_AT, rng)
        exact = (logs[0].amax(0) - logs[0].amin(0)) < 1e-9
        found = [weights_of(one)[1] for one in logs[0].T[~exact]]
        return min(max(found, default=0.0), 9.0)
