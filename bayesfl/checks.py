"""Numbers that a user passes, checked where they come in: the message names the argument and the value."""

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
