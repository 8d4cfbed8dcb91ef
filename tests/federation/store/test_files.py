"""Saved runs: whole, checked, and refused for anything else than what they were made with."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.archive import CheckpointError
from bayesfl.data import FederatedData
from bayesfl.evaluation.calibration.steps import changed
from bayesfl.federation.store import files
from bayesfl.federation.store.files import (
    CLIENT,
    CLIENT_FILE,
    NODE,
    RUN,
    STATE,
    read,
    read_file,
    write,
)
from tests.federation.made import algorithm


def test_tensors_come_back_to_the_bit(tmp_path: Path):
    """Nests, precisions, empty and scalar tensors, and aliases of one storage, among plain values
    and empty nests.
    """
    base = torch.randn(3, 4)
    tree = {
        "a": {"b": base, "c": base[1:], "k": [1, "two"]},
        "d": torch.tensor(2.5).double(),
        "e": torch.zeros(0, 3),
        "f": {},
    }
    write(tmp_path / "x", NODE, tree)
    back = read(tmp_path / "x", NODE)
    assert back["a"].pop("k") == tree["a"].pop("k")
    assert_close({name: back[name] for name in tree}, tree, atol=0, rtol=0)
    assert [p.name for p in (tmp_path / "x").iterdir()] == [STATE]


OTHERWISE = ("algorithm", "known", "form", "chosen", "history")
"""Fields whose values are written as something else."""


def test_every_field_is_written_and_read_by_its_entry(saved: Path, clients, tmp_path: Path):
    """What is read and written again has the same content."""
    for kind, found, file in (
        (RUN, bf.load(saved, algorithm(), clients), STATE),
        (CLIENT, bf.load(saved, algorithm(), clients).client(0), CLIENT_FILE),
    ):
        content = {**vars(found), "written": "now", "predicting": {"needs": "nothing"}}
        write(tmp_path / kind.name, kind, content, file=file)
        again = read_file(tmp_path / kind.name / file, kind)
        assert again.keys() == kind.fields.keys()
        before, after = (
            {name: content[name] for name in kind.fields if name not in OTHERWISE}
            for content in (content, again)
        )
        assert str(before) == str(after)


def test_another_kind_and_another_format_are_told(
    saved: Path, clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder without a run; a file of before by the version that wrote it."""
    bf.load(saved, algorithm(), clients).client(0).save(tmp_path / "client")
    with pytest.raises(CheckpointError, match="contains no saved run"):
        bf.load(tmp_path / "client", algorithm())
    monkeypatch.setattr("bayesfl.base.archive.FORMAT", 7)
    with pytest.raises(
        CheckpointError,
        match=rf"has format 6, which bayesfl {bf.__version__} wrote and can read; this version "
        r"cannot",
    ):
        bf.load(saved, algorithm())


def test_a_function_that_cannot_be_recognised_is_refused_when_a_run_is_saved(
    clients, tmp_path: Path
):
    """And not when it trains: it has neither a name nor source text."""
    nameless = eval("lambda server, uplink: uplink['n']")
    method = replace(
        algorithm(),
        combine=lambda server, ids, uplink: {},
        private={},
        reports={},
        phases=(),
        adapt=(),
    )
    method = replace(
        method,
        blocks={
            **method.blocks,
            "body": bf.Block("body.*", pool=bf.pools.Mean(nameless)),
            "head": bf.Block("head.*"),
        },
    )
    result = bf.simulate(
        replace(method, server=bf.Algorithm.server, broadcast=()),
        clients,
        rounds=1,
        progress=False,
        evaluate_every=None,
    )
    with pytest.raises(ValueError, match=r"neither a name nor source text.*with def"):
        result.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_the_old_one(saved: Path, clients, monkeypatch):
    """Nothing half-written, no temporary file left."""
    import safetensors.torch

    before = (saved / STATE).read_bytes()
    result = bf.load(saved, algorithm(), clients)

    def fails(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        result.save(saved)
    assert (saved / STATE).read_bytes() == before
    assert [p.name for p in saved.iterdir()] == [STATE]


def test_a_file_where_the_folder_should_be(saved: Path, clients, tmp_path: Path):
    """Refused, in the path itself or above it, and left as it was."""
    result = bf.load(saved, algorithm(), clients)
    file = tmp_path / "run"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises((FileExistsError, NotADirectoryError), match="run"):
            result.save(path)
    assert file.read_text() == "mine"


def test_one_run_holds_a_folder(clients, tmp_path: Path):
    """Another one, from a thread or a process, is refused before its first round; the folder is
    free again when the run ends, and by an error too.
    """

    def other(run) -> bool:
        with pytest.raises(ValueError, match=r"is in use by another run"):
            simulated(tmp_path / "run", 1)
        raise KeyError("stop")

    def simulated(folder: Path, rounds: int, **options):
        return bf.simulate(
            algorithm(), clients, rounds=rounds, checkpoint=folder, progress=False, **options
        )

    for _ in range(2):
        with pytest.raises(KeyError, match="stop"):
            simulated(tmp_path / "run", 2, on_round=[other])
    assert simulated(tmp_path / "run", 2).round == 2


def test_what_a_killed_save_left_is_removed(saved: Path, clients, tmp_path: Path):
    """By the next one, unless another process writes to it still."""
    run = bf.load(saved, algorithm(), clients)
    left = [tmp_path / f".state.{number:016x}.safetensors" for number in range(2)]
    for file in left:
        file.touch()
    os.utime(left[0], (0, 0))
    run.save(tmp_path)
    assert [file.exists() for file in left] == [False, True]


def test_a_full_disk_names_the_folder(saved: Path, clients, tmp_path: Path, monkeypatch):
    """And what is safe: the run that was there before."""
    run = bf.load(saved, algorithm(), clients)
    run.save(tmp_path / "run")

    def full(*args, **options) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(
        OSError, match=r"run/state.*No space left.*Earlier files in .*run' are undamaged"
    ):
        run.save(tmp_path / "run")
    assert bf.load(tmp_path / "run", algorithm(), clients).round == run.round
    assert [file.name for file in (tmp_path / "run").iterdir()] == [STATE]


@dataclass(frozen=True)
class Halved:
    """Divides the logits by two."""

    split: str = "validation"
    by = 2.0

    def start(self, outputs):
        return {}

    def shapes(self, state):
        return {}

    def answer(self, state, local):
        return {}

    def solve(self, state, total):
        return state, True

    def settle(self, state, local):
        return {}

    def apply(self, state, own, local):
        return changed(local.predictions, local.logits / self.by)


def test_a_step_of_ones_own(
    clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is saved once its class is registered, and read as long as its code is the same."""
    monkeypatch.setattr(files, "STEPS", dict(files.STEPS))
    method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=4, outputs=3))
    held = replace(clients, splits={**clients.splits, "validation": clients.test})
    result = bf.simulate(method, held, rounds=1, progress=False).calibrate(Halved())
    with pytest.raises(ValueError, match=r"STEPS\['Halved'\] = Halved"):
        result.save(tmp_path)
    files.STEPS["Halved"] = Halved
    result.save(tmp_path)
    found = bf.load(tmp_path, method, held)
    assert_close(found.predict().probs, result.predict().probs, equal_nan=True)
    monkeypatch.setattr(Halved, "by", 3.0)
    with pytest.raises(CheckpointError, match="code of the class Halved has changed"):
        bf.load(tmp_path, method, held)
