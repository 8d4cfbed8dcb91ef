"""Messages to nodes: how long they are waited for, and nodes that are away."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message

from bayesfl.data import FederatedData
from tests.flower.made import (
    Impatient,
    deploy,
    grid_of,
    sleeping,
    spoilt,
    trains,
    unheard,
)


def test_a_node_that_cannot_be_reached(
    fedavg: Any, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It is left out at once."""
    grid = grid_of(fedavg, clients, tmp_path)
    honest = grid.push_messages

    def push(messages: Iterable[Message]) -> Iterable[Any]:
        (message,) = messages
        return (
            [None] if trains(message) and message.metadata.dst_node_id == 102 else honest([message])
        )

    grid.push_messages = push  # type: ignore[method-assign]
    found = deploy(fedavg, clients, tmp_path, grid, rounds=1, timeout=1e6)
    assert found.history["lost"].tolist() == [1.0]
    assert re.search(r"client 2 .*left out.*reached", caplog.text)


def test_replies_have_the_time_that_was_given(
    fedavg: Any, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By a clock that only sleeping moves."""
    clock = sleeping(monkeypatch)
    grid = grid_of(fedavg, clients, tmp_path, alter=spoilt(2, unheard))
    deploy(fedavg, clients, tmp_path, grid, rounds=1, timeout=20.0)
    assert clock.monotonic() == pytest.approx(20.0)
    assert {message.metadata.ttl for message in grid.sent if trains(message)} == {20.0}


@pytest.mark.parametrize(
    ("after", "words"), [(5.0, "error 3: expired"), (19.5, "within 20 seconds")]
)
def test_a_message_that_is_gone(
    after: float,
    words: str,
    fedavg: Any,
    clients: FederatedData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
):
    """Flower drops a message when its time is over, and may say so just before the server gives it
    up.
    """
    clock = sleeping(monkeypatch)
    grid = grid_of(fedavg, clients, tmp_path)
    honest, due = grid.pull_messages, set()

    def alter(client: int, message: Message, reply: Message) -> Message:
        if client == 2 and trains(message):
            due.add(message.metadata.message_id)
            return Message(Error(code=3, reason="expired"), reply_to=message)
        return reply

    grid.alter = alter
    grid.pull_messages = lambda ids: honest(
        id for id in ids if id not in due or clock.monotonic() >= after
    )
    found = deploy(fedavg, clients, tmp_path, grid, rounds=1, timeout=20.0)
    assert found.history["lost"].tolist() == [1.0]
    assert re.search(rf"client 2 .*left out.*{words}", caplog.text)


def test_a_node_that_says_nothing_holds_up_nobody(
    fedavg: Any, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is asked who it is, and nothing waits for its answer."""

    def sleeps(seconds: float) -> None:
        raise Impatient

    monkeypatch.setattr("bayesfl.flower.post.time.sleep", sleeps)
    grid = grid_of(fedavg, clients, tmp_path, ids={200: "nobody"})
    grid.apps = {**grid.apps, 200: grid.apps[100]}
    grid.alter = lambda client, message, reply: None if client == "nobody" else reply
    found = deploy(fedavg, clients, tmp_path, grid)
    assert found.history["cohort"].tolist() == [7.0, 7.0, 7.0]
    assert len([message for message in grid.sent if message.metadata.dst_node_id == 200]) == 1
