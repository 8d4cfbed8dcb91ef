"""Times of follow-up over sites, and the grid of times for counts.

A shared curve or baseline is made of sums for each time. Exact times disclose single people, so by
default a site rounds its times up to the ends of a grid. With `exact_times=True`, the sum of the
answers contains the sites' own event times side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import PerClient
from bayesfl.stats.asking import Questions, SiteSurvey, counted, slot
from bayesfl.stats.survival import lattice
from bayesfl.stats.survival.groups import group, groups_of
from bayesfl.stats.tables import Site
from bayesfl.stats.terms import Levels

BINS = 100
"""Default maximum number of bins."""
FEWEST = 10
"""Minimum number of bins under a policy."""
EACH = 10
"""Minimum number of events in a bin under a policy; a twentieth of all if these are few."""
SHARES = 100
"""Number of times that each site reports, with equal numbers of its events between them."""


@dataclass(frozen=True)
class Grid:
    """Times at which rows are counted: upper ends of bins, or exact times of events.

    An event counts at its bin's end. A row that is censored within a bin is at risk there unless it
    is censored before the middle of the bin's events.

    Args:
        ends: The T times, increasing.
        exact_times: Whether these are exact times, or a user's own grid, in place of the library's
            bins of all sites' events. A site's policy may refuse them.
        middles: Middles of the bins, [T], for exact times their ends; None for halfway between
            ends.
        share: Mean number of events in a bin; 0 if unknown.
    """

    ends: tuple[float, ...]
    exact_times: bool
    middles: tuple[float, ...] | None = None
    share: float = 0.0

    @property
    def bins(self) -> Tensor:
        """Return the ends and the middles, [2, T]."""
        starts = (0.0, *self.ends[:-1])
        halfway = tuple((low + end) / 2 for low, end in zip(starts, self.ends, strict=True))
        return torch.tensor((self.ends, self.middles or halfway), dtype=torch.float64)

    def last(self, site: Site, times: Tensor, events: Tensor, group: Tensor) -> Tensor:
        """Return the place of the last time at which each row is at risk, [n], for rows with an
        event the event's; -1 if none.

        Under a policy, at least `min_level` censored rows of a group leave at a time: neighbours
        leave at the time of the middle one.

        Args:
            site: The site.
            times: Its rows' times, [n].
            events: Whether they end in an event, [n].
            group: The group of each row for counts, [n].

        Raises:
            ValueError: An event is beyond the last time.
        """
        ends, middles = self.bins
        if beyond := int((events & (times > ends[-1])).sum()):
            raise ValueError(
                f"site {site.name!r} has {beyond} events beyond the grid's last end, "
                f"{self.ends[-1]:g}; add an end, or censor these rows before"
            )
        last = torch.searchsorted(ends, times).clamp_max(len(ends) - 1)
        last = last - (~events & (times < middles[last])).long()
        return self._joined(site, last, times, ~events, group, 1 / 2)

    def first(
        self, site: Site, entries: Tensor, last: Tensor, events: Tensor, group: Tensor
    ) -> Tensor:
        """Return the place of the first time at which each row is at risk, [n], at most last + 1,
        or last for rows with an event there. A row that enters after the middle of a bin's events
        is at risk from the next bin on.

        Under a policy, at least `min_level` rows of a group enter at a time: neighbours enter at
        the time of the first one.

        Args:
            site: The site.
            entries: Entry times of its rows, [n].
            last: The result of `last`, [n].
            events: Whether they end in an event, [n].
            group: The group of each row for counts, [n].
        """
        ends, middles = self.bins
        first = torch.searchsorted(ends, entries, right=True)
        first = first + (entries > middles[first.clamp_max(len(ends) - 1)]).long()
        first = torch.minimum(first, last + (~events).long())
        return self._joined(site, first, entries, first >= 0, group, 0)

    def _joined(
        self,
        site: Site,
        places: Tensor,
        times: Tensor,
        chosen: Tensor,
        group: Tensor,
        share: float,
    ) -> Tensor:
        """Return the places of rows [n] after joining the chosen ones [n] of each group: neighbours
        in time, at least `min_level` of the policy, get one place, at a share of their own. They
        are the same on any grid.
        """
        least = _least(site)
        if least < 2 or self.exact_times:
            return places
        for one in group.unique():
            order = (chosen & (group == one)).nonzero().flatten()
            order = order[times[order].sort(stable=True).indices]
            for some in order.tensor_split(max(1, len(order) // least)):
                at = int(share * len(some))
                places[some] = places[some].sort().values[at : at + 1]
        return places

    def cells(self, last: Tensor, events: Tensor, group: Tensor) -> Tensor:
        """Return each row's cell in a table of groups, times and events, [n], from the result of
        `last`. Sums at these times determine sums over cells.
        """
        return (group * (len(self.ends) + 1) + last + 1) * 2 + events.long()

    def __str__(self) -> str:
        if self.exact_times and self.middles == self.ends:
            return f"{len(self.ends)} exact event times"
        return f"times rounded on a grid of {len(self.ends)} to {self.ends[-1]:g}" + (
            f", {self.share:.3g} events a bin" if self.share else ""
        )


def followed(site: Site, time: str, event: str) -> tuple[Tensor, Tensor]:
    """Return the times of a site's rows [n], and whether they end in an event, [n] of bools.

    Raises:
        ValueError: A time is not above 0, or an event is not 0 or 1.
    """
    times, events = site.column(time), site.column(event)
    if early := int((times <= 0).sum()):
        raise ValueError(
            f"site {site.name!r} has {early} rows with {time!r} <= 0, which were never at risk; "
            "leave them out"
        )
    if not bool(((events == 0) | (events == 1)).all()):
        raise ValueError(
            f"events are 0 or 1, and site {site.name!r} has {sorted({*events.tolist()})[:5]} in "
            f"{event!r}; recode it"
        )
    return times, events == 1


def entries(site: Site, time: str, entry: str | None, times: Tensor) -> Tensor:
    """Return the entry times of a site's rows, [n], checked against the times when they leave.

    Raises:
        ValueError: A row leaves before it enters.
    """
    found = torch.zeros_like(times) if entry is None else site.column(entry)
    if never := int((found >= times).sum()):
        raise ValueError(
            f"site {site.name!r} has {never} rows whose {entry!r} is not before {time!r}, which "
            "were never at risk; leave them out"
        )
    return found


@dataclass(frozen=True)
class OfTimes(SiteSurvey):
    """A question about rows with times.

    Args:
        time: Column of times.
        event: Column of events.
    """

    time: str
    event: str


@dataclass(frozen=True)
class FollowUp(OfTimes):
    """Ask for each site's numbers of rows and events, counted by weight, and its longest time,
    rounded up to one digit.

    Args:
        sites: Number of sites J.
    """

    sites: int

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        return dict.fromkeys(
            ("weights", "events", "n_dropped", "horizon"), PerClient((self.sites,))
        )

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's numbers; see `SiteSurvey`."""
        times, events = followed(site, self.time, self.event)
        return {
            "weights": slot(site.counts.sum(), place, self.sites),
            "events": slot(site.counts[events].sum(), place, self.sites),
            "n_dropped": slot(site.dropped, place, self.sites),
            "horizon": slot(lattice.above(float(times.max()), 1), place, self.sites),
        }


