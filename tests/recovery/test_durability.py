"""Checkpoints: a run killed at any moment and repeated ends in the same bits; damage is found;
nothing but our own error leaves.

BAYESFL_DURABILITY=full makes the kills 50 over 30 rounds, the mutations 2,000 and the long run 200
rounds of 1,000 clients; otherwise they are few.
"""

import gc
import json
import logging
import os
import re
import struct
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayesfl as bf
from bayesfl.base.archive import CheckpointError, digest_of_tensors
from bayesfl.federation.rounds.faults import at_random
from bayesfl.federation.store.files import STATE, checkpoints
from tests.federation.made import same, state
from tests.recovery import killed

FULL = os.environ.get("BAYESFL_DURABILITY") == "full"
ROUNDS, KILLS, MUTATIONS = (30, 50, 2000) if FULL else (6, 5, 200)
CLIENTS, LONG = (1000, 200) if FULL else (30, 10)
MOMENTS = ("write", "flush", "rename", "folder", "round")


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path):
    """By SIGKILL while it writes, flushes, renames, flushes the folder, or trains: in the end the
    bits of a run that never stopped.
    """
    folder, out = tmp_path / "checkpoints", tmp_path / "out"
    child = partial(killed.code_of, killed.program, str(folder), str(out), ROUNDS)
    rng = np.random.default_rng(0)
    for kill in range(KILLS):
        moment = MOMENTS[kill % len(MOMENTS)]
        code = child(moment, 1 + int(rng.integers(2)))
        if code == 0:  # there was no such moment any more: start over, so that every kill is one
            for file in folder.iterdir():
                file.unlink()
            code = child(moment, 1)
        assert code == -9
    assert child() == 0
    result = bf.load(out, killed.algorithm(), killed.federation())
    whole = killed.run(str(tmp_path / "whole"), ROUNDS)
    assert same(result, whole)
    assert sorted(file.name for file in folder.iterdir()) == [
        "lock",
        f"round-{ROUNDS - 1:06d}.safetensors",
        f"round-{ROUNDS:06d}.safetensors",
    ]


