"""Pools: how the federation gathers a block. Most are sums over clients followed by a closed form, so that they stream.

Totals are float64 whatever the run's precision, and are added one client after another, so that neither the chunk size nor
the number of workers changes them.

The last three are for clients that may lie, or whose training went wrong without leaving the finite numbers. A mean follows any one
client as far as it goes. A median and a trimmed mean stay within the range of the honest, coordinate by coordinate, while those are in
the majority; clipping bounds how far one can pull. All have a price where clients differ honestly: what a minority knows looks like a lie.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesfl.base.checks import number
from bayesfl.base.numerics import inverse_softplus
from bayesfl.base.protocols import AdditivePool, Server, Tensors, Uplink, Weight
from bayesfl.posteriors import MeanField


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


@dataclass(frozen=True)
class Mixed:
    """Every client gets a mixture of its own of what the cohort sends: sum_k A_jk w_k for client j.

    The server's entry holds beside the mean over clients, `loc`, what each of them is sent next, `each` [J, ...], and in `weights` [J, J]
    the last row of A that each was given: rows are those that get a mixture, columns those whose models are in it. Of a client outside
    the cohort both stay as they were; of one that never took part, `each` is the start and its row 0.

    Args:
        weights: (server, ids [C], uplink) -> A [C, C] among the clients of a round's cohort; taken as they are, so rows that sum to 1 mix.

    Raises:
        ValueError: In a round, the weights are no such matrix.
    """

    weights: Callable[[Server, Tensor, Uplink], Tensor]
    sends = ("loc",)
    holds = ("each", "weights")

    def start(self, entry: Tensors, clients: int) -> Tensors:
        """The server's entry before the first round: the same for each client."""
        loc = entry["loc"]
        return {**entry, "each": loc.expand(clients, *loc.shape).clone(), "weights": loc.new_zeros(clients, clients)}

    def newcomers(self, entry: Tensors) -> Tensors:
        """The entry as clients never seen meet it: nothing of their own."""
        return {**entry, "each": entry["each"][:0], "weights": entry["weights"][:0, :0]}

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """See `StackedPool`."""
        entry, ids = server[name], uplink["ids"]
        among = self.weights(server, ids, uplink)
        if not isinstance(among, Tensor) or among.shape != (len(ids), len(ids)):
            got = f"a tensor {list(among.shape)}" if isinstance(among, Tensor) else repr(among)
            raise ValueError(f"weights must give [{len(ids)}, {len(ids)}] numbers for a cohort of {len(ids)} clients, got {got}")
        among = among.double()
        mixed = torch.einsum("jk,k...->j...", among, uplink[name]["loc"].double())
        rows = among.new_zeros(len(ids), len(entry["each"])).index_copy(1, ids, among)
        each = entry["each"].index_copy(0, ids, mixed.to(entry["each"]))
        return {
            "loc": each.double().mean(0).to(each),
            "each": each,
            "weights": entry["weights"].index_copy(0, ids, rows.to(entry["weights"])),
        }


@dataclass(frozen=True)
class Median:
    """The coordinate-wise median of what the clients send, every client counting the same; of an even number, the mean of the middle two.

    Args:
        sends: Which of the posterior's tensors travel.

    References:
        Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018, option I.
    """

    sends: tuple[str, ...] = ("loc",)

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """See `StackedPool`."""
        found = {key: uplink[name][key].double().sort(0).values for key in self.sends}
        middle = {key: (t[(len(t) - 1) // 2] + t[len(t) // 2]) / 2 for key, t in found.items()}
        return {**server[name], **{key: t.to(server[name][key]) for key, t in middle.items()}}


@dataclass(frozen=True)
class TrimmedMean:
    """The coordinate-wise mean of what is left when the largest and the smallest numbers of the clients are taken away.

    Args:
        share: Of the clients, taken away at each end, in [0, 1/2); of few clients at least one where it is not 0.
        sends: Which of the posterior's tensors travel.

    Raises:
        ValueError: The share lies outside its range, or in a round no client is left.

    References:
        Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018, option II.
    """

    share: float = 0.1
    sends: tuple[str, ...] = ("loc",)

    def __post_init__(self) -> None:
        if not 0 <= number("share", self.share) < 0.5:
            raise ValueError(f"share is taken away at each end and must lie in [0, 0.5), got {self.share}")

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """See `StackedPool`."""
        clients = len(uplink["n"])
        cut = max(1, int(self.share * clients + 1e-9)) if self.share else 0
        if 2 * cut >= clients:
            raise ValueError(
                f"a trimmed mean of {clients} clients leaves none when {cut} go at each end; take a larger cohort, or a median"
            )
        found = {key: uplink[name][key].double().sort(0).values[cut : clients - cut].mean(0) for key in self.sends}
        return {**server[name], **{key: t.to(server[name][key]) for key, t in found.items()}}


@dataclass(frozen=True)
class Clipped:
    """Another pool, of clients whose difference from what the server sent is shrunk to a given length where it is longer.

    Args:
        pool: The pool that gathers them.
        norm: Largest Euclidean length of the difference over all tensors of the block that travel, > 0.

    Raises:
        ValueError: The norm is not positive, or the pool needs all clients at once.

    References:
        Sun, Kairouz, Suresh, McMahan, "Can you really backdoor federated learning?", 2019, section 4.
    """

    pool: AdditivePool
    norm: float

    def __post_init__(self) -> None:
        if isinstance(self.pool, type) or not hasattr(self.pool, "accumulate"):
            raise ValueError(f"pool must be one that adds up, such as Mean(), got {self.pool!r}")
        if not number("norm", self.norm) > 0:
            raise ValueError(f"norm must be > 0, got {self.norm}")

    @property
    def sends(self) -> tuple[str, ...]:
        """What the inner pool sends."""
        return self.pool.sends

    def accumulate(self, total: Tensors | None, server: Server, name: str, uplink: Uplink) -> Tensors:
        """As the inner pool, of what is left of the differences."""
        moved = {key: uplink[name][key].double() - server[name][key].double() for key in self.sends}
        length = torch.stack([t.flatten(1).square().sum(1) for t in moved.values()]).sum(0).sqrt()
        share = (self.norm / length).clamp(max=1.0)
        kept = {key: server[name][key].double() + t * share.view(-1, *[1] * (t.dim() - 1)) for key, t in moved.items()}
        return self.pool.accumulate(total, server, name, {**uplink, name: kept})

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """As the inner pool."""
        return self.pool.solve(server, name, total)
