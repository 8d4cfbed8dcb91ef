"""Terms of a design: columns of numbers, and categories by their levels.

A term has the same columns at all sites, whatever values a site has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True)
class Number:
    """A column of numbers or truth values.

    Args:
        column: Name of the column.
    """

    column: str

    @property
    def variables(self) -> tuple[str, ...]:
        """Return the columns of a frame that the term reads."""
        return (self.column,)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the name of the column."""
        return (self.column,)

    def values(self, frame: Any, site: str) -> np.ndarray:
        """Return the column of a frame's rows, [n, 1].

        Raises:
            ValueError: It contains other than numbers, or an infinite one.
        """
        return numbers(frame, self.column, site)[:, None]


@dataclass(frozen=True)
class Levels(Number):
    """A category, with a column 0 or 1 for each level but the first, the reference; see `levels`.

    Args:
        column: Name of the column.
        levels: The levels, the reference first.
    """

    levels: tuple[Any, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that the category has in the design."""
        return tuple(f"{self.column}[{level}]" for level in self.levels[1:])

    def values(self, frame: Any, site: str) -> np.ndarray:
        """Return the columns of a frame's rows, [n, levels - 1]; NaN where the value is missing.

        Raises:
            ValueError: A row has another level.
        """
        given = column_of(frame, self.column, site)
        missing = given.isna().to_numpy()
        # as objects, because comparisons of nullable types can be missing
        given = given.astype(object).where(~missing, self.levels[0])
        if others := sorted({*given} - {*self.levels}, key=str):
            raise ValueError(
                f"site {site!r} has the values {others[:5]} in {self.column!r}, not among its "
                f"levels {list(self.levels)}; list them in levels(), or leave these rows out"
            )
        found = [(given == level).to_numpy(dtype=bool, na_value=False) for level in self.levels[1:]]
        return np.where(missing[:, None], np.nan, np.stack(found, 1))


Term: TypeAlias = str | Levels


def levels(column: str, values: Sequence[Any]) -> Levels:
    """Declare a category with all its levels, the reference first.

    Args:
        column: Name of the column.
        values: The column's values, at least two; each but the first has a column of 0 and 1 in the
            design, `column[level]`.

    Raises:
        ValueError: There are fewer than two levels, or one is named twice.

    Example:
        >>> bf.stats.levels("cp", [1, 2, 3]).columns
        ('cp[2]', 'cp[3]')
    """
    found = tuple(values)
    if len(found) < 2 or len({*found}) < len(found):
        raise ValueError(f"levels of {column!r} must be two or more, each once, got {list(found)}")
    return Levels(column, found)


def is_number(given: Any) -> bool:
    """Return whether a column holds numbers or truth values; digits as text are not numbers."""
    if given.dtype == object:
        return all(isinstance(value, Real | Decimal | np.bool_) for value in given.dropna())
    return given.dtype.kind in "iufb"


def numbers(frame: Any, column: str, site: str) -> np.ndarray:
    """Return a column of numbers, [n] in float64, NaN where a value is missing.

    Raises:
        ValueError: It is absent, or contains other than numbers, or an infinite one.
    """
    given = column_of(frame, column, site)
    if not is_number(given):
        some = sorted({str(value) for value in given.dropna()})[:5]
        raise ValueError(
            f"site {site!r} has no numbers in {column!r}, but {some}; declare a category by "
            f"levels({column!r}, [...]), or convert the values to numbers"
        )
    found = given.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(found).any():
        raise ValueError(f"site {site!r} has infinite numbers in {column!r}; leave them out")
    return found


def column_of(frame: Any, column: str, site: str) -> Any:
    """Return a column of a site's frame.

    Raises:
        ValueError: It is absent, or several columns have the name.
    """
    if (found := list(frame.columns).count(column)) != 1:
        raise ValueError(
            f"site {site!r} has {'several columns' if found else 'no column'} {column!r}; its "
            f"columns are {list(frame.columns)}: "
            "rename one, or leave out the term or the site"
        )
    return frame[column]
