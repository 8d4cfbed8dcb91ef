"""Pools: rules by which the server aggregates a block. Most are sums over clients and then a closed
form, so replies can be added as they arrive.

Totals are float64 in any run, and are summed one client after another, so they do not depend on the
chunk size or on the number of workers.

The last three are for clients that may send false values, or whose training failed with finite
numbers. One client can move a mean arbitrarily far. In each coordinate, a median stays within the
range of the honest clients if these are the majority, and a trimmed mean if at most as many clients
are dishonest as are removed at each end; clipping bounds how far one client can move the result. If
honest clients differ, all three have a cost: they treat a minority's data like false values.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from bayesfl.base.numerics import add_row, inverse_softplus
from bayesfl.base.options import Positive, Range, declared
from bayesfl.base.protocols import AdditivePool, Server, Tensors, Uplink, Weight
from bayesfl.posteriors import MeanField
from bayesfl.posteriors.variational import Family

COLUMNS = 256  # number of weights of all clients' models that are averaged at once


def by_size(server: Server, uplink: Uplink) -> Tensor:
    """Weigh each client by its number of examples, [C].

    Example:
        >>> bf.pools.by_size({}, {"n": torch.tensor([10, 30])}).tolist()
        [10, 30]
    """
    return uplink["n"]


def equal(server: Server, uplink: Uplink) -> Tensor:
    """Weigh all clients equally, [C].

    Example:
        >>> bf.pools.equal({}, {"n": torch.tensor([10, 30])}).tolist()
        [1, 1]
    """
    return torch.ones_like(uplink["n"])


def counted(weight: Weight, server: Server, uplink: Uplink, name: str) -> Tensor:
    """Compute the clients' weights in a pool, in float64: [C], or [C, M] for a block of M copies.

    Raises:
        ValueError: `weight` does not give one real number for each client, or for each copy.
            Whether the numbers are finite depends on what clients report, and is checked at the end
            of the round.

    Example:
        >>> uplink = {"n": torch.tensor([10, 30]), "w": {"loc": torch.zeros(2, 5)}}
        >>> bf.pools.counted(bf.pools.by_size, {}, uplink, "w").tolist()
        [10.0, 30.0]
    """
    loc = uplink[name]["loc"]
    allowed = [loc.shape[:axes] for axes in range(1, loc.dim())]
    found = weight(server, uplink)
    if found.shape not in allowed:
        raise ValueError(
            f"weight must give {' or '.join(str(list(shape)) for shape in allowed)} numbers for "
            f"block {name!r}, got {list(found.shape)}"
        )
    return found.double()


def _add(total: Tensors | None, weight: Tensor, values: Tensors) -> Tensors:
    """Add weight * value to `total`, client after client, by weights [C], or [C, M] for copies, and
    values [C, ...].
    """
    if total is None:
        total = {
            k: torch.zeros(v.shape[1:], dtype=torch.float64, device=v.device)
            for k, v in values.items()
        }
    for key, value in values.items():
        if weight.dim() == 1:
            for w, row in zip(weight.tolist(), value, strict=True):
                add_row(total[key], row, w)
        else:
            for w, row in zip(weight, value, strict=True):
                total[key].addcmul_(row.double(), w.view(*w.shape, *[1] * (row.dim() - w.dim())))
    return total


def _cast(new: Tensors, old: Tensors) -> Tensors:
    return {**old, **{key: value.to(old[key]) for key, value in new.items()}}


@dataclass(frozen=True)
class Mean:
    """Take the weighted mean of the clients' centres; with weights 1 / rho_j^2 it is
    precision-weighted.

    Args:
        weight: (server, uplink) -> weights [C], not normalised, or [C, M] for the copies of a
            block; `by_size` gives FedAvg.
        sends: Names of the posterior's sent tensors, which are averaged one by one; for the raw
            parameters of a `MeanField`, `("loc", "rho")`.

    Example:
        >>> server = {"w": {"loc": torch.zeros(1)}}
        >>> uplink = {"n": torch.tensor([10, 30]), "w": {"loc": torch.tensor([[1.0], [5.0]])}}
        >>> pool = bf.pools.Mean()
        >>> pool.solve(server, "w", pool.accumulate(None, server, "w", uplink))["loc"].tolist()
        [4.0]
    """

    weight: Weight = by_size
    sends: tuple[str, ...] = ("loc",)

    def accumulate(
        self, total: Tensors | None, server: Server, name: str, uplink: Uplink
    ) -> Tensors:
        """Add the weights and the weighted centres to `total`."""
        weight = counted(self.weight, server, uplink, name)
        sent = {key: uplink[name][key] for key in self.sends}
        return _add(total, weight, {"weight": torch.ones_like(weight), **sent})

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Return the weighted mean; a copy of a block is unchanged if all its weights are 0."""
        weight, old = total["weight"], server[name]
        if not weight.dim():
            return _cast({key: total[key] / weight for key in self.sends}, old)
        weight = weight.unsqueeze(-1)
        return _cast(
            {
                key: torch.where(weight > 0, total[key] / weight, old[key].double())
                for key in self.sends
            },
            old,
        )


