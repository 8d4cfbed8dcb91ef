"""Saved runs: whole, checked, and refused for anything else than what they were made with."""

from pathlib import Path

import pytest
import torch

import bayesfl as bf
from bayesfl.federation.checkpoint import RUN, STATE, read, write
from bayesfl.federation.errors import CheckpointError
from tests.federation.made import algorithm


def test_tensors_come_back_to_the_bit(tmp_path: Path):
    """Nests, precisions, empty and scalar tensors, and aliases of one storage."""
    base = torch.randn(3, 4)
    tree = {"a": {"b": base, "c": base[1:]}, "d": torch.tensor(2.5).double(), "e": torch.zeros(0, 3), "f": torch.tensor([1, 2])}
    write(tmp_path / "x", {"k": [1, "two"]}, tree)
    meta, back = read(tmp_path / "x", RUN)
    assert meta["k"] == [1, "two"]
    assert torch.equal(back["a"]["b"], base)
    assert torch.equal(back["a"]["c"], base[1:])
    assert back["d"].dtype == torch.float64
    assert back["e"].shape == (0, 3)
    assert torch.equal(back["f"], tree["f"])
    assert [p.name for p in (tmp_path / "x").iterdir()] == [STATE]


def test_files_with_steps_are_of_another_format(tmp_path: Path):
    """Versions that know no steps would leave them out and say nothing: they refuse the format. Others read both, and no third."""
    for place, steps in enumerate(([], [{"step": "Temperature"}])):
        write(tmp_path / str(place), {"steps": steps}, {"a": torch.zeros(1)})
        assert read(tmp_path / str(place), RUN)[0]["format"] == 3 + place


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
