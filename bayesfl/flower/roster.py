"""The roster of a federation over Flower: which node is which client."""

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
"""In place of a digest, by a node without the secret that keys it."""
LONGEST = 200
"""Most characters of a client's name, or of what else a node says in words."""


@dataclass
class Hello(ABC):
    """The nodes that are there, and the question who they are, which is put again until all clients
    are known. A subclass says of an answer whose it is.

    Args:
        clients: Number of clients J.
        hello: Settings of the question.
        patience: Seconds that a node has to answer before it is asked again; it loads its data in
            this time.
        nodes: Nodes of the clients, {client: node}.
        names: Names of the clients, {client: name}.
        refused: Why nodes that are there were not taken, {node: reason}.
        there: Public keys of the nodes that are there, {node: hexadecimal digits}.
    """

    clients: int
    hello: Mapping[str, Any]
    patience: float
    nodes: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    there: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, tuple[str | None, float]] = field(default_factory=dict)
    """For each node the message whose answer has not come, and when the node is asked again."""

    @abstractmethod
    def missing(self) -> str:
        """Return in words who has not answered; nothing if all have."""

    @abstractmethod
    def bind(self, node: int, reply: RecordDict) -> None:
        """Bind a node to the client that it says it is.

        Raises:
            RecordError: It is not taken.
        """

    def wait(self, grid: Grid, *, least: int, timeout: float) -> None:
        """Wait until every client's node has answered; the log names those that are missing from
        time to time.

        Args:
            grid: Flower's grid.
            least: Number of clients that must have answered in any case.
            timeout: Seconds after which the other clients are no longer waited for, and after which
                a node that was refused ends the wait, if no other one has been taken since.

        Raises:
            BadClients: Nodes are there that cannot be taken.
        """
        start = taken = time.monotonic()
        said = -math.inf
        while missing := self.missing():
            now = time.monotonic()
            if now - start > timeout and len(self.nodes) >= least:
                log.warning("going on without %s", missing)
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
                    f"the server gave up waiting for {missing}: no node was taken for {timeout:g} "
                    f"seconds (timeout), and of those that are there {told}. Mend these nodes, and "
                    "start the run again"
                )
            time.sleep(1.0)

    def look(self, grid: Grid) -> bool:
        """Ask new nodes which client they are, take answers that have arrived, and return whether
        another node was taken; do not wait.
        """
        before, now = dict(self.nodes), time.monotonic()
        self.there = {node.node_id: bytes(node.public_key).hex() for node in grid.get_nodes()}
        self.refused = {node: why for node, why in self.refused.items() if node in self.there}
        # Before nodes are asked again: a new question replaces the old one, and its answer is lost.
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
                log.warning("node %d is not taken: %s", node, error)
                self.refused[node] = str(error)
            else:
                self.refused.pop(node, None)


@dataclass
class Roster(Hello):
    """The clients of an experiment and their nodes.

    A client is bound to the public key of the node that was first taken for it; the binding is in
    the server's checkpoint. If nodes have no keys, anyone who reaches the SuperLink can act as any
    client.

    Args:
        keys: Public keys of the clients that are bound, {client: hexadecimal digits}.
        counts: Numbers of training examples, {client: n}.
        splits: The splits in which clients have rows, {client: names}.
        predicted: What clients predict, {client: (task, number of classes or targets)}.
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
        """Return how a person calls a client."""
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
        """Bind a node to the client that it says it is.

        Raises:
            RecordError: The answer is no valid one, or another node or key is bound to that client.
        """
        key, there = self.there[node], self.there
        client, n, outputs = (
            records.setting(reply, key, int) for key in ("client", "n", "outputs")
        )
        name, task = (records.setting(reply, key, str) for key in ("name", "task"))
        splits = frozenset(map(str, records.setting(reply, "splits", list)))
        if not 0 <= client < self.clients:
            raise records.RecordError(
                f"it says that it is client {client}, and clients are 0 to {self.clients - 1}"
            )
        if not 1 <= len(name) <= LONGEST:
            raise records.RecordError(
                f"client {client} must have a name of 1 to {LONGEST} characters, got {len(name)}"
            )
        if (known := self.names.get(client, name)) != name:
            raise records.RecordError(
                f"client {client} was called {known!r}, and its data call it {name!r} now; start "
                "each node with the client-id and the data that it had, or start a new experiment"
            )
        if n < 1:
            raise records.RecordError(f"client {client} says that it has {n} training examples")
        if client in self.nodes and self.nodes[client] in there and self.nodes[client] != node:
            raise records.RecordError(
                f"{self.called(client)} is node {self.nodes[client]} already; give every node a "
                f"client-id of its own, got {name!r}"
            )
        if client in self.keys and self.keys[client] != key:
            raise records.RecordError(
                f"{self.called(client)} is bound to another node's key; start the node with the "
                "key file that it had (without one it makes a new key at each start), or start a "
                "new experiment"
            )
        others = [c for c, known in self.keys.items() if known == key and c != client]
        if key and others:
            raise records.RecordError(
                f"its key is that of {self.called(others[0])}; give every node a key of its own"
            )
        self.names[client] = name
        for kind in ("transform", "augment", "columns"):
            digest = records.setting(reply, kind, str)
            if digest == NOT_SENT and NOT_SENT not in self._changes.values():
                log.warning(
                    "whether all nodes read rows by the same %s is not looked at: give each the "
                    "same shared-secret in --node-config",
                    kind,
                )
            if self._changes.setdefault(kind, digest) != digest:
                log.warning(
                    "%s has another %s of its inputs than the first client that answered, or "
                    "none: the model would read its rows as something else; make every node's "
                    "data by the same function or columns, unless that is meant",
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
