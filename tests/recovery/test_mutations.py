"""Uplinks and a server's checkpoints, changed at random: nothing but our own errors leaves, and the
round is as without the client.

BAYESFL_DURABILITY=full makes the mutations 2,000; otherwise they are few.
"""

import copy
import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn
from torch.testing import assert_close

from bayesfl.base.archive import CheckpointError
from bayesfl.base.trees import flatten
from bayesfl.data import FederatedData
from bayesfl.federation.rounds.faults import FAULTS, Fault
from bayesfl.federation.store.files import STATE, checkpoints
from bayesfl.flower import load, records
from tests.flower.made import deploy, grid_of, method, simulated
from tests.recovery.test_durability import joined, mutated, parts, resealed

MUTATIONS = 2000 if os.environ.get("BAYESFL_DURABILITY") == "full" else 200
ODD: tuple[Any, ...] = (
    -1,
    0,
    2**62,
    1e30,
    float("nan"),
    "x",
    "../../x",
    True,
    [1, 2],
    b"bytes",
    [],
    "",
)


def changed_blob(blob: bytes, rng: np.random.Generator) -> bytes:
    """Bytes changed, cut, doubled or swapped; names, shapes and types of the header replaced."""
    kind = rng.integers(5)
    if kind < 3:
        return mutated(blob, np.random.default_rng(_seed_of(int(kind), rng)))
    header, body = parts(blob)
    names = [name for name in header if name != "__metadata__"]
    name = names[int(rng.integers(len(names)))]
    if kind == 3:
        value = ["F16", "I64", "F8_E4M3", None, [2**62, 2**62], [-1], "x", [0, 0]][
            int(rng.integers(8))
        ]
        header[name][["dtype", "shape", "data_offsets"][int(rng.integers(3))]] = value
    else:
        header[["body", "more", name + ".x", "", "a.b.c"][int(rng.integers(5))]] = header.pop(name)
    return joined(header, body)


def _seed_of(kind: int, rng: np.random.Generator) -> int:
    """A seed with which the general mutation is of this kind."""
    while True:
        seed = int(rng.integers(2**31))
        if np.random.default_rng(seed).integers(8) == kind:
            return seed


def changed_reply(reply: Message, rng: np.random.Generator, *, fits: bool) -> Message:
    """A reply whose tensors, settings or records are others; with a digest that fits, where it is
    to.
    """
    content = reply.content
    kind = rng.integers(10)
    if kind < 7:
        blob = changed_blob(content["up"][records.BLOB].data, rng)
        content["up"] = ArrayRecord(
            {records.BLOB: Array(dtype="uint8", shape=(len(blob),), stype=records.STYPE, data=blob)}
        )
        if fits:
            records.config(content)["digest"] = hashlib.sha256(blob).hexdigest()
    elif kind == 7:
        config = records.config(content)
        key = list(config)[int(rng.integers(len(config)))]
        if rng.random() < 0.3:
            del config[key]
        else:
            config[key] = ODD[int(rng.integers(len(ODD)))]
    elif kind == 8:
        name = list(content)[int(rng.integers(len(content)))]
        del content[name]
        if rng.random() < 0.5:
            content[name] = [ConfigRecord(), MetricRecord({"train_nll": [1.0]}), ArrayRecord()][
                int(rng.integers(3))
            ]
    else:
        stype = ["numpy.ndarray", records.STYPE][int(rng.integers(2))]
        array = Array(dtype="float64", shape=(2**40, 2**40), stype=stype, data=b"\x93NUMPY")
        content["up"] = ArrayRecord({[records.BLOB, "other"][int(rng.integers(2))]: array})
    return reply


class Recorded:
    """A client that says again what it said first."""

    def __init__(self, app: Any) -> None:
        self._app, self._said = app, dict[str, RecordDict]()

    def __call__(self, message: Message, context: Any) -> Message:
        kind = message.metadata.message_type
        if kind not in self._said:
            self._said[kind] = self._app(message, context).content
        return Message(copy.deepcopy(self._said[kind]), reply_to=message)


