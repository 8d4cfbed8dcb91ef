"""Files that know their digest."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.base import archive
from bayesfl.base.archive import CheckpointError, OtherFileError
from bayesfl.data.tables.columns import Columns, Number
from bayesfl.evaluation.alarm import Alarm
from bayesfl.posteriors import Laplace, MeanField, Samples


def test_what_is_written_is_read(tmp_path: Path):
    """Of any dtype, shape and strides, and plain values in their order."""
    tensors = {"b": torch.arange(6).view(2, 3).T, "a": torch.tensor(1.5, dtype=torch.float64)}
    tensors["expanded"] = torch.tensor(3).expand(1)
    archive.write(tmp_path / "file", "thing", {"z": [1, None], "y": "text"}, tensors)
    kind, said, found = archive.read(tmp_path / "file")
    assert (kind, list(said.items())) == ("thing", [("z", [1, None]), ("y", "text")])
    assert all(torch.equal(found[name], t) for name, t in tensors.items())
    with pytest.raises(OtherFileError, match="holds a thing, not a run"):
        archive.read_kind(tmp_path / "file", "run")


NETWORK = nn.Linear(3, 2)


def kinds() -> dict[str, tuple[Any, Any]]:
    """Everything that is saved outside of runs, with what reads it."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    columns = Columns((Number("age", 40.0, 12.0, flagged=False),), ("no", "yes"), None)
    laplace = Laplace.fit(NETWORK, x, precision=1.0)
    return {
        "laplace": (laplace, lambda path: Laplace.load(path, NETWORK)),
        "samples": (laplace.sample(3), lambda path: Samples.load(path, NETWORK)),
        "variational": (
            MeanField.fit(NETWORK, x, torch.arange(len(x)) % 2, precision=1.0, steps=2),
            lambda path: MeanField.load(path, NETWORK),
        ),
        "alarm": (Alarm([1.0, 2.0], of=("labels", "me")).see([1.5, 0.5]), Alarm.load),
        "columns": (columns, Columns.load),
    }


@pytest.mark.parametrize("name", ["laplace", "samples", "variational", "alarm", "columns"])
def test_damage_is_found(name: str, tmp_path: Path):
    """Fifty bits of a file turned, one at a time: none loads as another thing."""
    thing, load = kinds()[name]
    thing.save(tmp_path / "file")
    load(tmp_path / "file").save(tmp_path / "again")
    assert str(archive.read(tmp_path / "again")) == str(archive.read(tmp_path / "file"))
    whole = (tmp_path / "file").read_bytes()
    for place in np.random.default_rng(0).integers(8 * len(whole), size=50).tolist():
        turned = bytearray(whole)
        turned[place // 8] ^= 1 << place % 8
        (tmp_path / "file").write_bytes(turned)
        with pytest.raises(CheckpointError, match=r"damaged|format"):
            load(tmp_path / "file")


def test_what_is_absent_or_cut_is_named(tmp_path: Path):
    (tmp_path / "cut").write_bytes(b"not a file of bayesfl")
    for name in ("cut", "absent"):
        with pytest.raises(CheckpointError, match=f"{name}' is damaged"):
            Alarm.load(tmp_path / name)


def test_an_object_is_its_class_and_what_is_not_at_its_default():
    """Inside others, too; what a class has no default for is always named."""
    known = {"SGD": bf.optim.SGD, "Temperature": bf.calibration.Temperature}
    for one, options in (
        (bf.optim.SGD(0.1, weight_decay=0.5), {"rate": 0.1, "weight_decay": 0.5}),
        (bf.calibration.Temperature(strength=math.inf), {"strength": math.inf}),
    ):
        said = json.loads(json.dumps(archive.plain((one, 3), known)))
        assert said == [{"class": type(one).__name__, "options": options}, 3]
        assert archive.made(said, known) == (one, 3)
    with pytest.raises(archive.UnknownError, match="Bias"):
        archive.plain(bf.calibration.Bias(), known)
    with pytest.raises(ValueError, match="no 'SGD' of these options"):
        archive.made({"class": "SGD", "options": {"pace": 1}}, known)