def test_the_order_of_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file's bytes are on the disk before its name is, and the name before the next round
    begins; old ones go last.
    """
    calls: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def noted(*arguments: Any, **more: Any) -> Any:
            is_folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{arguments[0]}")
            calls.append(name + " folder" * is_folder)
            return function(*arguments, **more)

        return noted

    monkeypatch.setattr(os, "fsync", noting("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", noting("replace", os.replace))
    monkeypatch.setattr(Path, "unlink", noting("unlink", Path.unlink))
    killed.run(str(tmp_path), 3, evaluate_every=None)
    # The temporary name's, and the third's oldest.
    assert calls == ["fsync", "replace", "unlink", "fsync folder"] * 3 + ["unlink"]


@pytest.mark.parametrize("every", [1, 2, 4])
def test_resuming_from_a_checkpoint(tmp_path: Path, every: int):
    """Every k rounds, and at the end; stopped between, a run goes on from the last and gives the
    same bits.
    """
    stopped: list[int] = []

    class Stop(Exception):
        pass

    original = killed.module.run_round

    def until(rules: Any, server: Any, number: int, *more: Any, **options: Any) -> Any:
        if number == 3 and not stopped:
            stopped.append(3)
            raise Stop
        return original(rules, server, number, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(killed.module, "run_round", until)
        with pytest.raises(Stop):
            killed.run(str(tmp_path / "a"), 5, every=every)
        there = [file.name for file in checkpoints(tmp_path / "a")]
        assert there == [f"round-{k:06d}.safetensors" for k in {1: (3, 2), 2: (2,), 4: ()}[every]]
        result = killed.run(str(tmp_path / "a"), 5, every=every)
    assert same(result, killed.run(str(tmp_path / "b"), 5))
    assert checkpoints(tmp_path / "a")[0].name == "round-000005.safetensors"
    assert same(bf.load(tmp_path / "a", killed.algorithm(), killed.federation()), result)


def test_a_damaged_checkpoint_and_the_one_before(tmp_path: Path):
    """A warning names the damaged file, the run goes on from the one before to the same bits; where
    both are damaged, an error.
    """
    whole = killed.run(str(tmp_path / "whole"), 4)
    killed.run(str(tmp_path / "run"), 3)
    newest, before = checkpoints(tmp_path / "run")
    newest.write_bytes(newest.read_bytes()[:-7])
    with pytest.warns(
        UserWarning, match=r"round-000003\.safetensors' is damaged.*round-000002\.safetensors"
    ):
        result = bf.load(tmp_path / "run", killed.algorithm(), killed.federation())
    assert result.round == 2
    before.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"round-000003.*damaged.*round-000002.*damaged"):
        bf.load(tmp_path / "run", killed.algorithm(), killed.federation())
    killed.run(str(tmp_path / "again"), 3)
    newest = checkpoints(tmp_path / "again")[0]
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.warns(UserWarning, match="damaged"):
        # rounds=3 was a run of its own; schedules read the number of rounds, and this method has
        # none
        assert same(killed.run(str(tmp_path / "again"), 4), whole)


def test_a_damaged_checkpoint_takes_no_place(tmp_path: Path):
    """A run that went on from before it removes it, so that two whole ones are kept again."""
    killed.run(str(tmp_path), 6, every=3)
    newest, _ = checkpoints(tmp_path)
    newest.write_bytes(newest.read_bytes()[:-7])
    with pytest.warns(UserWarning, match="damaged"):
        killed.run(str(tmp_path), 5)
    assert [file.name for file in checkpoints(tmp_path)] == [
        "round-000005.safetensors",
        "round-000004.safetensors",
    ]


def test_a_digest_knows_names_types_and_shapes():
    """The same bytes as another tensor have another digest."""
    t = torch.arange(6, dtype=torch.int32)
    digests = {
        digest_of_tensors("a", {"t": t}),
        digest_of_tensors("a", {"t": t.view(2, 3)}),
        digest_of_tensors("a", {"t": t.view(torch.float32)}),
        digest_of_tensors("a", {"u": t}),
        digest_of_tensors("b", {"t": t}),
    }
    assert len(digests) == 5


def test_folders_hold_one_run(tmp_path: Path):
    """What a killed process left is removed; another run, a saved result and a file are refused,
    before anything is trained.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".round-000001.0123456789abcdef.safetensors", ".notes.safetensors"):
        (folder / name).write_bytes(b"mine")
    result = killed.run(str(folder), 1)
    assert sorted(file.name for file in folder.iterdir()) == [
        ".notes.safetensors",
        "lock",
        "round-000001.safetensors",
    ]
    result.save(tmp_path / "saved")
    for name, options, words in (
        (
            "run",
            {},
            r"keeps its settings, participation: saved 0\.5, given 1\.0; seed: saved 4, given 0; "
            "pass",
        ),
        ("run", {"resume": result}, "already has a run"),
        ("new", {"every": 0}, "^every .*1.* got 0"),
        ("saved", {"resume": tmp_path / "saved"}, "contains a saved result"),
    ):
        with pytest.raises(ValueError, match=words):
            bf.simulate(
                killed.algorithm(),
                killed.federation(),
                rounds=2,
                progress=False,
                checkpoint=tmp_path / name,
                **options,
            )
    assert not (tmp_path / "new").exists()


