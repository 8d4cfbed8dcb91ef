"""Checks of Cox's regression over sites: proportional hazards, and pairs that are ranked right."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from bayesfl.base.numerics import levelled
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import NotNegative, PerClient
from bayesfl.stats.asking import Questions, slot
from bayesfl.stats.diagnostics import DOUBT
from bayesfl.stats.survival.partial import AfterFit
from bayesfl.stats.survival.tested import Tested
from bayesfl.stats.survival.times import followed
from bayesfl.stats.tables import Site

Scale = Literal["log", "identity", "rank"]


@dataclass(frozen=True)
class Schoenfeld(AfterFit):
    """Ask for the mean of a function g of time over events; then for its squares about this, and
    for the sums of Schoenfeld's residuals times what g has beyond it.

    Args:
        scale: What g is: the `log` of time, time itself (`identity`), or the `rank` of events.
        unit: The time that is 1, so that sums are of moderate size.
        ranks: The share of events up to each time, [T], for `rank` under one baseline.
    """

    scale: Scale = "log"
    unit: float = 1.0
    ranks: tuple[float, ...] = ()

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        if "g" in state:
            return {"square": NotNegative(), "drift": (self.likelihood.columns,)}
        return {"events": NotNegative(), "g": ()}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's sums; see `SiteSurvey`."""
        rows = self.likelihood.rows(state["theta"], site)
        died = rows.events
        mean = self.baseline(state, rows)[2]
        residual = rows.design[died] - mean[rows.last[died]]
        w, g = rows.weights[died], self.function(site, rows.last[died], rows.weights[died])
        if "g" not in state:
            return {"events": w.sum(), "g": w @ g}
        g = g - state["g"]
        return {"square": w @ g.square(), "drift": (w * g) @ residual}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Keep the mean, then the sums."""
        if "g" in state:
            return state | total, True
        return state | {"events": total["events"], "g": total["g"] / total["events"]}, False

    def function(self, site: Site, last: Tensor, weights: Tensor) -> Tensor:
        """Return g at the events of a site, by the places of their times and their weights."""
        grid = self.likelihood.grid
        if self.scale == "rank":
            ranks = torch.tensor(self.ranks, dtype=torch.float64)
            if grid is None:
                ranks = shares(torch.bincount(last, weights, minlength=int(last.max()) + 1))
            return ranks[last]
        if grid is None:
            times, events = followed(site, self.likelihood.time, self.likelihood.event)
            times = times[events]
        else:
            times = torch.tensor(grid.ends, dtype=torch.float64)[last]
        return (times / self.unit).log() if self.scale == "log" else times / self.unit


def shares(events: Tensor) -> Tensor:
    """Return the mean rank of the events at each time, by their numbers there [T], over their
    number in all.
    """
    return (events.cumsum(0) - (events - 1) / 2) / events.sum()


def proportional(
    asked: Questions, survey: Schoenfeld, covariance: Tensor, names: tuple[str, ...]
) -> Tested:
    """Return the test that coefficients do not change with time, of each and of all together.

    Args:
        asked: The questions.
        survey: The question.
        covariance: Of the errors of coefficients of standardised columns, by the model, [p, p].
        names: Names of the columns.
    """
    import pandas

    sums = asked.conduct(survey)
    n, spread, drift = float(sums["events"]), sums["square"], sums["drift"]
    by_column = (covariance @ drift) ** 2 / covariance.diagonal() * n / spread
    together = float(drift @ covariance @ drift * n / spread)
    p_values = stats.chi2.sf(by_column.numpy(), 1)
    table = pandas.DataFrame({"chi2": by_column.numpy(), "p": p_values}, index=list(names))
    return Tested(
        what=f"proportional hazards, against the {survey.scale} of time"
        if survey.scale != "identity"
        else "proportional hazards, against time",
        statistic=together,
        degrees=len(names),
        p=float(stats.chi2.sf(together, len(names))),
        table=table,
        said=tuple(
            f"the hazard ratio of {name} changes with time (p {p:.2g}): fit early and late events "
            "apart, or each level of a category, or give it a term for each period"
            for name, p in zip(names, p_values.tolist(), strict=True)
            if p < DOUBT
        )
        or ("no hazard ratio is seen to change with time",),
        released=asked.released,
    )


@dataclass(frozen=True)
class Concordance(AfterFit):
    """Ask for the numbers of pairs of rows of each site of whom it is known who had an event first,
    and of pairs whose linear predictors agree with it, or are equal, by how often rows count.

    Args:
        sites: Number of sites J.
    """

    sites: int = 1

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        j = PerClient((self.sites,))
        return {"pairs": j, "concordant": j, "tied": j}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's numbers; see `SiteSurvey`."""
        times, events = followed(site, self.likelihood.time, self.likelihood.event)
        eta, w = self.likelihood.rows(state["theta"], site).eta, site.weights
        eta = levelled(eta, eta.norm())
        pairs = concordant = tied = 0.0
        for first in events.nonzero().flatten():  # a row at a time, as all pairs are many
            later = (times > times[first]) | ((times == times[first]) & ~events)
            pairs += float(w[first] * w[later].sum())
            concordant += float(w[first] * w[later & (eta < eta[first])].sum())
            tied += float(w[first] * w[later & (eta == eta[first])].sum())
        counts = {"pairs": pairs, "concordant": concordant, "tied": tied}
        return {name: slot(count, place, self.sites) for name, count in counts.items()}


def concordance(asked: Questions, survey: Concordance) -> Any:
    """Return Harrell's concordance of each site and of all pairs within sites, as a data frame of
    pandas.

    Args:
        asked: The questions.
        survey: The question.
    """
    import pandas

    sums = asked.conduct(survey)
    columns = {name: np.append(t.numpy(), float(t.sum())) for name, t in sums.items()}
    found = pandas.DataFrame(columns, index=[*asked.sites.names, "pairs within sites"])
    share = (found["concordant"] + found["tied"] / 2) / found["pairs"]
    found.insert(0, "concordance", share)
    return found
