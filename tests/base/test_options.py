"""Options that are declared: what is refused and how it is said, what becomes of numbers, and what
`help` shows.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from bayesfl.base.options import AT_LEAST_0, AT_LEAST_1, NotNegative, Range, declared

Epochs = Annotated[int, AT_LEAST_1, "Number of passes."]
Size = Annotated[int | None, AT_LEAST_1, "Number of examples of a step."]
Rate = Annotated[float | Callable[[int], float], AT_LEAST_0, "Step size."]


class Plain:
    """A kind under which some options say nothing."""


def no_text(name: str, value: object) -> None:
    if isinstance(value, str):
        raise TypeError(f"{name} must be no text, got {value!r}")


def is_empty(model: str) -> bool:
    return not model


@declared(
    idle={
        ("mode", "whole"): ("share",),
        ("kind", Plain): ("share", "flag"),
        ("model", is_empty): ("epochs",),
    }
)
def made(
    model: str,
    *,
    epochs: Epochs = 5,
    size: Size = None,
    mode: Literal["part", "whole"] = "part",
    share: Annotated[float, Range(0, 1, "]", why="a tenth is 0.1")] = 0.5,
    rate: Rate = 0.1,
    flag: bool = False,
    pair: tuple[NotNegative, NotNegative] | None = None,
    chosen: Literal["first"] | int = "first",
    kind: Annotated[object, no_text, "Anything but a text."] = None,
    **others: Any,
) -> dict[str, Any]:
    """Make it.

    At length.

    Args:
        model: What it is
            made of.
        rate: Rate of its own words.

    Returns:
        All options.
    """
    return {name: value for name, value in locals().items() if name != "others"} | others


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"epochs": 1.5}, ValueError, "epochs must be a whole number, got 1.5"),
        ({"epochs": True}, ValueError, "epochs must be a whole number, got True"),
        ({"epochs": None}, ValueError, "epochs must be a whole number, got None"),
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"size": "all"}, ValueError, "size must be a whole number, got 'all'"),
        ({"mode": "full"}, ValueError, "mode must be 'part' or 'whole', got 'full'"),
        ({"mode": 3}, ValueError, "mode must be 'part' or 'whole', got 3"),
        ({"share": 0.0}, ValueError, "share must lie within (0, 1], got 0.0; a tenth is 0.1"),
        ({"share": "half"}, ValueError, "share must be a number, got 'half'"),
        ({"share": math.nan}, ValueError, "share must lie within (0, 1], got nan; a tenth is 0.1"),
        ({"rate": -1}, ValueError, "rate must be >= 0 and finite, got -1"),
        ({"rate": math.inf}, ValueError, "rate must be >= 0 and finite, got inf"),
        ({"rate": "fast"}, ValueError, "rate must be a number, got 'fast'"),
        ({"flag": 1}, TypeError, "flag must be of type bool, got int; pass True or False"),
        ({"pair": 1.0}, ValueError, "pair must be 2 numbers, got 1.0"),
        ({"pair": (1, 2, 3)}, ValueError, "pair must be 2 numbers, got (1, 2, 3)"),
        ({"pair": (1, -1)}, ValueError, "each of pair must be >= 0 and finite, got -1"),
        ({"chosen": "last"}, ValueError, "chosen must be 'first', got 'last'"),
        ({"kind": "text"}, TypeError, "kind must be no text, got 'text'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str):
    """By name, with what came, before the function runs."""
    with pytest.raises(error) as said:
        made("model", **options)
    assert str(said.value) == message


def test_what_is_taken():
    """Each kind at its bounds; a function where one may stand; what a text may be besides is not
    looked at.
    """
    schedule = lambda round: -1.0  # noqa: E731
    options: dict[str, Any] = {
        "epochs": 1,
        "size": 1,
        "mode": "whole",
        "rate": schedule,
        "flag": True,
        "pair": [0, 2.0],
        "kind": 3,
    }
    found = made("model", **options)
    assert found == {
        "model": "model",
        **options,
        "share": 0.5,
        "pair": (0.0, 2.0),
        "chosen": "first",
    }
    assert made("model", share=1.0)["share"] == 1.0
    assert [made("model", chosen=value)["chosen"] for value in (3, "first")] == [3, "first"]


def test_numbers_become_pythons_own():
    """NumPy's, too; a float is one where a whole number was given, a whole number stays one."""
    found = made(
        "model",
        epochs=np.int64(3),
        size=np.int32(7),
        rate=2,
        share=Fraction(1, 4),
        pair=(np.float32(0.5), 1),
    )
    assert (found["epochs"], found["size"], found["rate"], found["share"], found["pair"]) == (
        3,
        7,
        2.0,
        0.25,
        (0.5, 1.0),
    )
    numbers = [*(found[name] for name in ("epochs", "size", "rate", "share")), *found["pair"]]
    assert [type(one) for one in numbers] == [int, int, float, float, float, float]


