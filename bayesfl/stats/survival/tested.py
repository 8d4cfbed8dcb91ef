"""Tests over sites."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bayesfl.base.display.sheet import Sheet, Shown, of_frame
from bayesfl.stats.asking import Released


@dataclass(frozen=True, repr=False)
class Tested(Shown):
    """Hold the result of a test by sums over sites; `print` shows it.

    Args:
        what: What was tested, in words.
        statistic: Its statistic, under the null of a chi-squared distribution.
        degrees: Degrees of freedom.
        p: Probability of a statistic as large.
        table: What it is made of, a data frame of pandas.
        released: What left each site.
        said: What follows, in words.
        left_out: {site: why it has no part}.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"t": [2, 3, 5, 8] * 5, "d": [1, 1, 0, 1] * 5})
        >>> frame["arm"] = list("aabb") * 5
        >>> sites = bf.stats.tables({"north": frame, "south": frame}, also=["t", "d", "arm"])
        >>> test = bf.stats.logrank(sites, time="t", event="d", by="arm", exact_times=True)
        >>> test.p < 0.01
        True
    """

    what: str
    statistic: float
    degrees: int
    p: float
    table: Any
    released: Released
    said: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def sheet(self) -> Sheet:
        """Return the test and its table, with what to know of it below."""
        head = (
            f"{self.what}: chi2 {self.statistic:.4f} on {self.degrees} degrees of freedom, p "
            f"{self.p:.4g}"
        )
        left = [f"left out: {site}, {why}" for site, why in self.left_out.items()]
        return of_frame(self.table, head, [*self.said, *left, str(self.released)])
