"""Warnings that point to the line that called bayesfl, and notes on errors of a user's function."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

OWN = ("bayesfl.", "contextlib", "torch.utils._contextlib")
"""Modules whose frames are skipped: the library's, and those of its decorators."""


def warn(message: str) -> None:
    """Issue a warning that points to the line outside bayesfl that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OWN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


@contextmanager
def noted(where: str) -> Iterator[None]:
    """Add a note to any error that a user's function raises in the block, and raise it again."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise
