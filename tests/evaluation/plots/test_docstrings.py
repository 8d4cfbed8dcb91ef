"""Examples in docstrings print what they say."""

import doctest

import pytest
import torch
from torch import nn

import bayesfl as bf

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("name", sorted(set(bf.plots.__all__) - {"OKABE_ITO"}))
def test_examples_print_what_they_say(name: str):
    """As they stand there, with torch and the library imported."""
    names = {"torch": torch, "nn": nn, "bf": bf}
    found = doctest.DocTestFinder(recurse=False).find(getattr(bf.plots, name), name, globs=names)
    assert found[0].examples
    assert [doctest.DocTestRunner(verbose=False).run(one).failed for one in found] == [0]
