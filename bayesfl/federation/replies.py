"""What the server makes of a round's replies: how they are added up, and which are left out of the sum."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl.base.protocols import Server, StackedPool, Tensors, Uplink
from bayesfl.base.trees import flatten, shapes
from bayesfl.composition.algorithm import Algorithm
from bayesfl.federation.admission import Admission, distances, shares, usual
from bayesfl.federation.client import read_rows
from bayesfl.federation.errors import DivergenceError, FailedRound
from bayesfl.federation.result import Result
from bayesfl.federation.settings import OPEN, Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replies:
    """What a chunk of clients replied, in the shapes that were declared.

    Args:
        ids: Its clients [C].
        n: Their numbers of training examples [C], in the run's precision.
        sent: What pools gather, {block: {tensor: [C, ...]}}; empty of clients outside the cohort, who only say that they have trained.
        reported: What they send beyond the blocks, [C, ...] each.
        losses: Mean negative log likelihood of their training, [C] in nats, NaN where it is not known.
    """

    ids: np.ndarray
    n: Tensor
    sent: dict[str, Tensors]
    reported: Uplink
    losses: np.ndarray

    def of(self, inside: np.ndarray) -> "Replies":
        """Those of some of the clients, [C] bool."""
        places = np.flatnonzero(inside)
        n, sent, reported = (read_rows(tree, places) for tree in (self.n, self.sent, self.reported))
        return Replies(self.ids[inside], n, sent, reported, self.losses[inside])


class RoundSum(Protocol):
    """How the replies of one round are added up."""

    def add(self, replies: Replies) -> None:
        """Add a chunk of replies that are taken; what a server would learn of each is the sum's business."""
        ...

    def server(self) -> Server:
        """The server's next state, after the last chunk."""
        ...

    def row(self) -> dict[str, float]:
        """What the history says of it, once the next state is known; replaces columns of the same name."""
        ...


class AggregationRun(Protocol):
    """How one run draws its cohorts and adds up their replies."""

    @property
    def least(self) -> int:
        """Replies that a round needs."""
        ...

    def cohort(self, round: int) -> np.ndarray:
        """The ids of one round's cohort, ascending."""
        ...

    def begin(self, server: Server, round: int, cohort: np.ndarray) -> RoundSum:
        """The sum of a round that starts from the state `server`, with all of its cohort, of whom some may not reply."""
        ...


@runtime_checkable
class Aggregation(Protocol):
    """What `simulate` is given as `aggregation`."""

    @property
    def name(self) -> str:
        """What a resumed run must share; holds no secret."""
        ...

    @property
    def sampling(self) -> Literal["poisson"] | None:
        """How cohorts are drawn, where that is not free."""
        ...

    def start(self, result: Result, admission: Admission, *, every: int | None, repeats: int) -> AggregationRun:
        """Start a run that goes on from `result`.

        Args:
            result: Where it begins.
            admission: Which replies are taken.
            every: Rounds between checkpoints; None where there are none.
            repeats: Rounds that a run before has done after `result`, and that are done again.

        Raises:
            ValueError: The method or the settings don't fit.
        """
        ...


@dataclass(frozen=True)
class OpenAggregation:
    """The server sees every client's reply."""

    name = OPEN
    sampling = None

    def start(self, result: Result, admission: Admission, *, every: int | None, repeats: int) -> AggregationRun:
        """See `Aggregation`."""
        return OpenRun(result.algorithm, result.settings, result.data.clients, admission.min_clients)


class OpenRun:
    """See `AggregationRun`.

    Args:
        algorithm: The method.
        settings: How the run is made.
        clients: How many there are.
        least: Replies that a round needs.
    """

    def __init__(self, algorithm: Algorithm, settings: Settings, clients: int, least: int) -> None:
        self._algorithm, self._settings, self._clients, self.least = algorithm, settings, clients, least

    def cohort(self, round: int) -> np.ndarray:
        """See `AggregationRun`."""
        return self._settings.cohort(self._clients, round)

    def begin(self, server: Server, round: int, cohort: np.ndarray) -> RoundSum:
        """See `AggregationRun`."""
        return OpenSum(self._algorithm, server, round, self._settings.rounds)


class Unseen:
    """Stands where `combine` expects what single clients sent and the server has not seen: it says the round's number and nothing else.

    Args:
        why: Why it is not there, a sentence's beginning.
        round: The round that is on.
        rounds: Of the run.
    """

    def __init__(self, why: str, round: int, rounds: int) -> None:
        self._why, self._known = why, {"round": round, "rounds": rounds}

    def __getitem__(self, name: Any) -> Any:
        return self._known[name] if isinstance(name, str) and name in self._known else self._refuse(name)

    def _refuse(self, *asked: Any) -> Any:
        raise ValueError(
            f"{self._why}, but the method's `combine` reads {asked[0] if asked else 'them'!r}; take a method whose server only adds up, "
            "or, where it can do without, dataclasses.replace(algorithm, combine=bf.Algorithm.combine, reports={})"
        )

    __contains__ = __iter__ = __len__ = __getattr__ = _refuse


