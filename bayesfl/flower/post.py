"""Messages to clients and their replies, within a time limit."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

PAUSE = (0.1, 1.0)
"""Seconds between two looks for replies: the first, and the longest."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, DecodeError)
"""What reading a stranger's bytes may raise."""


def ask(
    grid: Grid, kind: str, contents: Mapping[int, tuple[int, RecordDict]], *, timeout: float, group: str = ""
) -> Iterator[tuple[int, RecordDict | str]]:
    """Sends a message to each of some clients; each client and its reply as they come, or in words why there is none.

    Args:
        grid: Flower's.
        kind: Of message, as `train`.
        contents: {client: (node, what is sent)}.
        timeout: Seconds until a client that has not replied is given up; its node drops the message then, too.
        group: What Flower's own records call these messages.
    """
    clients = list(contents)
    messages = [Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=timeout) for node, content in contents.values()]
    # One by one: each carries its own tensors, and the transport's requests have limits.
    pushed = [next(iter(grid.push_messages([message])), None) for message in messages]
    waiting = {id: client for id, client in zip(pushed, clients, strict=True) if id}
    for client, id in zip(clients, pushed, strict=True):
        if not id:
            yield client, "its node could not be reached"
    end, pause = time.monotonic() + timeout, PAUSE[0]
    while waiting and time.monotonic() < end:
        found = _pull(grid, list(waiting))
        for id, reply in found:
            if (client := waiting.pop(id, None)) is not None:
                yield client, reply
        pause = PAUSE[0] if found else min(PAUSE[1], 1.5 * pause)
        if waiting and not found:
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
    for client in waiting.values():
        yield client, f"it did not reply within {timeout:g} seconds"


def _pull(grid: Grid, ids: list[str]) -> list[tuple[str, RecordDict | str]]:
    """The replies that are there, each with the id of the message that it answers."""
    try:
        found = list(grid.pull_messages(ids))
    except UNREADABLE as error:  # one reply that cannot be read must not cost the others; a lost connection ends the run
        if len(ids) == 1:
            return [(ids[0], f"its reply cannot be read: {error}")]
        return [one for id in ids for one in _pull(grid, [id])]
    return [(reply.metadata.reply_to_message_id, _content(reply)) for reply in found]


def _content(reply: Message) -> RecordDict | str:
    """What a reply holds, or in words what went wrong."""
    if reply.has_error():
        return f"its node reports error {reply.error.code}: {_last_line(reply.error.reason)}"
    return reply.content


def _last_line(reason: Any) -> str:
    """The end of a reason, where it may be long."""
    text = str(reason).strip()
    return text if len(text) <= 400 else "... " + text[-400:]
