"""Flower without a network: a grid that hands each message to a ClientApp in this process, with
what can go wrong on the way.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

log = logging.getLogger(__name__)
Alter = Callable[[int, Message, Message], Message | None]
"""(client, what was asked, its reply) -> the reply that arrives, None for none."""


@dataclass
class LocalGrid(Grid):
    """A grid of nodes in this process.

    Args:
        apps: A ClientApp for each node, or what stands in for one.
        folder: Under which each node keeps its state.
        alter: What goes wrong with replies.
        keys: The nodes' public keys; by default each has one.
        ids: Which client each node says it is.
        secret: What the nodes share; empty for nothing.
        config: What each node's configuration says besides.
    """

    apps: Mapping[int, Callable[[Message, Context], Message]]
    folder: Path
    alter: Alter | None = None
    keys: dict[int, bytes] = field(default_factory=dict)
    ids: dict[int, Any] = field(default_factory=dict)
    secret: str = ""
    config: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    states: dict[int, RecordDict] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    replies: dict[str, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **more: Any) -> Message:
        # abstract in Flower's grid, and deprecated: nothing here calls it
        raise NotImplementedError

    def get_nodes(self) -> Iterable[Any]:
        return [
            SimpleNamespace(node_id=node, public_key=self.keys.get(node, b"key %d" % node))
            for node in self.apps
        ]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            id, node = f"message {len(self.sent)}", message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = id
            self.sent.append(message)
            ids.append(id)
            client = self.ids.get(node, node - 100)
            try:
                reply: Message | None = self.apps[node](message, self.context(node))
            except Exception as error:  # as Flower's runtime does with whatever an app raises
                log.error("ClientApp raised an exception", exc_info=error)
                reply = Message(
                    Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message
                )
            if self.alter is not None and reply is not None:
                reply = self.alter(client, message, reply)
            if reply is not None:
                self.replies[id] = reply
        return ids

    def context(self, node: int) -> Context:
        """What a node's ClientApp knows of it."""
        config = {
            "client-id": self.ids.get(node, node - 100),
            "state-dir": str(self.folder / f"node-{node}"),
            **({"shared-secret": self.secret} if self.secret else {}),
            **self.config.get(node, {}),
        }
        state = self.states.setdefault(node, RecordDict())  # which a node keeps during a run
        return Context(run_id=1, node_id=node, node_config=config, state=state, run_config={})

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(id) for id in list(message_ids) if id in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError  # abstract in Flower's grid; the server pushes and pulls itself
