"""Where clients' models lie: which of several is meant, and which names can be folders."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.clients.client_model import check_file_names
from bayesfl.federation.run.result import Result
from bayesfl.federation.store import files
from tests.federation.made import run


@pytest.fixture(scope="module")
def short(clients: FederatedData) -> Result:
    method = bf.algorithms.ditto(bf.models.mlp(8, hidden=16, outputs=3), epochs=1, batch_size=10)
    return run(method, clients, rounds=1, evaluate_every=None)


@pytest.mark.parametrize("months", [("a-january", "b-february"), ("b-january", "a-february")])
def test_the_model_written_last_is_taken(months: tuple[str, str], short: Result, tmp_path: Path):
    """Whatever the names of the experiments, and however the files' own times were changed by
    copying.
    """
    first, last = (tmp_path / "states" / month / "client-0" for month in months)
    short.client(0).save(first)
    replace(short, round=2).client(0).save(last)
    os.utime(last / files.CLIENT_FILE, (0, 0))
    shutil.copytree(tmp_path / "states", tmp_path / "copied", copy_function=shutil.copyfile)
    for folder in (tmp_path / "states", tmp_path / "copied"):
        assert bf.load_client(folder, short.algorithm).round == 2
    assert bf.load_client(first.parent, short.algorithm).round == 1


def test_the_time_is_no_part_of_the_model(short: Result, tmp_path: Path):
    """Written twice, a model differs in nothing else."""
    for name in ("one", "two"):
        short.client(3).save(tmp_path / name)
    one, two = (
        files.read_file(tmp_path / name / files.CLIENT_FILE, files.CLIENT)
        for name in ("one", "two")
    )
    assert one.pop("written") < two.pop("written")
    assert str(one) == str(two)


def test_clients_that_are_called_by_numbers(short: Result, clients: FederatedData, tmp_path: Path):
    """Each is written under its own name, though 1 is also another one's number."""
    named = replace(clients, client_names=tuple(str(j + 1) for j in range(clients.clients)))
    found = run(short.algorithm, named, rounds=1, evaluate_every=None)
    found.save_clients(tmp_path)
    for name in named.client_names:
        assert bf.load_client(tmp_path / name, short.algorithm).name == name
    with pytest.raises(TypeError, match=r"numpy\.flatnonzero"):
        named.select([False, True])


@pytest.mark.parametrize(
    ("names", "bad"),
    [
        (("Bern", "Chur", "bern"), "Bern"),
        (("Bern", "Chur", "Chur"), "Chur"),
        (("Bern", "..", "a"), ".."),
        (("Bern", "a/b", "a"), "a/b"),
        (("Bern", "../Bern", "a"), "../Bern"),
        (("Bern", "a\\b", "a"), "a\\b"),
        (("Bern", "", "a"), ""),
        (("Bern", "x" * 300), "x" * 40),
        (("Bern", "ü" * 128), "ü" * 40),
    ],
)
def test_names_that_are_no_folders(names: tuple[str, ...], bad: str):
    words = (
        rf"names become folder names, but {re.escape(repr(bad))} .*result\.client\(\.\.\.\)\.save"
    )
    with pytest.raises(ValueError, match=words):
        check_file_names(names)
    check_file_names(("Bern", "Chur", "x" * 255))
