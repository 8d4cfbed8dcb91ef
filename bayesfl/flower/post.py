"""Messages over Flower and their replies: sending and awaiting them on a server, within a time
limit, and answering them on a node.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import summed
from bayesfl.flower import records

REMIND = 30.0
"""Seconds between two log lines on missing clients, and before a node that failed is asked again.
"""
FIRST, LONGEST = 0.1, 1.0
"""Shortest and longest pause between two attempts to fetch replies, in seconds."""
RAISED, GONE = 2, 3
"""Flower's error codes for a ClientApp that raised, and for a message that has expired or whose
node was removed.
"""


class Refused(RuntimeError):
    """Raised when a node does not accept a request; the server receives the reason."""


@dataclass(frozen=True)
class Failure:
    """Describe why there is no reply.

    Args:
        reason: The reason, as text.
        lost: True if the client did not answer; False if its reply was invalid.
        code: Flower's error code; None if there is none.
    """

    reason: str
    lost: bool = True
    code: int | None = None


def content_of(reply: RecordDict | Failure) -> RecordDict:
    """Return the records of a reply.

    Raises:
        RecordError: There is no reply.
    """
    if isinstance(reply, Failure):
        raise records.RecordError(reply.reason)
    return reply


def push(
    grid: Grid, kind: str, node: int, content: RecordDict, *, timeout: float, group: str
) -> str | None:
    """Send one message; return its id, which identifies the reply, or None if the node cannot be
    reached.

    Args:
        grid: Flower's grid.
        kind: Type of the message, such as `train`.
        node: The node to which it is sent.
        content: The message's records.
        timeout: Seconds after which the node discards it.
        group: Name of these messages in Flower's own records.
    """
    message = Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=timeout)
    return next(iter(grid.push_messages([message])), None)


def pull(grid: Grid, id: str) -> RecordDict | Failure | None:
    """Fetch the reply to a message: its records, a `Failure`, or None if there is no reply yet.

    Replies are fetched one at a time: Flower delivers a reply once, and an unreadable one would
    make the others of the same answer unreadable.

    Raises:
        httpx.HTTPError, OSError: The SuperLink cannot be reached.
    """
    try:
        for reply in grid.pull_messages([id]):
            if reply.has_error():
                reason = f"its node reports error {reply.error.code}: {_short(reply.error.reason)}"
                return Failure(reason, lost=reply.error.code != RAISED, code=reply.error.code)
            return reply.content
    except (httpx.HTTPError, OSError):
        raise
    except Exception as error:  # malformed bytes may raise anything
        return Failure(
            f"its reply cannot be read: {type(error).__name__} {_short(error)}", lost=False
        )
    return None


def ask(
    grid: Grid,
    kind: str,
    contents: Mapping[int, tuple[int, RecordDict]],
    *,
    timeout: float,
    group: str,
) -> Iterator[tuple[int, RecordDict | Failure]]:
    """Send a message to each of some clients, and yield each client with its reply, or a `Failure`,
    as they arrive.

    Args:
        grid: Flower's grid.
        kind: Type of the messages, such as `train`.
        contents: For each client its node and the message's records, {client: (node, content)}.
        timeout: Maximum time in seconds to wait for a client's reply; its node then discards the
            message, too.
        group: Name of these messages in Flower's own records.

    Raises:
        httpx.HTTPError, OSError: The SuperLink cannot be reached.
    """
    sent = {
        client: push(grid, kind, node, content, timeout=timeout, group=group)
        for client, (node, content) in contents.items()
    }
    late = Failure(f"it did not reply within {timeout:g} seconds")
    end, pause = time.monotonic() + timeout, FIRST
    while sent:
        before = len(sent)
        for client, id in list(sent.items()):
            reply = Failure("its node could not be reached") if id is None else pull(grid, id)
            if reply is not None:
                del sent[client]
                gone = isinstance(reply, Failure) and reply.code == GONE
                yield client, late if gone and time.monotonic() >= end - LONGEST else reply
        came, left = len(sent) < before, end - time.monotonic()
        if left <= 0:
            break
        pause = FIRST if came else min(LONGEST, 1.5 * pause)
        if not came:
            time.sleep(min(pause, left))
    for client in sent:
        yield client, late


def answers(
    replies: Iterable[tuple[int, RecordDict | Failure]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[int, Tensors | ValueError, Mapping[str, Any]]]:
    """Yield each client with its answer to a question of a survey, or the reason why there is none,
    and the settings of its reply.
    """
    for client, reply in replies:
        said: Mapping[str, Any] = {}
        try:
            said = records.config(content_of(reply))
            found: Tensors | ValueError = records.answer(content_of(reply), shapes, client)
        except ValueError as error:
            found = error
        yield client, found, said


def total(found: Mapping[int, Tensors]) -> Tensors:
    """Add clients' answers, in the order of their numbers."""
    names = next(iter(found.values()))
    stacked = {name: torch.stack([one[name] for one in found.values()]) for name in names}
    return summed(np.array([*found]), stacked)


def app_of(
    here: Callable[[Message, Context], AbstractContextManager[Any]],
    works: Mapping[str, Callable[[Any, Message], RecordDict]],
) -> ClientApp:
    """Make the ClientApp of a node, for a training client or a site of statistics.

    Args:
        here: Function from a message and the node's context to the node's object, which exists
            while it answers; it raises `Refused` if it does not accept this server.
        works: {type of message: function that answers it}.
    """
    app = ClientApp()

    def answered(
        message: Message, context: Context, work: Callable[[Any, Message], RecordDict]
    ) -> Message:
        records.same_protocol(message.content)
        with here(message, context) as held:
            return Message(work(held, message), reply_to=message)

    for kind, work in works.items():
        category, _, action = kind.partition(".")
        getattr(app, category)(action or "default")(partial(answered, work=work))
    return app


def _short(reason: object) -> str:
    """Return a reason on one line; for a long one only its end."""
    text = " ".join(str(reason).split())
    return text if len(text) <= 400 else "... " + text[-400:]
