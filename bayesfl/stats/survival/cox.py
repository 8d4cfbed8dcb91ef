"""Cox's regression over sites. It gives the same table as a fit to the pooled rows."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from scipy import stats
from torch import Tensor

from bayesfl.base.options import Count, Positive, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.warning import warn
from bayesfl.data.tables.table import pandas_of
from bayesfl.federation.clients.surveying import Adder
from bayesfl.stats.asking import Questions, Sites, Sums, standard, unit_of, used_rows
from bayesfl.stats.fit import ERRORS, Errors, Fit, chosen_errors, inverse, refuse_alone
from bayesfl.stats.survival.checks import (
    ByScore,
    Concordance,
    Schoenfeld,
    concordance,
    proportional,
)
from bayesfl.stats.survival.groups import group, groups_of
from bayesfl.stats.survival.partial import Alone, PartialLikelihood, Scores
from bayesfl.stats.survival.tested import Tested
from bayesfl.stats.survival.times import BINS, Grid, follow, grid_of
from bayesfl.stats.tables import offsets
from bayesfl.stats.terms import Levels

TENTH = 0.1
"""Maximum shift of an estimate by bins of times without a warning, in standard errors."""


@declared(
    idle={("baseline", "per_site"): ("grid", "exact_times"), ("exact_times", True): ("grid",)}
)
def cox(
    sites: Sites,
    *,
    time: str,
    event: str,
    baseline: Literal["shared", "per_site"] = "shared",
    grid: Count | Sequence[float] | Grid = BINS,
    exact_times: bool = False,
    strata: str | Levels | None = None,
    entry: str | None = None,
    errors: Errors | None = None,
    prior: Positive | None = None,
    aggregation: Adder | None = None,
) -> Fit:
    """Fit Cox's proportional hazards, with Efron's ties, to the rows of all sites.

    `fit.check()` tests whether hazards are proportional, `fit.concordance()` counts pairs that are
    ranked right, and `fit.survival(frame)` predicts survival.

    Args:
        sites: The sites, of `tables`, whose outcome is not read.
        time: Column of times, > 0.
        event: Column of events: 1 where the time ends in one, 0 where it is censored.
        baseline: One baseline hazard for all sites, from sums at each time; or each site's own, as
            stratified by site. Then no time leaves a site, a site without an event has no
            information and is left out, and a column must differ within sites.
        grid: For a shared baseline, the maximum number of bins of times, or their upper ends, or an
            earlier grid. Bins have equal shares of the events and ends of two digits; under a
            policy they have at least ten events, and its `min_level` joins some. Events count at
            their bin's end, and rows that are censored before its middle are not at risk there. The
            fit reports the possible error of its estimates: the length of two Newton steps, with
            bins joined in pairs from the first or the second on, times $1 - 1 / s$ with s events
            per bin.
        exact_times: Whether sites send the exact times of events; an answer then has
            $(p + 1) (p + 2)$ numbers for each.
        strata: Column of strata, each with its own baseline, shared by sites or, with `per_site`,
            at each site; over a network `levels`, because values are only known here.
        entry: Column of entry times (left truncation): a row is at risk only after it; None for 0.
            On a grid, a row that enters after the middle of a bin's events counts from the next bin
            on. Under a policy, no row or at least `min_level` enter at a time.
        errors: Standard errors by the `model`; by the `sandwich` of rows' score residuals; or by
            `site`, from the sums of at least three sites, times $J / (J - 1)$, with Student's t of
            $J - 1$ degrees of freedom. None takes the model's, and the sandwich under probability
            weights.
        prior: Standard deviation of a normal prior of the coefficients of standardised columns,
            such as 2.5, which keeps them finite. The fit then has an `evidence`, of the partial
            likelihood.
        aggregation: How the sites' answers are added, such as `SecureSum()`; None adds them openly.

    Raises:
        ValueError: A time is not above 0 or beyond the grid, an event is not 0 or 1, no site has
            one, a column is constant over all sites, or with `per_site` within each, columns are
            linearly dependent, some separate early events from late ones, or the sites' policies
            leave fewer than ten bins; with `errors="site"`, one site alone informs a coefficient.

    Warns:
        UserWarning: Bins of times may shift a coefficient by more than a tenth of its standard
            error.

    Source: Cox, "Regression models and life-tables", JRSS B 34, 1972; the sums over sites as in Lu
        et al., "WebDISCO", JAMIA 22, 2015, here with Efron's ties.

    Example:
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> frames = {
        ...     "north": pd.DataFrame({"t": [2, 3, 5, 8], "d": [1, 1, 0, 1], "dose": [3, 1, 2, 0]}),
        ...     "south": pd.DataFrame({"t": [1, 4, 6, 7], "d": [1, 0, 1, 1], "dose": [1, 2, 0, 1]}),
        ... }
        >>> sites = bf.stats.tables(frames, terms=["dose"], also=["t", "d"])
        >>> fit = bf.stats.cox(sites, time="t", event="d", exact_times=True)
        >>> round(float(fit.table()["coef"]["dose"]), 3)
        0.518
    """
    asked = Questions(sites, aggregation)
    per_site = baseline == "per_site"
    names = sites.columns
    known = follow(asked, time, event)
    sums = asked.conduct(Sums(len(asked.sites.names), len(names)))
    centre, scale = standard(sums, names)
    shared = None
    if per_site:
        silent = [name for name in asked.sites.names if not known.events[name]]
        asked.leave_out(
            {name: f"none of its {known.rows[name]} rows has an event" for name in silent}
        )
    else:
        shared = grid_of(asked, time, event, known, grid, exact_times, strata)
    errors = chosen_errors(asked.sites, errors, prior)
    groups = groups_of(asked.sites, strata)
    kept = asked.sites.names
    survey = PartialLikelihood(
        time=time,
        event=event,
        columns=len(names),
        grid=shared,
        entry=entry,
        strata=groups,
        prior=prior,
        centre=tuple(centre.tolist()),
        scale=tuple(scale.tolist()),
        unit=unit_of(sums),
    )
    state = asked.conduct(survey)
    theta, least = state["theta"], float(state["loss"])
    n = sum(known.events[name] for name in kept)
    flat = state["first"].diagonal() < (1e-26 if per_site else 1e-10) * n  # by rounding
    if alike := [names[place] for place in flat.nonzero().flatten().tolist()]:
        raise ValueError(
            f"{alike} do not differ among rows at risk together, so their coefficients cannot be "
            "estimated: leave these terms out" + (", or take baseline='shared'" if per_site else "")
        )
    model = covariance = inverse(state, names)
    at = state | {"theta": state["best"]}
    if errors == "site":
        refuse_alone(asked.conduct(Alone(survey, at=at))["alone"], names)
    if errors != "model":
        meat = asked.conduct(Scores(survey, errors, at=at))["meat"]
        covariance = model @ meat @ model
    said = ()
    if shared is not None and not exact_times and names:
        moves = state["coarser"] / covariance.diagonal().sqrt()
        share = n / float((state["weight"] > 0).sum())
        most, term = (1 - 1 / share) * float(moves.max()), names[int(moves.argmax())]
        said = (
            f"{share:.3g} events share a bin of times, so estimates may be off by "
            f"{most:.2g} standard errors ({term})",
        )
        if most > TENTH:
            warn(
                f"{said[0]}: if that is too much, take exact_times=True, or baseline='per_site', "
                "which needs no bins"
            )
    degrees = float(len(kept) - 1) if errors == "site" else None
    if degrees is not None:
        covariance = covariance * len(kept) / degrees
    volume = float(torch.linalg.slogdet(state["hessian"]).logabsdet) / 2
    read = (time, event) if entry is None else (time, event, entry)

    def check() -> Tested:
        against = Schoenfeld(survey, known.marks[-1], at=at)
        return proportional(asked.again(), against, model, names)

    def ranked() -> Any:
        across = None if per_site else ByScore(survey, at=at)
        return concordance(asked.again(), Concordance(survey, len(kept), at=at), across)

    def survival(frame: Any, level: float) -> Any:
        rows, stratum = groups.levels, torch.arange(len(groups.levels))
        design, offset = torch.zeros(len(rows), len(names), dtype=torch.float64), 0.0
        if frame is not None:
            frame = pandas_of(frame)
            rows, stratum = frame.index, group(frame, groups, "the frame")
            design = (sites.design(frame) - centre) / scale
            offset = offsets(frame, sites.offset)
        eta = design @ theta + offset
        assert shared is not None
        return predicted(state, shared.ends, rows, design, eta, stratum, covariance, level)

    further = {
        "concordance": ranked,
        "used rows": lambda key: used_rows(asked.again(), key, read),
    }
    if sites.weighing != "probability":  # which need other variances
        further |= {"check": check} | ({} if per_site else {"survival": survival})
    told = (
        ("a baseline for each site" if per_site else f"one baseline, {shared}")
        + (f", strata by {groups.column!r}" if strata else "")
        + (f", entry at {entry!r}" if entry else "")
    )
    return Fit(
        model=f"Cox's proportional hazards, Efron's ties, {told}"
        + (f", prior {prior:g}" if prior is not None else ""),
        names=names,
        estimate=theta / scale,
        covariance=covariance / torch.outer(scale, scale),
        errors="the sandwich, by sites, times J / (J - 1)" if errors == "site" else ERRORS[errors],
        degrees=degrees,
        ratio="hazard ratio",
        rows={name: known.rows[name] for name in kept},
        events={name: known.events[name] for name in kept},
        dropped={name: known.dropped[name] for name in kept},
        left_out=asked.left_out,
        log_likelihood=survey.strength * float(theta @ theta) / 2 - least,
        parameters=len(names),
        released=asked.released,
        evidence=None if prior is None else -least - len(names) * math.log(prior) - volume,
        said=said,
        likelihood=f"the order of {event!r} by {time!r}, {told}",
        weighing=sites.weighing,
        further=further,
        refit=lambda chosen: cox(
            sites.only(chosen),
            time=time,
            event=event,
            baseline=baseline,
            grid=grid if shared is None or exact_times else shared,  # of all sites
            exact_times=exact_times,
            strata=strata and groups,  # of all sites
            entry=entry,
            errors=errors,
            prior=prior,
            aggregation=aggregation,
        ),
    )


def predicted(
    baseline: Tensors,
    ends: Sequence[float],
    groups: Sequence[Any],
    design: Tensor,
    eta: Tensor,
    stratum: Tensor,
    covariance: Tensor,
    level: float,
) -> Any:
    """Return the cumulative hazard and the survival of G rows at each time while rows of their
    stratum are at risk, with errors and intervals, as a data frame of pandas.

    With dH the steps of Efron's estimate of the hazard, or Breslow's if no times tie, the
    cumulative hazard of a row is $e^eta H$; with D the sum of (mean of x - x) dH, its variance is

        $e^(2 eta) (sum w / phi_l^2 + D' V D)$.

    Intervals are normal for $log(-log survival)$.

    Args:
        baseline: `at_risk`, `variance` and `followed` of the baseline, as `PartialLikelihood` keeps
            them.
        ends: The T times.
        groups: Names of the rows.
        design: Their standardised columns, [G, p].
        eta: Their linear predictors, [G].
        stratum: The places of their strata, [G].
        covariance: Of the errors V of coefficients of standardised columns, [p, p].
        level: Probability of the intervals.

    Source: Tsiatis, "A large sample study of Cox's regression model", Annals of Statistics 9, 1981;
    Therneau and Grambsch, "Modeling survival data", Springer 2000, section 10.2, as R's survfit.
    """
    import pandas

    steps, spread, followed = (
        baseline[name].unflatten(0, (-1, len(ends)))[stratum]
        for name in ("at_risk", "variance", "followed")
    )
    met, relative = steps.cumsum(1), eta.exp().unsqueeze(1)  # [G, T, 1 + p], [G, 1]
    drift = met[..., 1:] - design.unsqueeze(1) * met[..., :1]
    variance = spread.cumsum(1) + ((drift @ covariance) * drift).sum(-1)
    hazard, error = relative * met[..., 0], relative * variance.sqrt()
    reach = float(stats.norm.ppf((1 + level) / 2)) * error / hazard.clamp_min(1e-300)
    columns = {
        "hazard": hazard,
        "se(hazard)": error,
        "survival": (-hazard).exp(),
        f"{50 * (1 - level):g} %": (-hazard * reach.exp()).exp(),
        f"{50 * (1 + level):g} %": (-hazard * (-reach).exp()).exp(),
    }
    index = pandas.MultiIndex.from_product([groups, ends], names=["row", "time"])
    flat = {name: one.flatten().numpy() for name, one in columns.items()}
    return pandas.DataFrame(flat, index=index)[followed.flatten().numpy()]
