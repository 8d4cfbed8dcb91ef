"""Messages to clients over Flower, and their replies, within a time limit."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from bayesfl.federation.errors import BadClients
from bayesfl.flower.records import RecordError

log = logging.getLogger(__name__)
REMIND = 30.0
"""Seconds between two log lines on missing clients, and after which a node that failed is asked
again.
"""
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


def content_of(reply: RecordDict | Failure) -> RecordDict:
    """Return the records of a reply.

    Raises:
        RecordError: There is none.
    """
    if isinstance(reply, Failure):
        raise RecordError(reply.reason)
    return reply


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


@dataclass
class Hello:
    """The question to nodes who they are, which is put again until they are taken.

    Args:
        content: The message's records.
        patience: Seconds that a node has to answer before it is asked again; it loads its data in
            this time.

    Attributes:
        again: When a node is asked next, {node: seconds}.
        pending: Messages whose answers have not come, {node: id}.
        refused: Why nodes that are there were not taken, {node: reason}.
    """

    content: RecordDict
    patience: float
    again: dict[int, float] = field(default_factory=dict)
    pending: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    _said: float = -REMIND
    _since: float = 0.0

    def look(
        self,
        grid: Grid,
        there: Collection[int],
        taken: Collection[int],
        take: Callable[[int, RecordDict | Failure], None],
    ) -> None:
        """Ask new nodes, and take the answers that have arrived; do not wait.

        Args:
            grid: Flower's grid.
            there: The nodes that are there.
            taken: The nodes that were taken.
            take: Function of a node and its answer; it raises RecordError if the node is not taken.
        """
        now = time.monotonic()
        self.refused = {node: why for node, why in self.refused.items() if node in there}
        # Before nodes are asked again: a new question replaces the old one, and its answer is lost.
        self._hear(grid, there, take)
        for node in [node for node, at in self.again.items() if node not in there and now >= at]:
            del self.again[node]
            self.pending.pop(node, None)
        for node in sorted(there):
            if node not in taken and now >= self.again.get(node, now):
                if id := push(
                    grid, "query", node, self.content, timeout=self.patience, group="hello"
                ):
                    self.pending[node] = id
                self.again[node] = now + self.patience
        self._hear(grid, there, take)

    def _hear(
        self,
        grid: Grid,
        there: Collection[int],
        take: Callable[[int, RecordDict | Failure], None],
    ) -> None:
        for node, id in list(self.pending.items()):
            reply = pull(grid, id) if node in there else None
            if reply is None:
                continue
            del self.pending[node]
            self.again[node] = time.monotonic() + REMIND
            try:
                take(node, reply)
            except RecordError as error:
                log.warning("node %d is not taken: %s", node, error)
                self._since = self._since if self.refused else time.monotonic()
                self.refused[node] = str(error)
            else:
                self.refused.pop(node, None)
                self._since = time.monotonic()

    def wait(self, missing: str, timeout: float) -> None:
        """Wait a moment for missing nodes; the log names them from time to time.

        Raises:
            BadClients: Nodes are there that cannot be taken, and no other one was taken for
                `timeout` seconds.
        """
        now = time.monotonic()
        if now - self._said > REMIND:
            log.warning("waiting for %s", missing)
            self._said = now
        if self.refused and now - self._since > timeout:
            told = "; ".join(f"node {node}: {why}" for node, why in self.refused.items())
            raise BadClients(
                f"the server gave up waiting for {missing}: no node was taken for {timeout:g} "
                f"seconds (timeout), and of those that are there {told}. Mend these nodes, and "
                "start the run again"
            )
        time.sleep(1.0)


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
