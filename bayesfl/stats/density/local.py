"""A site's model: the integral of its log density, its own parameters, and the shared prior.

Sites are alike if their own parameters and rows have the same shapes, and their models differ only
in the numbers of these rows. Their integrals are computed at once.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from bayesfl.base.protocols import Tensors
from bayesfl.base.random import Purpose, generator
from bayesfl.posteriors.importance import weights_of
from bayesfl.stats.density.integral import Integral
from bayesfl.stats.density.parameters import Parameter, constrained

CANDIDATES = 16
"""Number of draws of the normal approximation; one is chosen by weight."""
LOOKED_AT = 1000
"""Number of draws of the normal approximation for its k-hat."""
AT_ONCE, LENGTH = 64, 2**14
"""Maximum number of sites in one computation, and of elements of their longest tensors."""


@dataclass(frozen=True)
class Rows:
    """A site's rows, with exchangeable tensors and floats.

    Args:
        given: The original rows.
        tensors: The tensors in them, and their floats as tensors.
        like: A key that is equal for rows that differ only in these.
    """

    given: Any
    tensors: tuple[Tensor, ...]
    like: Hashable

    @classmethod
    def of(cls, given: Any) -> "Rows":
        """Make the object from the original rows."""
        leaves, form = tree_flatten(given)
        tensors = tuple(
            torch.as_tensor(one, dtype=None if isinstance(one, Tensor) else torch.float64)
            for one in leaves
            if isinstance(one, Tensor | float)
        )
        rest = tuple(
            one if isinstance(one, int | str | None) else id(one)
            for one in leaves
            if not isinstance(one, Tensor | float)
        )
        shapes = tuple((t.shape, t.dtype) for t in tensors)
        return cls(given, tensors, (str(form), shapes, rest))

    @property
    def longest(self) -> int:
        """Return the number of elements of the longest tensor, at least 1."""
        return max([1, *(t.numel() for t in self.tensors)])

    def having(self, tensors: Sequence[Tensor]) -> Any:
        """Return the rows with other tensors; without any, the original rows."""
        if not tensors:
            return self.given
        leaves, form = tree_flatten(self.given)
        others = iter(tensors)
        return tree_unflatten(
            [next(others) if isinstance(one, Tensor | float) else one for one in leaves], form
        )


@dataclass(frozen=True)
class Local:
    """A site's model.

    Args:
        integral: The integral over its own parameters, whose density takes other rows' tensors too.
        own: These parameters.
        begin: Start of the search for the shared parameters, [q].
        prior: The log prior density of the shared parameters [q] in the site's model.
        rows: The site's rows; None if it is computed alone.
        program: The model itself, if it can predict.
    """

    integral: Integral
    own: tuple[Parameter, ...]
    begin: Tensor
    prior: Callable[[Tensor], Tensor]
    rows: Rows | None = None
    program: object = None

    @property
    def like(self) -> Hashable:
        """Return a key that is equal for alike sites."""
        parts = self.integral.parts
        return self.rows and (self.rows.like, self.own, len(parts.common), parts.parts.shape)


def apart(models: Sequence[Local]) -> list[Local]:
    """Return the models of sites, marked as single if they cannot be computed together."""
    found = list(models)
    for places in _alike(models):
        if len(places) == 1:
            continue
        try:
            batch = Batch.of([models[k] for k in places]).integral
            phi = models[places[0]].begin[None]
            together = batch.values(phi, batch.begin[:, None])
            each = [models[k].integral for k in places]
            alone = torch.cat([one.values(phi, one.begin[:, None]) for one in each])
            same = torch.allclose(together, alone, rtol=1e-9)
        except (RuntimeError, TypeError, ValueError):  # as from `int(group.max())` in a model
            same = False
        if not same:
            for k in places:
                found[k] = replace(models[k], rows=None)
    return found


def batches(models: Sequence[Local]) -> list[list[int]]:
    """Return the places of the models in each joint computation."""
    found = []
    for places in _alike(models):
        some = min(AT_ONCE, max(1, LENGTH // models[places[0]].integral.width))
        found += [places[k : k + some] for k in range(0, len(places), some)]
    return found


def _alike(models: Sequence[Local]) -> list[list[int]]:
    found: dict[Hashable, list[int]] = {}
    for k, one in enumerate(models):
        found.setdefault(one.like or k, []).append(k)
    return list(found.values())


@dataclass(frozen=True)
class Batch:
    """J alike sites, or one.

    Args:
        own: Each one's own parameters.
        integral: The integrals over these.
        prior: The log density of the shared parameters.
    """

    own: tuple[Parameter, ...]
    integral: Integral
    prior: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, models: Sequence[Local]) -> "Batch":
        """Make the batch from the sites' models."""
        first = models[0]
        if len(models) == 1:
            return cls(first.own, first.integral, first.prior)
        rows = zip(*(one.rows.tensors for one in models if one.rows), strict=True)
        begin = torch.cat([one.integral.begin for one in models])
        integral = replace(first.integral, begin=begin, rows=tuple(map(torch.stack, rows)))
        return cls(first.own, integral, first.prior)

    def drawn(self, phi: Tensor, seed: int, places: Sequence[int]) -> list[Tensors]:
        """Return draws of each site's own parameters by name, [S, ...], one for each shared draw
        [S, q]: one of several draws of the normal approximation around the mode, chosen by weight,
        separately for each part if parts have no common parameters.

        Args:
            phi: The shared parameters.
            seed: Seed of the draws.
            places: The sites' numbers among all sites.
        """
        d, units = self.integral.size, self.integral.units
        if not self.own:
            return [{}] * len(places)
        noisy, choosing = (
            [generator(seed, Purpose.POSTERIOR, client=j + 1, stage=stage) for j in places]
            for stage in (0, 1)
        )
        found = []
        for some in self.integral.split(phi, CANDIDATES):
            size = len(some), CANDIDATES
            noise = np.stack([rng.standard_normal((*size, d)) for rng in noisy])
            to, logs = self.integral.weights(some, torch.from_numpy(noise))
            gumbel = np.stack([rng.gumbel(size=(*size, len(units))) for rng in choosing])
            best = (logs + torch.from_numpy(gumbel)).argmax(2)
            chosen = torch.zeros(len(places), len(some), d, dtype=torch.float64)
            at = best[:, :, None, :, None].expand(-1, -1, -1, -1, units.shape[1])
            chosen[..., units] = to[..., units].gather(2, at)[:, :, 0]
            found.append(chosen)
        return [vmap(lambda z: constrained(self.own, z)[0])(z) for z in torch.cat(found, 1)]

    def k_hats(self, phi: Tensor, seed: int) -> list[float]:
        """Return each site's largest Pareto's k-hat of the weights of draws of the normal
        approximation, at shared parameters [q]; 0 without own ones, or if it is exact.
        """
        begin = self.integral.begin
        if not begin.numel():
            return [0.0] * len(begin)
        noise = generator(seed, Purpose.POSTERIOR).standard_normal((LOOKED_AT, begin.shape[1]))
        of_all = torch.from_numpy(noise).expand(len(begin), 1, -1, -1)
        found = []
        for logs in self.integral.weights(phi[None], of_all)[1][:, 0]:
            exact = (logs.amax(0) - logs.amin(0)) < 1e-9
            each = [weights_of(one)[1] for one in logs.T[~exact]]
            found.append(min(max(each, default=0.0), 9.0))
        return found
