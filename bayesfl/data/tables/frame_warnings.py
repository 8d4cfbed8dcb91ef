"""Warnings about clients whose frames do not fit together: levels that differ by case alone, and
columns in another unit. Each frame gives one warning.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bayesfl.data.names import places_of

UNITS, KNOWN_ROWS = 5.0, 20
"""Smallest distance of a client's mean from that of the other clients that suggests another unit,
in standard deviations of their rows; and the smallest number of these rows.
"""


def few(names: Sequence[str]) -> str:
    """Return the first five names as text, and the number of the others."""
    return f"{list(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def of_levels(what: str, levels: Sequence[str]) -> list[str]:
    """Return a warning about levels, or classes, that differ by case alone."""
    alike = places_of(level.casefold() for level in levels).values()
    twins = [levels[k] for places in alike if len(places) > 1 for k in places]
    return [f"{what} differ by case alone, and are kept apart: {few(twins)}"] if twins else []


def of_units(statistics: Mapping[str, Any]) -> list[str]:
    """Return warnings about clients whose mean of a column is far from all others', as in another
    unit, and about columns in which most clients' are, as an identifier's.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for client, columns in statistics.items():
        for column in columns:
            if column["kind"] == "number" and (n := column["rows"] - column["missing"]):
                sums = np.array([n, n * column["mean"], column["squares"]])
                found.setdefault(column["name"], {})[client] = sums
    told = []
    for name, of in found.items():
        n, sums, squares = sum(of.values(), np.zeros(3))
        far = []
        for client, (own, total, within) in of.items():
            others = n - own
            if others < KNOWN_ROWS:
                continue
            mean, rest = total / own, (sums - total) / others
            spread = np.sqrt((squares - within) / others)
            if spread > 0 and abs(mean - rest) > UNITS * spread:
                far.append(
                    f"{name!r} has a mean of {mean:.3g} at {client!r} and of {rest:.3g} elsewhere, "
                    "as in another unit"
                )
        one = [f"{name!r} looks like an identifier: its means differ between most clients"]
        told += one if len(far) > max(2, len(of) / 2) else far
    return told[:10] + [f"and {len(told) - 10} more"] * (len(told) > 10)
