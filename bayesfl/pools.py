"""Pools: how the federation gathers a block. Most are sums over clients followed by a closed form, so that they stream.

Totals are float64 whatever the run's precision, and are added one client after another, so that neither the chunk size nor
the number of workers changes them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesfl.checks import number
from bayesfl.numerics import inverse_softplus
from bayesfl.posteriors import MeanField
from bayesfl.protocols import AdditivePool, Server, Tensors, Uplink, Weight


def by_size(server: Server, uplink: Uplink) -> Tensor:
    """A client counts by its number of examples, [C]."""
    return uplink["n"]


def equal(server: Server, uplink: Uplink) -> Tensor:
    """Every client counts the same, [C]."""
    return torch.ones_like(uplink["n"])


def counted(weight: Weight, server: Server, uplink: Uplink, name: str) -> Tensor:
    """What the clients count, in float64: [C], or [C, M] for the copies of the block `name`.

    Raises:
        ValueError: The weight gives something else than a number for each client, or each copy. Whether it is finite depends on what
            clients report, and is looked at when the round is done.
    """
    loc = uplink[name]["loc"]
    allowed = [loc.shape[:axes] for axes in range(1, loc.dim())]
    found = weight(server, uplink)
    if not isinstance(found, Tensor) or found.is_complex() or found.shape not in allowed:
        got = f"a tensor {list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else repr(found)
        raise ValueError(f"weight must give {' or '.join(str(list(shape)) for shape in allowed)} numbers for block {name!r}, got {got}")
    return found.double()


def _add(total: Tensors | None, summands: dict[str, tuple[Tensor, Tensor]]) -> Tensors:
    """Adds weight * value, client after client: {name: (weight [C], or [C, M] for copies, value [C, ...])}."""
    if total is None:
        total = {k: torch.zeros(v.shape[1:], dtype=torch.float64, device=v.device) for k, (_, v) in summands.items()}
    for key, (weight, value) in summands.items():
        if weight.dim() == 1:
            for w, row in zip(weight.tolist(), value, strict=True):
                total[key].add_(row, alpha=w)
        else:
            for w, row in zip(weight, value, strict=True):
                total[key].addcmul_(row.double(), w.view(*w.shape, *[1] * (row.dim() - w.dim())))
    return total


def _cast(new: Tensors, old: Tensors) -> Tensors:
    return {**old, **{key: value.to(old[key]) for key, value in new.items()}}


@dataclass(frozen=True)
class Mean:
    """The weighted mean of the clients' centres; 1 / rho_j^2 as the weight makes it precision-weighted.

    Args:
        weight: (server, uplink) -> [C], not normalised, or [C, M] for the copies of a block; `by_size` is FedAvg's.
    """

    weight: Weight = by_size
    sends = ("loc",)

    def accumulate(self, total: Tensors | None, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Adds the weights and the weighted centres."""
        weight = counted(self.weight, server, uplink, name)
        ones = torch.ones_like(weight)
        return _add(total, {"weight": (weight, ones), "loc": (weight, uplink[name]["loc"])})

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Their quotient; a copy for which no client counts stays as it is."""
        weight = total["weight"]
        if not weight.dim():
            return _cast({"loc": total["loc"] / weight}, server[name])
        mean = total["loc"] / weight.unsqueeze(-1)
        return _cast({"loc": torch.where(weight.unsqueeze(-1) > 0, mean, server[name]["loc"].double())}, server[name])


@dataclass(frozen=True)
class Relaxed:
    """Part of the way from the server's entry to another pool's: (1 - step) old + step new, on the tensors that travel.

    Args:
        pool: The pool that says where to go.
        step: Share of the way; pFedMe's server step beta may exceed 1.
    """

    pool: AdditivePool
    step: float

    def __post_init__(self) -> None:
        if not number("step", self.step) > 0:
            raise ValueError(f"step must be > 0, got {self.step}; 1 is the pool itself")

    @property
    def sends(self) -> tuple[str, ...]:
        """What the inner pool sends."""
        return self.pool.sends

    def accumulate(self, total: Tensors | None, server: Server, name: str, uplink: Uplink) -> Tensors:
        """As the inner pool."""
        return self.pool.accumulate(total, server, name, uplink)

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """The old entry moved towards the inner pool's."""
        old, new = server[name], self.pool.solve(server, name, total)
        return {**new, **{key: old[key].lerp(new[key], self.step) for key in self.sends}}


