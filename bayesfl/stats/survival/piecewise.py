"""Piecewise exponential regression over sites: hazards that are constant between cuts, as a Poisson
regression of rows by interval.

A row that is at risk for a time e of an interval, with d = 1 if its event is there, has the log
likelihood $d log h - h e$, which is Poisson's of a count d and mean $h e$, but for $d log e$.

Source: Holford, "The analysis of rates and of survivorship using log-linear models", Biometrics 36,
1980.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from bayesfl.base.options import Positive, declared
from bayesfl.base.protocols import Tensors
from bayesfl.federation.clients.surveying import Adder
from bayesfl.stats.asking import Questions, Sites, used_rows, with_likelihood
from bayesfl.stats.fit import Fit
from bayesfl.stats.glm import regression
from bayesfl.stats.survival.times import OfTimes, follow, followed, increasing
from bayesfl.stats.tables import Site


@dataclass(frozen=True)
class Exposure(OfTimes):
    """Ask for the sum of log exposures of events, each in the interval of its event.

    Args:
        cuts: The K - 1 times between K intervals.
    """

    cuts: tuple[float, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the intervals except the first."""
        ends = (*(f"{cut:g}]" for cut in self.cuts[1:]), "inf)")
        return tuple(
            f"{self.time}({low:g}, {end}" for low, end in zip(self.cuts, ends, strict=True)
        )

    def by_interval(self, site: Site) -> Site:
        """Return a site with a row for each row of its own and each interval with this at risk; the
        outcome is the event there.
        """
        times, events = followed(site, self.time, self.event)
        starts = torch.tensor((0.0, *self.cuts), dtype=torch.float64)
        ends = torch.tensor((*self.cuts, torch.inf), dtype=torch.float64)
        row, interval = (times[:, None] > starts).nonzero(as_tuple=True)
        exposure = torch.minimum(times[row], ends[interval]) - starts[interval]
        indicator = torch.nn.functional.one_hot(interval, len(starts))[:, 1:].double()
        return replace(
            site,
            frame=site.frame.iloc[row.numpy()],
            x=torch.cat([site.x[row], indicator], 1),
            y=(events[row] & (times[row] <= ends[interval])).double(),
            offset=site.offset[row] + exposure.log(),
            weights=site.weights[row],
        )

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        return {"log_exposure": ()}

    def cells(self, state: Tensors, site: Site) -> Sequence[Tensor]:
        """Return the interval and event of each row's last time, as cells; see `SiteSurvey`."""
        times, events = followed(site, self.time, self.event)
        interval = torch.searchsorted(torch.tensor(self.cuts, dtype=torch.float64), times)
        return (2 * interval + events,)

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's answer; see `SiteSurvey`."""
        times, events = followed(site, self.time, self.event)
        starts = torch.tensor((0.0, *self.cuts), dtype=torch.float64)
        exposure = times - starts[torch.searchsorted(starts, times) - 1]
        return {"log_exposure": site.weights[events] @ exposure[events].log()}


@dataclass(frozen=True)
class ByInterval(Exposure):
    """Ask another question about rows by interval.

    Args:
        survey: The question, a `SiteSurvey`.
    """

    survey: Any

    def start(self, about: Any, /) -> Tensors:
        """Return the state at first."""
        return self.survey.start(about)

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        return self.survey.shapes(state)

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's answer; see `SiteSurvey`."""
        return self.survey.of_site(state, self.by_interval(site), place)

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return each row's weight over all its intervals, [..., n]; see `SiteSurvey`."""
        expanded = self.by_interval(site)
        weight = self.survey.row_weights(state, expanded)
        row = torch.tensor(expanded.frame.index.to_numpy())
        return weight.new_zeros(*weight.shape[:-1], len(site.x)).index_add(-1, row, weight)

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the next state."""
        return self.survey.solve(state, total)


@declared
def piecewise(
    sites: Sites,
    *,
    time: str,
    event: str,
    cuts: Sequence[float],
    intercept: Literal["shared", "per_site"] = "shared",
    prior: Positive | None = None,
    aggregation: Adder | None = None,
) -> Fit:
    """Fit a proportional hazards model whose baseline is constant between cuts, to the rows of all
    sites, by `glm`.

    No time leaves a site. The coefficient of an interval, such as `time(12, inf)`, is the log ratio
    of its baseline to that of the first interval, and the intercept is the log of the latter.

    Args:
        sites: The sites, of `tables`; their outcome is not read.
        time: Column of times, > 0.
        event: Column of events: 1 if the time ends in one, 0 if it is censored.
        cuts: Times between intervals, increasing; each interval needs an event.
        intercept: One for all sites, or one for each site, which scales a baseline of common shape;
            a site without an event then has no information and is left out.
        prior: As in `glm`.
        aggregation: How the sites' answers are added, such as `SecureSum()`; None adds them openly.

    Raises:
        ValueError: Cuts do not increase from above 0, a time is not above 0, an event is not 0 or
            1, no site has one, an interval has none, or as by `glm`.

    Example:
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> frames = {
        ...     "north": pd.DataFrame({"t": [2, 3, 5, 8], "d": [1, 1, 0, 1], "dose": [3, 1, 2, 0]}),
        ...     "south": pd.DataFrame({"t": [1, 4, 6, 7], "d": [1, 0, 1, 1], "dose": [1, 2, 0, 1]}),
        ... }
        >>> sites = bf.stats.tables(frames, terms=["dose"], also=["t", "d"])
        >>> fit = bf.stats.piecewise(sites, time="t", event="d", cuts=[4])
        >>> fit.names
        ('(intercept)', 'dose', 't(4, inf)')
    """
    exposure = Exposure(time, event, increasing("cuts", cuts))
    with_likelihood(sites, "a piecewise model")
    asked = Questions(sites, aggregation)
    known = follow(asked, time, event)
    log_exposure = float(asked.first(lambda count: exposure)["log_exposure"])
    asked.through = partial(ByInterval, time, event, exposure.cuts)
    fit = regression(
        asked,
        sites.columns + exposure.columns,
        family="poisson",
        per_site=intercept == "per_site",
        errors=None,
        prior=prior,
        refit=lambda chosen: piecewise(
            sites.only(chosen),
            time=time,
            event=event,
            cuts=cuts,
            intercept=intercept,
            prior=prior,
            aggregation=aggregation,
        ),
    )
    own = "a level for each site" if intercept == "per_site" else "one baseline"
    told = ", ".join(f"{c:g}" for c in exposure.cuts)
    return replace(
        fit,
        model=f"proportional hazards, constant between cuts at {told}, {own}"
        + (f", prior {prior:g}" if prior is not None else ""),
        ratio="hazard ratio",
        rows={name: known.rows[name] for name in fit.rows},
        log_likelihood=fit.log_likelihood - log_exposure,
        evidence=None if fit.evidence is None else fit.evidence - log_exposure,
        # The variation of counts by person and interval, 0 or 1, does not measure the fit.
        further={
            **{name: ask for name, ask in fit.further.items() if name != "predict"},
            "used rows": lambda key: used_rows(
                Questions(asked.sites, aggregation), key, (time, event)
            ),
            "diagnostics": lambda level: fit.further["diagnostics"](level, counts=False),
        },
        likelihood=f"the density of {time!r} to {event!r}",
    )
