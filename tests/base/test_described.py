"""Descriptions of values: what they know, and what they do not; more of them in the tests of
methods' identities.
"""

import functools
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.base.described import anonymous, described


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
        lambda by: over(Scale(by)),
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


def test_functions_are_their_source():
    """That of each alone, of several on a line too, the names of its arguments included; not what
    stands around it.
    """
    one, other, third = lambda x, y: x, lambda x, y: x + 1, lambda y, x: x
    again = lambda x, y: x  # noqa: E731 (a lambda is what is looked at)
    inner = (lambda x: lambda y: y)(0)
    texts = [described(function)["source"] for function in (one, other, third, inner)]
    assert len(set(texts)) == 4
    assert described(one) == described(again)
    wide = lambda x: (  # noqa: E731
        x + 1
    )
    assert described(wide)["source"] != described(other)["source"]


PROGRAM = """
import sys
import json
from bayesfl.base.described import described
sys.dont_write_bytecode = True
start = sys.path.copy()
for place in sys.argv[1:]:
    sys.path = [place, *start]
    sys.modules.pop("mine", None)
    import mine
    print(json.dumps(described(eval(open(f"{place}/name").read(), vars(mine)))))
"""


def described_in(folder: Path, *texts: tuple[str, str]) -> list[Any]:
    """The descriptions of what stands in modules with these texts, made in another process."""
    places = [folder / str(place) for place in range(len(texts))]
    for place, (text, name) in zip(places, texts, strict=True):
        place.mkdir()
        (place / "mine.py").write_text(text)
        (place / "name").write_text(name)
    made = [sys.executable, "-c", PROGRAM, *map(str, places)]
    said = subprocess.run(made, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.slow
def test_a_function_that_moves_in_its_file_is_the_same(tmp_path: Path):
    """It knows neither its line nor its neighbours, nor comments, docstrings and layout; a letter
    of its own code changes it.
    """
    text = "def double(x):\n    return 2 * x\n"
    told = 'def double(\n    x,  # a number\n):\n    """Twice as much."""\n\n    return 2*x\n'
    kind = "class Doubled:\n    by = 2\n\n    def __call__(self, x):\n        return self.by * x\n"
    first, moved, laid_out, altered, *of_class = described_in(
        tmp_path,
        (text, "double"),
        (f"import math\n\n\ndef other():\n    return math.pi\n\n\n{text}", "double"),
        (told, "double"),
        (text.replace("2", "3"), "double"),
        (kind, "Doubled()"),
        (kind.replace("self.by *", "self.by  *  "), "Doubled()"),
        (kind.replace("* x", "+ x"), "Doubled()"),
    )
    assert first["name"] == "mine.double"
    assert first == moved == laid_out != altered
    assert of_class[0] == of_class[1] != of_class[2]


def test_what_has_no_source_has_code_or_is_anonymous():
    """A digest is for a user's own; the library, installed packages and Python count by names."""
    nameless, made = eval("lambda x: x"), {}
    exec("def double(x):\n    return 2 * x\n\ndef triple(x):\n    return 3 * x", made)
    assert described(nameless)["source"] is None
    assert anonymous({"of": [described(nameless)]})
    assert not anonymous(described(made["double"]))
    assert described(made["double"])["source"] != described(made["triple"])["source"]
    for known in (
        bf.pools.by_size,
        torch.relu,
        np.sin,
        json.dumps,
        bf.optim.multistep(0.1),
        nn.functional.relu,
    ):
        assert "source" not in described(known)
        assert not anonymous(described(known))


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by


def made_in_a_function(by):
    class Made:
        def __call__(self, x):
            return x * by

    return Made()


def named_as_what_is_said(source, *, added):
    return (lambda x: x + source) if added else (lambda x: x * source)


class Held(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by


def with_defaults(defaults, add):
    return lambda x, by=add: x + by * defaults


class Listed(list):
    def __call__(self, x):
        return x


def wrapping(inner):
    @functools.wraps(inner)
    def wrapper(x):
        return inner(x)

    return wrapper


def test_what_wraps_a_lambda_has_a_source():
    assert not anonymous(described(wrapping(lambda x: x)))
    assert described(wrapping(lambda x: x)) != described(wrapping(lambda x: 2 * x))


def test_loggers_and_attributes_that_raise():
    class Odd:
        def __init__(self):
            self.log = logging.getLogger("here")

        def __getattr__(self, name):
            raise RuntimeError

    assert described(Odd())["holds"] == {"log": "here"}


class Parent:
    def __call__(self, x):
        return x


class Other:
    def __call__(self, x):
        return 2 * x


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Slotted(1), Slotted(2)),
        (made_in_a_function(1), made_in_a_function(2)),
        (type("Made", (), {"by": 1})(), type("Made", (), {"by": 2})()),
        (named_as_what_is_said(1, added=True), named_as_what_is_said(1, added=False)),
        (torch.tensor(1.0).mul, torch.tensor(2.0).mul),
        (Held(1), Held(2)),
        (Held(scaled), Held(over(1))),
        (with_defaults(1, add=2), with_defaults(2, add=2)),
        (Listed([1]), [1]),
        (np.array([1j]), np.array([2j])),
        (type("Child", (Parent,), {})(), type("Child", (Other,), {})()),
    ],
)
def test_what_hides_is_told_apart(one, other):
    assert described(one) != described(other)
    assert described(one) == described(one)


def test_values_inside_themselves_are_cut_off():
    own: list = [1]
    own.append(own)
    assert described(own) == [1, "..."]
