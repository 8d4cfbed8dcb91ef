"""Curves of survival over sites, and the test that groups have one: sums of numbers at risk and of
events, for each group and time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from bayesfl.base.display.html import frame
from bayesfl.base.options import Count, Share, declared
from bayesfl.base.protocols import Tensors
from bayesfl.federation.clients.surveying import Adder
from bayesfl.stats.asking import Questions, Released, Sites, SiteSurvey
from bayesfl.stats.survival.tested import Tested
from bayesfl.stats.survival.times import BINS, Grid, follow, followed, grid_of
from bayesfl.stats.tables import Levels, Site, Tables
from bayesfl.stats.terms import column_of

ALL = "all"


@dataclass(frozen=True)
class Counts(SiteSurvey):
    """Ask how many rows are at risk, and have an event, at each time, by group.

    Args:
        time: Column of times.
        event: Column of events.
        grid: The T times.
        by: Column of groups; None for one.
        levels: The G groups.
    """

    time: str
    event: str
    grid: Grid
    by: str | None
    levels: tuple[Any, ...]

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        shape = (len(self.levels), len(self.grid.ends))
        return {"at_risk": shape, "events": shape}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's numbers; see `SiteSurvey`."""
        times, events = followed(site, self.time, self.event)
        last = self.grid.last(times, site.name)
        group = self._groups(site)
        groups, size = self.shapes(state)["events"]

        def counted(rows: Tensor) -> Tensor:
            at = group[rows] * size + last[rows]
            found = torch.bincount(at, site.weights[rows], minlength=groups * size)
            return found.reshape(groups, size)

        at_risk = counted(last >= 0).flip(1).cumsum(1).flip(1)
        return {"at_risk": at_risk, "events": counted(events)}

    def cells(self, state: Tensors, site: Site) -> Sequence[Tensor]:
        """Return who leaves the risk set of each group when and how; see `SiteSurvey`."""
        times, events = followed(site, self.time, self.event)
        at = self._groups(site) * len(self.grid.ends) + self.grid.last(times, site.name)
        return (2 * at + events,)

    def _groups(self, site: Site) -> Tensor:
        """Return the place of each row's group, [n]."""
        if self.by is None:
            return torch.zeros(len(site.weights), dtype=torch.int64)
        others = Levels(self.by, self.levels).values(site.frame, site.name)
        if missing := int(np.isnan(others).any(1).sum()):
            raise ValueError(
                f"site {site.name!r} has {missing} rows without {self.by!r}; name it in "
                "tables(also=...), which looks at missing values, or leave these rows out"
            )
        return torch.from_numpy(others @ np.arange(1, len(self.levels))).long()


