"""Checks of arguments that users pass, whose messages name the argument and the value received; and
warnings.
"""

import sys
import warnings
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor


def whole(name: str, value: Any, *, least: int) -> int:
    """Return `value` as an int of at least `least`.

    Raises:
        ValueError: `value` is smaller than `least`, not an integer, a bool, or no number.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def number(name: str, value: Any) -> float:
    """Return `value` as a float; the caller checks its range.

    Raises:
        ValueError: `value` is a bool, or no real number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def instance(name: str, value: Any, wanted: type, remedy: str) -> None:
    """Check that `value` is an instance of `wanted`.

    Raises:
        TypeError: `value` has another type, or is a class; the message ends with `remedy`.
    """
    if not isinstance(value, wanted) or isinstance(value, type):
        # A class has the methods of a protocol, but is not an instance.
        came = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be of type {wanted.__name__}, got {came}; {remedy}")


def listed(values: Any) -> Any:
    """Return the numbers of a tensor or an array as Python's own, in a list where there are
    several; return anything else as it is.
    """
    return values.tolist() if isinstance(values, Tensor | np.ndarray | np.generic) else values


def warn(message: str) -> None:
    """Warn, as from the line outside bayesfl that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("bayesfl."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
