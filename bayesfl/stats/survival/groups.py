"""Groups of rows by a column: those of curves, and the strata of a baseline."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.stats.asking import Sites
from bayesfl.stats.tables import Tables
from bayesfl.stats.terms import Levels, column_of

ALL = Levels("", ("all",))
"""One group of all rows."""


def groups_of(sites: Sites, by: str | Levels | None) -> Levels:
    """Return the groups by a column, or `ALL`.

    Raises:
        TypeError: It has text and numbers, which have no order.
        ValueError: Its levels are unknown here, or it has one value.
    """
    if by is None or isinstance(by, Levels):
        return by or ALL
    if not isinstance(sites, Tables):
        raise ValueError(f"the groups are unknown here: declare them, levels({by!r}, [...])")
    found = {
        value for site in sites.sites for value in column_of(site.frame, by, site.name).dropna()
    }
    if len(found) < 2:
        raise ValueError(f"{by!r} has one value only, {[*found]}; leave it out")
    return Levels(by, tuple(sorted(found)))


def group(frame: Any, by: Levels, site: str) -> Tensor:
    """Return the place of each row's group among the levels, [n], for a frame of a site.

    Raises:
        ValueError: A row has no group, or an undeclared one.
    """
    if by == ALL:
        return torch.zeros(len(frame), dtype=torch.int64)
    others = by.values(frame, site)
    if missing := int(np.isnan(others).any(1).sum()):
        raise ValueError(
            f"site {site!r} has {missing} rows without {by.column!r}; name it in "
            "tables(also=...), which checks for missing values, or leave these rows out"
        )
    return torch.from_numpy(others @ np.arange(1, len(by.levels))).long()
