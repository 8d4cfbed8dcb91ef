"""Generalised linear models over sites. They give the same table as a fit to the pooled rows.

The log likelihood of all rows is a sum over sites, and so are its gradient and its Hessian.
Newton's steps need no more. A site's own intercept is found and eliminated at the site: with H the
Hessian by (shared parameters, own intercept), a site answers the slope at its best intercept and
the Schur complement

    $H_bb - H_ba H_ab / H_aa$.

Their sums are slope and Hessian of the profile likelihood. No own intercept leaves its site.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import pandas
import torch
from torch import Tensor

from bayesfl.base.options import Positive, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import NotNegative, Semidefinite
from bayesfl.federation.clients.surveying import Adder
from bayesfl.stats import newton
from bayesfl.stats.asking import (
    AfterFit,
    Kept,
    Questions,
    Sites,
    SiteSurvey,
    Sums,
    counted,
    outcome_unit,
    standard,
    unit_of,
    used_rows,
)
from bayesfl.stats.diagnostics import BINARY, Diagnostics, diagnose
from bayesfl.stats.families import FAMILIES, row_information
from bayesfl.stats.fit import (
    ALONE,
    ERRORS,
    Errors,
    Fit,
    chosen_errors,
    inverse,
    refuse_alone,
    separation,
)
from bayesfl.stats.tables import Site, Tables, offsets

INTERCEPT_SD = 10.0
"""Standard deviation of the intercepts' prior, if the coefficients have one."""

FLAT = 1e-8
"""If the information of log alpha is below this, counts vary no more than Poisson's, and the
likelihood rises without bound as alpha falls."""
EDGE = 1e10
"""If the information at the log link is above this, a row's probability is 1 up to rounding."""


