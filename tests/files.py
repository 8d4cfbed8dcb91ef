"""Tests of the real files, which not every machine has."""

import functools
from collections.abc import Callable

import pytest


def where_present(test: Callable[..., None]) -> Callable[..., None]:
    """`test`, skipped where its files are neither in BAYESFL_DATA's folder nor in the
    user's cache.
    """

    @functools.wraps(test)
    def run(*arguments: object, **options: object) -> None:
        try:
            test(*arguments, **options)
        except FileNotFoundError as error:
            if "not on disk" not in str(error) or "as a whole" in str(error):
                raise
            pytest.skip(str(error).splitlines()[0].removesuffix(". Looked at"))

    return run