@pytest.mark.parametrize(
    ("range", "words", "inside", "outside"),
    [
        (Range(0), "be > 0 and finite", (1e-300, 1e300), (0.0, math.inf, math.nan)),
        (Range(0, ends="["), "be >= 0 and finite", (0.0,), (-1e-300, math.inf)),
        (Range(0, math.inf, "]"), "be > 0", (math.inf,), (0.0,)),
        (Range(0, 1), "lie within (0, 1)", (0.5,), (0.0, 1.0)),
        (Range(0, 1, "["), "lie within [0, 1)", (0.0,), (1.0,)),
        (Range(0, 1, "]"), "lie within (0, 1]", (1.0,), (0.0,)),
        (Range(0, 1, "[]"), "lie within [0, 1]", (0.0, 1.0), (1.1,)),
        (Range(1e-30, 1e30), "lie within (1e-30, 1e+30)", (1.0,), (1e30,)),
    ],
)
def test_ranges(range: Range, words: str, inside: tuple[float, ...], outside: tuple[float, ...]):
    assert str(range) == words
    assert all(value in range for value in inside)
    assert not any(value in range for value in outside)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            "model",
            {"mode": "whole", "share": 0.1},
            "share has no effect under mode='whole', got 0.1; remove it",
        ),
        (
            "model",
            {"kind": Plain(), "share": 0.1},
            "share has no effect under a kind of Plain, got 0.1; remove it",
        ),
        (
            "model",
            {"kind": Plain(), "flag": True},
            "flag has no effect under a kind of Plain, got True; remove it",
        ),
        ("", {"epochs": 3}, "epochs has no effect where the model is empty, got 3; remove it"),
    ],
    ids=["a value", "a class", "another of the same", "a predicate"],
)
def test_options_without_effect(model: str, options: dict[str, Any], message: str):
    """They are refused unless they are the defaults."""
    with pytest.raises(ValueError) as said:  # noqa: PT011  (the whole message is compared)
        made(model, **options)
    assert str(said.value) == message
    made(
        model,
        **{name: value for name, value in options.items() if name in ("mode", "kind")},
        share=0.5,
        flag=False,
        epochs=5,
    )