@dataclass(frozen=True)
class _Around:
    """Pool as an inner pool does."""

    pool: AdditivePool

    @property
    def sends(self) -> tuple[str, ...]:
        """Return the names of the tensors that the inner pool sends."""
        return self.pool.sends

    def accumulate(
        self, total: Tensors | None, server: Server, name: str, uplink: Uplink
    ) -> Tensors:
        """Add a chunk of clients to `total`, as the inner pool does."""
        return self.pool.accumulate(total, server, name, uplink)

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Return the inner pool's entry."""
        return self.pool.solve(server, name, total)


@dataclass(frozen=True)
@declared
class Relaxed(_Around):
    """Move the server's entry part of the way to another pool's result: (1 - step) old + step new,
    for the sent tensors.

    Args:
        pool: The inner pool, whose result is `new`.
        step: Share of the way, > 0; may exceed 1, like pFedMe's server step beta.

    Example:
        >>> server = {"w": {"loc": torch.zeros(1)}}
        >>> uplink = {"n": torch.tensor([10, 30]), "w": {"loc": torch.tensor([[1.0], [5.0]])}}
        >>> pool = bf.pools.Relaxed(bf.pools.Mean(), step=0.5)
        >>> pool.solve(server, "w", pool.accumulate(None, server, "w", uplink))["loc"].tolist()
        [2.0]
    """

    step: Positive

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Return the old entry moved towards the inner pool's."""
        old, new = server[name], self.pool.solve(server, name, total)
        return {**new, **{key: old[key].lerp(new[key], self.step) for key in self.sends}}


@dataclass(frozen=True, kw_only=True)
class _Gaussian(ABC):
    """Aggregate moments of mean-field Gaussians, whose `loc` and `rho` are sent."""

    posterior: MeanField = MeanField()
    weight: Weight = by_size
    sends = ("loc", "rho")

    def accumulate(
        self, total: Tensors | None, server: Server, name: str, uplink: Uplink
    ) -> Tensors:
        """Add the clients' weighted moments to `total`."""
        # Client by client: the rounding of vectorised exponentials depends on the place in memory,
        # so results would depend on the chunk size.
        rows = zip(*uplink[name].values(), strict=True)
        moments = [
            self.posterior.moments(
                {key: t.double() for key, t in zip(uplink[name], row, strict=True)}
            )
            for row in rows
        ]
        loc, variance = (torch.stack(each) for each in zip(*moments, strict=True))
        weight = counted(self.weight, server, uplink, name)
        summed = self._summed(server[name], loc, variance)
        return _add(total, weight, {"weight": torch.ones_like(weight), **summed})

    @abstractmethod
    def _summed(self, old: Tensors, loc: Tensor, variance: Tensor) -> Tensors:
        """Return the summands made from the clients' means and variances, [C, ...]."""

    def _solved(self, server: Server, name: str, loc: Tensor, variance: Tensor) -> Tensors:
        return _cast({"loc": loc, "rho": inverse_softplus(variance.sqrt())}, server[name])


