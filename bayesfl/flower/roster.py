"""The roster of a federation over Flower: the assignment of nodes to clients."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid

from bayesfl.federation.errors import BadClients, called
from bayesfl.flower import records
from bayesfl.flower.post import REMIND, content_of, pull, push

log = logging.getLogger(__name__)
NOT_SENT = "not sent"
"""Replaces a digest from a node without the secret that keys it."""
LONGEST = 200
"""Maximum number of characters of a client's name, or of another text from a node."""


@dataclass
class Hello(ABC):
    """Find the connected nodes and ask each which client it is, until all clients are known; a
    subclass reads the answers.

    Args:
        clients: Number of clients J.
        hello: Settings of the question.
        patience: Seconds after which a node without answer is asked again; it loads its data in
            this time.
        nodes: Nodes of the clients, {client: node}.
        names: Names of the clients, {client: name}.
        refused: Why connected nodes were not accepted, {node: reason}.
        there: Public keys of the connected nodes, {node: hexadecimal digits}.
    """

    clients: int
    hello: Mapping[str, Any]
    patience: float
    nodes: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    there: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, tuple[str | None, float]] = field(default_factory=dict)
    """For each node the message without answer, and the time when the node is asked again."""

    @abstractmethod
    def missing(self) -> str:
        """Return a text on the clients that have not answered; empty if all have."""

    @abstractmethod
    def bind(self, node: int, reply: RecordDict) -> None:
        """Assign a node to the client that its answer names.

        Raises:
            RecordError: The node is not accepted.
        """

    def wait(self, grid: Grid, *, least: int, timeout: float) -> None:
        """Wait until every client's node has answered; missing clients are logged at intervals.

        Args:
            grid: Flower's grid.
            least: Number of clients that must have answered in any case.
            timeout: Seconds after which the server stops waiting for the other clients, and after
                which a rejected node ends the wait, if no other one was accepted since.

        Raises:
            BadClients: Connected nodes were not accepted.
        """
        start = taken = time.monotonic()
        said = -math.inf
        while missing := self.missing():
            now = time.monotonic()
            if now - start > timeout and len(self.nodes) >= least:
                log.warning("continuing without %s", missing)
                return
            changed = self.look(grid)
            taken = now if changed or not self.refused else taken
            if changed:
                continue
            if now - said > REMIND:
                log.warning("waiting for %s", missing)
                said = now
            if now - taken > timeout:
                told = "; ".join(f"node {node}: {why}" for node, why in self.refused.items())
                raise BadClients(
                    f"the server stopped waiting for {missing}: no node was accepted for "
                    f"{timeout:g} seconds (timeout), and of the connected ones {told}. Repair "
                    "these nodes, and start the run again"
                )
            time.sleep(1.0)

    def look(self, grid: Grid) -> bool:
        """Ask new nodes which client they are, and read answers that have arrived, without waiting;
        return whether another node was accepted.
        """
        before, now = dict(self.nodes), time.monotonic()
        self.there = {node.node_id: bytes(node.public_key).hex() for node in grid.get_nodes()}
        self.refused = {node: why for node, why in self.refused.items() if node in self.there}
        # Do this first: a new question replaces the old one, whose answer would be lost.
        self._hear(grid)
        self._asked = {
            node: (id, again)
            for node, (id, again) in self._asked.items()
            if node in self.there or now < again
        }
        content = records.message({}, **self.hello)
        for node in sorted(self.there.keys() - self.nodes.values()):
            if now >= self._asked.get(node, (None, now))[1]:
                self._asked[node] = (
                    push(grid, "query", node, content, timeout=self.patience, group="hello"),
                    now + self.patience,
                )
        self._hear(grid)
        return self.nodes != before

    def _hear(self, grid: Grid) -> None:
        for node, (id, _) in list(self._asked.items()):
            if id is None or node not in self.there or (reply := pull(grid, id)) is None:
                continue
            self._asked[node] = (None, time.monotonic() + REMIND)
            try:
                content = content_of(reply)
                records.same_protocol(content)
                self.bind(node, content)
            except records.RecordError as error:
                log.warning("node %d is not accepted: %s", node, error)
                self.refused[node] = str(error)
            else:
                self.refused.pop(node, None)