@pytest.mark.slow
def test_mutated_uplinks(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Refused, and the round is as without the client, or taken, where only numbers or what nobody
    reads has changed.
    """
    algorithm, rng = method("ditto", model), np.random.default_rng(0)
    change: list[Callable[[Message], Message]] = []

    def alter(client: int, message: Message, reply: Message) -> Message:
        return (
            change[0](reply) if client == 2 and message.metadata.message_type == "train" else reply
        )

    def plan(round: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {2: FAULTS["lost"]}

    without = flatten(simulated(algorithm, clients, rounds=1, faults=plan).server)
    everyone = flatten(simulated(algorithm, clients, rounds=1).server)
    grid = grid_of(algorithm, clients, tmp_path, alter=alter)
    grid.apps = {node: Recorded(app) for node, app in grid.apps.items()}
    refused = taken = raw = 0
    for _ in range(MUTATIONS):
        seed = int(rng.integers(2**31))
        for fits in (False, True):
            change[:] = [
                lambda reply, s=seed, f=fits: changed_reply(reply, np.random.default_rng(s), fits=f)
            ]
            found = deploy(algorithm, clients, tmp_path, grid, rounds=1)
            if found.history["cohort"][0] == clients.clients:
                taken += 1
                assert all(bool(t.isfinite().all()) for t in flatten(found.server).values())
                if not fits:
                    assert_close(flatten(found.server), everyone, atol=1e-6, rtol=0)
            else:
                refused, raw = refused + 1, raw + (not fits)
                assert_close(flatten(found.server), without, atol=1e-6, rtol=0)
    assert raw > 0.8 * MUTATIONS
    assert refused > MUTATIONS
    assert taken > 0


@pytest.mark.slow
def test_mutated_checkpoints(
    model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server's checkpoint that was changed is refused, or its numbers are taken: also by a server
    that goes on from it.
    """

    class Impatient(Exception):
        """The server waits for clients of other keys."""

    def enough(seconds: float) -> None:
        raise Impatient

    monkeypatch.setattr("bayesfl.flower.roster.time.sleep", enough)
    algorithm, folder = method("ditto", model), tmp_path / "server"
    grid = grid_of(algorithm, clients, tmp_path)
    deploy(algorithm, clients, tmp_path, grid, rounds=2, checkpoint=folder)
    grid.apps = {node: Recorded(app) for node, app in grid.apps.items()}
    names = [file.name for file in checkpoints(folder)]
    good = {name: (folder / name).read_bytes() for name in names}
    whole = {name: t.shape for name, t in flatten(load(folder, algorithm).server).items()}
    rng, refused, accepted, words = np.random.default_rng(1), 0, 0, list[str]()
    for turn in range(MUTATIONS):
        name = names[turn % 2]
        bad = mutated(good[name], rng)
        for blob in (bad, resealed(bad)):
            for file in folder.glob("round-*"):
                file.unlink()
            for other in names:
                (folder / other).write_bytes(blob if other == name else good[other])
            alone = tmp_path / "alone" / STATE
            alone.parent.mkdir(exist_ok=True)
            alone.write_bytes(blob)
            try:
                again = load(alone.parent, algorithm)
            except CheckpointError:
                refused += 1
            else:
                accepted += 1
                assert {key: t.shape for key, t in flatten(again.server).items()} == whole
            if turn % 5 == 0:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        deploy(
                            algorithm,
                            clients,
                            tmp_path,
                            grid,
                            rounds=3,
                            checkpoint=folder,
                            timeout=0.01,
                        )
                    except (CheckpointError, Impatient):
                        pass
                    except ValueError as error:  # other settings, in words
                        words.append(str(error))
    assert refused > MUTATIONS
    assert accepted > 0
    assert all("keeps its settings" in said or "already done" in said for said in words)
