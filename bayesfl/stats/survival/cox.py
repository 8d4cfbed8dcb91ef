"""Cox's regression over sites, whose table is that of all rows together."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from bayesfl.base.options import Count, Positive, declared
from bayesfl.base.warning import warn
from bayesfl.data.tables.table import pandas_of
from bayesfl.federation.clients.surveying import Adder
from bayesfl.stats import newton
from bayesfl.stats.asking import Questions, Sites, Sums, standard, unit_of, used_rows
from bayesfl.stats.fit import (
    ERRORS,
    FEW_SITES,
    Errors,
    Fit,
    change_of,
    chosen_errors,
    inverse,
)
from bayesfl.stats.survival.checks import (
    ByScore,
    Concordance,
    Scale,
    Schoenfeld,
    concordance,
    proportional,
    shares,
)
from bayesfl.stats.survival.groups import group, groups_of
from bayesfl.stats.survival.partial import PartialLikelihood, Scores, after
from bayesfl.stats.survival.predicted import predicted
from bayesfl.stats.survival.tested import Tested
from bayesfl.stats.survival.times import BINS, Grid, follow, grid_of
from bayesfl.stats.terms import Levels, numbers

TENTH = 0.1
"""Bins of times that move an estimate by more than so many standard errors give a warning."""


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
        baseline: One baseline hazard for all sites, of which sites tell sums for each time; or one
            of each site's own, as stratified by site, where no time leaves a site, a site without
            an event says nothing and is left out, and a column must differ within sites.
        grid: Where the baseline is shared, the largest number of bins of times, or their upper
            ends, or a grid that was made before. Bins have equal shares of the events, ten or more
            under a policy, whose `min_level` joins some, and ends of two digits. Events count at
            their bin's end, rows that are censored before its middle are not at risk there, and
            the fit is that to such times. It says how far estimates may be off: a Newton step where
            bins are joined in pairs, times 1 - 1 / s with s events a bin.
        exact_times: Whether sites tell the times of events as they are; then an answer has
            (p + 1) (p + 2) numbers for each.
        strata: Column of strata, each with a baseline of its own, at all sites the same or, under
            `per_site`, at each site; on other machines `levels`, as what values there are is known
            here only.
        entry: Column of the times at which rows come under observation, who count as at risk after
            it only (left truncation); None if all are from 0. On a grid these are rounded down,
            under a policy so that each time has no entry or `min_level`.
        errors: Standard errors by the `model`; by the `sandwich` of rows' score residuals; or by
            `site`, of the sums of three sites at least, times J / (J - 1), with Student's t of
            J - 1 degrees of freedom for few sites. None takes the model's, and the
            sandwich under probability weights.
        prior: Standard deviation of a normal prior of the coefficients of standardised columns,
            as 2.5, which keeps them finite. With it the fit has an `evidence`, of the partial
            likelihood.
        aggregation: How the sites' answers are added, as `SecureSum()`; None adds them openly.

    Raises:
        ValueError: A time is not above 0 or beyond the grid, an event is not 0 or 1, no site has
            one, a column is constant over all sites, or under `per_site` within each, columns are
            linearly dependent, some separate early events from late ones, or the sites' policies
            leave fewer than ten bins.

    Warns:
        UserWarning: A coefficient may be off by more than a tenth of its standard error for the
            bins of times.

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
        >>> round(float(fit.coefficients["dose"]), 3)
        0.518
    """
    asked = Questions(sites, aggregation)
    per_site, errors = baseline == "per_site", chosen_errors(sites, errors, prior)
    known = follow(asked, time, event)
    everyone, sites = sites, asked.sites
    names = sites.columns
    sums = asked.conduct(Sums(len(sites.names), len(names)))
    centre, scale = standard(sums, names)
    if per_site:
        silent = [name for name in sites.names if not known.events[name]]
        asked.leave_out(
            {name: f"none of its {known.rows[name]} rows has an event" for name in silent}
        )
    shared = None
    if not per_site:
        shared = grid_of(asked, time, event, known, grid, exact_times, strata)
    column, levels = groups_of(asked.sites, strata)
    kept = asked.sites.names
    if errors == "site" and len(kept) < 3:
        raise ValueError(FEW_SITES)
    survey = PartialLikelihood(
        time=time,
        event=event,
        columns=len(names),
        grid=shared,
        entry=entry,
        strata=column,
        levels=levels,
        prior=prior,
        centre=tuple(centre.tolist()),
        scale=tuple(scale.tolist()),
        unit=unit_of(sums),
    )
    state = asked.conduct(survey)
    found = newton.minimum(state)
    n = sum(known.events[name] for name in kept)
    flat = found.first.diagonal() < (1e-26 if per_site else 1e-10) * n  # by rounding
    if alike := [names[place] for place in flat.nonzero().flatten().tolist()]:
        raise ValueError(
            f"{alike} do not differ among those at risk together, so that nothing can be learnt of "
            "their coefficients: leave these terms out"
            + (", or take baseline='shared'" if per_site else "")
        )
    model = covariance = inverse(found, names)
    fitted = after(survey, state)
    if errors != "model":
        meat = asked.conduct(Scores(**fitted, by=errors))["meat"]
        covariance = model @ meat @ model
    said = ()
    if shared is not None and not exact_times and names:
        moves = state["coarser"].abs() / covariance.diagonal().sqrt()
        share = n / float((state["weight"] > 0).sum())
        most, term = (1 - 1 / share) * float(moves.max()), names[int(moves.argmax())]
        said = (
            f"{share:.3g} events share a bin of times, by which estimates may be off by "
            f"{most:.2g} standard errors ({term})",
        )
        if most > TENTH:
            warn(
                f"{said[0]}: if that is too much, take exact_times=True, or baseline='per_site', "
                "which needs no bins"
            )
    degrees = None
    if errors == "site":
        degrees = float(len(kept) - 1)
        covariance = covariance * len(kept) / degrees
    on_unit = covariance
    change = change_of(len(names), centre, scale, intercept=False)
    estimate, covariance = change @ found.theta, change @ covariance @ change.T
    penalty = survey.strength * float(found.theta @ found.theta) / 2
    evidence = None
    if prior is not None:
        volume = float(torch.linalg.slogdet(found.hessian).logabsdet) / 2
        evidence = -found.loss - len(names) * math.log(prior) - volume

    def check(*, scale: Scale = "log") -> Tested:
        ranks = ()
        if scale == "rank" and not per_site:
            ranks = tuple(shares(state["weight"].unflatten(0, (len(levels), -1)).sum(0)).tolist())
        question = Schoenfeld(**fitted, scale=scale, unit=known.horizon, ranks=ranks)
        return proportional(Questions(asked.sites, aggregation), question, model, names)

    def ranked() -> Any:
        across = None if per_site else ByScore(**fitted)
        again = Questions(asked.sites, aggregation)
        return concordance(again, Concordance(**fitted, sites=len(kept)), across)

    def used(key: str) -> Any:
        columns = (time, event) if entry is None else (time, event, entry)
        return used_rows(Questions(asked.sites, aggregation), key, columns)

    def survival(frame: Any, level: float) -> Any:
        groups, stratum = levels, torch.arange(len(levels))
        rows, offset = torch.zeros(len(levels), len(names), dtype=torch.float64), 0.0
        if frame is not None:
            frame = pandas_of(frame)
            groups, stratum = frame.index, group(frame, column, levels, "the frame")
            rows = (sites.design(frame) - centre) / scale
            if sites.offset is not None:
                offset = torch.tensor(numbers(frame, sites.offset, "the frame"))
        eta = rows @ found.theta + offset
        assert shared is not None
        return predicted(state, shared.ends, groups, rows, eta, stratum, on_unit, level)

    further = {"concordance": ranked, "used rows": used}
    if sites.weighing != "probability":  # whose variances are others
        further |= {"check": check} | ({} if per_site else {"survival": survival})
    told = (
        ("a baseline for each site" if per_site else f"one baseline, {shared}")
        + (f", strata by {column!r}" if column else "")
        + (f", entry at {entry!r}" if entry else "")
    )
    return Fit(
        model=f"Cox's proportional hazards, Efron's ties, {told}"
        + (f", prior {prior:g}" if prior is not None else ""),
        names=names,
        estimate=estimate,
        covariance=covariance,
        errors="the sandwich, by sites, times J / (J - 1)" if errors == "site" else ERRORS[errors],
        degrees=degrees,
        ratio="hazard ratio",
        rows={name: known.rows[name] for name in kept},
        events={name: known.events[name] for name in kept},
        dropped={name: known.dropped[name] for name in kept},
        left_out=asked.left_out,
        log_likelihood=penalty - found.loss,
        parameters=len(names),
        released=asked.released,
        evidence=evidence,
        said=said,
        likelihood=f"the order of {event!r} by {time!r}, {told}",
        weighing=sites.weighing,
        further=further,
        refit=lambda chosen: cox(
            everyone.only(chosen),
            time=time,
            event=event,
            baseline=baseline,
            grid=grid if shared is None or exact_times else shared,  # of all sites
            exact_times=exact_times,
            strata=None if column is None else Levels(column, levels),  # of all sites
            entry=entry,
            errors=errors,
            prior=prior,
            aggregation=aggregation,
        ),
    )
