"""Checks of Cox's regression over sites: proportional hazards, and concordance."""

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas
import torch
from scipy import stats
from torch import Tensor

from bayesfl.base.numerics import levelled
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import NotNegative, PerClient
from bayesfl.stats.asking import AfterFit, Questions, slot
from bayesfl.stats.diagnostics import DOUBT
from bayesfl.stats.policy import Refusal
from bayesfl.stats.survival import efron
from bayesfl.stats.survival.partial import LARGEST
from bayesfl.stats.survival.tested import Tested
from bayesfl.stats.survival.times import entries, followed
from bayesfl.stats.tables import Site

FINE = 500
"""Number of bins of scores in the search for their quantiles."""
ROUNDS = 4
"""Number of rounds of that search: bins shrink from a width of 2 to 1e-8, below any differences."""
QUANTILES = 50
"""Number of bins of scores, with equal shares, for counts of pairs."""


@dataclass(frozen=True)
class Schoenfeld(AfterFit):
    """Ask for the mean of g, the logarithm of time, over events; then for the squares of g minus
    its mean, and for the sums of Schoenfeld's residuals times this difference.

    Args:
        unit: Unit of time, so that sums have moderate size.
    """

    unit: float = 1.0

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        if "g" in state:
            return {"square": NotNegative(), "drift": (self.likelihood.columns,)}
        return {"events": NotNegative(), "g": ()}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's sums; see `SiteSurvey`."""
        rows = self.likelihood.rows(state["theta"], site)
        baseline = self.likelihood.baseline(state, rows)
        died = rows.events
        residual = rows.design[died] - baseline["mean"][rows.place[died]]
        ends = torch.tensor(self.likelihood.grid_at(site).ends, dtype=torch.float64)
        w, g = rows.weights[died], (ends[rows.last] / self.unit).log()[died]
        if "g" not in state:
            return {"events": w.sum(), "g": w @ g}
        g = g - state["g"]
        return {"square": w @ g.square(), "drift": (w * g) @ residual}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Keep the mean, then the sums."""
        if "g" in state:
            return state | total, True
        return state | {"events": total["events"], "g": total["g"] / total["events"]}, False


def proportional(
    asked: Questions, survey: Schoenfeld, covariance: Tensor, names: tuple[str, ...]
) -> Tested:
    """Return the test that coefficients do not change with time, each alone and all together.

    Args:
        asked: The questions.
        survey: The question.
        covariance: Of the errors of coefficients of standardised columns, by the model, [p, p].
        names: Names of the columns.
    """
    sums = asked.conduct(survey)
    n, spread, drift = float(sums["events"]), sums["square"], sums["drift"]
    by_column = (covariance @ drift) ** 2 / covariance.diagonal() * n / spread
    together = float(drift @ covariance @ drift * n / spread)
    p_values = stats.chi2.sf(by_column.numpy(), 1)
    return Tested(
        what="proportional hazards, against the log of time",
        statistic=together,
        degrees=len(names),
        p=float(stats.chi2.sf(together, len(names))),
        table=pandas.DataFrame({"chi2": by_column.numpy(), "p": p_values}, index=list(names)),
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
    """Ask for each site's numbers of pairs of rows with a known order of events, and of those whose
    linear predictors agree with it, or are equal, counted by weight.

    Args:
        sites: Number of sites J.
    """

    sites: int = 1

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        return dict.fromkeys(("pairs", "concordant", "tied"), PerClient((self.sites,)))

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's numbers; see `SiteSurvey`."""
        of = self.likelihood
        rows, w = of.rows(state["theta"], site), site.weights
        times, died = followed(site, of.time, of.event)
        start, eta = entries(site, of.time, of.entry, times), levelled(rows.eta, rows.eta.norm())
        counts = dict.fromkeys(self.shapes(state), 0.0)
        for one in died.nonzero().split(256):  # [c, 1] events beside all rows, as pairs are many
            later = (times > times[one]) | ((times == times[one]) & ~died)
            together = (start < times[one]) & (rows.stratum == rows.stratum[one])
            weight = w[one] * w * (later & together)
            counts["pairs"] += float(weight.sum())
            counts["concordant"] += float(weight[eta < eta[one]].sum())
            counts["tied"] += float(weight[eta == eta[one]].sum())
        return {name: slot(count, place, self.sites) for name, count in counts.items()}