@dataclass(frozen=True)
class Likelihood(SiteSurvey):
    """Ask for the negative log likelihood, its slope and its information at the parameters, and
    make Newton's step; columns are standardised.

    Args:
        family: Name of the family, of `FAMILIES`.
        columns: Number p of columns.
        per_site: Whether each site has its own intercept.
        prior: Standard deviation of the coefficients' prior; None without one.
        centre: Means of the columns.
        scale: Their standard deviations.
        intercept: Start of Newton's steps, with coefficients of 0.
        outcome_centre: Number subtracted from a Gaussian outcome.
        outcome_scale: Number that then divides it.
        unit: The weight that counts as 1.
    """

    family: str
    columns: int
    per_site: bool
    prior: float | None = None
    centre: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    intercept: float = 0.0
    outcome_centre: float = 0.0
    outcome_scale: float = 1.0
    unit: float = 1.0

    @property
    def size(self) -> int:
        """Return the number q of shared parameters: an intercept, the coefficients, and the
        family's own.
        """
        return (not self.per_site) + self.columns + len(FAMILIES[self.family].own)

    def start(self, about: Any, /) -> Tensors:
        """Return Newton's start."""
        theta = torch.zeros(self.size, dtype=torch.float64)
        theta[: int(not self.per_site)] = self.intercept
        return newton.begin(theta) | {
            "centre": torch.tensor(self.centre, dtype=torch.float64),
            "scale": torch.tensor(self.scale, dtype=torch.float64),
        }

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        q = self.size
        wrong = {"n_wrong": ()} if self.family == "binomial" and self.prior is None else {}
        return {
            "loss": (),
            "slope": (q,),
            # A family's loss is convex in the coefficients, but not in parameters of its own.
            "hessian": (q, q) if FAMILIES[self.family].own else Semidefinite((q, q)),
            **wrong,
            "n_outside": (),
            **({"volume": (), "penalty": ()} if self.per_site else {}),
        }

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        at, shapes = self.at(state, site), self.shapes(state)
        if at.outside:  # sums without some rows would reveal these
            return newton.outside(shapes)
        answer = {
            "loss": at.loss.sum() + at.penalty,
            "slope": at.scores,
            "hessian": at.hessian,
            "n_outside": torch.tensor(0.0),
            # A number that changes at a row's own boundary would reveal its outcome.
            "n_wrong": at.wrong if site.policy is None else at.wrong.clamp(max=1),
        }
        if at.own is not None:
            answer |= {"volume": at.own.log() / 2, "penalty": at.penalty}
        return {name: answer[name] for name in shapes}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Make Newton's step, see `newton.step`, and detect whether the parameters separate the
        outcomes of all rows.
        """
        loss = torch.where(total["n_outside"] > 0, torch.inf, total["loss"])
        strength, theta = self.strength(), state["theta"]
        after, done = newton.step(
            state,
            loss + (strength * theta**2).sum() / 2,
            total["slope"] + strength * theta,
            total["hessian"] + torch.diag(strength),
        )
        # Separated: no row is on the wrong side of the boundary between outcomes 0 and 1. At the
        # log link it is enough that all outcomes of some rows are 1.
        separated = total.get("n_wrong", torch.tensor(1)) == 0
        if self.family == "log_binomial":
            separated = (total["n_outside"] == 0) & (total["hessian"] > EDGE).any()
        return state | total | after | {"separated": separated}, done or bool(separated)

    def strength(self) -> Tensor:
        """Return the prior's precision of each shared parameter, [q]; 0 without a prior."""
        sizes = [not self.per_site, self.columns, len(FAMILIES[self.family].own)]
        of_slopes = 0.0 if self.prior is None else self.prior**-2
        each = torch.tensor([self.own_strength, of_slopes, 0.0], dtype=torch.float64)
        return each.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))

    def standardised(self, site: Site) -> Site:
        """Return a site with outcomes, offsets and weights in the survey's units."""
        return replace(
            site,
            y=(site.outcome - self.outcome_centre) / self.outcome_scale,
            offset=site.offset / self.outcome_scale,
            weights=site.weights / self.unit,
        )

    def predictors(self, state: Tensors, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        """Return a standardised site's columns in the linear predictor [n, d], this predictor [n]
        with the best own intercept, and that intercept, 0 if there is none.
        """
        first = int(not self.per_site)
        # One copy, which is changed in place, as a table may be large.
        design = torch.nn.functional.pad(site.x[:, : self.columns], (first, 0), value=1.0)
        design[:, first:].sub_(self.centre_at(state, site)).div_(state["scale"])
        slopes, own = state["theta"].tensor_split([design.shape[1]])
        eta = design @ slopes + site.offset
        alpha = torch.zeros((), dtype=torch.float64)
        if self.per_site:
            alpha = best_intercept(self.family, eta, site, own, self.own_strength)
        return design, eta + alpha, alpha

    def centre_at(self, state: Tensors, site: Site) -> Tensor:
        """Return the means that are subtracted from a site's columns, [p]: its own if this changes
        only its own intercept, so that sites far apart keep their digits; else those of all rows.
        """
        if self.per_site and self.prior is None:
            return site.weights @ site.x[:, : self.columns] / site.weights.sum()
        return state["centre"]

    @property
    def own_strength(self) -> float:
        """Return the precision of the own intercepts' prior; 0 without one."""
        return 0.0 if self.prior is None else INTERCEPT_SD**-2

    def at(self, state: Tensors, site: Site) -> "At":
        """Return a site's losses and derivatives at the parameters and its best own intercept."""
        site = self.standardised(site)
        design, eta, alpha = self.predictors(state, site)
        own, strength = state["theta"][design.shape[1] :], self.own_strength
        pieces = FAMILIES[self.family].pieces(eta, site.outcome, own)
        information = site.weights[:, None, None] * pieces.information
        volume = information[:, 0, 0].sum() + strength
        return At(
            design=design,
            loss=site.weights * pieces.loss,
            slope=site.weights[:, None] * pieces.slope,
            information=information,
            outside=not (pieces.loss.isfinite().all() and pieces.information.isfinite().all()),
            wrong=((eta - site.offset) * (2 * site.outcome - 1) <= 0).sum(),
            own=volume.clamp_min(1e-300) if self.per_site else None,  # 0 where separated
            penalty=strength * alpha**2 / 2,
        )

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return each row's information, and the weight of a negative binomial outcome in the
        slope, [k, n]; see `SiteSurvey`.
        """
        design, eta, _ = self.predictors(state, self.standardised(site))
        own = state["theta"][design.shape[1] :]
        found = [row_information(FAMILIES[self.family], eta, own)]
        if self.family == "negative_binomial":
            found.append(1 / (1 + (own[0] + eta).exp()))
        return site.weights * torch.stack(found)

    def means(self, state: Tensors, site: Site) -> Tensor:
        """Return the expected outcomes of a site's rows, [n]."""
        eta = self.predictors(state, self.standardised(site))[1]
        return self.outcome_centre + self.outcome_scale * FAMILIES[self.family].mean(eta)

    def own_intercept(self, state: Tensors, site: Site) -> float:
        """Return a site's best own intercept, for columns that are not standardised."""
        alpha = self.predictors(state, self.standardised(site))[2]
        centre = self.centre_at(state, site) / state["scale"]
        alpha = alpha - state["theta"][: self.columns] @ centre
        return float(self.outcome_centre + self.outcome_scale * alpha)


@dataclass(frozen=True)
class At:
    """Hold losses and derivatives of a site's n rows at some parameters.

    Args:
        design: Their columns in the linear predictor, [n, d].
        loss: Their negative log likelihoods, weighted, [n].
        slope: Slopes by the linear predictor and the family's own parameters, weighted, [n, m].
        information: Their information, weighted, [n, m, m].
        outside: Whether a row is outside the family's range.
        wrong: Number of rows with outcome 1 and a probability without offset of at most a half, or
            outcome 0 and one of at least a half.
        own: The information of the site's own intercept, with its prior's; None if it has none.
        penalty: Half the square of this intercept times its prior's precision.
    """

    design: Tensor
    loss: Tensor
    slope: Tensor
    information: Tensor
    outside: bool
    wrong: Tensor
    own: Tensor | None
    penalty: Tensor

    @property
    def scores(self) -> Tensor:
        """Return the slopes of all shared parameters: [q], sums over rows."""
        return torch.cat([self.design.T @ self.slope[:, 0], self.slope[:, 1:].sum(0)])

    @cached_property
    def cross(self) -> Tensor:
        """Return the information between shared parameters and the own intercept, [q]."""
        first = self.information[:, 0]
        return torch.cat([self.design.T @ first[:, 0], first[:, 1:].sum(0)])

    @property
    def hessian(self) -> Tensor:
        """Return the information of the shared parameters, [q, q], with the own intercept
        eliminated: from columns about their means under the information, so no digits cancel.
        """
        design, first = self.design, self.information[:, :1, 0]
        rest, own = self.information[:, 1:, 1:].sum(0), self.cross[design.shape[1] :]
        of_prior: Tensor | float = 0.0
        if self.own is not None:
            mean = self.cross[: design.shape[1]] / self.own
            design, rest = design - mean, rest - torch.outer(own, own) / self.own
            of_prior = (self.own - first.sum()) * torch.outer(mean, mean)
        among = design.T @ (design * first) + of_prior
        across = design.T @ self.information[:, 0, 1:]
        return torch.cat([torch.cat([among, across], 1), torch.cat([across.T, rest], 1)])

    @property
    def row_scores(self) -> Tensor:
        """Return the slopes of each row, [n, q], with the own intercept eliminated."""
        found = torch.cat([self.design * self.slope[:, :1], self.slope[:, 1:]], 1)
        if self.own is not None:
            found = found - torch.outer(self.slope[:, 0], self.cross / self.own)
        return found


def best_intercept(family: str, eta: Tensor, site: Site, own: Tensor, strength: float) -> Tensor:
    """Return the own intercept that minimises a site's loss, by Newton's steps, halved if the loss
    rises.

    Args:
        family: Name of the family.
        eta: The linear predictors without it, [n].
        site: The site.
        own: The family's own parameters.
        strength: Precision of its prior; 0 without one.
    """
    rule, y = FAMILIES[family], site.outcome
    # Here no mean overflows for any offsets, and the log link's means are within its range.
    alpha = best = -eta.max() - int(family == "log_binomial")
    lowest = torch.inf
    for _ in range(200):
        pieces = rule.pieces(eta + alpha, y, own)
        loss = float(site.weights @ pieces.loss + strength * alpha**2 / 2)
        if not loss <= lowest + 1e-12 * abs(lowest):
            alpha = (alpha + best) / 2
            continue
        best, lowest = alpha, loss
        slope = site.weights @ pieces.slope[:, 0] + strength * alpha
        information = site.weights @ pieces.information[:, 0, 0] + strength
        move = -slope / information.abs().clamp_min(1e-300)
        if abs(float(slope * move)) < 1e-22 * max(1.0, abs(lowest)):
            return alpha + move
        alpha = alpha + move.clamp(-20.0, 20.0)
    return best


@dataclass(frozen=True)
class Meat(AfterFit):
    """Ask for outer products of rows' scores, counted by frequency weight, for robust errors."""

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        return {"meat": Semidefinite((self.likelihood.size, self.likelihood.size))}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        scores = self.likelihood.at(state, site).row_scores  # weighted
        return {"meat": scores.T @ (scores / site.counts[:, None])}


@dataclass(frozen=True)
class SiteMeat(Meat):
    """Ask for the outer products of sites' scores, adjusted for few sites by CR2, and for the terms
    of the degrees of freedom.

    Let $L L'$ be the inverse of the information, $M_j$ site j's share of the information,
    $N_j = L' M_j L$, and $s_j$ its score. The adjusted score is $t_j = (I - N_j)^(-1/2) L' s_j$,
    and the covariance $L (sum_j t_j t_j') L'$. If the model is true, the variance of a contrast c
    is a quadratic form of residuals; with $v = L' c$ and $h_j = N_j (I - N_j)^(-1/2) v$ it has the
    trace and the trace of its square

        $sum_j v' N_j v$, $sum_j ((v' N_j v)^2 - (h_j' h_j)^2) + |sum_j h_j h_j'|^2$.

    Source: Bell and McCaffrey, "Bias reduction in standard errors for linear regression with
        multi-stage samples", Survey Methodology 28, 2002; with weights, Pustejovsky and Tipton,
        "Small-sample methods for cluster-robust variance estimation", JBES 36, 2018.

    The state has L as `root` and v of q contrasts as `v`, [q, q].
    """

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        q = self.likelihood.size
        each = NotNegative((q,))
        outer = {"outer": (q, q, q), "trace": each, "square": (q,), "alone": each}
        return {**super().shapes(state), **outer}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        at, root = self.likelihood.at(state, site), state["root"]
        values, vectors = torch.linalg.eigh(root.T @ at.hessian @ root)
        left = 1 - values
        alone = left < ALONE  # the other sites have no information in these directions
        factor = torch.where(alone, 0.0, left.clamp_min(ALONE).rsqrt())
        score = factor * (vectors.T @ (root.T @ at.scores))
        v = state["v"] @ vectors
        h = v * values * factor
        trace, size = v.square() @ values, h.square().sum(1)
        of_all = h @ vectors.T
        return {
            "meat": torch.outer(vectors @ score, vectors @ score),
            "outer": torch.einsum("ca,cb->cab", of_all, of_all),
            "trace": trace.clamp_min(0.0),
            "square": trace.square() - size.square(),
            "alone": v.square() @ alone.double() / v.square().sum(1),
        }


@dataclass(frozen=True)
class OwnIntercept(Kept, AfterFit):
    """Send sites on other machines the `estimate` for columns that are not standardised; each
    stores it with its own intercept.

    Args:
        names: Names of the shared parameters.
    """

    names: tuple[str, ...] = ()

    def kept(self, state: Tensors, site: Site, place: int) -> Any:
        """Return the site's own model, with a column for each parameter."""
        values = (self.likelihood.own_intercept(state, site), *state["estimate"].tolist())
        return pandas.DataFrame([values], columns=["(intercept)", *self.names])


@declared
def glm(
    sites: Sites,
    *,
    family: Literal["gaussian", "binomial", "log_binomial", "poisson", "negative_binomial"],
    intercept: Literal["shared", "per_site"] = "shared",
    errors: Errors | None = None,
    prior: Positive | None = None,
    aggregation: Adder | None = None,
) -> Fit:
    """Fit a generalised linear model to the rows of all sites, by sums over sites.

    Args:
        sites: The sites, of `tables`.
        family: Of the outcome: `gaussian` at the identity link, `binomial` at the logit,
            `log_binomial` at the log, `poisson` and `negative_binomial` (NB2) at the log.
        intercept: One for all sites, or one for each site, which stays there. A site whose outcomes
            have a single level then has no information and is left out.
        errors: Standard errors by the `model`; by the `sandwich` of rows' scores (HC0), for
            independent rows and a wrong model; or by `site`, from the scores of at least three
            sites, with the correction for few (CR2) and Bell and McCaffrey's degrees of freedom,
            `df` in the table. None takes the model's, and the sandwich under probability weights.
        prior: Standard deviation of a normal prior of the coefficients of standardised columns,
            such as 2.5, which keeps them finite if an outcome is separated; intercepts have a prior
            with 10. The fit then has an `evidence`. Not for `gaussian`.
        aggregation: How the sites' answers are added, such as `SecureSum()`; None adds them openly.

    Raises:
        ValueError: An outcome is outside the family's range, a column is constant, columns are
            linearly dependent, some separate the outcome, or counts vary no more than Poisson's;
            with `errors="site"`, there are two sites, or one alone informs a coefficient.

    Example:
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> frames = {
        ...     "north": pd.DataFrame({"dose": [0.0, 1, 2, 3], "ill": [0, 1, 0, 1]}),
        ...     "south": pd.DataFrame({"dose": [0.0, 2, 3, 4], "ill": [0, 0, 1, 1]}),
        ... }
        >>> sites = bf.stats.tables(frames, outcome="ill", terms=["dose"])
        >>> fit = bf.stats.glm(sites, family="binomial")
        >>> round(float(fit.table()["coef"]["dose"]), 3)
        1.345
    """
    return regression(
        Questions(sites, aggregation),
        sites.columns,
        family=family,
        per_site=intercept == "per_site",
        errors=errors,
        prior=prior,
        refit=lambda chosen: glm(
            sites.only(chosen),
            family=family,
            intercept=intercept,
            errors=errors,
            prior=prior,
            aggregation=aggregation,
        ),
    )


def regression(
    asked: Questions,
    columns: tuple[str, ...],
    *,
    family: str,
    per_site: bool,
    errors: Errors | None,
    prior: float | None,
    refit: Callable[[Sequence[str]], Fit],
) -> Fit:
    """Return the fit of a generalised linear model; see `glm`.

    Args:
        asked: Puts the questions.
        columns: Names of the columns of the design.
        family: As in `glm`.
        per_site: Whether each site has an intercept of its own.
        errors: As in `glm`.
        prior: As in `glm`.
        refit: As in `Fit`.
    """
    if family == "gaussian" and prior is not None:
        raise ValueError("prior= is for families without a scale of their own; leave it out")
    sums = asked.first(lambda count: Sums(count, len(columns), family))
    rows, dropped, events = (
        counted(asked.sites.names, sums[name]) for name in ("rows", "n_dropped", "outcome")
    )
    centre, scale = standard(sums, columns)
    outcome = getattr(asked.sites, "outcome", None) or "outcome"
    middle, unit = outcome_unit(family, sums, outcome)
    if per_site and prior is None and family != "gaussian":
        # The own intercept of a site whose outcome has a single level absorbs all information.
        none = {name: "none of its {:g} rows has an event" for name in rows if not events[name]}
        full = {
            name: "all of its {:g} rows have an event"
            for name in rows
            if family in BINARY and math.isclose(events[name], rows[name])
        }
        asked.leave_out({name: why.format(rows[name]) for name, why in (none | full).items()})
    sites, kept = asked.sites, asked.sites.names
    if not kept:
        told = "; ".join(f"{name}, {why}" for name, why in asked.left_out.items())
        raise ValueError(f"no site has information beyond its own intercept: {told}")
    errors = chosen_errors(sites, errors, prior)
    rule = FAMILIES[family]
    survey = Likelihood(
        family=family,
        columns=len(columns),
        per_site=per_site,
        prior=prior,
        centre=tuple(centre.tolist()),
        scale=tuple(scale.tolist()),
        intercept=0.0
        if family == "gaussian"
        else rule.link(float((sums["outcome"].sum() + 0.5) / (sums["rows"].sum() + 1)))
        - float(sums["offset_mean"]),
        outcome_centre=middle,
        outcome_scale=unit,
        unit=unit_of(sums),
    )
    state = asked.conduct(survey)
    theta, least = state["theta"], float(state["loss"])
    names = (() if per_site else ("(intercept)",)) + columns + rule.own
    rows = {name: rows[name] for name in kept}
    n = sum(rows.values())
    free = len(names) + per_site * len(kept)
    if state["separated"]:
        raise ValueError(
            separation(theta.abs(), names)
            if family == "binomial"
            else "all outcomes of some rows are 1, and their probability becomes 1, the end of the "
            "log link: leave out the terms that separate them, or take family='poisson' with "
            "errors='sandwich', whose coefficients are logarithms of risk ratios, too"
        )
    if family == "negative_binomial" and state["hessian"][-1, -1] < FLAT:
        raise ValueError("counts vary no more than Poisson's, so alpha is 0: take family='poisson'")
    bread = covariance = inverse(state, names)
    penalty = (survey.strength() * theta**2).sum() / 2 + state.get("penalty", 0.0)
    loss = plain = least - float(penalty)
    degrees, variance = None, 1.0
    if family == "gaussian":
        degrees = n - free
        if degrees <= 0 or least <= 0:
            raise ValueError(
                f"{free} coefficients of {n:g} rows leave no residuals of {outcome!r}, so there "
                "are no standard errors: leave terms out"
            )
        variance = 2 * least / degrees
        covariance = covariance * variance
        loss = n / 2 * (math.log(2 * math.pi * 2 * least / n) + 1) + n * math.log(unit)
    first = int(not per_site)
    change = torch.nn.functional.pad(1 / scale, (first, len(rule.own)), value=1.0).diag()
    change[:first, first : first + len(scale)] = -centre / scale
    if errors == "sandwich":
        meat = asked.conduct(Meat(survey, at=state))["meat"]
        covariance, degrees = bread @ meat @ bread, None
    if errors == "site":
        covariance, degrees = _by_site(asked, survey, state, bread, change, names)
    estimate, covariance = unit * change @ theta, unit**2 * change @ covariance @ change.T
    estimate[:first] += middle
    own = {}
    if per_site and isinstance(sites, Tables) and asked.through is None:
        own = {site.name: survey.own_intercept(state, site) for site in sites.sites}
    elif per_site:
        asked.conduct(OwnIntercept(survey, names, at=state | {"estimate": estimate}))

    def predict(frame: Any, site: Any) -> Tensor:
        if per_site and site not in own:
            raise ValueError(f"each site has an intercept of its own: name one of {sorted(own)}")
        start = own[site] if per_site else estimate[0]
        x = sites.design(frame)
        eta = x @ estimate[first : first + x.shape[1]] + start
        return rule.mean(eta + offsets(frame, sites.offset))

    def diagnostics(level: float, *, counts: bool = True) -> Diagnostics:
        null = replace(survey, columns=0, prior=None, centre=(), scale=())
        return diagnose(asked.again(), survey, null, state, plain, rows, level, counts=counts)

    further: dict[str, Any] = {
        "used rows": lambda key: used_rows(asked.again(), key),
        "predict": predict,
    }
    if sites.weighing != "probability":
        further["diagnostics"] = diagnostics
    return Fit(
        model=f"{rule.name}, {'an intercept for each site' if per_site else 'one intercept'}"
        + (f", prior {prior:g}" if prior is not None else ""),
        names=names,
        estimate=estimate,
        covariance=covariance,
        errors=ERRORS[errors],
        ratio=rule.ratio,
        rows=rows,
        events={} if family == "gaussian" else {name: events[name] for name in kept},
        dropped={name: dropped[name] for name in kept},
        left_out=asked.left_out,
        log_likelihood=-loss,
        parameters=free + (family == "gaussian"),
        released=asked.released,
        likelihood=f"the {'density' if family == 'gaussian' else 'probability'} of {outcome!r}",
        degrees=degrees,
        scale=unit**2 * variance,
        evidence=None if prior is None else _evidence(survey, state, len(kept)),
        own_intercepts=own,
        weighing=sites.weighing,
        further=further,
        refit=refit,
    )


def _by_site(
    asked: Questions,
    survey: Likelihood,
    state: Tensors,
    bread: Tensor,
    change: Tensor,
    names: Sequence[str],
) -> tuple[Tensor, Tensor]:
    """Return the covariance by sites [q, q], for standardised columns, and the degrees of freedom
    of each coefficient [q], for the original columns; see `SiteMeat`.

    Raises:
        ValueError: A single site alone informs a coefficient.
    """
    root = torch.linalg.cholesky(bread)
    found = asked.conduct(SiteMeat(survey, at=state | {"root": root, "v": change @ root}))
    refuse_alone(found["alone"], names)
    square = found["square"] + found["outer"].square().sum((1, 2))
    return root @ found["meat"] @ root.T, found["trace"].square() / square


def _evidence(survey: Likelihood, state: Tensors, sites: int) -> float:
    """Return Laplace's log marginal likelihood under the prior, in nats. The family's own
    parameters have no prior; their density is set to 1.
    """
    strength = survey.strength()
    density = strength[strength > 0].log().sum() / 2
    if survey.per_site:
        density = density - sites * math.log(INTERCEPT_SD) - state["volume"]
    flat = int((strength == 0).sum())
    around = flat / 2 * math.log(2 * math.pi) - torch.linalg.slogdet(state["hessian"]).logabsdet / 2
    return float(density + around - state["loss"])