@dataclass(frozen=True, kw_only=True)
class PrecisionWeighted:
    """Take the product of the clients' Gaussians: precisions are added, means are weighted by
    precision.

    For a `FullGaussian` precisions are matrices [D, D], and the product is exact, as for a
    `MeanField`.

    Args:
        posterior: Family of the clients' Gaussians, the same as the block's: `MeanField` or
            `FullGaussian`.
        prior: (server) -> (mean, precision) [D] of a prior that every client's posterior contains,
            to be counted once and not once for each client; None if they contain none.

    Example:
        >>> q = bf.posteriors.MeanField(init_scale=1.0)
        >>> server = {"w": q.init(torch.zeros(1))}
        >>> uplink = {"w": q.init(torch.tensor([[1.0], [3.0]]))}
        >>> pool = bf.pools.PrecisionWeighted(posterior=q)
        >>> found = pool.solve(server, "w", pool.accumulate(None, server, "w", uplink))
        >>> [round(t.item(), 4) for t in q.moments(found)]  # the variance of a product of two
        [2.0, 0.5]
    """

    posterior: Family = MeanField()
    prior: Any = None

    @property
    def sends(self) -> tuple[str, ...]:
        """Return the names of the posterior's tensors; all are sent."""
        return tuple(self.posterior.init(torch.zeros(1)))

    def accumulate(
        self, total: Tensors | None, server: Server, name: str, uplink: Uplink
    ) -> Tensors:
        """Add the precisions and the precision-weighted means to `total`."""
        # Client by client: the rounding of vectorised sums depends on the place in memory, so
        # results would depend on the chunk size.
        rows = zip(*(uplink[name][key].double() for key in self.sends), strict=True)
        found = [self.posterior.natural(dict(zip(self.sends, row, strict=True))) for row in rows]
        precision, weighted = (torch.stack(parts) for parts in zip(*found, strict=True))
        ones = torch.ones(len(found), dtype=torch.float64)
        values = {"count": ones.to(weighted), "precision": precision, "weighted": weighted}
        return _add(total, ones, values)

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Return the product.

        Raises:
            ValueError: A precision is not positive after the prior is removed.
        """
        precision, weighted = total["precision"], total["weighted"]
        if self.prior is not None:
            mean0, precision0 = (value.double() for value in self.prior(server))
            again = total["count"] - 1
            weighted = weighted - again * precision0 * mean0
            full = precision.dim() > weighted.dim()
            own = precision0.expand_as(weighted)
            precision = precision - again * (own.diag_embed() if full else own)
            least = torch.linalg.eigvalsh(precision) if full else precision
            if not bool((least > 0).all()):
                raise ValueError(
                    f"block {name!r}: {int((least <= 0).sum())} weights have no positive precision "
                    "if the prior counts once; the clients' posteriors are wider than their prior"
                )
        return _cast(self.posterior.of_natural(precision, weighted), server[name])


@dataclass(frozen=True, kw_only=True)
class MomentMatched(_Gaussian):
    """Take the Gaussian with the mean and variance of the clients' mixture.

    Args:
        posterior: Posterior that converts `loc` and `rho` to moments.
        weight: (server, uplink) -> mixture weights [C], not normalised.

    Example:
        >>> q = bf.posteriors.MeanField(init_scale=1.0)
        >>> server = {"w": q.init(torch.zeros(1))}
        >>> uplink = {"n": torch.ones(2), "w": q.init(torch.tensor([[1.0], [3.0]]))}
        >>> pool = bf.pools.MomentMatched(posterior=q)
        >>> found = pool.solve(server, "w", pool.accumulate(None, server, "w", uplink))
        >>> [round(t.item(), 4) for t in q.moments(found)]  # variance within, plus that between
        [2.0, 2.0]
    """

    def _summed(self, old: Tensors, loc: Tensor, variance: Tensor) -> Tensors:
        # Means are relative to the server's centre, so that small spreads are not lost by rounding.
        shift = loc - old["loc"].double()
        return {"first": shift, "within": variance, "second": shift.square()}

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Return the mean and variance of the mixture."""
        first, second, within = (
            total[key] / total["weight"] for key in ("first", "second", "within")
        )
        between = (second - first.square()).clamp_min(0)  # rounding alone can make it negative
        return self._solved(server, name, server[name]["loc"].double() + first, within + between)