@dataclass(frozen=True, repr=False)
class KaplanMeier:
    """Hold survival curves by Kaplan and Meier, with Greenwood's errors; `print` shows medians, and
    `bf.plots.kaplan_meier` draws them.

    Args:
        groups: Names of the G groups.
        times: The T times of events, or upper ends of bins.
        at_risk: Rows at risk just before each time, [G, T].
        events: Events at each time, [G, T].
        told: What the times are, in words.
        rows: {site: its number of rows, each as often as it counts}.
        dropped: {site: rows left out as a value is missing}.
        left_out: {site: why it has no part}.
        released: What left each site.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"t": [2, 3, 5, 8], "d": [1, 1, 0, 1]})
        >>> sites = bf.stats.tables({"north": frame}, also=["t", "d"])
        >>> curve = bf.stats.kaplan_meier(sites, time="t", event="d", exact_times=True)
        >>> curve.survival[0, -1].item()  # nobody is left
        0.0
    """

    groups: tuple[str, ...]
    times: Tensor
    at_risk: Tensor
    events: Tensor
    told: str
    rows: Mapping[str, float]
    dropped: Mapping[str, float]
    left_out: Mapping[str, str]
    released: Released

    @property
    def survival(self) -> Tensor:
        """Return the probability to be without an event after each time, [G, T]."""
        return (1 - self.events / self.at_risk.clamp_min(1e-300)).cumprod(1)

    @property
    def log_variance(self) -> Tensor:
        """Return Greenwood's variance of the logarithm of survival, [G, T]; infinite where that
        is 0.
        """
        left = self.at_risk - self.events
        return torch.where(self.events > 0, self.events / (self.at_risk * left), 0.0).cumsum(1)

    @property
    def error(self) -> Tensor:
        """Return Greenwood's standard errors of survival, [G, T]; 0 where survival is 0."""
        survival = self.survival
        return torch.where(survival > 0, survival * self.log_variance.sqrt(), 0.0)

    def interval(self, level: Share = 0.95) -> tuple[Tensor, Tensor]:
        """Return lower and upper ends of intervals, [G, T], normal for log(-log survival), which
        are survival itself where it is 1 or 0.

        Args:
            level: Probability of each interval.
        """
        survival = self.survival
        inside = (survival > 0) & (survival < 1)
        log = torch.where(inside, survival, 0.5).log()
        variance = torch.where(inside, self.log_variance, 0.0)
        reach = float(stats.norm.ppf((1 + level) / 2)) * variance.sqrt() / log
        ends = [torch.where(inside, (log * sign.exp()).exp(), survival) for sign in (-reach, reach)]
        return ends[0], ends[1]

    def table(self, level: Share = 0.95) -> Any:
        """Return a data frame of pandas with a row for each group and time.

        Args:
            level: Probability of the intervals.
        """
        import pandas

        low, high = self.interval(level)
        columns = {
            "at risk": self.at_risk,
            "events": self.events,
            "survival": self.survival,
            "se": self.error,
            _percent((1 - level) / 2): low,
            _percent((1 + level) / 2): high,
        }
        index = pandas.MultiIndex.from_product(
            [self.groups, self.times.tolist()], names=["group", "time"]
        )
        return pandas.DataFrame(
            {name: values.flatten().numpy() for name, values in columns.items()}, index=index
        )

    def median(self, level: Share = 0.95) -> Any:
        """Return the first time after which at most half are without an event, of each group, with
        those of the ends of the intervals, as a data frame of pandas; infinite where more are.

        Args:
            level: Probability of the intervals.
        """
        import pandas

        low, high = self.interval(level)
        columns = {
            "rows": self.at_risk[:, 0],
            "events": self.events.sum(1),
            "median": self._first(self.survival),
            _percent((1 - level) / 2): self._first(low),
            _percent((1 + level) / 2): self._first(high),
        }
        return pandas.DataFrame(
            {name: values.numpy() for name, values in columns.items()}, index=list(self.groups)
        )

    def _first(self, curve: Tensor) -> Tensor:
        """Return the first time at which each curve is 0.5 or below, [G]."""
        return torch.where(curve <= 0.5 + 1e-12, self.times, torch.inf).amin(1)

    def __str__(self) -> str:
        dropped = sum(self.dropped.values())
        lines = [
            f"Kaplan-Meier, {self.told}",
            self.median().to_string(float_format=lambda value: f"{value:.4g}"),
            f"{len(self.rows)} sites, {sum(self.rows.values()):.10g} rows"
            + (f", {dropped} left out" if dropped else ""),
            *(f"left out: {site}, {why}" for site, why in self.left_out.items()),
            str(self.released),
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return frame(self.median(), caption=f"Kaplan-Meier, {self.told}")


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


@declared
def kaplan_meier(
    sites: Sites,
    *,
    time: str,
    event: str,
    by: str | Levels | None = None,
    grid: Count | Sequence[float] = BINS,
    exact_times: bool = False,
    aggregation: Adder | None = None,
) -> KaplanMeier:
    """Estimate survival curves of the rows of all sites, by Kaplan and Meier.

    Args:
        sites: The sites, of `tables`, whose design and outcome are not read.
        time: Column of times, > 0.
        event: Column of events: 1 where the time ends in one, 0 where it is censored.
        by: Column of groups, each with a curve of its own; on other machines `levels`, as what
            values there are is known here only.
        grid: Number of bins up to the longest time, rounded up to one digit, or their upper ends;
            times are rounded up to these.
        exact_times: Whether sites tell the times of events as they are.
        aggregation: How the sites' answers are added, as `SecureSum()`; None adds them openly.

    Raises:
        ValueError: A time is not above 0 or beyond the grid, an event is not 0 or 1, no site has
            one, or a group is missing or none of the levels.

    Source: Kaplan and Meier, "Nonparametric estimation from incomplete observations", JASA 53,
        1958.

    Example:
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> frames = {
        ...     "north": pd.DataFrame({"t": [2, 3, 5, 8], "d": [1, 1, 0, 1]}),
        ...     "south": pd.DataFrame({"t": [1, 4, 6, 7], "d": [1, 0, 1, 1]}),
        ... }
        >>> sites = bf.stats.tables(frames, also=["t", "d"])
        >>> found = bf.stats.kaplan_meier(sites, time="t", event="d", exact_times=True)
        >>> found.median()[["events", "median"]].to_dict("records")
        [{'events': 6.0, 'median': 6.0}]
    """
    asked = Questions(sites, aggregation)
    known = follow(asked, time, event)
    times = grid_of(asked, time, event, known.horizon, grid, exact_times)
    told = str(times)
    if exact_times:  # numbers at risk are told between events, too, and up to the horizon
        marks = (known.horizon * np.arange(1, 11) / 10).tolist()
        times = Grid(tuple(sorted({*times.ends, *marks})), exact_times=True)
    sums = asked.first(lambda count: Counts(time, event, times, *_groups(asked.sites, by)))
    _, levels = _groups(asked.sites, by)
    kept = asked.sites.names
    return KaplanMeier(
        groups=tuple(map(str, levels)),
        times=torch.tensor(times.ends, dtype=torch.float64),
        at_risk=sums["at_risk"],
        events=sums["events"],
        told=told,
        rows={name: known.rows[name] for name in kept},
        dropped={name: known.dropped[name] for name in kept},
        left_out=asked.left_out,
        released=asked.released,
    )


def _groups(sites: Sites, by: str | Levels | None) -> tuple[str | None, tuple[Any, ...]]:
    """Return the column of groups and its levels.

    Raises:
        ValueError: Its levels are not known here.
    """
    if by is None:
        return None, (ALL,)
    if isinstance(by, Levels):
        return by.column, by.levels
    if not isinstance(sites, Tables):
        raise ValueError(f"what groups there are is not known here: by=levels({by!r}, [...])")
    found = {
        value for site in sites.sites for value in column_of(site.frame, by, site.name).dropna()
    }
    if len(found) < 2:
        raise ValueError(f"{by!r} has one value only, {[*found]}; leave it out")
    return by, tuple(sorted(found))


@declared
def logrank(
    sites: Sites,
    *,
    time: str,
    event: str,
    by: str | Levels,
    grid: Count | Sequence[float] = BINS,
    exact_times: bool = False,
    aggregation: Adder | None = None,
) -> Tested:
    """Test whether two or more groups have the same hazard, by the log-rank test over the rows of
    all sites.

    Args:
        sites: The sites, of `tables`, whose design and outcome are not read.
        time: As in `kaplan_meier`.
        event: As in `kaplan_meier`.
        by: Column of groups, as of `kaplan_meier`.
        grid: As in `kaplan_meier`.
        exact_times: As in `kaplan_meier`.
        aggregation: As in `kaplan_meier`.

    Raises:
        ValueError: A group has no row, or as by `kaplan_meier`.

    Source: Mantel, "Evaluation of survival data and two new rank order statistics arising in its
        consideration", Cancer Chemotherapy Reports 50, 1966; the hypergeometric variance.

    Example:
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> frames = {
        ...     "north": pd.DataFrame({"t": [2, 3, 5, 8], "d": [1, 1, 0, 1], "arm": list("aabb")}),
        ...     "south": pd.DataFrame({"t": [1, 4, 6, 7], "d": [1, 0, 1, 1], "arm": list("abab")}),
        ... }
        >>> sites = bf.stats.tables(frames, also=["t", "d", "arm"])
        >>> test = bf.stats.logrank(sites, time="t", event="d", by="arm", exact_times=True)
        >>> round(test.statistic, 3), test.degrees
        (6.156, 1)
    """
    import pandas

    asked = Questions(sites, aggregation)
    known = follow(asked, time, event)
    times = grid_of(asked, time, event, known.horizon, grid, exact_times)
    sums = asked.first(lambda count: Counts(time, event, times, *_groups(asked.sites, by)))
    column, levels = _groups(asked.sites, by)
    at_risk, events = sums["at_risk"], sums["events"]
    if absent := [level for level, n in zip(levels, at_risk[:, 0].tolist(), strict=True) if n == 0]:
        raise ValueError(f"the groups {absent} of {column!r} have no row at risk; leave them out")
    n, d = at_risk.sum(0), events.sum(0)
    share = at_risk / n.clamp_min(1e-300)
    expected = (d * share).sum(1)
    factor = torch.where(n > 1, d * (n - d) / (n - 1).clamp_min(1e-300), 0.0)
    variance = torch.diag((factor * share).sum(1)) - (factor * share) @ share.T
    excess = (events.sum(1) - expected)[:-1]  # the last is what the others lack
    statistic = float(excess @ torch.linalg.solve(variance[:-1, :-1], excess))
    columns = {"at risk at first": at_risk[:, 0], "events": events.sum(1), "expected": expected}
    return Tested(
        what=f"log-rank of {len(levels)} groups of {column}, {times}",
        statistic=statistic,
        degrees=len(levels) - 1,
        p=float(stats.chi2.sf(statistic, len(levels) - 1)),
        table=pandas.DataFrame(
            {name: values.numpy() for name, values in columns.items()}, index=list(map(str, levels))
        ),
        released=asked.released,
        left_out=asked.left_out,
    )
