"""Replies of a round: how the server adds them up, and which it leaves out of the sum."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl.base.numerics import finite
from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Reported, Server, StackedPool, Tensors, Uplink
from bayesfl.base.trees import alike, flatten, shapes
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.buffers import Buffers
from bayesfl.federation.clients.local import read_rows
from bayesfl.federation.errors import DivergenceError, FailedRound, called
from bayesfl.federation.rounds.admission import Admission, distances, shares, usual
from bayesfl.federation.settings import OPEN, Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replies:
    """Hold the replies of a chunk of clients, in the declared shapes.

    Args:
        ids: The chunk's clients [C].
        n: Their numbers of training examples [C], in the run's precision.
        sent: Tensors for the pools, {block: {tensor: [C, ...]}}; empty for clients outside the
            cohort, which only report that they have trained.
        reported: Tensors that the clients send in addition to the blocks, [C, ...] each.
        losses: Mean negative log likelihood of each client's training, [C] in nats, NaN if unknown.
    """

    ids: np.ndarray
    n: Tensor
    sent: dict[str, Tensors]
    reported: Uplink
    losses: np.ndarray

    def of(self, inside: np.ndarray) -> "Replies":
        """Return the replies of the clients for which `inside` [C], bool, is True."""
        places = np.flatnonzero(inside)
        n, sent, reported = (read_rows(tree, places) for tree in (self.n, self.sent, self.reported))
        return Replies(self.ids[inside], n, sent, reported, self.losses[inside])


class Unseen:
    """Stand in for uplinks that the server has not seen; only the number of the round, of rounds
    and of clients are available to `combine`.

    Any other use raises ValueError.

    Args:
        why: Why the uplinks are missing; begins the error message.
        round: The current round, counted from 1.
        rounds: Number of rounds of the run.
        clients: Number of clients J of the federation.
    """

    def __init__(self, why: str, round: int, rounds: int, clients: int) -> None:
        self._why, self._known = why, {"round": round, "rounds": rounds, "clients": clients}

    def __getitem__(self, name: Any) -> Any:
        return (
            self._known[name]
            if isinstance(name, str) and name in self._known
            else self._refuse(name)
        )

    def _refuse(self, *asked: Any) -> Any:
        raise ValueError(
            f"{self._why}, but the method's `combine` reads {asked[0] if asked else 'them'!r}; use "
            "a method whose server only adds up or, if `combine` is not needed, "
            "dataclasses.replace(algorithm, combine=bf.Algorithm.combine, reports={})"
        )

    __contains__ = __iter__ = __len__ = __getattr__ = _refuse


def check_combine(result: Any, ids: Any, why: str) -> None:
    """Check that the method's `combine` works without the replies of single clients, by calling it
    once with a placeholder for them.

    Args:
        result: The state that the run starts from, a `Result`.
        ids: The clients that `combine` receives, [clients] int64, or a placeholder if the server
            does not have them either.
        why: Why the server does not see single replies; begins the error message.

    Raises:
        ValueError: `combine` reads a reply, or fails without the replies.
    """
    unseen = Unseen(why, result.round + 1, result.settings.rounds, result.data.clients)
    try:
        combined(result.algorithm, result.server, ids, unseen)
    except (TypeError, IndexError) as error:
        raise ValueError(f"{why}, and the method's `combine` fails without it: {error}") from error


def combined(algorithm: Algorithm, server: Server, ids: Any, uplink: Any) -> Server:
    """Return the server's entries that the method's `combine` computes.

    Raises:
        ValueError: `combine` modifies its input.
    """
    given = tree_map(lambda t: t, server)  # in new mappings
    versions = [t._version for t in tree_leaves(server)]
    changed = algorithm.combine(given, ids, uplink)
    before, after = flatten(server), flatten(given)
    assigned = before.keys() != after.keys() or any(before[key] is not after[key] for key in before)
    if assigned or versions != [t._version for t in tree_leaves(server)]:
        raise ValueError(
            "`combine` modifies the server's state in place, which earlier results share; return "
            "new tensors, as {'k': server['k'] + 1}"
        )
    return changed


class RoundSum:
    """Sum one round's replies and compute the server's next state from them.

    In this class the server sees the replies: pools add them up as they arrive, and the entries
    that `combine` reads are kept. Subclasses have their own `add` and `server`.

    Args:
        run: The rule of the run.
        server: The state that was sent to the clients.
        round: The current round, counted from 0.
        cohort: The ids of all clients of the cohort.
    """

    def __init__(
        self, run: "AggregationRun", server: Server, round: int, cohort: np.ndarray
    ) -> None:
        self.run, self.start, self.round, self.cohort = run, server, round, cohort.tolist()
        self._known = {"round": round + 1, "rounds": run.settings.rounds, "clients": run.clients}
        self._versions = [t._version for t in tree_leaves(server)]
        blocks = run.algorithm.blocks.items()
        self._pools: dict[str, Any] = {name: block.pool for name, block in blocks if block.pool}
        self.total: Any = {}, []
        """The partial sum, as tensors and plain values in lists, tuples and mappings."""
        self.row: dict[str, float] = {}
        """Columns that the sum adds to the history, available after the next state was computed;
        they replace columns of the same name.
        """
        self.seen: Uplink = {}
        """What the server has seen of single clients, [C, ...], available then."""

    def add(self, replies: Replies) -> None:
        """Add a chunk of accepted replies; each class decides what the server may read of them."""
        extra = replies.reported | {
            "n": replies.n,
            "ids": torch.from_numpy(replies.ids).to(replies.n.device),
        }
        totals, stacked = self.total
        for name, pool in self._pools.items():
            if not isinstance(pool, StackedPool):
                uplink = {**replies.sent, **extra, **self._known}
                totals[name] = pool.accumulate(totals.get(name), self.start, name, uplink)
        stacked.append(
            extra
            | {
                name: replies.sent[name]
                for name, pool in self._pools.items()
                if isinstance(pool, StackedPool)
            }
        )

    def server(self) -> Server:
        """Return the server's next state, after the last chunk.

        Raises:
            DivergenceError: The next state is not finite.
            ValueError: The method's `combine` returns unknown entries, or entries that are not
                tensors or have other shapes or dtypes.
        """
        totals, stacked = self.total
        self.seen = tree_map(lambda *rows: torch.cat(rows), *stacked)
        uplink = self.seen | self._known
        new = dict(self.start)
        for name, pool in self._pools.items():
            if isinstance(pool, StackedPool):
                new[name] = pool(self.start, name, uplink)
            else:
                new[name] = pool.solve(self.start, name, totals[name])
        return self._next_state(new, uplink["ids"], uplink)

    def _next_state(self, new: Server, ids: Any, uplink: Any) -> Server:
        """Return the server's next state: the pools' result `new`, updated by the method's
        `combine` and checked against the present state.

        Raises:
            DivergenceError: The next state is not finite.
            ValueError: A pool or `combine` returns other names, shapes or dtypes than the server
                has, or modifies the previous state.
        """
        new = new | combined(self.run.algorithm, new, ids, uplink)
        if self._versions != [t._version for t in tree_leaves(self.start)]:
            raise ValueError(
                "a pool or `address` writes into the server's tensors, which earlier results "
                "share; let it return new ones"
            )
        before, after, free = flatten(self.start), flatten(new), self.run.algorithm.free
        if wrong := [
            key
            for key in sorted(before.keys() | after.keys())
            if key not in after
            or key not in before
            or not (
                alike(before[key], after[key])
                or alike(before[key], after[key], free=free(self.run.clients).get(key, 0))
            )
        ]:
            returned, expected = shapes(new), shapes(self.start)
            found = {key: returned.get(key, "nothing") for key in wrong}
            held = {key: expected.get(key, "nothing") for key in wrong}
            raise ValueError(
                f"a pool or `combine` returns {found}, but the server has {held}; return entries "
                "in these shapes and dtypes, and give new ones an initial value in `server`"
            )
        if not all(finite(t) for t in tree_leaves(new)):
            raise DivergenceError(
                f"the server is no longer finite after round {self.round + 1}; lower "
                "the learning rates",
                round=self.round + 1,
            )
        return new


@dataclass
class AggregationRun:
    """Draw the cohorts of one run and add up their replies; in this class the settings draw them,
    and the server sees every reply.

    Args:
        algorithm: The method.
        settings: The run's settings.
        clients: Number of clients.
        least: Minimum number of replies in a round.
        sums: Function that makes the sum of a round, see `begin`.
    """

    algorithm: Algorithm
    settings: Settings
    clients: int
    least: int
    sums: Callable[[Any, Server, int, np.ndarray], RoundSum] = RoundSum

    def cohort(self, round: int, known: Mapping[str, np.ndarray] = {}) -> np.ndarray:
        """Return the ids of one round's cohort, ascending; see `Settings.cohort`."""
        return self.settings.cohort(self.clients, round, known)

    def begin(self, server: Server, round: int, cohort: np.ndarray) -> RoundSum:
        """Start the sum of a round from the state `server`; `cohort` has the ids of all its
        clients, some of which may not reply.
        """
        return self.sums(self, server, round, cohort)