@dataclass(frozen=True, kw_only=True)
class Barycentre(_Gaussian):
    """Take the diagonal Gaussian closest to the clients' in squared 2-Wasserstein distance: means
    and standard deviations are averaged.

    Args:
        posterior: Posterior that converts `loc` and `rho` to moments.
        weight: (server, uplink) -> weights [C], not normalised.

    Example:
        >>> q = bf.posteriors.MeanField(init_scale=1.0)
        >>> server = {"w": q.init(torch.zeros(1))}
        >>> uplink = {"n": torch.ones(2), "w": q.init(torch.tensor([[1.0], [3.0]]))}
        >>> pool = bf.pools.Barycentre(posterior=q)
        >>> found = pool.solve(server, "w", pool.accumulate(None, server, "w", uplink))
        >>> [round(t.item(), 4) for t in q.moments(found)]
        [2.0, 1.0]
    """

    def _summed(self, old: Tensors, loc: Tensor, variance: Tensor) -> Tensors:
        return {"loc": loc, "scale": variance.sqrt()}

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Return the weighted averages of means and standard deviations."""
        scale = total["scale"] / total["weight"]
        return self._solved(server, name, total["loc"] / total["weight"], scale.square())


@dataclass(frozen=True)
class Stack:
    """Leave the server's entry unchanged, and pass all clients' tensors, stacked, to the
    algorithm's `combine`.

    Args:
        sends: Names of the posterior's tensors that travel.

    Example:
        >>> server = {"w": {"loc": torch.zeros(1)}}
        >>> uplink = {"w": {"loc": torch.tensor([[1.0], [5.0]])}}
        >>> bf.pools.Stack()(server, "w", uplink)["loc"].tolist()
        [0.0]
    """

    sends: tuple[str, ...] = ("loc",)

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Return the server's entry unchanged."""
        return server[name]


@dataclass(frozen=True)
class Mixed:
    """Give every client its own mixture of what the cohort sends: sum_k A_jk w_k for client j.

    The server's entry has the mean over clients, `loc`, and each client's next model, `each` [J,
    ...], which is unchanged for a client outside the cohort. For the last round it has `cohort`
    [C], its clients' places, ascending, and `weights` [C, C], the A among them: row i has the
    weights of client cohort[i]'s model.

    Args:
        weights: (server, ids [C], uplink) -> A [C, C] among the clients of a round's cohort. A is
            not normalised; for averages its rows must sum to 1.

    Raises:
        ValueError: In a round, `weights` does not return a [C, C] tensor.

    Example:
        >>> weights = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> pool = bf.pools.Mixed(lambda server, ids, uplink: weights)
        >>> server = {"w": pool.start({"loc": torch.zeros(1)}, clients=2)}
        >>> uplink = {"ids": torch.arange(2), "w": {"loc": torch.tensor([[1.0], [5.0]])}}
        >>> pool(server, "w", uplink)["each"].tolist()
        [[1.0], [3.0]]
    """

    weights: Callable[[Server, Tensor, Uplink], Tensor]
    sends = ("loc",)
    # The entry's tensors for single clients, with the number of axes for a round's cohort.
    holds: ClassVar = {"each": 0, "weights": 2, "cohort": 1}

    def start(self, entry: Tensors, clients: int) -> Tensors:
        """Return the server's entry before the first round, with the same model for each client; of
        clients never seen in training none has a model of its own, and `clients` is 0.
        """
        loc = entry["loc"]
        return {
            **entry,
            "each": loc.expand(clients, *loc.shape),
            "weights": loc.new_zeros(0, 0),
            "cohort": torch.zeros(0, dtype=torch.long, device=loc.device),
        }

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Return the server's new entry, see `StackedPool`."""
        entry, ids = server[name], uplink["ids"]
        among = self.weights(server, ids, uplink).double()
        mixed = torch.einsum("jk,k...->j...", among, uplink[name]["loc"].double())
        each = entry["each"].index_copy(0, ids, mixed.to(entry["each"]))
        mean = torch.empty(each[0].numel(), dtype=torch.float64, device=each.device)
        # Some weights at a time, because a float64 copy of all clients' models may not fit.
        for part, into in zip(each.flatten(1).split(COLUMNS, 1), mean.split(COLUMNS), strict=True):
            torch.mean(part.double(), 0, out=into)
        cohort, order = ids.sort()  # replies are in the engine's order
        return {
            "loc": mean.view(each.shape[1:]).to(each),
            "each": each,
            "weights": among[order][:, order].to(each),
            "cohort": cohort,
        }


