"""Survival curves over sites, and the test that groups have the same: from numbers at risk and of
events for each group and time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas
import torch
from scipy import stats
from torch import Tensor

from bayesfl.base.display.sheet import Sheet, of_frame
from bayesfl.base.options import Count, Share, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.warning import warn
from bayesfl.federation.clients.surveying import Adder
from bayesfl.stats.asking import Answered, Questions, Sites, with_likelihood
from bayesfl.stats.survival.groups import ALL, group, groups_of
from bayesfl.stats.survival.tested import Tested
from bayesfl.stats.survival.times import BINS, Grid, OfTimes, entries, follow, followed, grid_of
from bayesfl.stats.tables import Site
from bayesfl.stats.terms import Levels


@dataclass(frozen=True)
class Counts(OfTimes):
    """Ask for the numbers of rows at risk, and with an event, at each time, by group.

    Args:
        grid: The T times.
        by: The G groups.
        robust: Whether to ask for sums of squared weights, too, of rows by their last time, without
            an event there and with one, [G, 1 + T, 2]; at 0 those of rows that are never at risk.
        entry: Column of the times at which rows enter; None if all are at risk from 0.
    """

    grid: Grid
    by: Levels = ALL
    robust: bool = False
    entry: str | None = None

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        g, t = len(self.by.levels), len(self.grid.ends)
        found = {"rows": (g,), "at_risk": (g, t), "events": (g, t)}
        return {**found, "square": (g, 1 + t, 2)} if self.robust else found

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's numbers; see `SiteSurvey`."""
        cells, entering = self.cells(state, site)
        g, t = self.shapes(state)["events"]

        def by_cell(values: Tensor) -> Tensor:
            return torch.bincount(cells, values, minlength=g * (1 + t) * 2).reshape(g, 1 + t, 2)

        leaving = by_cell(site.weights)
        entered = torch.bincount(entering, site.weights, minlength=g * (1 + t)).reshape(g, -1)
        found = {
            "rows": by_cell(site.counts).sum((1, 2)),
            "at_risk": (leaving.sum(2) - entered).flip(1).cumsum(1).flip(1)[:, 1:],
            "events": leaving[:, 1:, 1],
        }
        return {**found, "square": by_cell(site.weights.square())} if self.robust else found

    def cells(self, state: Tensors, site: Site) -> list[Tensor]:
        """Return the cells of groups, times and events, and of groups and entry times; see
        `SiteSurvey`.
        """
        times, events = followed(site, self.time, self.event)
        own = group(site.frame, self.by, site.name)
        last = self.grid.last(site, times, events, own)
        first = self.grid.first(
            site, entries(site, self.time, self.entry, times), last, events, own
        )
        return [self.grid.cells(last, events, own), own * (len(self.grid.ends) + 1) + first]