def check_combine(result: Result, ids: Any, why: str) -> None:
    """That the method's `combine` does without what single clients sent.

    Raises:
        ValueError: It does not; `why` begins the sentence that says so.
    """
    unseen = Unseen(why, result.round, result.settings.rounds)
    try:
        result.algorithm.combine(result.server, ids, unseen)  # pyright: ignore[reportArgumentType]
    except (TypeError, IndexError) as error:
        raise ValueError(f"{why}, and the method's `combine` fails without it: {error}") from error


def closed(algorithm: Algorithm, new: Server, ids: Any, uplink: Any, round: int) -> Server:
    """The server's next state from what its pools made, `new`: changed by the method's `combine`, and checked.

    Raises:
        DivergenceError: It is not finite.
        ValueError: The method's `combine` returns something that the server does not have, or in other shapes.
    """
    changed = algorithm.combine(new, ids, uplink)
    if unknown := sorted(changed.keys() - new.keys()):
        raise ValueError(f"`combine` returns {unknown}, which the server does not have; give them a start in `server`")
    if loose := [name for name, leaf in flatten(changed).items() if not isinstance(leaf, Tensor)]:
        raise ValueError(f"`combine` returns {loose}, which must be tensors, or mappings of tensors")
    for name in changed:
        before, after = shapes({name: new[name]}), shapes({name: changed[name]})
        first = int(name not in algorithm.blocks)  # what a method adds may grow along its first axis, as models of clusters do
        if {key: (dtype, shape[first:]) for key, (dtype, shape) in before.items()} != {
            key: (dtype, shape[first:]) for key, (dtype, shape) in after.items()
        }:
            raise ValueError(f"`combine` returns {after} where the server has {before}; return an entry whole, in its shapes and dtypes")
    if not all(bool(t.isfinite().all()) for t in tree_leaves(new | changed)):
        raise DivergenceError(f"the server is no longer finite after round {round}, counted from 0; lower the learning rates", round=round)
    return new | changed


class OpenSum:
    """See `RoundSum`: pools add up as replies come, and what `combine` wants of single clients is kept for it.

    Args:
        algorithm: Whose pools they are.
        server: The state that clients were sent.
        round: The round that is on.
        rounds: Of the run.
    """

    def __init__(self, algorithm: Algorithm, server: Server, round: int, rounds: int) -> None:
        self._algorithm, self._server, self._round = algorithm, server, {"round": round, "rounds": rounds}
        self._totals: dict[str, Tensors] = {}
        self._stacked: list[Uplink] = []
        self._pools = {name: block.pool for name, block in algorithm.blocks.items() if block.pool}

    def add(self, replies: Replies) -> None:
        """See `RoundSum`: client after client."""
        extra = replies.reported | {"n": replies.n, "ids": torch.from_numpy(replies.ids).to(replies.n.device)}
        for name, pool in self._pools.items():
            if not isinstance(pool, StackedPool):
                uplink = {**replies.sent, **extra, **self._round}
                self._totals[name] = pool.accumulate(self._totals.get(name), self._server, name, uplink)
        self._stacked.append(extra | {name: replies.sent[name] for name, pool in self._pools.items() if isinstance(pool, StackedPool)})

    def server(self) -> Server:
        """See `RoundSum`.

        Raises:
            DivergenceError: It is not finite.
            ValueError: The method's `combine` returns something that the server does not have.
        """
        uplink = tree_map(lambda *rows: torch.cat(rows), *self._stacked) | self._round
        new = dict(self._server)
        for name, pool in self._pools.items():
            if isinstance(pool, StackedPool):
                new[name] = pool(self._server, name, uplink)
            else:
                new[name] = pool.solve(self._server, name, self._totals[name])
        return closed(self._algorithm, new, uplink["ids"], uplink, self._round["round"])

    def row(self) -> dict[str, float]:
        """See `RoundSum`: nothing."""
        return {}