@dataclass(frozen=True)
class Median:
    """Take the coordinate-wise median of the clients' tensors, with equal weights; for an even
    number, the mean of the middle two.

    Args:
        sends: Names of the posterior's tensors that travel.

    References:
        Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal
        statistical rates", ICML 2018, option I.

    Example:
        >>> server = {"w": {"loc": torch.zeros(1)}}
        >>> uplink = {"n": torch.ones(3), "w": {"loc": torch.tensor([[1.0], [2.0], [1e6]])}}
        >>> bf.pools.Median()(server, "w", uplink)["loc"].tolist()
        [2.0]
    """

    sends: tuple[str, ...] = ("loc",)

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Return the server's new entry, see `StackedPool`."""
        found = {key: uplink[name][key].double().sort(0).values for key in self.sends}
        middle = {key: (t[(len(t) - 1) // 2] + t[len(t) // 2]) / 2 for key, t in found.items()}
        return {**server[name], **{key: t.to(server[name][key]) for key, t in middle.items()}}


@dataclass(frozen=True)
@declared
class TrimmedMean:
    """Take the coordinate-wise mean of the clients' numbers without the largest and the smallest
    ones.

    Args:
        share: Share of the clients removed at each end, in [0, 1/2); at least one client at each
            end unless it is 0.
        sends: Names of the posterior's tensors that travel.

    Raises:
        ValueError: In a round no client is left.

    References:
        Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal
        statistical rates", ICML 2018, option II.

    Example:
        >>> server = {"w": {"loc": torch.zeros(1)}}
        >>> uplink = {"n": torch.ones(4), "w": {"loc": torch.tensor([[0.0], [1.0], [3.0], [1e6]])}}
        >>> bf.pools.TrimmedMean(share=0.25)(server, "w", uplink)["loc"].tolist()
        [2.0]
    """

    share: Annotated[float, Range(0, 0.5, "[")] = 0.1
    sends: tuple[str, ...] = ("loc",)

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Return the server's new entry, see `StackedPool`."""
        clients = len(uplink["n"])
        cut = max(1, int(self.share * clients + 1e-9)) if self.share else 0
        if 2 * cut >= clients:
            raise ValueError(
                f"a trimmed mean of {clients} clients leaves none if {cut} are removed at each "
                "end; use a larger cohort, or a median"
            )
        found = {
            key: uplink[name][key].double().sort(0).values[cut : clients - cut].mean(0)
            for key in self.sends
        }
        return {**server[name], **{key: t.to(server[name][key]) for key, t in found.items()}}


@dataclass(frozen=True)
@declared
class Clipped(_Around):
    """Limit the influence of one client: shorten updates longer than `norm`, then aggregate them by
    another pool.

    An update is the difference of a client's tensors from those that the server sent.

    Args:
        pool: The pool that aggregates the shortened differences by a sum, such as `Mean`.
        norm: Largest Euclidean length of the difference over all sent tensors of the block, > 0.

    References:
        Sun, Kairouz, Suresh, McMahan, "Can you really backdoor federated learning?", 2019, section
        4.

    Example:
        >>> server = {"w": {"loc": torch.zeros(1)}}
        >>> uplink = {"n": torch.ones(2), "w": {"loc": torch.tensor([[1.0], [1e6]])}}
        >>> pool = bf.pools.Clipped(bf.pools.Mean(), norm=2.0)
        >>> pool.solve(server, "w", pool.accumulate(None, server, "w", uplink))["loc"].tolist()
        [1.5]
    """

    norm: Annotated[float, Range(0, math.inf, "]")]

    def accumulate(
        self, total: Tensors | None, server: Server, name: str, uplink: Uplink
    ) -> Tensors:
        """Add a chunk of clients to `total`, as the inner pool does, after their differences are
        shortened.
        """
        moved = {key: uplink[name][key].double() - server[name][key].double() for key in self.sends}
        length = torch.stack([t.flatten(1).square().sum(1) for t in moved.values()]).sum(0).sqrt()
        share = (self.norm / length).clamp(max=1.0)
        kept = {
            key: server[name][key].double() + t * share.view(-1, *[1] * (t.dim() - 1))
            for key, t in moved.items()
        }
        return self.pool.accumulate(total, server, name, {**uplink, name: kept})
