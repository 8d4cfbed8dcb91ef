"""Descriptions of values: what they know, and what they do not; more of them in the tests of methods' identities."""

import functools
import json

import numpy as np
import pytest
import torch
from torch import nn

from bayesfl.base.described import described


def scaled(x, by=2.0):
    return x / by


def over(by):
    """A function that knows a number."""
    return lambda x: x / by


class Scale:
    """An object that is called."""

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x / self.by

    def apply(self, x):
        return x / self.by


@pytest.mark.parametrize(
    "make",
    [
        over,
        lambda by: functools.partial(scaled, by=by),
        Scale,
        lambda by: Scale(by).apply,
        lambda by: over(torch.tensor(by)),
        lambda by: over(np.full(3, by)),
        lambda by: nn.Sequential(nn.Dropout(by / 10)),
    ],
)
def test_functions_are_what_they_hold(make):
    """Equal ones are described alike wherever they lie in memory; others are not."""
    assert described(make(2.0)) == described(make(2.0)) != described(make(3.0))
    json.dumps(described(make(2.0)))
    assert "0x" not in json.dumps(described(make(2.0)))


def test_code_is_not_described():
    assert described(lambda x: x + 1) == described(lambda x: x + 2)


def test_values_inside_themselves_are_cut_off():
    own: list = [1]
    own.append(own)
    assert described(own) == [1, "..."]
