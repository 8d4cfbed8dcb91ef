"""The transport of rounds over Flower's grid, and the server's requests to its clients."""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp import Grid

from bayesfl.base.archive import CheckpointError
from bayesfl.base.trees import nest
from bayesfl.federation.rounds.admission import LARGEST_SHARE, Message, objection, shares
from bayesfl.federation.rounds.replies import Replies
from bayesfl.federation.rounds.round import Absence, Round, Transport
from bayesfl.flower import records
from bayesfl.flower.deployed import Deployed
from bayesfl.flower.orders import orders
from bayesfl.flower.post import Failure, ask
from bayesfl.flower.roster import Roster
from bayesfl.flower.states import FORGOTTEN, state_name

log = logging.getLogger(__name__)


class Connection:
    """Connect a server with the clients of a federation.

    Args:
        grid: Flower's grid.
        roster: Assignment of nodes to clients.
        timeout: Time limit for a client's reply in seconds.
    """

    def __init__(self, grid: Grid, roster: Roster, timeout: float) -> None:
        self.grid, self.roster, self.timeout = grid, roster, timeout
        self._named: set[int] = set()
        self._lost: set[int] = set()

    def counts(self) -> np.ndarray:
        """Return the numbers of training examples of all clients, [J], 0 if unknown; log clients
        that report unusually large numbers.
        """
        counts = self.roster.sizes()
        for client in np.flatnonzero(shares(counts) >= LARGEST_SHARE).tolist():
            if client not in self._named:
                self._named.add(client)
                log.warning(
                    "%s reports %d training examples, the median client %g",
                    self.roster.called(client),
                    counts[client],
                    np.median(counts[counts > 0]),
                )
        return counts

    def ask(
        self, kind: str, orders: Mapping[int, RecordDict], *, group: str
    ) -> Iterator[tuple[int, RecordDict | Failure]]:
        """Send each client its request, and yield each client with its reply, or a `Failure`, as
        they arrive.

        Raises:
            CheckpointError: All clients have lost their states of the earlier run (`start=`).
        """
        nodes = self.roster.nodes
        there = {client: (nodes[client], orders[client]) for client in orders if client in nodes}
        for client, reply in ask(self.grid, kind, there, timeout=self.timeout, group=group):
            if not isinstance(reply, Failure):
                self._lost.discard(client)
            elif FORGOTTEN in reply.reason:
                self._lost.add(client)
            yield client, reply
        for client in orders.keys() - there.keys():
            yield client, Failure("its node has not connected")
        if len(self._lost) == self.roster.clients:
            raise CheckpointError(
                "no client has kept its state of the run from which this one starts: nodes keep "
                "only their newest states, so if that run continued after the state in start=, "
                "pass its folder of checkpoints as start=; otherwise restore the folders of the "
                "nodes' states, or leave start= out to start anew"
            )


class Journey(Transport):
    """Carry one attempt at a round over a network.

    Clients store a round's new state under another name than their state before the round, so
    nothing needs to be restored: the server selects the valid state by the name that it sends next.

    Args:
        network: The connection to the clients.
        state: The federation before the round.
        kept: For each kept checkpoint its `base`: the names of states that may be needed again, a
            tuple of J.
    """

    def __init__(
        self, network: Connection, state: Deployed, kept: Collection[tuple[str, ...]]
    ) -> None:
        super().__init__(network.roster.sizes())
        self._network, self._state, self._kept = network, state, kept
        self.base = state.base
        """For each client the name of its last accepted state, including those of this round after
        `commit`.
        """
        self._acknowledged: set[int] = set()

    @contextmanager
    def asked(self, round: Round) -> Iterator[Iterator[Replies | Absence]]:
        """Send the request to the clients of a round; see `Transport.asked`."""
        self._network.roster.look(self._network.grid)
        self.counts = self._network.counts()
        yield self._answers(round)

    def commit(self, dropped: Collection[int]) -> None:
        """Record the names of accepted new states; see `Transport.commit`."""
        made = state_name(self._state.round + 1, self._state.sessions[-1])
        known = self._acknowledged.difference(dropped)
        self.base = tuple(
            made if client in known else name for client, name in enumerate(self._state.base)
        )

    def _answers(self, round: Round) -> Iterator[Replies | Absence]:
        senders = set(round.cohort.tolist())
        found = orders(self._state, np.union1d(round.cohort, round.rest), senders, self._kept)
        self.traffic["bytes_down"] = sum(
            _size(order) for client, order in found.items() if client in self._network.roster.nodes
        )
        most = records.most_bytes(round.declared)
        for client, reply in self._network.ask(
            "train", found, group=f"{round.number}.{round.attempt}"
        ):
            if isinstance(reply, Failure):
                yield Absence(client, reply.reason, reply.lost)
                continue
            sends = client in senders
            try:
                self.traffic["bytes_up"] += _size(reply)
                message = Message(
                    records.unpack(reply, "up", records.setting(reply, "digest", str), most=most)
                    if sends
                    else {},
                    records.setting(reply, "round", int),
                    records.setting(reply, "protocol", int),
                )
                reason = objection(message, round.declared if sends else {}, round.number)
            except records.RecordError as error:
                yield Absence(client, str(error))
                continue
            if reason:
                yield Absence(client, reason)
                continue
            self._acknowledged.add(client)
            if sends:
                reported = nest({name: t.unsqueeze(0) for name, t in message.tensors.items()})
                blocks = self._state.algorithm.blocks.items()
                sent = {name: reported.pop(name) for name, block in blocks if block.pool}
                n = torch.from_numpy(self.counts[[client]]).to(self._state.dtype)
                loss = records.measure(reply, "metrics", "train_nll")
                losses = np.array([np.nan if loss is None else loss])
                yield Replies(np.array([client]), n, sent, reported, losses)


def _size(content: RecordDict) -> int:
    """Return the number of bytes of a message's tensors."""
    return sum(
        len(array.data)
        for record in content.values()
        if isinstance(record, ArrayRecord)
        for array in record.values()
    )
