"""What a user passes, checked where it comes in: the message names the argument and what came."""

from numbers import Integral, Real
from typing import Any


def whole(name: str, value: Any, *, least: int) -> int:
    """`value` as an int of at least `least`.

    Raises:
        ValueError: It is smaller, a fraction, a truth value, or no number.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def number(name: str, value: Any) -> float:
    """`value` as a float; its range is the caller's to check.

    Raises:
        ValueError: It is a truth value, or no number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def instance(name: str, value: Any, wanted: type, remedy: str) -> None:
    """That `value` is a `wanted`.

    Raises:
        TypeError: It is something else; the message ends with the remedy.
    """
    if not isinstance(value, wanted) or isinstance(value, type):  # a class has the methods of a protocol, but is none of its values
        came = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be of type {wanted.__name__}, got {came}; {remedy}")