class Aggregation:
    """Add up the clients' uplinks in `simulate(aggregation=)`; in this class the server sees each
    reply.
    """

    sampling: ClassVar[Literal["poisson"] | None] = None
    """How cohorts are drawn; None if the run may choose."""

    @property
    def name(self) -> str:
        """Return the settings as text, without secrets; a resumed run must have the same name."""
        return OPEN

    def start(
        self, result: Any, admission: Admission, *, every: int | None, repeats: int
    ) -> AggregationRun:
        """Start a run that continues from `result`.

        Args:
            result: The state from which the run starts, a `Result`.
            admission: Rules for accepting replies.
            every: Rounds between checkpoints; None for no checkpoints.
            repeats: Number of rounds after `result` that an earlier run has done already and that
                are repeated.

        Raises:
            ValueError: The method or the settings do not fit.
        """
        return AggregationRun(
            result.algorithm, result.settings, result.data.clients, admission.min_clients
        )


class ReplyFilter:
    """Filter replies before they enter a round's sum.

    It passes replies on at once or, with `admission`, after all have arrived and were compared. A
    rank passes its replies on after those of the earlier ranks.

    Args:
        sum: The sum of the accepted replies.
        admission: Rules for accepting replies; None accepts all at once.
        history: The rows of the earlier rounds.
        counts: Numbers of examples of all clients, [J], 0 if unknown.
        names: The clients' names, for messages.
    """

    def __init__(
        self,
        sum: RoundSum,
        admission: Admission | None,
        history: Iterable[Mapping[str, Any]],
        counts: np.ndarray,
        names: tuple[str, ...] = (),
    ) -> None:
        self._sum, self._admission = sum, admission
        self._earlier = [
            row["uplink_norm"] for row in history if math.isfinite(row.get("uplink_norm", math.nan))
        ]
        self._held: list[Replies] = []
        self._norms: dict[int, float] = {}
        self._sizes: dict[str, dict[int, float]] = {}
        self._shares, self._names = shares(counts), names
        self.losses = np.empty(0)
        """Training losses of the clients whose replies are in the sum."""
        self.dropped: dict[int, str] = {}
        """Clients that are left out, each with the first reason."""
        self.usual = math.nan
        """The `usual` distance of the accepted replies, available after `close`; NaN if distances
        are not checked.
        """

    def add(self, replies: Replies) -> None:
        """Add the replies of a chunk of the cohort, or store them until all have arrived."""
        if self._admission is None:
            if current().rank:
                self._held.append(replies)
            else:
                self._pass(replies)
            return
        if self._admission.max_norm is not None:
            sent = {
                name: t
                for name, t in replies.sent.items()
                if not isinstance(self._sum.run.algorithm.blocks[name], Buffers)
            }
            ids = replies.ids
            start = (
                was_sent(self._sum.run.algorithm, self._sum.start, ids, replies.n.device, sent)
                if sent
                else {}
            )
            norms = distances(sent, start) if sent else torch.zeros(len(ids))
            self._norms |= dict(zip(ids.tolist(), norms.tolist(), strict=True))
            for name, t in flatten(replies.reported).items():
                sizes = (
                    t.double().abs().reshape(len(ids), -1).amax(1)
                    if t.numel()
                    else t.new_zeros(len(ids))
                )
                self._sizes.setdefault(name, {}).update(
                    zip(ids.tolist(), sizes.tolist(), strict=True)
                )
        self._check_reports(replies)
        self._check_statistics(replies)
        self._held.append(replies)

    def _check_reports(self, replies: Replies) -> None:
        """Leave out clients whose reports lie outside the declared range."""
        ranges = {
            name: start.range
            for name, start in self._sum.run.algorithm.reports.items()
            if isinstance(start, Reported)
        }
        for name, t in flatten({name: replies.reported[name] for name in ranges}).items():
            allowed = ranges[name.split(".")[0]]
            ends = torch.aminmax(t.double().reshape(len(replies.ids), -1), dim=1)
            for client, low, high in zip(replies.ids, *(e.tolist() for e in ends), strict=True):
                if low not in allowed or high not in allowed:
                    self.dropped.setdefault(
                        int(client), f"its {name} must {allowed}, got {low:g} to {high:g}"
                    )

    def _check_statistics(self, replies: Replies) -> None:
        """Leave out clients whose norms have negative variances, which would make the server's NaN;
        the size of statistics is not bounded.
        """
        for name in replies.sent:
            if isinstance(self._sum.run.algorithm.blocks[name], Buffers):
                leaves = self._sum.run.algorithm.layout(name).leaves(replies.sent[name]["loc"])
                variances = [
                    t.reshape(len(replies.ids), -1)
                    for leaf, t in leaves.items()
                    if leaf.endswith("running_var")
                ]
                for client in replies.ids[
                    (torch.cat(variances, 1).amin(1) < 0).cpu().numpy()
                ].tolist():
                    self.dropped.setdefault(client, f"its {name} have negative variances")

    def _pass(self, replies: Replies) -> None:
        self._sum.add(replies)
        self.losses = np.append(self.losses, replies.losses)

    def close(self) -> list[int]:
        """Add the accepted replies to the sum, in the order of a simulation, independent of their
        order of arrival.

        Returns:
            The ids of clients whose reply, or training, was not accepted.
        """
        ranks, known = current(), (self.dropped, self._norms, self._sizes)
        self.dropped, self._norms, self._sizes = {}, {}, {}
        for dropped, norms, sizes in ranks.every(lambda: known):
            self.dropped |= {j: why for j, why in dropped.items() if j not in self.dropped}
            self._norms |= norms
            for name, each in sizes.items():
                self._sizes.setdefault(name, {}).update(each)
        if self._admission is not None:
            self._compare(self._admission)
        for client, reason in self.dropped.items():
            log.warning(
                "round %d: %s is left out: %s",
                self._sum.round + 1,
                called(client, self._names),
                reason,
            )
        self._sum.total, self.losses = ranks.relay((self._sum.total, self.losses), self._passed_on)
        return list(self.dropped)

    def _passed_on(self, before: tuple[Any, np.ndarray]) -> Any:
        """Add the stored replies to the earlier ranks' sum and losses, and return both."""
        self._sum.total, self.losses = before
        # The order of a simulation's chunks makes sums over a network bit-identical.
        for replies in sorted(self._held, key=lambda held: (-float(held.n[0]), int(held.ids[0]))):
            if (kept := ~np.isin(replies.ids, list(self.dropped))).any():
                self._pass(replies if kept.all() else replies.of(kept))
        return self._sum.total, self.losses

    def _compare(self, admission: Admission) -> None:
        """Leave out clients with extreme distances or extreme reports."""
        norms = {client: norm for client, norm in self._norms.items() if client not in self.dropped}
        limit = admission.limit(list(norms.values()), self._shares[list(norms)], self._earlier)
        for client, norm in norms.items():
            if norm > (own := limit * max(1.0, self._shares[client])):
                self.dropped.setdefault(
                    client, f"its distance from the sent state is {norm:.3g}, more than {own:.3g}"
                )
        for name, sizes in self._sizes.items():
            known = {client: size for client, size in sizes.items() if client not in self.dropped}
            limit = admission.report_limit(list(known.values()), self._shares[list(known)])
            for client, size in known.items():
                if size > (own := limit * max(1.0, self._shares[client])):
                    self.dropped.setdefault(
                        client, f"its {name} goes up to {size:.3g}, more than {own:.3g}"
                    )
        if inside := {client: norm for client, norm in norms.items() if client not in self.dropped}:
            self.usual = usual(list(inside.values()), self._shares[list(inside)])

    def loss(self) -> float:
        """Return the mean negative log likelihood of training, in nats, over the accepted clients;
        NaN if none reports it.
        """
        known = self.losses[~np.isnan(self.losses)]
        return float(torch.from_numpy(known).mean()) if len(known) else math.nan

    def server(self) -> Server:
        """Return the server's next state from the accepted replies.

        Raises:
            DivergenceError: The next state is not finite, and bad clients stop the run.
            FailedRound: The next state is not finite although each reply was, and bad clients are
                skipped.
        """
        try:
            return self._sum.server()
        except DivergenceError as error:
            if error.client is not None or self._admission is None or not self._admission.skips:
                raise
            raise FailedRound(
                f"the sum of the replies of round {self._sum.round + 1} is not finite"
            ) from error


def was_sent(
    algorithm: Algorithm,
    server: Server,
    ids: np.ndarray,
    device: torch.device,
    blocks: Iterable[str],
) -> dict[str, Tensors]:
    """Return, for each of `blocks`, the state that the server sent to the clients `ids`: one for
    all [...], or one for each [C, ...].
    """
    common, addressed = algorithm.share(server, torch.from_numpy(ids).to(device))
    return {name: addressed.get(name, common.get(name, {})) for name in blocks}