@dataclass(frozen=True)
class EventTimes(OfTimes):
    """Ask for the times of all events: first for each site's number, then for the times. Each site
    writes its own at its own places, so the sum contains all.

    A time is sent as its 64 bits, in four whole numbers, which secure sums do not round.

    Args:
        sites: Number of sites J.
    """

    sites: int
    exact_times = True

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        if "n_times" not in state:
            return {"n_times": PerClient((self.sites,))}
        times = PerClient((int(state["n_times"].sum()), 4))
        times.ends = state["n_times"].cumsum(0).int().tolist()
        return {"times": times}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's number of times, or its times; see `SiteSurvey`."""
        times, events = followed(site, self.time, self.event)
        own = torch.unique(times[events])
        if "n_times" not in state:
            return {"n_times": slot(len(own), place, self.sites)}
        counts = state["n_times"].int()
        around = (0, 0, int(counts[:place].sum()), int(counts[place + 1 :].sum()))
        bits = own.view(torch.int16).reshape(-1, 4).double()
        return {"times": torch.nn.functional.pad(bits, around)}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Keep the numbers of times, then the times, [T]."""
        if "n_times" not in state:
            return total, False
        bits = total["times"].round().to(torch.int16)
        return {"times": bits.view(torch.float64).flatten().unique()}, True


@dataclass(frozen=True)
class Followed:
    """Hold facts about all sites' rows before a fit.

    Args:
        rows: {site: number of rows, counted by weight}.
        events: {site: number of events}.
        dropped: {site: number of rows left out, with a missing value, or few new ones}.
        marks: Ten times of two digits; no row exceeds the last.
    """

    rows: dict[str, float]
    events: dict[str, float]
    dropped: dict[str, float]
    marks: tuple[float, ...]


def follow(asked: Questions, time: str, event: str) -> Followed:
    """Ask sites for their numbers of rows and events, and their length of follow-up; see
    `Questions.first`.

    Raises:
        ValueError: No site has an event, or as by `followed`.
    """
    found = asked.first(lambda count: FollowUp(time, event, count))
    rows, events, dropped = (
        counted(asked.sites.names, found[key]) for key in ("weights", "events", "n_dropped")
    )
    if not any(events.values()):
        raise ValueError(f"no site has an event in {event!r}")
    horizon = lattice.at(int(found["horizon"].max()), 1)
    return Followed(
        rows, events, dropped, marks=tuple(float(f"{horizon * k / 10:.1e}") for k in range(1, 11))
    )


@dataclass(frozen=True)
class Bins(OfTimes):
    """Ask for bins of equal shares of all sites' events. In each bin each site has no event or at
    least its policy's `min_level`, of each group.

    First each site reports times, rounded up on the lattice, with equal numbers of its events
    between them, at least its `min_level`; these make narrow bins. Then each site reports the bins
    joined from these that have too few events, alone or together with those of earlier analyses.
    Last, each reports the position of its events in the bins.

    Args:
        sites: Number of sites J.
        most: Maximum number of bins.
        by: The groups.
    """

    sites: int
    most: int
    by: Levels

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        j = (self.sites,)
        if "narrow" not in state:
            return {"places": (*j, SHARES), "n_events": j, "n_least": j, "n_digits": j}
        if "ends" not in state:
            return {"n_few": 2 * (len(state["narrow"]),)}
        return dict.fromkeys(("n_inside", "past"), (len(state["ends"]) - 1,))

    def cells(self, state: Tensors, site: Site) -> Sequence[Tensor]:
        """Return the bins of events; see `SiteSurvey`."""
        return [self._places(state["ends"], site)[0]] if "ends" in state else []

    def _places(self, ends: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """Return the bin of each event among those with some ends [1 + T], numbered group by group,
        and its time.
        """
        times, events = followed(site, self.time, self.event)
        at = torch.searchsorted(ends, times[events]).clamp_max(len(ends) - 1)
        return group(site.frame, self.by, site.name)[events] * len(ends) + at, times[events]

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share of an answer; see `SiteSurvey`."""
        if "narrow" not in state:
            times, events = followed(site, self.time, self.event)
            return self._shares(times[events].sort().values, site, place)
        if "ends" in state:
            ends, width = state["ends"], state["ends"].diff()
            at, times = self._places(ends, site)
            at = at % len(ends) - 1
            past = (times - ends[at]) / width[at]
            found = torch.zeros(2, len(width), dtype=torch.float64)
            found.index_add_(1, at, torch.stack([torch.ones_like(past), past]))
            return dict(zip(("n_inside", "past"), found, strict=True))
        size = len(state["narrow"])
        at, _ = self._places(state["narrow"], site)
        counts = torch.bincount(at, minlength=len(self.by.levels) * size)
        until = counts.reshape(-1, size).cumsum(1)
        inside = until[:, None, :] - until[:, :, None]
        few = ((inside > 0) & (inside < _least(site))).any(0)
        if site.policy is not None:
            fewest = [
                site.policy.ledger.fewest(site, self.time, self.event, [end])
                for end in state["narrow"].tolist()
            ]
            apart = torch.tensor(fewest) < _least(site)
            few = few | apart | apart[:, None]
        return {"n_few": few.double()}

    def _shares(self, own: Tensor, site: Site, place: int) -> Tensors:
        """Return the times of equal shares of the sorted times of a site's events."""
        least, places = _least(site), torch.zeros(self.sites, SHARES, dtype=torch.float64)
        n = len(own) if len(own) >= least else 0
        if n:
            step = max(least, -(-n // SHARES))
            counts = [-(-(k * n) // (SHARES * step)) * step for k in range(1, SHARES + 1)]
            ends = [own[count - 1 if count + step <= n else n - 1].item() for count in counts]
            places[place] = torch.tensor([lattice.above(end) for end in ends])
        digits = getattr(site.policy, "digits", lattice.DIGITS)
        return {
            "places": places,
            "n_events": slot(n, place, self.sites),
            "n_least": slot(least, place, self.sites),
            "n_digits": slot(min(digits, lattice.DIGITS), place, self.sites),
        }

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Make narrow bins, then join them, and find their middles.

        The last state has `ends` [1 + T], 0 and the ends of the bins, or 0 alone without such bins;
        their `middles` [T], the means of their events' times; the number of `events`; whether a
        site has a policy, `guarded`; and the `digits` of times.
        """
        if "ends" in state:
            past = total["past"] / total["n_inside"].clamp_min(1)
            middles = state["ends"][:-1] + state["ends"].diff() * past
            # Rounding does not exclude rows that are censored at the time of an event.
            return state | {"middles": middles * (1 - 1e-9)}, True
        if "narrow" not in state:
            return self._narrow(total), False
        at = torch.tensor([0, *cheapest(state["cost"].where(total["n_few"] == 0, torch.inf))])
        found = {name: state[name] for name in ("narrow", "events", "guarded", "digits")}
        return found | {"ends": state["narrow"][at]}, len(at) == 1

    def _narrow(self, total: Tensors) -> Tensors:
        """Return 0 and the ends of `narrow` bins [1 + T], and the `cost` of a bin from one end to
        another, [1 + T, 1 + T].
        """
        digits = total["n_digits"].min()
        guarded = total["n_least"].max() > 1
        places, order = total["places"].flatten().sort(stable=True)
        below = (total["n_events"] / SHARES).repeat_interleave(SHARES)[order].cumsum(0)
        events = float(below[-1])
        count = min(self.most, max(FEWEST, round(events)))
        wanted = events * torch.arange(1, 2 * count + 1, dtype=torch.float64) / (2 * count)
        at = torch.searchsorted(below, wanted * (1 - 1e-9)).clamp_max(len(below) - 1)
        halves = torch.tensor(
            [
                lattice.at(lattice.above(lattice.at(int(place)), int(digits)), int(digits))
                for place in places[at].tolist()
            ],
            dtype=torch.float64,
        )
        narrow = torch.nn.functional.pad(halves[1::2].unique(), (1, 0))
        share = torch.searchsorted(halves, narrow, right=True).double() / len(halves)
        share = share - share[:, None]
        least = min(EACH / events, 0.5 / FEWEST) if guarded else 0.0
        return {
            "narrow": narrow,
            # The square favours many and equal bins.
            "cost": share.square().where(share >= least * (1 - 1e-9), torch.inf),
            "guarded": guarded,
            "digits": digits,
            "events": below[-1],
        }


def cheapest(cost: Tensor) -> list[int]:
    """Return the places of the cuts of T parts with the lowest cost, the last one T; empty if every
    way has infinite cost.

    Args:
        cost: Cost of a bin from one place to a later one, [1 + T, 1 + T].
    """
    best = torch.zeros(len(cost), dtype=torch.float64)
    cuts: list[list[int]] = [[]]
    for end in range(1, len(cost)):
        ways = best[:end] + cost[:end, end]
        place = int(ways.argmin())
        best[end] = ways[place]
        cuts.append([*cuts[place], end])
    return cuts[-1] if best[-1].isfinite() else []


def _least(site: Site) -> int:
    return 0 if site.policy is None else site.policy.min_level


def grid_of(
    asked: Questions,
    time: str,
    event: str,
    known: Followed,
    grid: int | Sequence[float] | Grid,
    exact_times: bool,
    by: str | Levels | None = None,
) -> Grid:
    """Return the grid of times for counts.

    Args:
        asked: The questions.
        time: Column of times.
        event: Column of events.
        known: Facts about the rows.
        grid: Maximum number of bins, or their upper ends, or an earlier grid.
        exact_times: Whether sites send the exact times of events instead.
        by: Groups with separate counts.

    Raises:
        ValueError: The ends do not increase from above 0, or the sites' policies leave too few
            bins.
    """
    if exact_times:
        found = asked.conduct(EventTimes(time, event, len(asked.sites.names)))
        ends = tuple(found["times"].tolist())
        return Grid(ends, exact_times=True, middles=ends)
    if isinstance(grid, Grid):
        return grid
    if not isinstance(grid, int):
        return Grid(increasing("grid", grid), exact_times=True)
    found = asked.first(lambda count: Bins(time, event, count, grid, groups_of(asked.sites, by)))
    bins = len(found["ends"]) - 1
    if found["guarded"] and bins < FEWEST:
        few = sorted((count, name) for name, count in known.events.items() if count)[:5]
        raise ValueError(
            f"there are {bins or 'no'} bins of times with no event or at least min_level at each "
            f"site, by its policy, and {FEWEST} are needed. Continue without the sites with the "
            f"fewest events, {', '.join(f'{name!r} {count:g}' for count, name in few)}, by "
            "sites.only([...]), or give each its own baseline, cox(baseline='per_site')"
        )
    last, digits = float(found["ends"][-1]), int(found["digits"])
    further = tuple(
        mark
        for mark in known.marks
        if mark > last and lattice.at(lattice.above(mark, digits), digits) == mark
    )
    return Grid(
        ends=(*found["ends"][1:].tolist(), *further),
        exact_times=False,
        middles=(*found["middles"].tolist(), *further),
        share=float(found["events"]) / bins,
    )


def increasing(name: str, given: Sequence[float]) -> tuple[float, ...]:
    """Return times as a tuple.

    Raises:
        ValueError: They do not increase from above 0.
    """
    ends = tuple(float(end) for end in given)
    if not ends or not all(low < high for low, high in zip((0.0, *ends), ends, strict=False)):
        raise ValueError(f"{name} must be times that increase from above 0, got {list(given)}")
    return ends
