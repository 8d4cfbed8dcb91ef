"""Messages to clients over Flower, and their replies, within a time limit."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

FIRST, LONGEST = 0.1, 1.0
"""Shortest and longest pause between two attempts to fetch replies, in seconds."""


RAISED, GONE = 2, 3
"""Flower's error codes for a ClientApp that raised, and for a message that has expired or whose
node was removed.
"""


@dataclass(frozen=True)
class Failure:
    """The reason why there is no reply.

    Args:
        reason: The reason, in words.
        lost: True if the client did not answer; False if it answered, but not with a valid reply.
        code: Code of Flower's error; None if there is none.
    """

    reason: str
    lost: bool = True
    code: int | None = None


def push(
    grid: Grid, kind: str, node: int, content: RecordDict, *, timeout: float, group: str
) -> str | None:
    """Send one message, and return its id, with which the reply is fetched, or None if the node
    cannot be reached.

    Args:
        grid: Flower's grid.
        kind: Type of the message, such as `train`.
        node: The node to which it is sent.
        content: The message's records.
        timeout: Seconds after which the node drops it.
        group: Name of these messages in Flower's own records.
    """
    message = Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=timeout)
    return next(iter(grid.push_messages([message])), None)


def pull(grid: Grid, id: str) -> RecordDict | Failure | None:
    """Fetch the reply to a message: its records, a `Failure`, or None if there is no reply yet.

    Replies are fetched one at a time: Flower hands a reply out once, and one that cannot be read
    would take with it the others of the same answer.

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
        timeout: Seconds until a client that has not replied is given up; its node drops the message
            then, too.
        group: Name of these messages in Flower's own records.

    Raises:
        httpx.HTTPError, OSError: The SuperLink cannot be reached.
    """
    waiting: dict[int, str] = {}
    for client, (node, content) in contents.items():
        if id := push(grid, kind, node, content, timeout=timeout, group=group):
            waiting[client] = id
        else:
            yield client, Failure("its node could not be reached")
    late = Failure(f"it did not reply within {timeout:g} seconds")
    end, pause = time.monotonic() + timeout, FIRST
    while waiting:
        came = False
        for client, id in list(waiting.items()):
            if (reply := pull(grid, id)) is not None:
                del waiting[client]
                came = True
                gone = (
                    isinstance(reply, Failure)
                    and reply.code == GONE
                    and time.monotonic() >= end - LONGEST
                )
                yield client, late if gone else reply
        pause = FIRST if came else min(LONGEST, 1.5 * pause)
        if time.monotonic() >= end:
            break
        if waiting and not came:
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
    for client in waiting:
        yield client, late


def _short(reason: object) -> str:
    """Return a reason on one line; of a long one its end."""
    text = " ".join(str(reason).split())
    return text if len(text) <= 400 else "... " + text[-400:]
