"""Options declared once: an annotation holds an option's meaning and its allowed values, which are
checked before the function runs.

    Epochs = Annotated[int, AT_LEAST_1, "Number of passes over a client's data each round."]

    @declared
    def fedavg(model, *, epochs: Epochs = 5, weight: Literal["size", "equal"] = "size"): ...

A function or a data class that is `declared` raises an error for `epochs=0` and `weight="sizes"`,
and the annotation's text becomes the entry for `epochs` in the docstring unless its `Args` have
one. The check covers numbers and their ranges, words (`Literal`), bools, and functions (name,
value) in the annotation; Python handles other types.
"""

import difflib
import functools
import inspect
import math
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

import numpy as np
from torch import Tensor

from bayesfl.base.numerics import own_modes

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
T = TypeVar("T")

ELSEWHERE = {
    "lr": {"optimiser": "=bf.optim.SGD(lr)", "rate": "", "options": "={'*': {'optimiser': [...]}}"},
    "learning_rate": {"optimiser": "=bf.optim.SGD(learning_rate)", "rate": ""},
    "momentum": {"optimiser": "=bf.optim.SGD(rate, momentum)"},
    "weight_decay": {"optimiser": "=bf.optim.SGD(rate, weight_decay=weight_decay)"},
    "fraction": {"participation": ""},
    "num_classes": {"outputs": ""},
    "concentration": {"alpha": ""},
    "callbacks": {"on_round": "=[...]"},
    "random_state": {"seed": "", "seeds": "=[...]"},
    "verbose": {"progress": ""},
    "weights": {"_weights": "="},
    "secure": {"aggregation": "=bf.SecureSum()"},
    "duration": {"time": ""},
    "duration_col": {"time": ""},
}
"""{option in other libraries: {end of its name here: how its value is passed}}."""

Idle = Mapping[tuple[str, Any], tuple[str, ...]]
"""{(option, value): options that have no effect with this value}. A class stands for its instances,
a function for all values for which it returns True.
"""


@dataclass(frozen=True)
class Range:
    """Describe an interval of finite numbers.

    Args:
        low: The lower end.
        high: The upper end.
        ends: The ends that belong to the interval: `[` the lower one, `]` the upper one, `[]` both.
        why: Reason or remedy, at the end of the error message.
    """

    low: float
    high: float = math.inf
    ends: Literal["", "[", "]", "[]"] = ""
    why: str = ""

    def __contains__(self, value: float) -> bool:
        above = self.low <= value if "[" in self.ends else self.low < value
        return above and (value <= self.high if "]" in self.ends else value < self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return (
                f"be >{'=' * ('[' in self.ends)} {self.low}{' and finite' * (']' not in self.ends)}"
            )
        return (
            f"lie within {'[' if '[' in self.ends else '('}{self.low}, "
            f"{self.high}{']' if ']' in self.ends else ')'}"
        )


AT_LEAST_0, AT_LEAST_1 = Range(0, ends="["), Range(1, ends="[")
INVERTIBLE = Range(1e-30, 1e30, why="its inverse must be a number in float32, too")

PROBABILITY = Range(0, 1, why="95 % is 0.95")

Count = Annotated[int, AT_LEAST_1]
Natural = Annotated[int, AT_LEAST_0]
Positive = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1, "]", why="95 % is 0.95")]
NotNegative = Annotated[float, AT_LEAST_0]


