"""Messages to clients and their replies, within a time limit."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

FIRST, LONGEST = 0.1, 1.0
"""Seconds between two looks for replies."""


RAISED, GONE = 2, 3
"""Flower's error codes for a ClientApp that raised, and for a message that has expired or whose node was removed."""


@dataclass(frozen=True)
class Failure:
    """Why there is no reply.

    Args:
        reason: In words.
        lost: Whether nothing was heard of the client; else it answered, but not with a reply.
        code: Of Flower's error, where there is one.
    """

    reason: str
    lost: bool = True
    code: int | None = None


def push(grid: Grid, kind: str, node: int, content: RecordDict, *, timeout: float, group: str) -> str | None:
    """Sends one message; its id, by which the reply is pulled, or None where the node cannot be reached.

    Args:
        grid: Flower's.
        kind: Of message, as `train`.
        node: Whose it is.
        content: What is sent.
        timeout: Seconds after which the node drops it.
        group: What Flower's own records call these messages.
    """
    message = Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=timeout)
    return next(iter(grid.push_messages([message])), None)


def pull(grid: Grid, id: str) -> RecordDict | Failure | None:
    """The reply to a message, why there is none, or None where there is none yet.

    One at a time: Flower hands a reply out once, and one that cannot be read would take with it those that come in the same answer.

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
    except Exception as error:  # whatever a stranger's bytes raise in a reader
        return Failure(f"its reply cannot be read: {type(error).__name__} {_short(error)}", lost=False)
    return None


def ask(
    grid: Grid, kind: str, contents: Mapping[int, tuple[int, RecordDict]], *, timeout: float, group: str
) -> Iterator[tuple[int, RecordDict | Failure]]:
    """Sends a message to each of some clients; each client and its reply as they come, or why there is none.

    Args:
        grid: Flower's.
        kind: Of message, as `train`.
        contents: {client: (node, what is sent)}.
        timeout: Seconds until a client that has not replied is given up; its node drops the message then, too.
        group: What Flower's own records call these messages.

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
                gone = isinstance(reply, Failure) and reply.code == GONE and time.monotonic() >= end - LONGEST
                yield client, late if gone else reply
        pause = FIRST if came else min(LONGEST, 1.5 * pause)
        if time.monotonic() >= end:
            break
        if waiting and not came:
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
    for client in waiting:
        yield client, late


def _short(reason: object) -> str:
    """The end of a reason on one line, where it may be long."""
    text = " ".join(str(reason).split())
    return text if len(text) <= 400 else "... " + text[-400:]
