"""Generators that a program shares: which of them were used, and that they are left as they were."""

import contextlib
import random

import numpy as np
import pytest
import torch

from bayesfl.base.generators import kept

DRAWS = {
    "torch": lambda: torch.rand(3).tolist(),
    "numpy.random": lambda: np.random.rand(3).tolist(),  # noqa: NPY002 (the generator that is watched)
    "random": lambda: [random.random() for _ in range(3)],
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_used_is_named_and_put_back(name):
    with kept(*DRAWS) as used:
        before = used()
        drawn = DRAWS[name]()
        after = used()
    assert not before
    assert after == [name]
    assert DRAWS[name]() == drawn


def test_generators_that_are_not_asked_for_go_on():
    with kept("random") as used:
        drawn = DRAWS["torch"]()
        assert not used()
    assert DRAWS["torch"]() != drawn


def test_generators_are_put_back_after_an_error():
    state = random.getstate()
    with contextlib.suppress(KeyError), kept("random"):
        raise KeyError(random.random())
    assert random.getstate() == state
