"""Replies as they come: one that is bad is left out by name, one that cannot be read costs nobody
else.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from torch import nn

from bayesfl.data import FederatedData
from bayesfl.federation.rounds.admission import PROTOCOL
from bayesfl.flower import records
from tests.flower.grid import LocalGrid
from tests.flower.made import (
    assert_same,
    changed,
    deploy,
    first,
    grid_of,
    losing,
    method,
    packed,
    rounds_of,
    simulated,
    spoilt,
    trains,
    unheard,
)


def blob(reply: Message, change: Callable[[bytes], bytes]) -> Message:
    """A reply with other bytes, whose digest does not match."""
    data = change(reply.content["up"][records.BLOB].data)
    reply.content["up"] = ArrayRecord(
        {records.BLOB: Array(dtype="uint8", shape=(len(data),), stype=records.STYPE, data=data)}
    )
    return reply


def lacking(reply: Message, name: str) -> Message:
    """A reply that lacks a record."""
    del reply.content[name]
    return reply


def test_measures_are_held_to_where_they_lie():
    """An accuracy of 40 or a negative error counts as not measured; an interval may be endless, and
    a user's own measure and a regression's NLL may be anything that is finite.
    """
    said = {"accuracy": 40.0, "rmse": -1.0, "width": math.inf, "nll": -3.0, "mine": -7.0}
    content = RecordDict({"test": MetricRecord(said | {"ece": 0.5, "crps": math.inf})})
    assert records.measures(content, "test") == {
        "width": math.inf,
        "nll": -3.0,
        "mine": -7.0,
        "ece": 0.5,
    }


BAD: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "silent": (unheard, "did not reply within"),
    "raises": (
        lambda reply: Message(Error(code=2, reason="out of memory"), metadata=reply.metadata),
        "error 2: out of memory",
    ),
    "stale": (lambda reply: changed(reply, round=0), "round 1, not round 2"),
    "protocol": (lambda reply: changed(reply, protocol=PROTOCOL + 1), "it uses protocol"),
    "untyped": (lambda reply: changed(reply, round="one"), "must be of type int"),
    "missing": (
        lambda reply: packed(reply, lambda t: {k: v for k, v in t.items() if k != min(t)}),
        "are missing",
    ),
    "extra": (
        lambda reply: packed(reply, lambda t: {**t, "more": torch.zeros(1)}),
        "were not declared",
    ),
    "shape": (lambda reply: packed(reply, first(lambda t: t[None])), "declared as"),
    "dtype": (lambda reply: packed(reply, first(lambda t: t.half())), "declared as"),
    "nan": (lambda reply: packed(reply, first(lambda t: t / 0 * 0)), "is not finite"),
    "far": (lambda reply: packed(reply, first(lambda t: t + 1e6)), r"its distance .* more than"),
    "large": (
        lambda reply: packed(reply, lambda t: {**t, "more": torch.zeros(10**6)}),
        "more than the",
    ),
    "damaged": (
        lambda reply: blob(reply, lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        "digest",
    ),
    "no tensors": (lambda reply: lacking(reply, "up"), "blob of tensors"),
    "no settings": (lambda reply: lacking(reply, "config"), "has no settings"),
}


QUICK = ("silent", "large", "damaged", "no tensors")


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in BAD]
)
def test_a_bad_reply_is_left_out(
    kind: str,
    model: nn.Module,
    clients: FederatedData,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """By name and with the reason; the round is as without the client, and the client goes on from
    its last state that was taken.
    """
    algorithm, (change, words) = method("pfedvem", model), BAD[kind]

    with caplog.at_level(logging.WARNING):
        found = deploy(algorithm, clients, tmp_path, alter=spoilt(2, change, round=1), timeout=0.3)
    (line,) = [record.message for record in caplog.records if "is left out" in record.message]
    assert_same(found, tmp_path, simulated(algorithm, clients, faults=losing(2, round=1)))
    assert re.match(f"round 2: client 2 is left out: .*{words}", line)
    assert (found.history["lost"][1], found.history["rejected"][1]) == (
        (1.0, 0.0) if kind == "silent" else (0.0, 1.0)
    )
    assert rounds_of(found.base) == [3] * clients.clients


def test_an_unreadable_reply_costs_nobody_else(
    fedavg: Any, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Whatever reading it raises; a lost connection ends the run."""
    for error in (IndexError, RecursionError, KeyError, MemoryError):
        caplog.clear()
        grid = grid_of(fedavg, clients, tmp_path)
        honest = grid.pull_messages

        def pull(
            ids: Iterable[str], honest: Any = honest, error: Any = error, grid: LocalGrid = grid
        ) -> Iterable[Message]:
            replies = list(honest(ids))
            for reply in replies:
                if trains(reply) and reply.metadata.src_node_id == 102:
                    raise error("odd bytes")
            return replies

        grid.pull_messages = pull  # type: ignore[method-assign]
        found = deploy(fedavg, clients, tmp_path, grid, rounds=1)
        assert found.history["cohort"].tolist() == [6.0]
        assert re.search(rf"client 2 .*left out.*{error.__name__}", caplog.text)
    grid = grid_of(fedavg, clients, tmp_path)

    def gone(ids: Iterable[str]) -> Iterable[Message]:
        raise httpx.ConnectError("the SuperLink is away")

    grid.pull_messages = gone  # type: ignore[method-assign]
    with pytest.raises(httpx.ConnectError):
        deploy(fedavg, clients, tmp_path, grid, rounds=1)
