"""Warnings about a data frame's likely mistakes: ids, dates as numbers, typing errors, copies of
the target, levels that differ by case alone. Each frame gives one warning.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bayesfl.base.warning import warn
from bayesfl.data.names import places_of
from bayesfl.data.tables.table import Table, Values

SLIP = 1000.0
"""A number is taken for a slip if it is this many times further from the median than the middle
half of the rows.
"""
UNITS, KNOWN_ROWS = 5.0, 20
"""Number of standard deviations of the other clients' rows from which on a client's mean is as in
another unit, and the least number of these rows.
"""
FIRST = 1000
"""Rows on which a column is compared with the target first."""
CHANCE_ROWS = 50
"""Rows that are needed before what all have in common is taken for more than chance."""


def few(names: Sequence[str]) -> str:
    """Return names as text, of many the first five and their number."""
    return f"{list(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def warn_of_columns(told: Sequence[str]) -> None:
    """Warn of what is doubtful in a frame's columns."""
    if told:
        warn(
            f"look at these columns: {'; '.join(told)}. Drop or correct them unless this is "
            "intended"
        )


def of_levels(what: str, levels: Sequence[str]) -> list[str]:
    """Tell of levels, or classes, that differ by case alone."""
    alike = places_of(level.casefold() for level in levels).values()
    twins = [levels[k] for places in alike if len(places) > 1 for k in places]
    return [f"{what} differ by case alone, and are kept apart: {few(twins)}"] if twins else []


def of_units(statistics: Mapping[str, Any]) -> list[str]:
    """Tell of clients whose mean of a column is far from all others', as in another unit."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for client, columns in statistics.items():
        for column in columns:
            if column["kind"] == "number" and (n := column["rows"] - column["missing"]):
                sums = np.array([n, n * column["mean"], column["squares"]])
                found.setdefault(column["name"], {})[client] = sums
    told = []
    for name, of in found.items():
        n, sums, squares = sum(of.values(), np.zeros(3))
        for client, (own, total, within) in of.items():
            others = n - own
            if others < KNOWN_ROWS:
                continue
            mean, rest = total / own, (sums - total) / others
            spread = np.sqrt((squares - within) / others)
            if spread > 0 and abs(mean - rest) > UNITS * spread:
                told.append(
                    f"{name!r} has a mean of {mean:.3g} at {client!r} and of {rest:.3g} elsewhere, "
                    "as in another unit"
                )
    return told[:10] + [f"and {len(told) - 10} more"] * (len(told) > 10)


def of_columns(
    table: Table, names: Sequence[str], categories: Sequence[str], rows: np.ndarray, y: np.ndarray
) -> list[str]:
    """Tell of inputs that are probably no measurements.

    Args:
        table: The frame.
        names: The columns that are inputs.
        categories: Those that are categories though they may hold numbers.
        rows: The training rows, [n].
        y: The targets of all rows, [N] or [N, O].
    """
    told = []
    for name in names:
        values = table.values(name)
        if values.numbers is not None and name not in categories:
            told += _of_numbers(values, rows)
        if len(rows) >= CHANCE_ROWS and y.ndim == 1 and _tells(values, rows, y[rows]):
            told.append(f"{name!r} tells the target of every row, as a copy of it does")
    return told


def _of_numbers(values: Values, rows: np.ndarray) -> list[str]:
    assert values.numbers is not None
    held = values.numbers[rows]
    known = held[~np.isnan(held)]
    if len(known) < CHANCE_ROWS:
        return []
    told = []
    if values.exact is not None:
        exact = values.exact[rows].tolist()
        if all(len(set(some)) == len(some) for some in (exact[:FIRST], exact)):
            told.append(f"{values.name!r} has another whole number in every row, as an id has")
        year, month, day = known // 10_000, known // 100 % 100, known % 100
        if bool(
            (
                (year >= 1900)
                & (year <= 2100)
                & (month >= 1)
                & (month <= 12)
                & (day >= 1)
                & (day <= 31)
            ).all()
        ):
            told.append(f"{values.name!r} looks like dates written as numbers")
    low, middle, high = np.quantile(known, [0.25, 0.5, 0.75])
    away = np.abs(known - middle)
    if high > low and away.max() > SLIP * (high - low):
        told.append(
            f"{values.name!r} holds {known[away.argmax()]:g}, while half of the rows are from "
            f"{low:g} to {high:g}"
        )
    return told


def _tells(values: Values, rows: np.ndarray, y: np.ndarray) -> bool:
    """Return whether a column has one value for each of at least two targets: equal ones, or levels
    that come with one class each.
    """
    if y.dtype.kind != "i":
        if values.numbers is None:
            return False
        held = values.numbers[rows]
        spread = float(np.std(held)) if np.isfinite(held).all() else 0.0
        return (
            spread > 0
            and float(np.std(y)) > 0
            and abs(float(np.corrcoef(held, y.astype(float))[0, 1])) > 1 - 1e-9
        )
    # Nearly every column fails at its first rows, before all are compared.
    return _paired(values, rows[:FIRST], y[:FIRST]) and _paired(values, rows, y, least=2)


def _paired(values: Values, rows: np.ndarray, y: np.ndarray, *, least: int = 1) -> bool:
    """Return whether each level of some rows has one class, and each class one level."""
    pairs = set(zip(values.levels(rows).tolist(), y.tolist(), strict=True))
    classes = len({label for _, label in pairs})
    return len(pairs) == len({level for level, _ in pairs}) == classes >= least