@dataclass(frozen=True, repr=False)
class KaplanMeier(Answered):
    """Hold survival curves by Kaplan and Meier with their errors; `print` shows medians, and
    `bf.plots.kaplan_meier` draws them.

    Args:
        groups: Names of the G groups.
        times: The T times of events, or upper ends of bins, while somebody is at risk.
        at_risk: Rows at risk just before each time, [G, T], or the sum of their weights.
        events: Events at each time, [G, T], or the sum of their weights.
        counts: Number of rows of each group, [G].
        log_variance: Variance of the logarithm of survival, [G, T], Greenwood's or the robust one;
            infinite where survival is 0.
        told: A text on the times.
        said: A text on the possible error of survival by bins of times.
        rows: {site: its number of rows, counted by weight}.

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
    counts: Tensor
    log_variance: Tensor
    told: str
    said: str
    rows: Mapping[str, float]

    @property
    def survival(self) -> Tensor:
        """Return the probability of no event until after each time, [G, T]."""
        return _survival(self.at_risk, self.events)

    @property
    def error(self) -> Tensor:
        """Return the standard errors of survival, [G, T]; 0 where survival is 0."""
        survival = self.survival
        return torch.where(survival > 0, survival * self.log_variance.sqrt(), 0.0)

    def interval(self, level: Share = 0.95) -> tuple[Tensor, Tensor]:
        """Return lower and upper ends of intervals, [G, T], normal for log(-log survival). Where
        survival is 1 or 0, both equal it.

        Args:
            level: Probability of each interval.
        """
        survival = self.survival
        inside = (survival > 0) & (survival < 1)
        log = survival.log()
        reach = float(stats.norm.ppf((1 + level) / 2)) * self.log_variance.sqrt() / log
        ends = [torch.where(inside, (log * sign.exp()).exp(), survival) for sign in (-reach, reach)]
        return ends[0], ends[1]

    def table(self, level: Share = 0.95) -> Any:
        """Return a data frame of pandas with a row for each group and time at which any of its rows
        is at risk.

        Args:
            level: Probability of the intervals.
        """
        low, high = self.interval(level)
        columns = {
            "at risk": self.at_risk,
            "events": self.events,
            "survival": self.survival,
            "se": self.error,
            f"{50 * (1 - level):g} %": low,
            f"{50 * (1 + level):g} %": high,
        }
        index = pandas.MultiIndex.from_product(
            [self.groups, self.times.tolist()], names=["group", "time"]
        )
        return pandas.DataFrame(
            {name: values.flatten().numpy() for name, values in columns.items()}, index=index
        )[self.at_risk.flatten().numpy() > 0]

    def median(self, level: Share = 0.95) -> Any:
        """Return the median survival time of each group with its interval, as a data frame of
        pandas; infinite if survival stays above a half.

        Args:
            level: Probability of the intervals.
        """
        low, high = self.interval(level)
        columns = {
            "rows": self.counts,
            "events": self.events.sum(1),
            "median": self._first(self.survival),
            f"{50 * (1 - level):g} %": self._first(low),
            f"{50 * (1 + level):g} %": self._first(high),
        }
        return pandas.DataFrame(
            {name: values.numpy() for name, values in columns.items()}, index=list(self.groups)
        )

    def _first(self, curve: Tensor) -> Tensor:
        """Return the first time at which each curve is 0.5 or below, [G]."""
        return torch.where(curve <= 0.5 + 1e-12, self.times, torch.inf).amin(1)

    def sheet(self) -> Sheet:
        """Return the medians, with the facts about the estimate below them."""
        dropped = sum(self.dropped.values())
        lines = [
            f"{len(self.rows)} sites, {sum(self.rows.values()):.10g} rows"
            + (f", {dropped} left out" if dropped else ""),
            *(f"left out: {site}, {why}" for site, why in self.left_out.items()),
            *([self.said] if self.said else []),
            str(self.released),
        ]
        return of_frame(self.median(), f"Kaplan-Meier, {self.told}", lines)


def _survival(at_risk: Tensor, events: Tensor) -> Tensor:
    return (1 - events / at_risk.clamp_min(1e-300)).cumprod(1)


def _log_variance(at_risk: Tensor, events: Tensor, square: Tensor | None) -> Tensor:
    """Return Greenwood's variance of the logarithm of survival, [G, T], or, from sums of squared
    weights [G, 1 + T, 2], the robust one; infinite where survival is 0.

    A row's weight w moves the logarithm of survival after t by w u, where u is Greenwood's sum c
    up to t or to the row's last time, less 1 / (at risk - events) at an event of its own; the
    robust variance is the sum of (w u)^2. With weights of 1 it is Greenwood's.
    """
    left = at_risk - events
    died = (events > 0) & (left > 0)
    found = c = torch.where(died, events / (at_risk * left), 0.0).cumsum(1)
    if square is not None:
        own = torch.where(died, 1 / left, 0.0)
        gone = square[:, 1:, 0] * c.square() + square[:, 1:, 1] * (c - own).square()
        later = square.sum(2).flip(1).cumsum(1).flip(1)
        later = torch.cat([later[:, 2:], torch.zeros_like(later[:, :1])], 1)
        found = gone.cumsum(1) + c.square() * later
    return torch.where(_survival(at_risk, events) > 0, found, torch.inf)


def _off(at_risk: Tensor, events: Tensor, log_variance: Tensor) -> Tensor:
    """Return the change of survival in standard errors, [G, T], if neighbouring times are joined in
    pairs, from the first on and from the second on. A row that is censored between two joined times
    counts half as at risk.
    """
    survival, found = _survival(at_risk, events), torch.zeros_like(at_risk)
    for skip in (0, 1):
        pairs = [
            torch.cat([front, t], 1)[:, : (t.shape[1] + skip) // 2 * 2].unflatten(1, (-1, 2))
            for t, front in ((at_risk, at_risk[:, :skip]), (events, 0 * events[:, :skip]))
        ]
        (first, second), (died, later) = (pair.unbind(2) for pair in pairs)
        joined = _survival((first + second + died) / 2, died + later).clamp_min(0.0)
        own = survival[:, 1 - skip :: 2]
        found[:, 1 - skip :: 2] = (joined - own).abs() / own.clamp_min(1e-300)
    return torch.where((found > 1e-12) & (at_risk > 0), found / log_variance.sqrt(), 0.0)


@declared
def kaplan_meier(
    sites: Sites,
    *,
    time: str,
    event: str,
    by: str | Levels | None = None,
    grid: Count | Sequence[float] | Grid = BINS,
    exact_times: bool = False,
    entry: str | None = None,
    aggregation: Adder | None = None,
) -> KaplanMeier:
    """Estimate survival curves of the rows of all sites, by Kaplan and Meier.

    Under probability weights these are the weighted curves, and their errors robust.

    On a grid, survival and medians refer to the ends of bins. The result reports the possible error
    from rows that are censored in a bin: the change of survival if bins are joined in pairs, from
    the first or the second on.

    Args:
        sites: The sites, of `tables`; their design and outcome are not read.
        time: Column of times, > 0.
        event: Column of events: 1 if the time ends in one, 0 if it is censored.
        by: Column of groups, each with its own curve; over a network `levels`, because values are
            only known here.
        grid: As in `cox`; with `by` each site has `min_level` events of each group in a bin.
        exact_times: Whether sites send the exact times of events.
        entry: Column of entry times, as in `cox`; not with probability weights.
        aggregation: How the sites' answers are added, such as `SecureSum()`; None adds them openly.

    Raises:
        ValueError: A time is not above 0 or beyond the grid, an event is not 0 or 1, no site has
            one, or a group is missing or none of the levels.

    Warns:
        UserWarning: Bins of times may shift survival by more than its standard error.

    Source: Kaplan and Meier, "Nonparametric estimation from incomplete observations", JASA 53,
        1958; robust errors as in Williams, "Product-limit survival functions with correlated
        survival times", Lifetime Data Analysis 1, 1995, each row a cluster of its own, which are
        those of R's survfit(robust=TRUE).

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
    times = grid_of(asked, time, event, known, grid, exact_times, by)
    told, robust = str(times), sites.weighing == "probability"
    if robust and entry is not None:
        raise ValueError("curves with entry= have no robust errors: take cox, or leave out weights")
    if exact_times:  # numbers at risk also between events, and up to the horizon
        ends = tuple(sorted({*times.ends, *known.marks}))
        times = replace(times, ends=ends, middles=ends)
    sums = asked.first(
        lambda count: Counts(time, event, times, groups_of(asked.sites, by), robust, entry)
    )
    kept = asked.sites.names
    there = sums["at_risk"].sum(0) > 0
    at_risk, events = sums["at_risk"], sums["events"]
    variance = _log_variance(at_risk, events, sums.get("square"))
    said = ""
    if not exact_times:
        off = _off(at_risk, events, variance)
        most, place = off.amax(0).max(0)
        said = (
            f"survival may be off by {float(most):.2g} standard errors for its bins of times (at "
            f"{times.ends[int(place)]:g})"
        )
        if most > 1:
            first = times.ends[int((off.amax(0) > 1).nonzero()[0])]
            warn(f"{said}. Estimates from time {first:g} on are unreliable. Use exact_times=True.")
    return KaplanMeier(
        groups=tuple(map(str, groups_of(asked.sites, by).levels)),
        times=torch.tensor(times.ends, dtype=torch.float64)[there],
        at_risk=at_risk[:, there],
        events=events[:, there],
        counts=sums["rows"],
        log_variance=variance[:, there],
        told=told
        + (f", entry at {entry!r}" if entry else "")
        + (", robust errors" if robust else ""),
        said=said,
        rows={name: known.rows[name] for name in kept},
        dropped={name: known.dropped[name] for name in kept},
        left_out=asked.left_out,
        released=asked.released,
    )


