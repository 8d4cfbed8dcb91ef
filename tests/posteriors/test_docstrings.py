"""Examples in docstrings print what they say."""

import doctest

import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl import posteriors
from bayesfl.posteriors.variational import Family


@pytest.mark.parametrize(
    "thing",
    [
        posteriors.Laplace.fit,
        posteriors.Samples,
        Family.fit,
        posteriors.ensemble,
        posteriors.sghmc,
        posteriors.sgld,
    ],
    ids=lambda thing: thing.__qualname__,
)
def test_examples_print_what_they_say(thing):
    """As they stand there, with torch and the library imported."""
    names = {"torch": torch, "nn": nn, "bf": bf}
    found = doctest.DocTestFinder(recurse=False).find(thing, thing.__name__, globs=names)
    assert [doctest.DocTestRunner(verbose=False).run(one).failed for one in found] == [0]
