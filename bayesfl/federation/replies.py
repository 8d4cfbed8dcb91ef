"""What the server makes of a round's replies: which it takes, and what their sum gives."""

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
from bayesfl.base.trees import flatten
from bayesfl.composition.algorithm import Algorithm
from bayesfl.federation.admission import Admission, distances, shares, usual
from bayesfl.federation.client import read_rows
from bayesfl.federation.errors import DivergenceError, FailedRound
from bayesfl.federation.result import Result
from bayesfl.federation.settings import OPEN

log = logging.getLogger(__name__)


class Adding(Protocol):
    """How the uplinks of one round are added up."""

    def add(self, ids: np.ndarray, n: Tensor, sent: Mapping[str, Tensors], reported: Uplink) -> None:
        """The uplinks of a chunk [C, ...] that are taken; what a server would learn of them is the adder's business."""
        ...

    def server(self) -> Server:
        """The server's next state, after the last chunk."""
        ...

    def row(self) -> dict[str, float]:
        """What the history says of it, once the next state is known; replaces columns of the same name."""
        ...


class Aggregator(Protocol):
    """How a run draws its cohorts and adds up their uplinks."""

    @property
    def least(self) -> int:
        """Replies that a round needs."""
        ...

    def cohort(self, round: int) -> np.ndarray:
        """The ids of one round's cohort, ascending."""
        ...

    def gather(self, server: Server, round: int, cohort: np.ndarray) -> Adding:
        """Of a round that begins from the state `server`, with all of its cohort, of whom some may not reply."""
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

    def start(self, result: Result, admission: Admission, *, every: int | None, repeats: int) -> Aggregator:
        """For a run that goes on from `result`.

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
class Plain:
    """The server sees every client's uplink."""

    name = OPEN
    sampling = None

    def start(self, result: Result, admission: Admission, *, every: int | None, repeats: int) -> Aggregator:
        """See `Aggregation`."""
        return PlainRun(result, admission.min_clients)


class PlainRun:
    """See `Aggregator`.

    Args:
        result: Where the run begins.
        least: Replies that a round needs.
    """

    def __init__(self, result: Result, least: int) -> None:
        self._algorithm, self._settings, self._clients, self.least = result.algorithm, result.settings, result.data.clients, least

    def cohort(self, round: int) -> np.ndarray:
        """See `Aggregator`."""
        return self._settings.cohort(self._clients, round)

    def gather(self, server: Server, round: int, cohort: np.ndarray) -> Adding:
        """See `Aggregator`."""
        return Gather(self._algorithm, server, round)


