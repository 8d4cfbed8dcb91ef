"""The examples in docstrings of `bf.stats` run."""

import doctest
import importlib
import pkgutil

import pytest

import bayesfl as bf

MODULES = [
    one.name for one in pkgutil.walk_packages(bf.stats.__path__, "bayesfl.stats.") if not one.ispkg
]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # arviz' own
def test_examples_run(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
