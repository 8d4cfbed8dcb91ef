"""What a user passes, checked where it comes in."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from bayesfl.base.options import instance, number, whole
from bayesfl.base.protocols import Prior
from bayesfl.composition.priors import Flat


def test_whole_numbers():
    """Python's and NumPy's, as an int."""
    assert [whole("k", value, least=0) for value in (0, 3, np.int64(7))] == [0, 3, 7]
    assert type(whole("k", np.int32(1), least=1)) is int


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *((value, "whole number, got ") for value in (1.0, "1", None, True, Fraction(1, 2))),
        (1, "at least 2, got 1$"),
    ],
    ids=str,
)
def test_what_is_no_such_whole_number(value: Any, words: str):
    """Fractions, text, nothing, truth values; and less than the bound."""
    with pytest.raises(ValueError, match=f"^k must be a? ?{words}"):
        whole("k", value, least=2)


def test_numbers():
    """Of any kind, as a float; truth values and text are none."""
    assert [number("x", value) for value in (1, 0.5, np.float32(0.25), Fraction(1, 8))] == [
        1.0,
        0.5,
        0.25,
        0.125,
    ]
    for value in (True, "1", None):
        with pytest.raises(ValueError, match=r"^x .*number.* got "):
            number("x", value)


def test_instances():
    """The message says what came, a class too, and ends with the remedy."""
    instance("s", "text", str, "")
    with pytest.raises(TypeError, match=r"^s .*str.* got int; pass text$"):
        instance("s", 3, str, "pass text")
    with pytest.raises(TypeError, match=r"^prior .*Prior.* got the class Flat; pass Flat\(\)$"):
        instance("prior", Flat, Prior, "pass Flat()")