class Unseen:
    """Stands where `combine` expects what single clients sent, and the server has not seen it: whatever is asked of it is refused.

    Args:
        why: Why it is not there, a sentence's beginning.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def _refuse(self, *asked: Any) -> Any:
        raise ValueError(
            f"{self._why}, but the method's `combine` reads {asked[0] if asked else 'them'!r}; take a method whose server only adds up, "
            "or, where it can do without, dataclasses.replace(algorithm, combine=bf.Algorithm.combine, report=bf.Algorithm.report)"
        )

    __getitem__ = __contains__ = __iter__ = __len__ = __getattr__ = _refuse


def check_combine(algorithm: Algorithm, server: Server, ids: Any, why: str) -> None:
    """That the method's `combine` does without what single clients sent.

    Raises:
        ValueError: It does not; `why` begins the sentence that says so.
    """
    unseen = Unseen(why)
    try:
        algorithm.combine(server, ids, unseen)  # pyright: ignore[reportArgumentType]
    except (TypeError, IndexError) as error:
        raise ValueError(f"{why}, and the method's `combine` fails without it: {error}") from error


def closed(algorithm: Algorithm, new: Server, ids: Any, uplink: Any, round: int) -> Server:
    """The server's next state from what its pools made, `new`: changed by the method's `combine`, and checked.

    Raises:
        DivergenceError: It is not finite.
        ValueError: The method's `combine` returns something that the server does not have.
    """
    changed = algorithm.combine(new, ids, uplink)
    if unknown := sorted(changed.keys() - new.keys()):
        raise ValueError(f"`combine` returns {unknown}, which the server does not have; give them a start in `server`")
    if not all(bool(t.isfinite().all()) for t in tree_leaves(new | changed)):
        raise DivergenceError(f"the server is no longer finite after round {round}, counted from 0; lower the learning rates", round=round)
    return new | changed


class Gather:
    """What the server adds up over a round.

    Args:
        algorithm: Whose pools they are.
        server: The state that clients were sent.
        round: The round that is on.
    """

    def __init__(self, algorithm: Algorithm, server: Server, round: int) -> None:
        self._algorithm, self._server, self._round = algorithm, server, round
        self._totals: dict[str, Tensors] = {}
        self._stacked: list[Uplink] = []
        self._pools = {name: block.pool for name, block in algorithm.blocks.items() if block.pool}

    def add(self, ids: np.ndarray, n: Tensor, sent: Mapping[str, Tensors], reported: Uplink) -> None:
        """The uplinks of a chunk, client after client."""
        extra = reported | {"n": n, "ids": torch.from_numpy(ids).to(n.device)}
        for name, pool in self._pools.items():
            if not isinstance(pool, StackedPool):
                self._totals[name] = pool.accumulate(self._totals.get(name), self._server, name, {**sent, **extra})
        self._stacked.append(extra | {name: sent[name] for name, pool in self._pools.items() if isinstance(pool, StackedPool)})

    def server(self) -> Server:
        """The server's next state.

        Raises:
            DivergenceError: It is not finite.
            ValueError: The method's `combine` returns something that the server does not have.
        """
        uplink = tree_map(lambda *rows: torch.cat(rows), *self._stacked)
        new = dict(self._server)
        for name, pool in self._pools.items():
            if isinstance(pool, StackedPool):
                new[name] = pool(self._server, name, uplink)
            else:
                new[name] = pool.solve(self._server, name, self._totals[name])
        return closed(self._algorithm, new, uplink["ids"], uplink, self._round)

    def row(self) -> dict[str, float]:
        """Nothing."""
        return {}


class Gate:
    """Holds a round's replies until it is known which are taken; those are gathered in the order in which they came.

    Args:
        algorithm: The method.
        server: The state that clients were sent.
        gather: What adds up the replies that are taken.
        admission: Which are.
        round: The round that is on.
        history: Rows of the rounds before.
        counts: Examples of all clients, [J].
    """

    def __init__(
        self,
        algorithm: Algorithm,
        server: Server,
        gather: Adding,
        admission: Admission,
        round: int,
        history: Iterable[Mapping[str, Any]],
        counts: np.ndarray,
    ) -> None:
        self._algorithm, self._server, self._gather, self._admission, self._round = algorithm, server, gather, admission, round
        self._earlier = [row["uplink_norm"] for row in history if math.isfinite(row.get("uplink_norm", math.nan))]
        self._held: list[tuple[np.ndarray, Tensor, dict[str, Tensors], Uplink]] = []
        self._norms: dict[int, float] = {}
        self._sizes: dict[str, dict[int, float]] = {}
        self._shares = shares(counts)
        self.dropped: dict[int, str] = {}
        """Why a client is left out."""
        self.usual = math.nan
        """What is `usual` of the distances of the replies that were taken, where these are looked at; known when closed."""

    def drop(self, client: int, reason: str) -> None:
        """Leaves a client out, whose reply may still be held with the others of its chunk."""
        self.dropped.setdefault(client, reason)

    def hold(self, ids: np.ndarray, n: Tensor, sent: dict[str, Tensors], reported: Uplink) -> None:
        """The replies of a chunk, each looked at on its own before; of clients that were dropped any numbers."""
        if self._admission.max_norm is not None:
            norms = distances(sent, was_sent(self._algorithm, self._server, ids, n.device, sent)) if sent else torch.zeros(len(ids))
            self._norms |= dict(zip(ids.tolist(), norms.tolist(), strict=True))
            for name, t in flatten(reported).items():
                sizes = t.double().abs().reshape(len(ids), -1).amax(1) if t.numel() else t.new_zeros(len(ids))
                self._sizes.setdefault(name, {}).update(zip(ids.tolist(), sizes.tolist(), strict=True))
        self._held.append((ids, n, sent, reported))

    def close(self) -> list[int]:
        """Gathers the replies that are taken; the ids of clients whose reply, or training, was not."""
        norms = {client: norm for client, norm in self._norms.items() if client not in self.dropped}
        limit = self._admission.limit(list(norms.values()), self._shares[list(norms)], self._earlier)
        for client, norm in norms.items():
            if norm > (own := limit * max(1.0, self._shares[client])):
                self.drop(client, f"it went {norm:.3g} from what it was sent, more than {own:.3g}")
        for name, sizes in self._sizes.items():
            known = {client: size for client, size in sizes.items() if client not in self.dropped}
            limit = self._admission.report_limit(list(known.values()), self._shares[list(known)])
            for client, size in known.items():
                if size > (own := limit * max(1.0, self._shares[client])):
                    self.drop(client, f"its {name} goes up to {size:.3g}, more than {own:.3g}")
        for client, reason in self.dropped.items():
            log.warning("round %d: client %d is left out: %s", self._round, client, reason)
        if inside := {client: norm for client, norm in norms.items() if client not in self.dropped}:
            self.usual = usual(list(inside.values()), self._shares[list(inside)])
        for ids, n, sent, reported in self._held:
            if (kept := ~np.isin(ids, list(self.dropped))).any():
                self._gather.add(ids[kept], *(read_rows(tree, np.flatnonzero(kept)) for tree in (n, sent, reported)))
        return list(self.dropped)

    def server(self) -> Server:
        """The server's next state from the replies that were taken.

        Raises:
            FailedRound: It is not finite, though each of them is.
        """
        try:
            return self._gather.server()
        except DivergenceError as error:
            if error.client is not None or not self._admission.skips:
                raise
            raise FailedRound(f"what the replies of round {self._round}, counted from 0, make together is not finite") from error


def was_sent(algorithm: Algorithm, server: Server, ids: np.ndarray, device: torch.device, blocks: Iterable[str]) -> dict[str, Tensors]:
    """Of each block what the server sent to the clients `ids`: the same to all [...], or to each its own [C, ...]."""
    common, addressed = algorithm.share(server, torch.from_numpy(ids).to(device))
    return {name: addressed.get(name, common.get(name, {})) for name in blocks}