@declared
def logrank(
    sites: Sites,
    *,
    time: str,
    event: str,
    by: str | Levels,
    grid: Count | Sequence[float] | Grid = BINS,
    exact_times: bool = False,
    entry: str | None = None,
    aggregation: Adder | None = None,
) -> Tested:
    """Test whether two or more groups have the same hazard, by the log-rank test over the rows of
    all sites.

    Args:
        sites: The sites, of `tables`; their design and outcome are not read.
        time: As in `kaplan_meier`.
        event: As in `kaplan_meier`.
        by: Column of groups, as of `kaplan_meier`.
        grid: As in `kaplan_meier`.
        exact_times: As in `kaplan_meier`.
        entry: As in `kaplan_meier`.
        aggregation: As in `kaplan_meier`.

    Raises:
        ValueError: A group has no row, no two groups are at risk together, rows have probability
            weights, or as by `kaplan_meier`.

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
    with_likelihood(sites, "the log-rank test")
    asked = Questions(sites, aggregation)
    known = follow(asked, time, event)
    times = grid_of(asked, time, event, known, grid, exact_times, by)
    sums = asked.first(
        lambda count: Counts(time, event, times, groups_of(asked.sites, by), entry=entry)
    )
    groups = groups_of(asked.sites, by)
    names = [str(level) for level in groups.levels]
    at_risk, events = sums["at_risk"], sums["events"]
    n, d = at_risk.sum(0), events.sum(0)
    share = at_risk / n.clamp_min(1e-300)
    expected = (d * share).sum(1)
    factor = torch.where(n > 1, d * (n - d) / (n - 1).clamp_min(1e-300), 0.0)
    variance = torch.diag((factor * share).sum(1)) - (factor * share) @ share.T
    compared = variance.diagonal() > 1e-12 * expected  # at risk with other groups at an event
    scale = variance.diagonal()[compared].rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * variance[compared][:, compared] * scale)
    free = values > 1e-10  # groups that are never at risk together make no contrast
    degrees = int(free.sum())
    if not degrees:
        raise ValueError(
            f"no two groups of {groups.column!r} are at risk together at an event that some "
            "survive, so there is nothing to test"
        )
    excess = vectors.T @ (scale * (events.sum(1) - expected)[compared])
    statistic = float((excess[free].square() / values[free]).sum())
    columns = {"rows": sums["rows"], "events": events.sum(1), "expected": expected}
    apart = [name for name, so in zip(names, compared.tolist(), strict=True) if not so]
    return Tested(
        what=f"log-rank of {len(names)} groups of {groups.column}, {times}"
        + (f", entry at {entry!r}" if entry else ""),
        statistic=statistic,
        degrees=degrees,
        p=float(stats.chi2.sf(statistic, degrees)),
        table=pandas.DataFrame(
            {name: values.numpy() for name, values in columns.items()}, index=names
        ),
        said=tuple(f"group {name} is left out: none is at risk at an event" for name in apart),
        released=asked.released,
        left_out=asked.left_out,
    )