def test_what_python_refuses_itself():
    """In its own words: an unknown option, an absent argument, one too many."""

    @declared
    def few(model: Any, *, epochs: Epochs = 1) -> int:
        return epochs

    for call, message in (
        (lambda: few(1, lr=0.1), r"few\(\) got an unexpected keyword argument 'lr'"),
        (lambda: few(epochs=0), r"few\(\) missing 1 required positional argument: 'model'"),
        (lambda: few(1, 2), r"few\(\) takes 1 positional argument but 2 were given"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    assert made("model", more=1)["more"] == 1  # others are others


def test_the_docstring_is_completed():
    """In the order of the signature; what the docstring says itself stands, what nothing says is
    left out.
    """
    assert made.__doc__.split("\n") == [
        "Make it.",
        "",
        "At length.",
        "",
        "Args:",
        "    model: What it is",
        "        made of.",
        "    epochs: Number of passes.",
        "    size: Number of examples of a step.",
        "    rate: Rate of its own words.",
        "    kind: Anything but a text.",
        "",
        "Returns:",
        "    All options.",
    ]


def test_a_docstring_without_arguments_is_given_some():
    """Before its other sections; one that is empty stays so."""

    @declared
    def bare(epochs: Epochs = 1) -> int:
        """Count.

        Raises:
            ValueError: Never.
        """
        return epochs

    @declared
    def mute(epochs: Epochs = 1) -> int:
        return epochs

    assert (
        bare.__doc__
        == "Count.\n\nArgs:\n    epochs: Number of passes.\n\nRaises:\n    ValueError: Never."
    )
    assert mute.__doc__ is None
    assert mute() == 1


def test_the_signature_is_plain():
    """Of types alone, with all defaults; the name is the function's."""
    found = inspect.signature(made).parameters
    assert made.__annotations__["epochs"] is int  # which Sphinx reads
    assert {
        name: found[name].annotation
        for name in ("model", "epochs", "size", "share", "flag", "kind")
    } == {
        "model": str,
        "epochs": int,
        "size": int | None,
        "share": float,
        "flag": bool,
        "kind": object,
    }
    assert list(found) == list(inspect.signature(inspect.unwrap(made)).parameters)
    assert (found["epochs"].default, found["share"].default, found["model"].default) == (
        5,
        0.5,
        inspect.Parameter.empty,
    )
    assert made.__name__ == "made"


@dataclass(frozen=True)
@declared(idle={("mode", "off"): ("rate",)})
class Base:
    """A thing.

    Args:
        mode: Its mode.
    """

    epochs: Epochs
    mode: Literal["on", "off"] = "on"
    rate: Rate = 0.1

    def __post_init__(self) -> None:
        assert type(self.epochs) is int  # the check comes first
        if self.epochs > 100:
            raise ValueError("too many")


@dataclass(frozen=True)
@declared
class Declared(Base):
    """One with a field of its own."""

    share: Annotated[float, Range(0, 1), "A share."] = 0.5


@dataclass(frozen=True)
class Undeclared(Base):
    """One whose fields the base looks at."""

    share: Annotated[float, Range(0, 1)] = 0.5


def test_a_data_class():
    """Its fields are checked when they are set, by `replace` too, then its own `__post_init__`
    runs; numbers are Python's.
    """
    assert type(Base(np.int64(3)).epochs) is int
    for wrong, message in (
        (lambda: Base(0), "epochs must be at least 1, got 0"),
        (lambda: replace(Base(1), mode="no"), "mode must be 'on' or 'off', got 'no'"),
        (
            lambda: Base(1, "off", rate=0.3),
            "rate has no effect under mode='off', got 0.3; remove it",
        ),
        (lambda: Base(101), "too many"),
    ):
        with pytest.raises(ValueError) as said:  # noqa: PT011  (the whole message is compared)
            wrong()
        assert str(said.value) == message
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'epochs'"):
        Base()  # pyright: ignore[reportCallIssue]
    assert (
        Base.__doc__
        == "A thing.\n\nArgs:\n    epochs: Number of passes.\n    mode: Its mode.\n    rate: Step "
        "size."
    )


@pytest.mark.parametrize("kind", [Declared, Undeclared])
def test_a_subclass_of_a_data_class(kind: type[Base]):
    """Its own fields and those of its base, and the base's `__post_init__`, whether it is declared
    or not.
    """
    assert type(kind(1, share=np.float32(0.25)).share) is float  # pyright: ignore
    for options, message in (
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": 1, "share": 1.0}, r"share must lie within \(0, 1\), got 1.0"),
        ({"epochs": 1, "mode": "off", "rate": 0.3}, "rate has no effect under mode='off'"),
        ({"epochs": 101}, "too many"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(**options)