@dataclass(frozen=True)
class Option:
    """Hold the meaning and the allowed values of an option, from its annotation.

    Args:
        meaning: The text for the docstring; empty if the docstring has its own.
        words: Allowed texts, or None.
        kind: `int`, `float` or `bool` if allowed.
        range: Allowed numbers; None for all.
        parts: For a tuple of several numbers, the option that each must satisfy.
        free: Further allowed types, which are not checked; `Callable` for any function.
        looks: Functions (name, value) that raise an error for values that are not allowed.
    """

    meaning: str = ""
    words: tuple[Any, ...] = ()
    kind: type | None = None
    range: Range | None = None
    parts: "tuple[Option, ...]" = ()
    free: tuple[Any, ...] = ()
    looks: tuple[Callable[[str, Any], object], ...] = ()

    @classmethod
    def of(cls, hint: Any) -> "Option":
        """Return the option that a type hint describes."""
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Annotated:
            found = cls.of(inner[0])
            for said in inner[1:]:
                if isinstance(said, str):
                    found = replace(found, meaning=said)
                elif isinstance(said, Range):
                    found = replace(found, range=said)
                else:
                    found = replace(found, looks=(*found.looks, said))
            return found
        if origin in (Union, types.UnionType):
            return functools.reduce(Option._or, map(Option.of, inner))
        if origin is Literal or hint is type(None):
            return cls(words=inner or (None,))
        if hint in (int, float, bool):
            return cls(kind=hint)
        parts = tuple(map(cls.of, inner)) if origin is tuple and ... not in inner else ()
        return (
            cls(parts=parts)
            if parts and all(part.kind for part in parts)
            else cls(free=(origin or hint,))
        )

    def _or(self, other: "Option") -> "Option":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Option(*(one + two if isinstance(one, tuple) else one or two for one, two in pairs))

    def __call__(self, name: str, value: Any) -> Any:
        """Check a value and return it, numbers as Python's own type.

        Raises:
            TypeError: A bool is required and the value is not one; or a function in `looks` raises.
            ValueError: The value is not among the words, is not a number or lies out of range; or a
                function in `looks` raises.
        """
        if any(
            value is word or (isinstance(word, str) and isinstance(value, str) and value == word)
            for word in self.words
        ):
            return value
        texts = str in map(type, self.words)
        if texts and (
            (isinstance(value, str) and str not in self.free)
            or not (self.kind or self.parts or self.free)
        ):
            *others, last = map(repr, self.words)
            raise ValueError(
                f"{name} must be {', '.join(others)}{' or ' * bool(others)}{last}, got {value!r}"
            )
        if self.kind is bool:
            instance(name, value, bool, "pass True or False")
        elif (
            self.kind
            and not (Callable in self.free and callable(value))
            and (isinstance(value, Real) or set(self.free) <= {Callable})
        ):
            value = self._number(name, value)
        elif self.parts and not self.free:
            if not isinstance(value, tuple | list) or len(value) != len(self.parts):
                raise ValueError(f"{name} must be {len(self.parts)} numbers, got {value!r}")
            value = tuple(
                part(f"each of {name}", one) for part, one in zip(self.parts, value, strict=True)
            )
        for look in self.looks:
            look(name, value)
        return value

    def _number(self, name: str, value: Any) -> int | float:
        found = whole(name, value, least=-(2**63)) if self.kind is int else number(name, value)
        if self.range is not None and found not in self.range:
            wanted = (
                f"be at least {self.range.low}"
                if self.kind is int and self.range.high == math.inf
                else self.range
            )
            raise ValueError(
                f"{name} must {wanted}, got {value}{self.range.why and '; ' + self.range.why}"
            )
        return found


def whole(name: str, value: object, *, least: int) -> int:
    """Return `value` as an int of at least `least`.

    Raises:
        ValueError: `value` is smaller than `least`, is not an integer, or is a bool.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def number(name: str, value: object) -> float:
    """Return `value` as a float; the caller checks its range.

    Raises:
    Raises:
        ValueError: `value` is a bool, or not a real number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def instance(name: str, value: object, wanted: type, remedy: str) -> None:
    """Check that `value` is an instance of `wanted`.

    Raises:
        TypeError: `value` has another type, or is a class; the message ends with `remedy`.
    """
    if not isinstance(value, wanted) or isinstance(value, type):
        # A class has the methods of a protocol, but is not an instance.
        came = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be of type {wanted.__name__}, got {came}; {remedy}")


def listed(values: Any) -> Any:
    """Convert the numbers of a tensor or an array to Python's own, as a list if there are several;
    return anything else unchanged.
    """
    return values.tolist() if isinstance(values, Tensor | np.ndarray | np.generic) else values


def _here(asked: str, names: Iterable[str]) -> list[str]:
    """Return the names that an option of another library has here; see `ELSEWHERE`."""
    called = ELSEWHERE.get(asked, {})
    return [name + given for end, given in called.items() for name in names if name.endswith(end)]


