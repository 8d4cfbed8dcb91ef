"""Sites with rows of every family, and the same rows in one table."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

import bayesfl as bf
from bayesfl.stats.tables import Tables

SIZES = {"east": 70, "north": 120, "south": 50, "west": 90}
TERMS: tuple[Any, ...] = ("age", bf.stats.levels("kind", ["a", "b", "c"]))
OUTCOMES = {
    "gaussian": "score",
    "binomial": "ill",
    "log_binomial": "rare",
    "poisson": "visits",
    "negative_binomial": "days",
}


@cache
def frames() -> Mapping[str, pd.DataFrame]:
    """Rows of four sites, whose levels of the outcomes differ."""
    rng = np.random.default_rng(0)
    found = {}
    for place, (site, n) in enumerate(SIZES.items()):
        age = rng.normal(50 + 3 * place, 10, n)
        kind = rng.choice(["a", "b", "c"], n, p=[0.5, 0.3, 0.2])
        eta = 0.04 * (age - 50) + 0.5 * (kind == "b") - 0.4 * (kind == "c") + 0.3 * place - 0.5
        found[site] = pd.DataFrame(
            {
                "site": site,
                "age": age,
                "kind": kind,
                "exposure": rng.uniform(0.5, 2, n),
                "count": rng.integers(1, 4, n),
                "score": eta + rng.normal(0, 1, n),
                "ill": rng.random(n) < 1 / (1 + np.exp(-eta)),
                "rare": rng.random(n) < np.exp(np.minimum(0.3 * eta - 1.5, -0.05)),
                "visits": rng.poisson(np.exp(0.5 * eta)),
                "days": rng.negative_binomial(2, 2 / (2 + np.exp(0.5 * eta))),
            }
        )
    return found


def sites(family: str, **options: Any) -> Tables:
    """The tables of these sites with the outcome of a family."""
    return bf.stats.tables(frames(), **{"outcome": OUTCOMES[family], "terms": TERMS, **options})


def pooled() -> pd.DataFrame:
    """All rows, the sites in the order of their names."""
    return pd.concat([frames()[site] for site in sorted(SIZES)], ignore_index=True)
