"""Reading: where files are looked for, what is said when they are not there, and what is made of
tables and texts.
"""

import sys

import pytest
import torch
from torch.testing import assert_close

from bayesfl.data import load
from bayesfl.data.recipes import readers
from tests.data.made import write_mnist
from tests.files import where_present


def test_environment_and_argument_name_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESFL_DATA", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError) as error:
        load("mnist")
    parts = (str(tmp_path / "empty" / "mnist.npz"), "MNIST", "download=True", "BAYESFL_DATA")
    assert [part for part in parts if part not in str(error.value)] == []
    with pytest.raises(ValueError, match=r"'minst'.*digits, mnist"):
        load("minst")
    write_mnist(tmp_path)
    assert load("mnist", root=tmp_path).train == 30
    monkeypatch.setenv("BAYESFL_DATA", str(tmp_path))
    assert load("mnist").train == 30
    monkeypatch.delenv("BAYESFL_DATA")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert readers.default_root() == tmp_path / "cache" / "bayesfl" / "datasets"


@pytest.mark.parametrize(
    "name", ["cifar10", "cifar100", "fashion-mnist", "emnist-letters", "heart", "shakespeare"]
)
def test_what_is_not_there_says_where_it_was_looked_for(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="Looked at") as error:
        load(name, root=tmp_path)
    assert str(tmp_path) in str(error.value)


def test_digits_and_diabetes_need_no_files(tmp_path):
    digits = load("digits", root=tmp_path)
    assert (digits.x.shape, digits.train, *digits.x.aminmax()) == ((1797, 64), 1438, 0.0, 1.0)
    share = torch.bincount(digits.y[digits.train :]) / torch.bincount(digits.y)
    assert_close(share, torch.full((10,), 0.2), atol=0.005, rtol=0)
    assert load("digits", root=tmp_path) is digits
    diabetes = load("diabetes", root=tmp_path)
    assert (diabetes.x.shape, diabetes.train, diabetes.task) == ((442, 10), 354, "regression")


def test_hearts_from_the_repository_files(tmp_path):
    folder = tmp_path / "heart_disease"
    folder.mkdir()
    for name in readers.HOSPITALS:
        rows = [
            "63,1,1,145,233,1,2,150,0,2.3,3,0,6,0",
            "40,0,4,120,?,0,0,100,1,1.0,?,?,?,2",
            "50,0,4,120,9,0,0,100,1,1,?,?,?,2",
        ]
        (folder / f"processed.{name}.data").write_text("\n".join(rows) + "\n")
    source = load("heart", root=tmp_path)
    assert source.owners is not None
    assert (source.y.tolist(), source.owners.tolist()) == ([0, 1] * 4, [0, 0, 1, 1, 2, 2, 3, 3])
    assert source.x[0].tolist() == pytest.approx([63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1])
    assert source.x[1, 8:].tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("name", "shape", "train"),
    [
        ("mnist", (70_000, 1, 28, 28), 60_000),
        ("fashion-mnist", (70_000, 1, 28, 28), 60_000),
        ("cifar10", (60_000, 3, 32, 32), 50_000),
        ("cifar100", (60_000, 3, 32, 32), 50_000),
        ("emnist-letters", (36_400, 1, 28, 28), 26_000),
        ("heart", (740, 13), 740),
    ],
)
@where_present
def test_the_real_files(name, shape, train):
    source = load(name)
    assert (tuple(source.x.shape), source.train) == (shape, train)
    if len(shape) == 4:
        # Which is given MNIST's mean.
        assert source.x[: source.train].mean().abs() < (0.2 if name == "emnist-letters" else 0.02)
        assert torch.bincount(source.y[source.train :]).unique().numel() == (
            1 if name != "mnist" else 10
        )