def nearest(asked: str, names: Sequence[str], most: int) -> list[str]:
    """Return at most `most` names that end with the requested one or are closest to it, ignoring
    case; the first ones if none is close.
    """
    if here := _here(asked, names):
        return here[:most]
    asked, folded = asked.casefold(), {name.casefold(): name for name in names}
    ends = [key for key in folded if key.endswith(f"_{asked}")]
    near = [*ends, *difflib.get_close_matches(asked, list(folded), n=most, cutoff=0.5)]
    return [folded[key] for key in dict.fromkeys(near)][:most] or list(names[:most])


def refuse_unknown(function: Callable[..., Any], given: Iterable[str]) -> None:
    """Raise TypeError for options that a function does not have.

    Raises:
        TypeError: An option is unknown; the message contains the most similar options, or the
            option's name in bayesfl.
    """
    parameters = inspect.signature(function).parameters
    asked = next((name for name in given if name not in parameters), "")
    if asked and all(one.kind is not one.VAR_KEYWORD for one in parameters.values()):
        names = [name for name in parameters if name[0] != "_" and name not in ("self", "cls")]
        near = (
            _here(asked, names)
            or [name for name in names if name.startswith(asked)]
            or difflib.get_close_matches(asked.casefold(), names, cutoff=0.7)
        )
        told = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names)}"
        raise TypeError(
            f"{function.__qualname__.removesuffix('.__init__')}() got an unexpected keyword "
            f"argument {asked!r}; {told}"
        )