def parts(file: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def joined(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def resealed(file: bytes) -> bytes:
    """With a digest that fits what the file says now, where it can be read at all."""
    from safetensors.torch import load

    try:
        header, body = parts(file)
        text = header["__metadata__"]["bayesfl"]
        header["__metadata__"]["digest"] = digest_of_tensors(text, load(file))
        return joined(header, body)
    except Exception:  # a mutation that no reader understands stays as it is
        return file


def mutated(file: bytes, rng: np.random.Generator) -> bytes:
    """Bytes changed, cut, doubled or swapped; names, shapes, types and numbers of the header and of
    the JSON in it replaced.
    """
    kind = rng.integers(8)
    if kind == 0:
        changed = bytearray(file)
        for place in rng.integers(len(file), size=int(rng.integers(1, 9))):
            changed[place] = int(rng.integers(256))
        return bytes(changed)
    if kind == 1:
        return file[: int(rng.integers(len(file)))]
    if kind == 2:
        place, size = int(rng.integers(len(file))), int(rng.integers(1, 64))
        return file[:place] + file[place : place + size] + file[place:]
    header, body = parts(file)
    names = [name for name in header if name != "__metadata__"]
    name = names[int(rng.integers(len(names)))]
    odd = [
        None,
        -1,
        0,
        1e30,
        "x",
        [],
        {},
        True,
        [[]],
        "nan",
        2**70,
        "../../x",
        [1, 2, 3],
        {"a": {}},
    ]
    value = odd[int(rng.integers(len(odd)))]
    if kind == 3:
        header[name][["dtype", "shape", "data_offsets"][int(rng.integers(3))]] = [
            "F16",
            "I64",
            "BF16",
            value,
        ][int(rng.integers(4))]
    elif kind == 4:
        header[["server.w.loc", "private", "x.y", name + ".z", ""][int(rng.integers(5))]] = (
            header.pop(name)
        )
    elif kind == 5:
        body = body[::-1]
    else:
        meta = json.loads(header["__metadata__"]["bayesfl"])
        place, key = meta, list(meta)[int(rng.integers(len(meta)))]
        if isinstance(meta[key], dict) and meta[key] and rng.random() < 0.7:
            place, key = meta[key], list(meta[key])[int(rng.integers(len(meta[key])))]
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = value
        text = json.dumps(meta)
        header["__metadata__"]["bayesfl"] = "[" * 100_000 if rng.random() < 0.02 else text
    return joined(header, body)


def test_nothing_but_our_own_error_leaves(tmp_path: Path):
    """A damaged file is found by its digest; with a digest made to fit, it is refused by what a run
    must be, or its values are taken.
    """
    result = killed.run(str(tmp_path / "run"), 2)
    algorithm, data = killed.algorithm(), killed.federation()
    good = checkpoints(tmp_path / "run")[0].read_bytes()
    file = tmp_path / "bad" / STATE
    file.parent.mkdir()
    rng, found, refused, accepted = np.random.default_rng(1), 0, 0, 0
    for _ in range(MUTATIONS):
        bad = mutated(good, rng)
        file.write_bytes(bad)
        try:  # the same header in other words is no damage
            assert same(bf.load(file.parent, algorithm, data), result)
        except CheckpointError:
            found += 1
        file.write_bytes(resealed(bad))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                again = bf.load(file.parent, algorithm, data)
            except CheckpointError:
                refused += 1
            else:
                accepted += 1
                assert state(again).keys() == state(result).keys()
                assert all(t.shape == state(result)[name].shape for name, t in state(again).items())
    assert found > 0.9 * MUTATIONS
    assert refused > MUTATIONS / 2
    assert accepted > 0


def held() -> tuple[int, int]:
    """What this process holds in memory, in kB, and how many tensors."""
    gc.collect()
    kilobytes = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]
    return int(kilobytes), sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A long run with faults in a tenth of all replies and a checkpoint now and then: after the
    first fifth it takes no more.
    """
    data, seen = killed.federation(sizes=(20,) * CLIENTS), {}
    original = killed.module.run_round

    def watched(rules: Any, server: Any, number: int, *more: Any, **options: Any) -> Any:
        if number in (LONG // 5, LONG - 1):
            seen[number] = held()
        return original(rules, server, number, *more, **options)

    monkeypatch.setattr(killed.module, "run_round", watched)
    # Pytest would keep every line.
    monkeypatch.setattr(logging.getLogger("bayesfl.federation.rounds.replies"), "disabled", True)
    options: dict[str, Any] = {
        "faults": at_random(0.1, seed=2),
        "checkpoint": tmp_path,
        "every": 10,
        "evaluate_every": None,
    }
    bf.simulate(killed.algorithm(), data, rounds=LONG, progress=False, **options)
    (before, tensors), (after, now) = seen[LONG // 5], seen[LONG - 1]
    print(f"{before / 1024:.0f} MiB and {tensors} tensors, then {after / 1024:.0f} and {now}")
    assert after <= 1.05 * before
    assert now < tensors + LONG // 2  # one more in a round is too many
