"""Sites with times of follow-up, and the same rows in one table."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

import bayesfl as bf
from bayesfl.stats.asking import Questions
from bayesfl.stats.survival.times import BINS, Grid, follow, grid_of
from bayesfl.stats.tables import Tables

SIZES = {"east": 70, "north": 120, "south": 50, "west": 90}
TERMS: tuple[Any, ...] = ("age", "arm", bf.stats.levels("kind", ["a", "b", "c"]))
COLUMNS = ["age", "arm", "b", "c"]
TIMES = ["tied", "untied"]


@cache
def frames() -> Mapping[str, pd.DataFrame]:
    """Rows of four sites: times to half a unit, which tie, and times that do not."""
    rng = np.random.default_rng(0)
    found = {}
    for place, (site, n) in enumerate(SIZES.items()):
        age, arm = rng.normal(50 + place, 10, n), rng.integers(0, 2, n)
        rate = np.exp(0.03 * (age - 50) + 0.5 * arm + 0.2 * place) / 10
        event, censored = rng.exponential(1 / rate), rng.exponential(15, n)
        found[site] = pd.DataFrame(
            {
                "site": site,
                "age": age,
                "arm": arm,
                "kind": rng.choice(["a", "b", "c"], n),
                "count": rng.integers(1, 4, n),
                "tied": np.ceil(2 * np.minimum(event, censored)) / 2,
                "untied": np.minimum(event, censored) + 1e-3,
                "event": (event <= censored).astype(int),
            }
        )
    return found


def sites(given: Mapping[str, pd.DataFrame] | None = None, **options: Any) -> Tables:
    """The tables of these sites, or of others, without an outcome."""
    chosen = {"terms": TERMS, "also": ["tied", "untied", "event"], **options}
    return bf.stats.tables(given or frames(), **chosen)


def pooled(given: Mapping[str, pd.DataFrame] | None = None) -> pd.DataFrame:
    """All rows, the sites in the order of their names, the kinds as columns."""
    given = given or frames()
    rows = pd.concat([given[site] for site in sorted(given)], ignore_index=True)
    return rows.join(pd.get_dummies(rows["kind"], dtype=float)[["b", "c"]])


def rounded(time: str, grid: Any = BINS) -> tuple[Grid, pd.DataFrame]:
    """A grid, and the pooled rows with times rounded as on it: who leaves before the first of it
    never meets an event.
    """
    asked = Questions(sites())
    found = grid_of(asked, time, "event", follow(asked, time, "event"), grid, False)
    rows, ends = pooled(), np.array([found.ends[0] / 2, *found.ends])
    place = np.searchsorted(found.ends, rows[time])
    middles = found.middles or (np.array([0.0, *found.ends[:-1]]) + found.ends) / 2
    early = (rows["event"] == 0) & (rows[time] < np.array(middles)[place])
    return found, rows.assign(**{time: ends[1 + place - early]})