@dataclass(frozen=True)
class ByScore(AfterFit):
    """Ask for the weights of rows at risk and with an event at each time of the baseline, by the
    bin of their linear predictor; before that, `ROUNDS` times, for the weights in each of `FINE`
    bins, whose shares become more equal each time.
    """

    def start(self, about: Any, /) -> Tensors:
        """Return the fit, and bins of equal width."""
        edges = torch.linspace(-LARGEST, LARGEST, FINE + 1, dtype=torch.float64)[1:-1]
        return super().start(about) | {"edges": edges, "round": torch.tensor(0)}

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        bins = len(state["edges"]) + 1
        if state["round"] < ROUNDS:
            return {"weight": NotNegative((bins,))}
        return dict.fromkeys(("at_risk", "events"), (len(state["mean"]), bins))

    def cells(self, state: Tensors, site: Site) -> list[Tensor]:
        """Return each row as its own cell, because bins of scores can hold single people."""
        return [torch.arange(len(site.x))]

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's numbers; see `SiteSurvey`.

        Raises:
            Refusal: The site has a policy, because cells can hold single people.
        """
        if site.policy is not None:
            raise Refusal(type(self).__name__, {site.name: "min_level"})
        rows = self.likelihood.rows(state["theta"], site)
        bins = len(state["edges"]) + 1
        score = torch.bucketize(rows.eta, state["edges"])
        if state["round"] < ROUNDS:
            return {"weight": efron.added(site.weights, score, bins)}

        def counted(chosen: Tensor, at: Tensor, size: int) -> Tensor:
            cell = at * bins + score[chosen]
            return efron.added(site.weights[chosen], cell, size * bins).reshape(size, bins)

        return {
            "at_risk": efron.over_risk_sets(rows, counted),
            "events": counted(rows.events, rows.place[rows.events], rows.strata * rows.times),
        }

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the next bins, or the numbers of rows."""
        if state["round"] == ROUNDS:
            return total, True
        bins = FINE if state["round"] + 1 < ROUNDS else QUANTILES
        ends = np.concatenate([[-LARGEST], state["edges"].numpy(), [LARGEST]])
        share = np.append(0.0, (total["weight"].cumsum(0) / total["weight"].sum()).numpy())
        edges = torch.from_numpy(np.interp(np.arange(1, bins) / bins, share, ends))
        return state | {"edges": edges, "round": state["round"] + 1}, False


def concordance(asked: Questions, within: Concordance, across: ByScore | None) -> Any:
    """Return Harrell's concordance of each site, of all pairs within sites and of all pairs, as a
    data frame of pandas.

    Args:
        asked: The questions.
        within: The question about pairs within sites.
        across: The question about all pairs; None if each site has its own baseline.
    """
    sums = asked.conduct(within)
    columns = {name: np.append(t.numpy(), float(t.sum())) for name, t in sums.items()}
    found = pandas.DataFrame(columns, index=[*asked.sites.names, "pairs within sites"])
    if across is not None:
        with contextlib.suppress(Refusal):  # pairs within sites remain
            cells = asked.conduct(across)
            events, others = cells["events"], cells["at_risk"] - cells["events"]
            parts = (others.sum(1, keepdim=True), others.cumsum(1) - others, others)
            found.loc["all pairs"] = [float((events * part).sum()) for part in parts]
    found.insert(0, "concordance", (found["concordant"] + found["tied"] / 2) / found["pairs"])
    return found