@dataclass
class Roster(Hello):
    """Hold the clients of an experiment and their nodes.

    A client is bound to the public key of the first node that was accepted for it; the binding is
    stored in the server's checkpoint. If nodes have no keys, anyone who reaches the SuperLink can
    act as any client.

    Args:
        keys: Public keys of the bound clients, {client: hexadecimal digits}.
        counts: Numbers of training examples, {client: n}.
        splits: The splits with rows of the clients, {client: names}.
        predicted: The clients' prediction tasks, {client: (task, number of classes or targets)}.
    """

    keys: dict[int, str] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    splits: dict[int, frozenset[str]] = field(default_factory=dict)
    predicted: dict[int, tuple[str, int]] = field(default_factory=dict)
    _changes: dict[str, str] = field(default_factory=dict)

    def missing(self) -> str:
        """Return the names of clients that have not answered."""
        names = [self.called(client) for client in range(self.clients) if client not in self.nodes]
        return ", ".join(names[:10]) + f" and {len(names) - 10} more" * (len(names) > 10)

    def everyone(self) -> tuple[str, ...]:
        """Return the names of all clients; empty text for clients that have not answered."""
        return tuple(self.names.get(client, "") for client in range(self.clients))

    def called(self, client: int) -> str:
        """Return a client's number and name for messages."""
        return called(client, self.everyone())

    def sizes(self) -> np.ndarray:
        """Return the numbers of training examples of all clients, [J]; 0 for clients that have not
        answered.
        """
        return np.array([self.counts.get(client, 0) for client in range(self.clients)])

    def having(self, split: str) -> list[int]:
        """Return the clients that have rows in a split."""
        return sorted(client for client, names in self.splits.items() if split in names)

    def bind(self, node: int, reply: RecordDict) -> None:
        """Assign a node to the client that its answer names.

        Raises:
            RecordError: The answer is invalid, or another node or key is bound to that client.
        """
        key, there = self.there[node], self.there
        client, n, outputs = (
            records.setting(reply, key, int) for key in ("client", "n", "outputs")
        )
        name, task = (records.setting(reply, key, str) for key in ("name", "task"))
        splits = frozenset(map(str, records.setting(reply, "splits", list)))
        if not 0 <= client < self.clients:
            raise records.RecordError(
                f"it claims to be client {client}, but clients are 0 to {self.clients - 1}"
            )
        if not 1 <= len(name) <= LONGEST:
            raise records.RecordError(
                f"client {client} must have a name of 1 to {LONGEST} characters, got {len(name)}"
            )
        if (known := self.names.get(client, name)) != name:
            raise records.RecordError(
                f"client {client} was called {known!r}, but its data now call it {name!r}; start "
                "each node with its earlier client-id and data, or start a new experiment"
            )
        if n < 1:
            raise records.RecordError(f"client {client} reports {n} training examples")
        if client in self.nodes and self.nodes[client] in there and self.nodes[client] != node:
            raise records.RecordError(
                f"{self.called(client)} is node {self.nodes[client]} already; give every node its "
                f"own client-id, got {name!r}"
            )
        if client in self.keys and self.keys[client] != key:
            raise records.RecordError(
                f"{self.called(client)} is bound to another node's key; start the node with its "
                "earlier key file (without one it makes a new key at each start), or start a "
                "new experiment"
            )
        others = [c for c, known in self.keys.items() if known == key and c != client]
        if key and others:
            raise records.RecordError(
                f"its key is that of {self.called(others[0])}; give every node its own key"
            )
        self.names[client] = name
        for kind in ("transform", "augment", "columns"):
            digest = records.setting(reply, kind, str)
            if digest == NOT_SENT and NOT_SENT not in self._changes.values():
                log.warning(
                    "not checked: whether all nodes use the same %s; for this check set the same "
                    "shared-secret in each node's --node-config",
                    kind,
                )
            if self._changes.setdefault(kind, digest) != digest:
                log.warning(
                    "%s has no or another %s of its inputs than the first client that answered, so "
                    "the model would interpret its rows differently; use the same function or "
                    "columns on every node, unless this is intended",
                    self.called(client),
                    kind,
                )
        if self.counts.get(client, n) != n:
            log.warning(
                "%s has %d training examples now, %d before",
                self.called(client),
                n,
                self.counts[client],
            )
        if not key:
            log.warning(
                "node %d of %s has no key: anyone could be this client", node, self.called(client)
            )
        self.keys[client], self.nodes[client], self.counts[client] = key, node, n
        self.splits[client], self.predicted[client] = splits, (task, outputs)
