"""Saved runs: whole, checked, and refused for anything else than what they were made with."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bayesfl as bf
from bayesfl.federation.errors import CheckpointError
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
    assert torch.equal(back["a"]["b"], base)
    assert torch.equal(back["a"]["c"], base[1:])
    assert back["a"]["k"] == [1, "two"]
    assert back["d"].dtype == torch.float64
    assert back["e"].shape == (0, 3)
    assert back["f"] == {}
    assert [p.name for p in (tmp_path / "x").iterdir()] == [STATE]


def test_every_field_is_written_and_read_by_its_entry(saved: Path, clients, tmp_path: Path):
    """What is read and written again has the same content."""
    for kind, found, file in (
        (RUN, bf.load(saved, algorithm(), clients), STATE),
        (CLIENT, bf.load(saved, algorithm(), clients).client(0), CLIENT_FILE),
    ):
        write(tmp_path / kind.name, kind, {**vars(found), "written": "now"}, file=file)
        again = read_file(tmp_path / kind.name / file, kind)
        assert again.keys() == kind.fields.keys()
        same = [
            name
            for name in kind.fields
            if name not in ("algorithm", "known", "form", "chosen", "history")
        ]
        assert str([again[name] for name in same]) == str(
            [{**vars(found), "written": "now"}[name] for name in same]
        )


def test_another_kind_and_another_format_are_told(
    saved: Path, clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By what reads them; a file of before by the version that wrote it."""
    bf.load(saved, algorithm(), clients).client(0).save(tmp_path / "client")
    with pytest.raises(
        CheckpointError,
        match=r"holds a client's own model, not a run of bf\.simulate: bf\.load_client\(path, "
        r"algorithm\)",
    ):
        bf.load(tmp_path / "client", algorithm())
    monkeypatch.setattr("bayesfl.federation.store.files.FORMAT", 6)
    with pytest.raises(
        CheckpointError,
        match=rf"has format 5, which bayesfl {bf.__version__} wrote and reads, and this version "
        r"does not",
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
    with pytest.raises(ValueError, match=r"neither a name nor source text.*by def"):
        result.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_damage_is_found(saved: Path, clients, tmp_path: Path):
    """One changed byte anywhere, a file cut short, no file: our own error, with the path."""
    good = (saved / STATE).read_bytes()
    assert bf.load(saved, algorithm(), clients).round == 2
    for place in (9, len(good) // 3, len(good) // 2, len(good) - 3):
        bad = bytearray(good)
        bad[place] ^= 1
        (tmp_path / STATE).write_bytes(bad)
        with pytest.raises(CheckpointError, match="damaged"):
            bf.load(tmp_path, algorithm(), clients)
    (tmp_path / STATE).write_bytes(good[:-10])
    with pytest.raises(CheckpointError, match="damaged"):
        bf.load(tmp_path, algorithm(), clients)
    with pytest.raises(CheckpointError, match="holds no saved run"):
        bf.load(tmp_path / "nowhere", algorithm(), clients)


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
    """Refused by name, in the path itself or above it, and left as it was."""
    result = bf.load(saved, algorithm(), clients)
    file = tmp_path / "run"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(ValueError, match=r"path .*folder.*'.*run.*' .*file"):
            result.save(path)
    assert file.read_text() == "mine"


def test_a_resumed_run_keeps_the_order_of_columns(saved: Path, clients):
    """Its table is that of a run that never stopped."""
    resumed = bf.simulate(algorithm(), clients, rounds=3, resume=saved, progress=False).history
    whole = bf.simulate(algorithm(), clients, rounds=3, progress=False).history
    assert resumed.columns == whole.columns
    assert [list(row) for row in resumed] == [list(row) for row in whole]


def test_history_survives(saved: Path, clients):
    """Rows, columns and types."""
    again = bf.load(saved, algorithm(), clients)
    assert again.history["round"].tolist() == [1, 2]
    assert again.history.rows[0]["cohort"] == 7
