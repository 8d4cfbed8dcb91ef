"""The roster of a federation over Flower: which node is which client."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from bayesfl.federation.errors import called
from bayesfl.flower import records
from bayesfl.flower.post import Failure, Hello, content_of

log = logging.getLogger(__name__)
NOT_SENT = "not sent"
"""In place of a digest, by a node without the secret that keys it."""
LONGEST = 200
"""Most characters of a client's name."""


@dataclass
class Roster:
    """The clients of an experiment and their nodes.

    A client is bound to the public key of the node that was first taken for it; the binding is in
    the server's checkpoint. If nodes have no keys, anyone who reaches the SuperLink can act as any
    client.

    Args:
        clients: Number of clients J.
        hello: Settings of the message that asks a node which client it is.
        patience: Seconds that a node has to answer before it is asked again; it loads its data in
            this time.
        keys: Public keys of the clients that are bound, {client: hexadecimal digits}.
        nodes: Nodes of the clients, {client: node}.
        counts: Numbers of training examples, {client: n}.
        splits: The splits in which clients have rows, {client: names}.
        predicted: What clients predict, {client: (task, number of classes or targets)}.
        names: Names of the clients, {client: name}.
    """

    clients: int
    hello: Mapping[str, Any]
    patience: float
    keys: dict[int, str] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    splits: dict[int, frozenset[str]] = field(default_factory=dict)
    predicted: dict[int, tuple[str, int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    _changes: dict[str, str] = field(default_factory=dict)
    _there: dict[int, str] = field(default_factory=dict)
    _hello: Hello = field(init=False)

    def __post_init__(self) -> None:
        content = RecordDict({"config": ConfigRecord(dict(self.hello))})
        self._hello = Hello(content, self.patience)

    def wait(self, grid: Grid, *, least: int, timeout: float) -> None:
        """Wait until every client's node has answered.

        Args:
            grid: Flower's grid.
            least: Number of clients that must have answered in any case.
            timeout: Seconds after which the other clients are no longer waited for, and after which
                a node that was refused ends the wait, if no other one has been taken since.

        Raises:
            BadClients: Nodes are there that cannot be taken.
        """
        start = time.monotonic()
        while missing := [client for client in range(self.clients) if client not in self.nodes]:
            names = ", ".join(map(self.called, missing[:10])) + f" and {len(missing) - 10} more" * (
                len(missing) > 10
            )
            if time.monotonic() - start > timeout and len(self.nodes) >= least:
                log.warning("going on without %s", names)
                return
            if not self.look(grid):
                self._hello.wait(names, timeout)

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

    def look(self, grid: Grid) -> bool:
        """Ask new nodes which client they are, take answers that have arrived, and return whether
        the roster changed; do not wait.
        """
        before = dict(self.nodes)
        self._there = {node.node_id: bytes(node.public_key).hex() for node in grid.get_nodes()}
        self._hello.look(grid, self._there, self.nodes.values(), self._bind)
        return self.nodes != before

    def _bind(self, node: int, reply: RecordDict | Failure) -> None:
        """Bind a node to the client that it says it is.

        Raises:
            RecordError: The answer is no valid one, or another node or key is bound to that client.
        """
        key, there, reply = self._there[node], self._there, content_of(reply)
        records.same_protocol(reply)
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
