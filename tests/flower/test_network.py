"""What is asked of clients, and when a reply is not taken for one."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from bayesfl.data import FederatedData
from bayesfl.flower.roster import Roster
from tests.flower.made import changed, deploy, first, grid_of, packed


def test_what_a_client_says_of_its_data_buys_little(
    fedavg: Any, clients: FederatedData, tmp_path: Path, caplog: Any
):
    """Limits grow with the examples that a node says it has, up to a hundredfold; the log
    names it.
    """

    def alter(client: int, message: Message, reply: Message) -> Message:
        if client != 2 or message.metadata.message_type == "evaluate":
            return reply
        return (
            changed(reply, n=2**40)
            if message.metadata.message_type == "query"
            else packed(reply, first(lambda t: t + 1e6))
        )

    found = deploy(fedavg, clients, tmp_path, alter=alter)
    assert found.history["rejected"].tolist() == [1.0, 1.0, 1.0]
    assert re.search(rf"client 2 .*{2**40} training examples", caplog.text)


def test_counts_of_clients_that_are_away(
    fedavg: Any, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """They are in the checkpoint; where they are not known, they don't count."""
    assert Roster(3, {}, patience=1.0, counts={1: 5}).sizes().tolist() == [0, 5, 0]
    folder = tmp_path / "server"
    deploy(fedavg, clients, tmp_path, rounds=1, checkpoint=folder)

    def alter(client: int, message: Message, reply: Message) -> Message:
        return (
            changed(reply, n=2**40)
            if client == 2 and message.metadata.message_type == "query"
            else reply
        )

    grid = grid_of(fedavg, clients, tmp_path, alter=alter)
    grid.apps = {node: grid.apps[node] for node in (100, 102)}
    found = deploy(fedavg, clients, tmp_path, grid, rounds=2, checkpoint=folder, timeout=0.05)
    assert found.history["bytes_down"][1] == found.history["bytes_down"][0] * 2 / clients.clients
    median = np.median(
        [2**40 if client == 2 else n for client, n in enumerate(clients.train.counts)]
    )
    assert re.search(
        rf"client 2 .*{2**40} training examples, .*median .*{re.escape(f'{median:g}')}", caplog.text
    )