class ReplyFilter:
    """Lets replies through to a round's sum: at once, or, where single ones are looked at, when all are there and compared.

    Args:
        algorithm: The method.
        server: The state that clients were sent.
        sum: Where replies go that are taken.
        admission: Which are; None takes all at once.
        round: The round that is on.
        history: Rows of the rounds before.
        counts: Examples of all clients, [J], 0 where that is not known.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        server: Server,
        sum: RoundSum,
        admission: Admission | None,
        round: int,
        history: Iterable[Mapping[str, Any]],
        counts: np.ndarray,
    ) -> None:
        self._algorithm, self._server, self._sum, self._admission, self._round = algorithm, server, sum, admission, round
        self._earlier = [row["uplink_norm"] for row in history if math.isfinite(row.get("uplink_norm", math.nan))]
        self._held: list[Replies] = []
        self._norms: dict[int, float] = {}
        self._sizes: dict[str, dict[int, float]] = {}
        self._shares = shares(counts)
        self._losses: list[np.ndarray] = []
        self.dropped: dict[int, str] = {}
        """Why a client is left out."""
        self.taken = 0
        """Clients of the cohort whose replies are in the sum."""
        self.usual = math.nan
        """What is `usual` of the distances of the replies that were taken, where these are looked at; known when closed."""

    def drop(self, client: int, reason: str) -> None:
        """Leave a client out."""
        self.dropped.setdefault(client, reason)

    def add(self, replies: Replies) -> None:
        """Take, or hold, the replies of a chunk of the cohort."""
        if self._admission is None:
            self._pass(replies)
            return
        if self._admission.max_norm is not None:
            sent, ids = replies.sent, replies.ids
            start = was_sent(self._algorithm, self._server, ids, replies.n.device, sent) if sent else {}
            norms = distances(sent, start) if sent else torch.zeros(len(ids))
            self._norms |= dict(zip(ids.tolist(), norms.tolist(), strict=True))
            for name, t in flatten(replies.reported).items():
                sizes = t.double().abs().reshape(len(ids), -1).amax(1) if t.numel() else t.new_zeros(len(ids))
                self._sizes.setdefault(name, {}).update(zip(ids.tolist(), sizes.tolist(), strict=True))
        self._held.append(replies)

    def _pass(self, replies: Replies) -> None:
        self._sum.add(replies)
        self.taken += len(replies.ids)
        self._losses.append(replies.losses)

    def close(self) -> list[int]:
        """Hand on the replies that are taken, in the order of a simulation whatever the order in which they came.

        Returns:
            The ids of clients whose reply, or training, was not taken.
        """
        if self._admission is not None:
            self._compare(self._admission)
        for client, reason in self.dropped.items():
            log.warning("round %d: client %d is left out: %s", self._round, client, reason)
        for replies in sorted(self._held, key=lambda held: (-float(held.n[0]), int(held.ids[0]))):  # longest first, as in a simulation
            if (kept := ~np.isin(replies.ids, list(self.dropped))).any():
                self._pass(replies if kept.all() else replies.of(kept))
        return list(self.dropped)

    def _compare(self, admission: Admission) -> None:
        """Leave out what went absurdly far, and whoever reports absurdly large numbers."""
        norms = {client: norm for client, norm in self._norms.items() if client not in self.dropped}
        limit = admission.limit(list(norms.values()), self._shares[list(norms)], self._earlier)
        for client, norm in norms.items():
            if norm > (own := limit * max(1.0, self._shares[client])):
                self.drop(client, f"it went {norm:.3g} from what it was sent, more than {own:.3g}")
        for name, sizes in self._sizes.items():
            known = {client: size for client, size in sizes.items() if client not in self.dropped}
            limit = admission.report_limit(list(known.values()), self._shares[list(known)])
            for client, size in known.items():
                if size > (own := limit * max(1.0, self._shares[client])):
                    self.drop(client, f"its {name} goes up to {size:.3g}, more than {own:.3g}")
        if inside := {client: norm for client, norm in norms.items() if client not in self.dropped}:
            self.usual = usual(list(inside.values()), self._shares[list(inside)])

    def loss(self) -> float:
        """Mean negative log likelihood of the training of the clients that were taken, in nats; NaN where nobody said it."""
        losses = np.concatenate(self._losses) if self._losses else np.empty(0)
        known = losses[~np.isnan(losses)]
        return float(torch.from_numpy(known).mean()) if len(known) else math.nan

    def server(self) -> Server:
        """The server's next state from the replies that were taken.

        Raises:
            DivergenceError: It is not finite.
            FailedRound: The same, where bad clients are left out and each reply was finite.
        """
        try:
            return self._sum.server()
        except DivergenceError as error:
            if error.client is not None or self._admission is None or not self._admission.skips:
                raise
            raise FailedRound(f"what the replies of round {self._round}, counted from 0, make together is not finite") from error


def was_sent(algorithm: Algorithm, server: Server, ids: np.ndarray, device: torch.device, blocks: Iterable[str]) -> dict[str, Tensors]:
    """Of each block what the server sent to the clients `ids`: the same to all [...], or to each its own [C, ...]."""
    common, addressed = algorithm.share(server, torch.from_numpy(ids).to(device))
    return {name: addressed.get(name, common.get(name, {})) for name in blocks}