@dataclass(frozen=True, kw_only=True)
class _Gaussian:
    """Pools of mean-field Gaussians: both moments travel, as `loc` and `rho`."""

    posterior: MeanField = MeanField()
    sends = ("loc", "rho")

    def _moments(self, name: str, uplink: Uplink) -> tuple[Tensor, Tensor]:
        # Client by client: vectorised exponentials round by their place in memory, and a chunk would move them.
        rows = zip(*uplink[name].values(), strict=True)
        moments = [self.posterior.moments({key: t.double() for key, t in zip(uplink[name], row, strict=True)}) for row in rows]
        return torch.stack([loc for loc, _ in moments]), torch.stack([variance for _, variance in moments])

    def _solved(self, server: Server, name: str, loc: Tensor, variance: Tensor) -> Tensors:
        return _cast({"loc": loc, "rho": inverse_softplus(variance.sqrt())}, server[name])


@dataclass(frozen=True, kw_only=True)
class PrecisionWeighted(_Gaussian):
    """The product of the clients' Gaussians: precisions add, means weigh by precision.

    Args:
        posterior: How `loc` and `rho` give moments.
        prior: (server) -> (mean, precision) [D] of a prior that every client's posterior already contains, to be counted
            once instead of once for each client; None where they contain none.
    """

    prior: Any = None

    def accumulate(self, total: Tensors | None, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Adds precisions and precision-weighted means."""
        loc, variance = self._moments(name, uplink)
        ones = torch.ones(len(loc), dtype=torch.float64)
        precision = 1 / variance
        return _add(total, {"count": (ones, ones.to(loc)), "precision": (ones, precision), "weighted": (ones, precision * loc)})

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """The product's moments.

        Raises:
            ValueError: Taking out the prior leaves a precision that is not positive.
        """
        precision, weighted = total["precision"], total["weighted"]
        if self.prior is not None:
            mean0, precision0 = (value.double() for value in self.prior(server))
            precision = precision - (total["count"] - 1) * precision0
            weighted = weighted - (total["count"] - 1) * precision0 * mean0
            if not bool((precision > 0).all()):
                raise ValueError(
                    f"block {name!r}: {int((precision <= 0).sum())} weights have no positive precision once the prior is counted "
                    "once; the clients' posteriors are wider than their prior"
                )
        return self._solved(server, name, weighted / precision, 1 / precision)


@dataclass(frozen=True, kw_only=True)
class MomentMatched(_Gaussian):
    """The Gaussian with the moments of the clients' mixture.

    Args:
        posterior: How `loc` and `rho` give moments.
        weight: (server, uplink) -> [C], not normalised.
    """

    weight: Weight = by_size

    def accumulate(self, total: Tensors | None, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Adds weighted variances, and moments of the means about the server's centre, so that small spreads survive rounding."""
        loc, variance = self._moments(name, uplink)
        weight = counted(self.weight, server, uplink, name)
        shift = loc - server[name]["loc"].double()
        ones = torch.ones_like(weight)
        return _add(
            total, {"weight": (weight, ones), "first": (weight, shift), "within": (weight, variance), "second": (weight, shift.square())}
        )

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Mean and variance of the mixture."""
        first, second, within = (total[key] / total["weight"] for key in ("first", "second", "within"))
        between = (second - first.square()).clamp_min(0)  # rounding alone can make it negative
        return self._solved(server, name, server[name]["loc"].double() + first, within + between)


@dataclass(frozen=True, kw_only=True)
class Barycentre(_Gaussian):
    """The diagonal Gaussian closest to the clients' in squared 2-Wasserstein distance: means average, and standard deviations.

    Args:
        posterior: How `loc` and `rho` give moments.
        weight: (server, uplink) -> [C], not normalised.
    """

    weight: Weight = by_size

    def accumulate(self, total: Tensors | None, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Adds weighted means and standard deviations."""
        loc, variance = self._moments(name, uplink)
        weight = counted(self.weight, server, uplink, name)
        ones = torch.ones_like(weight)
        return _add(total, {"weight": (weight, ones), "loc": (weight, loc), "scale": (weight, variance.sqrt())})

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Both quotients."""
        scale = total["scale"] / total["weight"]
        return self._solved(server, name, total["loc"] / total["weight"], scale.square())


@dataclass(frozen=True)
class Stack:
    """Sent as it is, stacked over clients for `combine`, which decides; the server's entry is unchanged.

    Args:
        sends: Which of the posterior's tensors travel.
    """

    sends: tuple[str, ...] = ("loc",)

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """The server's entry."""
        return server[name]