def suggests(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise TypeError for unknown options, as a declared one does."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(function, kwargs)
        return function(*args, **kwargs)

    return called


def typed(wanted: type, remedy: str) -> Callable[[str, Any], None]:
    """Return a function for annotations that checks an option's type; its error message ends with
    `remedy`.
    """
    return lambda name, value: instance(name, value, wanted, remedy)


@functools.cache
def options_of(owner: Any) -> dict[str, Option]:
    """Return the options of a function or a data class from their annotations, by name."""
    hints = get_type_hints(inspect.unwrap(owner), include_extras=True)
    return {name: Option.of(hint) for name, hint in hints.items() if name not in ("return", "_")}


signature_of = functools.cache(inspect.signature)
"""Return the signature of a function or a class, cached."""


@overload
def declared(function: C, /) -> C: ...
@overload
def declared(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def declared(*, idle: Idle) -> Callable[[T], T]: ...
def declared(function: Any = None, /, *, idle: Idle = types.MappingProxyType({})) -> Any:
    """Check the options of a function before it runs, or those of a data class after its fields are
    set, and complete the docstring. The function computes in `own_modes`.

    A data class is declared below `dataclass`, and its own `__post_init__` runs after the check.

    Args:
        function: A function, or a class with the fields of a data class.
        idle: Options that have no effect under certain values of others; passing them then raises
            ValueError.
    """

    def declare(owner: Any) -> Any:
        return (_declared_class if isinstance(owner, type) else _declared)(owner, idle)

    return declare if function is None else declare(function)


def _declared(function: Callable[P, R], idle: Idle) -> Callable[P, R]:
    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        found = arguments(function, args, kwargs, idle)
        with own_modes():
            return (
                function(*args, **kwargs)
                if found is None
                else function(*found.args, **found.kwargs)
            )

    return documented(checked, function)


def documented(checked: Callable[P, R], function: Callable[P, R]) -> Callable[P, R]:
    """Give a function that checks another one's options the other's completed docstring, and its
    signature in plain types.
    """
    checked.__doc__ = completed(function)
    # `help` reads `__doc__`, Sphinx the signature.
    checked.__signature__ = _plain(function)  # type: ignore[attr-defined]
    checked.__annotations__ = get_type_hints(function)
    return checked


def _plain(function: Callable[..., Any], skip: int = 0) -> inspect.Signature:
    hints, signature = get_type_hints(function), inspect.signature(function)
    parameters = [
        one.replace(annotation=hints.get(one.name, one.annotation))
        for one in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters[skip:])


class _Signature:
    """Provide the signature of a declared data class, in plain types; its instances, which may be
    callable, have none.
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        return _plain(owner.__init__, skip=1)


def arguments(
    function: Callable[..., Any], args: Any, kwargs: Any, idle: Idle
) -> inspect.BoundArguments | None:
    """Bind a call's arguments, converted as the annotations require, with all defaults; None if
    the call itself is invalid in Python.

    Raises:
        TypeError: See `Option`; or there is no such option.
        ValueError: See `Option`; or an option has no effect because of another one.
    """
    signature, declared_as = signature_of(function), options_of(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        refuse_unknown(function, kwargs)
        return None  # Python reports the other errors
    bound.apply_defaults()
    for name, option in declared_as.items():
        if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = option(name, bound.arguments[name])
    _refuse_idle(bound.arguments, signature, idle)
    return bound


def _refuse_idle(found: Mapping[str, Any], signature: inspect.Signature, idle: Idle) -> None:
    for (option, value), names in idle.items():
        if _holds(found[option], value):
            for name in names:
                if found[name] != signature.parameters[name].default:
                    raise ValueError(
                        f"{name} has no effect {_told(option, value)}, got {found[name]!r}; "
                        "remove it"
                    )


def _holds(found: Any, value: Any) -> bool:
    if isinstance(value, type):
        return isinstance(found, value)
    return bool(value(found) if callable(value) else found == value)


def _told(option: str, value: Any) -> str:
    if isinstance(value, type):
        return f"under a {option} of {value.__name__}"
    return (
        f"where the {option} {value.__name__.replace('_', ' ')}"
        if callable(value)
        else f"under {option}={value!r}"
    )


def _declared_class(cls: C, idle: Idle) -> C:
    after = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        if type(self).__post_init__ is __post_init__:  # once only if the base is declared too
            for name, option in options_of(type(self)).items():
                found = getattr(self, name, None)
                if (own := option(name, found)) is not found:  # a number of Python's own
                    object.__setattr__(self, name, own)
        if idle:
            _refuse_idle(vars(self), signature_of(cls), idle)
        if after is not None:
            after(self)

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_unknown(cls.__init__, kwargs)
        return object.__new__(cls)

    cls.__new__ = __new__  # `dataclass` makes `__init__` after this
    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]  # `dataclass` reads it next
    cls.__signature__ = _Signature()  # type: ignore[attr-defined]  # for `help` and Sphinx
    cls.__doc__ = completed(cls)
    return cls


def completed(owner: Any) -> str | None:
    """Return a docstring with an `Args` entry for every option whose annotation has a text, in the
    order of the signature.
    """
    doc = (
        inspect.getdoc(owner)
        if not isinstance(owner, type)
        else inspect.cleandoc(owner.__doc__ or "")
    )
    found = {name: option.meaning for name, option in options_of(owner).items() if option.meaning}
    if not doc or not found:
        return doc
    before, own, after = _sections(doc)
    known = options_of(owner) if isinstance(owner, type) else inspect.signature(owner).parameters
    order = [name for name in known if name in own or name in found]
    order += [name for name in (*own, *found) if name not in order]
    form: Any = {
        "width": 100,
        "initial_indent": "    ",
        "subsequent_indent": "        ",
        "break_on_hyphens": False,
    }
    entries = [own.get(name) or textwrap.fill(f"{name}: {found[name]}", **form) for name in order]
    return "\n".join([before, "", "Args:", *entries, *(["", after] if after else [])])


def _sections(doc: str) -> tuple[str, dict[str, str], str]:
    """Return the text before the arguments, the arguments by name, and the text after them."""
    before, *rest = re.split(
        r"^(?=(?:Args|Returns|Raises|Warns|References|Example):$)",
        doc,
        maxsplit=1,
        flags=re.MULTILINE,
    )
    after = "".join(rest)
    if not after.startswith("Args:"):
        return before.rstrip(), {}, after
    entries, *rest = re.split(
        r"^(?=\S)", after.removeprefix("Args:\n"), maxsplit=1, flags=re.MULTILINE
    )
    own = {
        entry.strip().partition(":")[0]: entry.rstrip()
        for entry in re.split(r"^(?=    \S)", entries, flags=re.MULTILINE)
        if entry
    }
    return before.rstrip(), own, "".join(rest)
