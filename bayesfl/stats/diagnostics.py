"""Diagnostics of regressions by site, from sums and a few numbers of each site."""

import math
from dataclasses import dataclass
from typing import Any

import pandas
import torch
from scipy import stats
from torch import Tensor

from bayesfl.base.display.sheet import of_frame
from bayesfl.base.numerics import levelled
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import PerClient, Survey
from bayesfl.stats.asking import AfterFit, Questions, Released, slot
from bayesfl.stats.families import saturated
from bayesfl.stats.tables import Site

BINARY = ("binomial", "log_binomial")
COUNTS = ("poisson", "negative_binomial")
DOUBT = 0.01
"""p value below which the diagnostics report a problem."""


@dataclass(frozen=True)
class Looks(AfterFit):
    """Ask for expected and observed outcomes by site; for outcomes 0 or 1 also for each site's
    concordance with its variance.

    Args:
        sites: Number of sites J.
    """

    sites: int = 1

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        j = PerClient((self.sites,))
        found: dict[str, tuple[int, ...]] = {"saturated": (), "expected": j, "observed": j}
        if self.likelihood.family in COUNTS:
            found |= {"spread": j, "pearson": (), "tails": ()}
        if self.likelihood.family in BINARY:
            found |= {"spread": j, "auc": j, "variance": j, "known": j}
        return found

    def spread(self, state: Tensors, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return the variances of outcomes with these means [n], and alpha of counts."""
        family, none = self.likelihood.family, torch.zeros(())
        alpha = state["theta"][-1].exp() if family == "negative_binomial" else none
        return mean * (1 - mean) if family in BINARY else mean + alpha * mean**2, alpha

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return those of the fitted question, and those in Pearson's statistic and in the tails of
        counts, [k, n]; see `SiteSurvey`.
        """
        found = torch.atleast_2d(self.likelihood.row_weights(state, site))
        if self.likelihood.family not in COUNTS:
            return found
        spread, _ = self.spread(state, self.likelihood.means(state, site))
        return torch.cat([found, (site.weights / spread)[None]])

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        family, y, w = self.likelihood.family, site.outcome, site.weights
        mean = self.likelihood.means(state, site)
        found = {
            "saturated": w @ (saturated(y) if family == "poisson" else torch.zeros_like(y)),
            "expected": slot(w @ mean, place, self.sites),
            "observed": slot(w @ y, place, self.sites),
        }
        if family == "gaussian":
            return found
        spread, alpha = self.spread(state, mean)
        found["spread"] = slot(w @ spread, place, self.sites)
        if family in COUNTS:
            found["tails"] = w @ excess_kurtosis(spread, alpha)
            return found | {"pearson": w @ ((y - mean).square() / spread)}
        auc, variance, pairs = concordance(mean, y, w)
        return found | {
            "auc": slot(auc, place, self.sites),
            "variance": slot(variance, place, self.sites),
            "known": slot(pairs, place, self.sites),
        }


def excess_kurtosis(variance: Tensor, alpha: Tensor) -> Tensor:
    """Return the excess kurtosis of negative binomial counts from their variance, [n]; an alpha of
    0 gives Poisson's.
    """
    return 1 / variance + 6 * alpha


def concordance(risk: Tensor, y: Tensor, weights: Tensor) -> tuple[float, float, float]:
    """Return the concordance, its variance, and the number of pairs: the share of pairs of an event
    and a non-event with the higher risk for the event, ties counted half.

    Source: DeLong, DeLong, Clarke-Pearson, "Comparing the areas under two or more correlated
    receiver operating characteristic curves", Biometrics 44, 1988.

    Args:
        risk: Predicted risks, [n].
        y: Outcomes 0 or 1, [n].
        weights: The rows' weights, [n].
    """
    risk = levelled(risk)
    high, n_high = risk[y == 1], weights[y == 1]
    low, n_low = risk[y == 0], weights[y == 0]
    events, others = float(n_high.sum()), float(n_low.sum())
    if not events or not others:
        return 0.0, 0.0, 0.0
    above = _below(high, low, n_low) / others  # for each event the share of non-events below it
    under = 1 - _below(low, high, n_high) / events
    auc = float(n_high @ above) / events
    variance = 0.0
    for shares, weight, n in ((above, n_high, events), (under, n_low, others)):
        if n > 1:
            variance += float(weight @ (shares - auc).square()) / (n - 1) / n
    return auc, variance, events * others


def _below(at: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Return for each of `at` [m] the number of lower values [n], equal ones counted half."""
    values, order = values.sort()
    upto = torch.cat([weights.new_zeros(1), weights[order].cumsum(0)])
    lower, upper = (torch.searchsorted(values, at, side=side) for side in ("left", "right"))
    return (upto[lower] + upto[upper]) / 2


@dataclass(frozen=True, repr=False)
class Diagnostics:
    """Hold measures of how well a fit describes the rows; `print` shows them.

    Args:
        deviance: Twice the log likelihood that a saturated model has more; for a Gaussian outcome
            the sum of squared residuals. None for negative binomial counts.
        null_deviance: The same for intercepts alone.
        null_log_likelihood: Log likelihood of intercepts alone, in nats; None for a Gaussian
            outcome.
        sites: Data frame of pandas, by site: rows, sums of the outcome and of its expectation.
        concordance: Data frame of pandas, by site: the area under the ROC curve with its standard
            error and interval by DeLong, NaN for a site with one level of the outcome; last, that
            of pairs within sites. None for other outcomes.
        said: Problems, in words: counts that vary more than the family's, by Pearson's statistic,
            whose variance accounts for the tails of rare counts; sites with other outcomes than
            expected.
        released: What left each site.
    """

    deviance: float | None
    null_deviance: float | None
    null_log_likelihood: float | None
    sites: Any
    concordance: Any
    said: tuple[str, ...]
    released: Released

    def __str__(self) -> str:
        lines = []
        if self.deviance is not None:
            lines = [f"deviance {self.deviance:.4f}, of intercepts alone {self.null_deviance:.4f}"]
        if self.null_log_likelihood is not None:
            lines.append(f"log likelihood of intercepts alone {self.null_log_likelihood:.4f}")
        titles = {
            "outcomes by site": self.sites,
            "concordance (AUC), DeLong's intervals": self.concordance,
        }
        lines += [
            str(of_frame(frame, title)) for title, frame in titles.items() if frame is not None
        ]
        return "\n".join([*lines, *self.said, str(self.released)])

    __repr__ = __str__


def diagnose(
    asked: Questions,
    survey: Any,
    null: Survey[Any],
    state: Tensors,
    loss: float,
    rows: dict[str, float],
    level: float,
    *,
    counts: bool,
) -> Diagnostics:
    """Return the diagnostics of a fit.

    Args:
        asked: Puts the questions to the sites of the fit.
        survey: The regression, the survey of `bf.stats.glm`.
        null: The survey that fits intercepts alone, by Newton's steps.
        state: Its last state.
        loss: Negative log likelihood there, in nats.
        rows: {site: its number of rows}.
        level: Probability of intervals.
        counts: Whether to test if counts vary more than the family's.
    """
    names = asked.sites.names
    looks = asked.conduct(Looks(survey, len(names), at=state))
    least, alone = float(looks["saturated"]), float(asked.conduct(null)["loss"])
    unit = survey.outcome_scale**2
    parameters = len(state["theta"]) + survey.per_site * len(names)
    own_scale = survey.family == "negative_binomial"
    sums = {key: looks[key].numpy() for key in ("observed", "expected")}
    return Diagnostics(
        deviance=None if own_scale else 2 * unit * (loss - least),
        null_deviance=None if own_scale else 2 * unit * (alone - least),
        null_log_likelihood=None if survey.family == "gaussian" else -alone,
        sites=pandas.DataFrame({"rows": list(rows.values()), **sums}, index=list(rows)),
        concordance=_areas(looks, names, level) if survey.family in BINARY else None,
        said=_said(survey.family, looks, rows, None if not counts else parameters),
        released=asked.released,
    )


def _said(
    family: str, looks: Tensors, rows: dict[str, float], parameters: int | None
) -> tuple[str, ...]:
    """Return texts on the problems of a fit with this number of parameters. Without the number, the
    variation of counts is not tested.
    """
    found = []
    if family in COUNTS and parameters is not None:
        degrees = sum(rows.values()) - parameters
        pearson = float(looks["pearson"])
        # A multiple of a chi-squared variable with Pearson's mean and variance, which is 2 and the
        # excess kurtosis for each row; that of rare counts is largest.
        multiple = 1 + float(looks["tails"]) / (2 * degrees)
        p = float(stats.chi2.sf(pearson / multiple, degrees / multiple))
        if p < DOUBT:
            found.append(
                f"counts vary {pearson / degrees:.2f} times as much as the family's (Pearson's p "
                f"{p:.2g}): take "
                + ("family='negative_binomial' or " if family == "poisson" else "")
                + "errors='sandwich'"
            )
    if family != "gaussian":
        z = (looks["observed"] - looks["expected"]) / looks["spread"].sqrt()
        least = float(stats.norm.isf(DOUBT / 2 / len(rows)))
        for place in (z.abs() > least).nonzero().flatten().tolist():
            seen, wanted = (float(looks[key][place]) for key in ("observed", "expected"))
            found.append(
                f"{list(rows)[place]} has {seen:g} where {wanted:.1f} are expected: give each site "
                "its own intercept, intercept='per_site'"
            )
    return tuple(found)


def _areas(looks: Tensors, names: tuple[str, ...], level: float) -> Any:
    share = looks["known"] / looks["known"].sum()
    auc, variance = (looks[name].where(share > 0, math.nan) for name in ("auc", "variance"))
    auc = torch.cat([auc, (share @ looks["auc"])[None]])
    se = torch.cat([variance, (share.square() @ looks["variance"])[None]]).sqrt()
    reach = float(stats.norm.ppf((1 + level) / 2)) * se
    columns = {
        "auc": auc,
        "se": se,
        f"{50 * (1 - level):g} %": (auc - reach).clamp(0, 1),
        f"{50 * (1 + level):g} %": (auc + reach).clamp(0, 1),
    }
    return pandas.DataFrame(
        {key: t.numpy() for key, t in columns.items()}, index=[*names, "within sites"]
    )
