"""Tests over sites."""

from dataclasses import dataclass
from typing import Any

from bayesfl.base.display.sheet import Sheet, of_frame
from bayesfl.stats.asking import Answered


@dataclass(frozen=True, repr=False)
class Tested(Answered):
    """Hold the result of a test from sums over sites; `print` shows it.

    Args:
        what: The hypothesis, in words.
        statistic: Its statistic, chi-squared under the null hypothesis.
        degrees: Degrees of freedom.
        p: Probability of a statistic as large.
        table: Its parts, as a data frame of pandas.
        said: Conclusions, in words.

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
    said: tuple[str, ...] = ()

    def sheet(self) -> Sheet:
        """Return the test and its table, with remarks below."""
        head = (
            f"{self.what}: chi2 {self.statistic:.4f} on {self.degrees} degrees of freedom, p "
            f"{self.p:.4g}"
        )
        return of_frame(self.table, head, [*self.said, *self._below])
