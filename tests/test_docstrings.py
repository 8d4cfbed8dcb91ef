"""Examples in docstrings print what they say, and every public name has one."""

import doctest
import importlib
import pkgutil
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import bayesfl as bf

GIVEN = {"torch": torch, "nn": nn, "bf": bf}
"""What an example may use without importing it."""
MODULES = ["bayesfl", *(one.name for one in pkgutil.walk_packages(bf.__path__, "bayesfl."))]
TABLES = Path(bf.__file__).parent.parent / "docs" / "tables.py"


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # arviz' own
def test_examples_print_what_they_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(importlib.import_module(name), globs=GIVEN).failed == 0


def test_every_public_name_has_an_example() -> None:
    """What the pages of public names list, and the methods."""
    sections = runpy.run_path(str(TABLES))["sections"]()
    listed = {name: thing for names in sections.values() for name, thing in names.items()}
    assert [name for name, thing in listed.items() if ">>>" not in (thing.__doc__ or "")] == []
