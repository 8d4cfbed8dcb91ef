"""A round's transport over Flower's grid, and what the server tells its clients."""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch.utils._pytree import tree_map

from bayesfl.base.trees import nest
from bayesfl.federation.admission import LARGEST, PROTOCOL, Message, objection, shares
from bayesfl.federation.identity import fingerprint
from bayesfl.federation.replies import Replies
from bayesfl.federation.round import Absence, Round
from bayesfl.federation.settings import name_of
from bayesfl.flower import records
from bayesfl.flower.deployed import Deployed
from bayesfl.flower.post import Failure, ask
from bayesfl.flower.roster import Roster
from bayesfl.flower.states import name_of as state_name

log = logging.getLogger(__name__)


class Network:
    """Speaks with the clients of a federation.

    Args:
        grid: Flower's.
        roster: Which node is which client.
        timeout: Seconds that a client has for its reply.
    """

    def __init__(self, grid: Grid, roster: Roster, timeout: float) -> None:
        self.grid, self.roster, self.timeout = grid, roster, timeout
        self._named: set[int] = set()

    def counts(self) -> np.ndarray:
        """Training examples of all clients, [J], 0 where they are not known; the log names who says that it has very many."""
        counts = self.roster.sizes()
        for client in np.flatnonzero(shares(counts) >= LARGEST).tolist():
            if client not in self._named:
                self._named.add(client)
                median = np.median(counts[counts > 0])
                log.warning("client %d says that it has %d training examples, the median client %g", client, counts[client], median)
        return counts

    def ask(self, kind: str, orders: Mapping[int, RecordDict], *, group: str) -> Iterator[tuple[int, RecordDict | Failure]]:
        """Send each client its order; every client and its reply as they come, or why there is none."""
        nodes = {client: node for client in orders if (node := self.roster.nodes.get(client, 0))}
        there = {client: (nodes[client], orders[client]) for client in nodes}
        yield from ask(self.grid, kind, there, timeout=self.timeout, group=group)
        for client in orders.keys() - nodes.keys():
            yield client, Failure("its node has not come")


class Journey:
    """See `Transport`; of one attempt, over a network.

    Clients keep the states that they made under other names than those they started from, so there is nothing to put back: what the
    server names next decides.

    Args:
        network: The clients.
        state: The federation before the round.
        kept: Names of states that checkpoints may ask for again, a tuple of J for each.
    """

    trusted = False
    apart = 0.0

    def __init__(self, network: Network, state: Deployed, kept: Collection[tuple[str, ...]]) -> None:
        self._network, self._state, self._kept = network, state, kept
        self.base = state.base
        """Of each client the name of its last state that was taken; after `commit` those of this round."""
        self.counts = np.zeros(state.clients, np.int64)
        self.seconds: dict[str, float] = {}
        self.traffic: dict[str, float] = {"bytes_up": 0, "bytes_down": 0}
        self._acknowledged: set[int] = set()

    @contextmanager
    def asked(self, round: Round) -> Iterator[Iterator[Replies | Absence]]:
        """See `Transport`."""
        self._network.roster.look(self._network.grid)
        self.counts = self._network.counts()
        yield self._answers(round)

    def commit(self, dropped: Collection[int]) -> None:
        """See `Transport`."""
        made, known = state_name(self._state.round + 1, self._state.sessions[-1]), self._acknowledged.difference(dropped)
        self.base = tuple(made if client in known else name for client, name in enumerate(self._state.base))

    def _answers(self, round: Round) -> Iterator[Replies | Absence]:
        senders = set(round.cohort.tolist())
        found = orders(self._state, np.union1d(round.cohort, round.rest), senders, self._kept)
        self.traffic["bytes_down"] = sum(_size(order) for client, order in found.items() if client in self._network.roster.nodes)
        most = records.most_bytes(round.declared)
        for client, reply in self._network.ask("train", found, group=f"{round.number}.{round.attempt}"):
            if isinstance(reply, Failure):
                yield Absence(client, reply.reason, reply.lost)
                continue
            sends = client in senders
            try:
                self.traffic["bytes_up"] += _size(reply)
                message = _message(reply, most if sends else None)
                reason = objection(message, round.declared if sends else {}, round.number)
            except records.RecordError as error:
                yield Absence(client, str(error))
                continue
            if reason:
                yield Absence(client, reason)
                continue
            self._acknowledged.add(client)
            if sends:
                yield self._replies(client, message, measure(reply, "train_nll"))

    def _replies(self, client: int, message: Message, loss: float | None) -> Replies:
        state = self._state
        reported = nest({name: t.unsqueeze(0) for name, t in message.tensors.items()})
        sent = {name: reported.pop(name) for name, block in state.algorithm.blocks.items() if block.pool}
        ids = np.array([client])
        return Replies(
            ids, torch.from_numpy(self.counts[ids]).to(state.dtype), sent, reported, np.array([np.nan if loss is None else loss])
        )


def orders(
    state: Deployed,
    ids: np.ndarray,
    senders: set[int],
    kept: Collection[tuple[str, ...]],
    *,
    value: float = float("nan"),
    tolerant: bool = False,
) -> dict[int, RecordDict]:
    """Tell each of some clients what is asked of it; the tensors for all are the same bytes.

    Args:
        state: The federation.
        ids: Whom.
        senders: Whose replies are gathered.
        kept: See `Journey`.
        value: What was tuned; NaN for nothing.
        tolerant: Whether a client whose fine-tuning is not finite predicts without it.

    Returns:
        The message to each client, by its id.
    """
    common, addressed = state.algorithm.share(state.server, torch.from_numpy(ids))
    shared, digest = records.pack(common)
    told: dict[str, Any] = {
        "protocol": PROTOCOL,
        "algorithm": fingerprint(state.algorithm),
        "experiment": state.experiment,
        "sessions": list(state.sessions),
        "round": state.round,
        "rounds": state.settings.rounds,
        "seed": state.settings.seed,
        "dtype": name_of(state.dtype),
        "value": value,
        "tolerant": tolerant,
        "keeps": bool(state.start),
        "common_digest": digest,
    }
    found: dict[int, RecordDict] = {}
    for place, client in enumerate(ids.tolist()):
        base = state.base[client]
        start = {} if base else tree_map(lambda t: t[None], state.start)
        own, digest = records.pack({"addressed": tree_map(lambda t, i=place: t[i : i + 1], addressed), "start": start})
        named = sorted({base, *(names[client] for names in kept)} - {""})
        config = {**told, "client": client, "base": base, "named": named, "sends": client in senders, "own_digest": digest}
        found[client] = RecordDict({"config": ConfigRecord(config), "common": shared, "own": own})
    return found


def measure(reply: RecordDict, name: str) -> float | None:
    """A number that a client measured, where it is there and finite."""
    found = reply.get("metrics")
    value = found.get(name) if isinstance(found, MetricRecord) else None
    return float(value) if isinstance(value, float) and np.isfinite(value) else None


def _message(reply: RecordDict, most: int | None) -> Message:
    """What a client replied; of one outside the cohort, for None, nothing but that it trained.

    Raises:
        RecordError: It is no such message.
    """
    tensors = {} if most is None else records.unpack(reply, "up", records.setting(reply, "digest", str), most=most)
    return Message(tensors, records.setting(reply, "round", int), records.setting(reply, "protocol", int))


def _size(content: RecordDict) -> int:
    """Bytes of a message's tensors."""
    return sum(len(array.data) for record in content.values() if isinstance(record, ArrayRecord) for array in record.values())
