"""Times of follow-up over sites, and the grid on which sites count what happens at which time.

A curve or a baseline that sites share is made of sums for each time. Exact times disclose single
people, so by default a site rounds its times up to the ends of a grid. Where exact times are asked
for, the sum of the answers puts the sites' own event times side by side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import PerClient
from bayesfl.stats.asking import Questions, SiteSurvey, counted, slot
from bayesfl.stats.tables import Site

BINS = 100
"""So many bins of equal width reach up to the horizon where no grid is given."""


@dataclass(frozen=True)
class Grid:
    """Times at which rows are counted.

    Args:
        ends: The T times, increasing.
        exact_times: Whether events are at these times alone; otherwise they are the upper ends of
            bins, to which times are rounded up.
    """

    ends: tuple[float, ...]
    exact_times: bool

    def last(self, times: Tensor, site: str) -> Tensor:
        """Return the place of the last time at which each row is at risk, [n], where rows that have
        an event have it; -1 if none.

        Raises:
            ValueError: A time is beyond the last bin.
        """
        ends = torch.tensor(self.ends, dtype=torch.float64)
        if self.exact_times:
            return torch.searchsorted(ends, times, right=True) - 1
        if beyond := int((times > ends[-1]).sum()):
            raise ValueError(
                f"site {site!r} has {beyond} times beyond the grid's last end, {self.ends[-1]:g}; "
                "add an end, or censor these rows before"
            )
        return torch.searchsorted(ends, times)

    def __str__(self) -> str:
        if self.exact_times:
            return f"{len(self.ends)} exact event times"
        return f"times rounded up on a grid of {len(self.ends)} to {self.ends[-1]:g}"


def followed(site: Site, time: str, event: str) -> tuple[Tensor, Tensor]:
    """Return the times of a site's rows [n], and whether they end in an event, [n] of bools.

    Raises:
        ValueError: A time is not above 0, or an event is not 0 or 1.
    """
    times, events = site.column(time), site.column(event)
    if early := int((times <= 0).sum()):
        raise ValueError(
            f"site {site.name!r} has {early} rows with {time!r} <= 0, who were never at risk; "
            "leave them out"
        )
    if not bool(((events == 0) | (events == 1)).all()):
        raise ValueError(
            f"events are 0 or 1, and site {site.name!r} has {sorted({*events.tolist()})[:5]} in "
            f"{event!r}; recode it"
        )
    return times, events == 1


@dataclass(frozen=True)
class FollowUp(SiteSurvey):
    """Ask for each site's numbers of rows and events, each as often as it counts, and its longest
    time, rounded up to one digit.

    Args:
        sites: Number of sites J.
        time: Column of times.
        event: Column of events.
    """

    sites: int
    time: str
    event: str

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        j = PerClient((self.sites,))
        return {"weights": j, "events": j, "n_dropped": j, "horizon": j}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's numbers; see `SiteSurvey`."""
        times, events = followed(site, self.time, self.event)
        return {
            "weights": slot(site.counts.sum(), place, self.sites),
            "events": slot(site.counts[events].sum(), place, self.sites),
            "n_dropped": slot(site.dropped, place, self.sites),
            "horizon": slot(_step_above(float(times.max())), place, self.sites),
        }


def _step_above(time: float) -> int:
    """Return the place of the least number of one digit that is not below a time, in the row
    ..., 0.9, 1, 2, ..., 9, 10, 20, ...: a whole number, which secure sums do not round.
    """
    power = math.floor(math.log10(time))
    found = 9 * power + math.floor(time / 10.0**power) - 2
    while _at_step(found) < time:
        found += 1
    return found


def _at_step(step: int) -> float:
    return (step % 9 + 1) * 10.0 ** (step // 9)


@dataclass(frozen=True)
class EventTimes(SiteSurvey):
    """Ask for the times of all events: first how many each site has, then for the times, each site
    writing its own at places of its own, so that the sum is all of them.

    A time travels as its 64 bits, in four whole numbers, which secure sums do not round.

    Args:
        sites: Number of sites J.
        time: Column of times.
        event: Column of events.
    """

    sites: int
    time: str
    event: str
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
        own = torch.unique(times[events]).numpy()
        if "n_times" not in state:
            return {"n_times": slot(len(own), place, self.sites)}
        counts = state["n_times"].long()
        first = int(counts[:place].sum())
        bits = own.astype("<f8").view("<u2").reshape(-1, 4).astype(np.float64)
        found = torch.zeros(int(counts.sum()), 4, dtype=torch.float64)
        found[first : first + len(own)] = torch.from_numpy(bits)
        return {"times": found}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Keep the numbers of times, then the times, [T]."""
        if "n_times" not in state:
            return total, False
        bits = np.ascontiguousarray(total["times"].round().numpy().astype("<u2"))
        times = bits.view("<f8").ravel().astype(np.float64)
        return {"times": torch.unique(torch.from_numpy(times))}, True


@dataclass(frozen=True)
class Followed:
    """Hold what is known of all sites' rows before anything is fitted.

    Args:
        rows: {site: number of rows, each as often as it counts}.
        events: {site: number of events}.
        dropped: {site: rows left out as a value is missing}.
        horizon: A time that no row exceeds.
    """

    rows: dict[str, float]
    events: dict[str, float]
    dropped: dict[str, float]
    horizon: float


def follow(asked: Questions, time: str, event: str) -> Followed:
    """Ask sites how many rows and events they have, and how long they followed; see
    `Questions.first`.

    Raises:
        ValueError: No site has an event, or as by `followed`.
    """
    found = asked.first(lambda count: FollowUp(count, time, event))
    names = asked.sites.names
    rows, events, dropped = (
        counted(names, found[key]) for key in ("weights", "events", "n_dropped")
    )
    if not any(events.values()):
        raise ValueError(f"no site has an event in {event!r}")
    horizon = _at_step(int(found["horizon"].max()))
    return Followed(rows, events, dropped, horizon)


def grid_of(
    asked: Questions,
    time: str,
    event: str,
    horizon: float,
    grid: int | Sequence[float],
    exact_times: bool,
) -> Grid:
    """Return the grid on which sites count.

    Args:
        asked: The questions.
        time: Column of times.
        event: Column of events.
        horizon: A time that no row exceeds.
        grid: Number of bins up to the horizon, or their upper ends.
        exact_times: Whether sites tell the exact times of events instead.

    Raises:
        ValueError: The ends do not increase from above 0.
    """
    if exact_times:
        found = asked.conduct(EventTimes(len(asked.sites.names), time, event))
        return Grid(tuple(found["times"].tolist()), True)
    if isinstance(grid, int):
        return Grid(tuple((horizon * (np.arange(grid) + 1) / grid).tolist()), False)
    return Grid(increasing("grid", grid), False)


def increasing(name: str, given: Sequence[float]) -> tuple[float, ...]:
    """Return times as a tuple.

    Raises:
        ValueError: They do not increase from above 0.
    """
    ends = tuple(float(end) for end in given)
    if not ends or not all(low < high for low, high in zip((0.0, *ends), ends, strict=False)):
        raise ValueError(f"{name} must be times that increase from above 0, got {list(given)}")
    return ends
