"""Warnings that show the line that called bayesfl."""

import sys
import warnings

OWN = ("bayesfl.", "contextlib", "torch.utils._contextlib")
"""Modules whose frames are skipped: the library's, and those of its decorators."""


def warn(message: str) -> None:
    """Warn, as from the line outside bayesfl that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OWN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
