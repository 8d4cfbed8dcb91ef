"""Cox's regression over sites beside lifelines' on one table of all rows, and beside loops."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.stats.asking import Questions
from bayesfl.stats.survival import efron
from bayesfl.stats.survival.partial import PartialLikelihood
from bayesfl.stats.survival.times import Grid, follow, grid_of
from tests.stats.survival.made import COLUMNS, SIZES, TERMS, TIMES, frames, pooled, rounded, sites

lifelines = pytest.importorskip("lifelines", reason="lifelines is not installed")
BASELINES = ["shared", "per_site"]
pytestmark = pytest.mark.filterwarnings("ignore:Starting with pandas")  # within lifelines
close = np.testing.assert_allclose


def fitted(time: str, baseline: Any, given: Any = None, **options: Any) -> Any:
    """Our fit, at exact times."""
    exact = {"exact_times": True} if baseline == "shared" else {}
    chosen = sites() if given is None else given
    return bf.stats.cox(chosen, time=time, event="event", baseline=baseline, **exact, **options)


def anchor(
    rows: pd.DataFrame,
    time: str,
    baseline: str,
    columns: Sequence[str] = COLUMNS,
    strata: Sequence[str] = (),
    **options: Any,
) -> tuple[Any, Any]:
    """The fit of lifelines, to its last digits, and the rows that it read."""
    strata = [*strata, "site"] if baseline == "per_site" else [*strata]
    others = [options[key] for key in ("cluster_col", "weights_col", "entry_col") if key in options]
    read = rows[[*columns, time, "event", *strata, *others]]
    found = lifelines.CoxPHFitter().fit(
        read,
        time,
        "event",
        strata=strata or None,
        fit_options={"precision": 1e-14, "r_precision": 1e-15},
        **options,
    )
    return found, read


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("time", TIMES)
def test_the_pooled_table(time: str, baseline: str):
    """Coefficients, errors, likelihood."""
    fit, (wanted, _) = fitted(time, baseline), anchor(pooled(), time, baseline)
    close(fit.estimate, wanted.params_, rtol=0, atol=1e-9)
    close(fit.covariance, wanted.variance_matrix_, rtol=0, atol=1e-9)
    close(fit.log_likelihood, wanted.log_likelihood_, rtol=0, atol=1e-9)
    counts = pooled().groupby("site")["event"]
    assert (dict(fit.rows), dict(fit.events)) == (SIZES, counts.sum().to_dict())
    assert fit.ratio == "hazard ratio"
    assert fit.parameters == 4


def entered() -> dict[str, pd.DataFrame]:
    """The sites' rows with times of entry, some of them a time of an event of others."""
    return {
        site: frame.assign(
            entry_tied=np.floor(frame["tied"] / 2),
            entry_untied=frame["untied"] * (np.arange(len(frame)) % 3) / 3,
        )
        for site, frame in frames().items()
    }


@pytest.mark.parametrize("errors", ["model", "sandwich"])
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize(("strata", "enters"), [(None, True), ("arm", False), ("arm", True)])
def test_strata_and_entry_times(
    strata: str | None, enters: bool, time: str, baseline: str, errors: Any
):
    """Beside lifelines' for both, whose robust errors know neither ties nor entry times."""
    if errors == "sandwich" and (enters or time == "tied"):
        return
    terms = [term for term in TERMS if term != strata]
    columns = [column for column in COLUMNS if column != strata]
    rows = entered()
    given, entry = sites(rows, terms=terms), f"entry_{time}" if enters else None
    fit = fitted(time, baseline, given, strata=strata, entry=entry, errors=errors)
    options: Any = {"entry_col": entry} if enters else {}
    options |= {"robust": True} if errors == "sandwich" else {}
    by = [] if strata is None else [strata]
    wanted, read = anchor(pooled(rows), time, baseline, columns, by, **options)
    close(fit.estimate, wanted.params_, rtol=0, atol=1e-10)
    close(fit.table()["se"], wanted.standard_errors_, rtol=0, atol=1e-10)
    close(fit.log_likelihood, wanted.log_likelihood_, rtol=0, atol=1e-9)
    if not enters and errors == "model":  # lifelines' residuals know no entry times
        test = lifelines.statistics.proportional_hazard_test(wanted, read, time_transform="log")
        close(fit.check().table["chi2"], test.test_statistic, rtol=1e-8)
    assert fit.model.endswith(
        (f", strata by {strata!r}" if strata else "") + (f", entry at {entry!r}" if entry else "")
    )
    again = fit.without("east")
    fewer = {site: frame for site, frame in rows.items() if site != "east"}
    alone = fitted(
        time, baseline, sites(fewer, terms=terms), strata=strata, entry=entry, errors=errors
    )
    close(again.estimate, alone.estimate, rtol=0, atol=1e-10)


def test_entry_times_and_strata_on_a_grid():
    """Entries before the middle of a bin are rounded down, later ones up, but for who has an event
    in that bin; who is censored early in the bin of his entry has no part.
    """
    rows, ends = entered(), [0.5, 1, 2, 4, 8, 16, 40]
    options: Any = {"time": "untied", "event": "event", "strata": bf.stats.levels("arm", [0, 1])}
    terms = [term for term in TERMS if term != "arm"]
    with pytest.warns(UserWarning, match="events share a bin"):
        fit = bf.stats.cox(sites(rows, terms=terms), **options, entry="entry_untied", grid=ends)
    start, (_, known) = pooled(rows)["entry_untied"], rounded("untied", ends)
    place = np.searchsorted(ends, start, side="right")
    middle = ((np.array([0.0, *ends[:-1]]) + ends) / 2)[place]
    own = (known["event"] == 1) & (known["untied"] == np.array(ends)[place])
    place = place + ((start > middle) & ~own)
    known = known.assign(entry_untied=np.array([0.0, *ends])[place])
    known = known[known["untied"] > known["entry_untied"]]
    columns = [column for column in COLUMNS if column != "arm"]
    wanted, _ = anchor(known, "untied", "shared", columns, ["arm"], entry_col="entry_untied")
    close(fit.estimate, wanted.params_, rtol=0, atol=1e-10)
    close(fit.covariance, wanted.variance_matrix_, rtol=0, atol=1e-10)
    late = {**rows, "west": rows["west"].assign(entry_tied=rows["west"]["tied"])}
    for baseline in BASELINES:
        with pytest.raises(ValueError, match="'west' has 90 rows whose 'entry_tied' is not before"):
            fitted("tied", baseline, sites(late), entry="entry_tied")
        with pytest.raises(ValueError, match=r"not among its levels \[1, 2\]"):
            fitted("tied", baseline, sites(late), strata=bf.stats.levels("arm", [1, 2]))


@pytest.mark.filterwarnings("ignore:.* events share a bin")
def test_a_policy_joins_those_who_enter_or_leave():
    """Each cell of strata and times has none or `min_level`; estimates are near the exact ones."""
    rng, n = np.random.default_rng(0), 1800
    x, arm = rng.normal(size=n), rng.integers(0, 2, n)
    died, censored = rng.exponential(5 * np.exp(-x / 2)), rng.exponential(8, n)
    rows = pd.DataFrame({"t": np.minimum(died, censored) + 0.01, "x": x, "arm": arm})
    rows = rows.assign(d=died <= censored, e=rows["t"] * rng.uniform(-1, 0.9, n).clip(0))
    parts = {f"{site}": part for site, part in rows.groupby(np.arange(n) % 3)}
    options: Any = {"time": "t", "event": "d", "strata": "arm", "entry": "e"}
    told: Any = {"terms": ["x"], "also": ["t", "d", "e", "arm"]}
    given = bf.stats.tables(parts, **told, policy=bf.stats.Policy(min_level=4))
    fit = bf.stats.cox(given, **options)
    exact = bf.stats.cox(bf.stats.tables(parts, **told), **options, exact_times=True)
    close(fit.table()["se"], exact.table()["se"], rtol=0.02)
    assert float((fit.estimate - exact.estimate).abs()) < 0.5 * exact.table()["se"].item()
    asked = Questions(given)
    grid = grid_of(asked, "t", "d", follow(asked, "t", "d"), 100, False, "arm")
    survey = PartialLikelihood(
        "t", "d", 1, grid, None, (0.0,), (1.0,), 1.0, "e", bf.stats.levels("arm", [0, 1])
    )
    for site in given.sites:
        own = survey.rows(torch.zeros(1, dtype=torch.float64), site)
        assert bool((own.first <= own.last + 1).all())
        for cells in survey.cells({"theta": torch.zeros(1, dtype=torch.float64)}, site):
            assert cells.unique(return_counts=True)[1].min() >= 4


@pytest.mark.parametrize("baseline", BASELINES)
def test_weights_and_offsets(baseline: str):
    """Weights are lifelines'; an offset is a column whose coefficient is 1."""
    given = sites(frequency_weights="count")
    wanted, _ = anchor(pooled(), "tied", baseline, weights_col="count")
    fit = fitted("tied", baseline, given)
    close(fit.estimate, wanted.params_, rtol=0, atol=1e-9)
    close(fit.covariance, wanted.variance_matrix_, rtol=0, atol=1e-9)
    whole = fitted("tied", baseline)
    moved = {
        site: frame.assign(known=float(whole.table()["coef"]["age"]) * frame["age"])
        for site, frame in frames().items()
    }
    again = fitted("tied", baseline, sites(moved, offset="known"))
    close(again.table()["coef"]["age"], 0.0, atol=1e-9)
    close(again.covariance, whole.covariance, rtol=0, atol=1e-9)


def test_a_grid_is_times_rounded():
    """By default bins of the events; by ends, those. The warning says what may be lost."""
    for grid in (100, [0.5, 1, 2, 4, 8, 16, 40]):
        with pytest.warns(UserWarning, match=r"events share a bin of times.*exact_times=True"):
            fit = bf.stats.cox(sites(), time="untied", event="event", grid=grid)
        wanted, _ = anchor(rounded("untied", grid)[1], "untied", "shared")
        close(fit.estimate, wanted.params_, rtol=0, atol=1e-9)
        close(fit.covariance, wanted.variance_matrix_, rtol=0, atol=1e-9)
        assert fit.said[0] in str(fit)
    with pytest.raises(ValueError, match=r"'east' has .* events beyond the grid's last end, 2"):
        bf.stats.cox(sites(), time="untied", event="event", grid=[1.0, 2.0])
    with pytest.raises(ValueError, match="grid must be times that increase"):
        bf.stats.cox(sites(), time="untied", event="event", grid=[2.0, 1.0])


SKEWED: dict[str, Any] = {
    "weibull": lambda rng, x: (np.exp(-x) * rng.weibull(0.4, len(x)), rng.exponential(60, len(x))),
    "lognormal": lambda rng, x: (
        np.exp(2 * rng.normal(size=len(x)) - x),
        rng.exponential(90, len(x)),
    ),
    "seconds": lambda rng, x: (
        3e7 * rng.exponential(np.exp(-x / 2)),
        1e8 * rng.uniform(size=len(x)),
    ),
    "mostly censored": lambda rng, x: (
        9000 * rng.exponential(np.exp(-x / 3)),
        rng.lognormal(7, 1, len(x)),
    ),
}


@pytest.mark.parametrize("slip", [False, True], ids=["clean", "slip"])
@pytest.mark.parametrize("times", SKEWED)
@pytest.mark.filterwarnings("ignore:.* events share a bin")
def test_the_default_bins_of_skewed_times(times: str, slip: bool):
    """Coefficients and medians are those of exact times, though one row has a slip of the unit."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=800)
    died, censored = SKEWED[times](rng, x)
    rows = pd.DataFrame({"x": x, "t": np.minimum(died, censored) + 1e-6, "d": died <= censored})
    if slip:
        rows.loc[rows.index[~rows["d"]][0], "t"] *= 1e5
    given = bf.stats.tables(
        {f"s{k}": part for k, part in rows.groupby(np.arange(800) % 4)},
        terms=["x"],
        also=["t", "d"],
    )
    when: Any = {"time": "t", "event": "d"}
    wanted, found = bf.stats.cox(given, **when, exact_times=True), bf.stats.cox(given, **when)
    off = (found.estimate - wanted.estimate) / wanted.covariance.diagonal().sqrt()
    assert float(off.abs().max()) < 0.15
    exact = bf.stats.kaplan_meier(given, **when, exact_times=True).median()
    binned = bf.stats.kaplan_meier(given, **when).median()
    close(binned.iloc[:, 2:], exact.iloc[:, 2:], rtol=0.11)


def test_how_far_bins_may_lead():
    """Two Newton steps where who is in a pair of bins is in one, times 1 - 1 / s."""
    theta = torch.tensor([0.3, -0.5, 0.2], dtype=torch.float64)
    late, *_ = by_hand(theta, 3)
    sums, hazard = efron.moments(late) | efron.squares(late), late.eta.exp() * late.weights
    for skip in (0, 1):  # entered counts where more enter than leave
        risk = efron.paired(sums, late.times, skip)["risk"][:, 0].reshape(3, -1)
        for stratum, pair in np.ndindex(*risk.shape):
            own, time = hazard * (late.stratum == stratum), 2 * pair - skip
            first, second = ((late.first <= t) & (t <= late.last) for t in (time, time + 1))
            second |= first & late.events & (late.last == time)
            close(risk[stratum, pair], max(own[first].sum(), own[second].sum()), rtol=1e-12)
    rows = replace(late, first=torch.zeros_like(late.first))
    sums = efron.moments(rows) | efron.squares(rows)
    for skip in (0, 1):
        last = torch.where(rows.last < 0, -1, (rows.last + skip).div(2, rounding_mode="floor"))
        pairs = replace(rows, last=last, times=-(-(rows.times + skip) // 2))
        wanted = efron.moments(pairs) | efron.squares(pairs)
        for name, found in efron.paired(sums, rows.times, skip).items():
            close(found, wanted[name], atol=1e-12)
    given, standardised = sites(), {"centre": (50.0, 0.5, 0.3, 0.3), "scale": (10.0, 1.0, 1.0, 1.0)}
    two = Grid((2.0, 40.0), True, middles=(0.0, 21.0))
    survey = PartialLikelihood("untied", "event", 4, two, prior=0.5, **standardised)
    state = Questions(given).conduct(survey)
    one = replace(survey, grid=Grid((40.0,), True, middles=(0.0,)))
    theta = state["best"]
    total = given.ask(one, None)({"theta": theta}, one.shapes({}), {})
    joined = efron.hazards(total)
    hessian = efron.hessian(joined, total) + 4 * torch.eye(4, dtype=torch.float64)
    move = torch.linalg.solve(hessian, joined["slope"] + 4 * theta)
    close(state["coarser"], move.abs(), atol=1e-10)  # from the second bin on nothing is joined
    with pytest.warns(UserWarning, match="events share"):
        fit = bf.stats.cox(given, time="untied", event="event", grid=[2.0, 5.0, 40.0])
    share = sum(fit.events.values()) / 3
    assert fit.said[0].startswith(f"{share:.3g} events share a bin")
    single = bf.stats.cox(
        sites({"a": pooled().nsmallest(9, "untied").assign(arm=0, kind="a")}, terms=["age"]),
        time="untied",
        event="event",
    )  # bins of one event each lose nothing
    assert "off by 0 standard errors (age)" in single.said[0]


def risk_sets(rows: efron.Rows, times: torch.Tensor, entries: torch.Tensor) -> Any:
    """Yield who has an event, and who is at risk, at each time of each stratum."""
    for stratum in rows.stratum.unique():
        here = rows.stratum == stratum
        for time in times[rows.events & here].unique():
            yield rows.events & here & (times == time), here & (times >= time) & (entries < time)


def loss(theta: torch.Tensor, rows: efron.Rows, *when: torch.Tensor) -> torch.Tensor:
    """Efron's negative log partial likelihood as a loop over events."""
    eta = rows.design @ theta
    risk, found = rows.weights * eta.exp(), torch.zeros((), dtype=torch.float64)
    for tied, there in risk_sets(rows, *when):
        d, weight = int(tied.sum()), rows.weights[tied].mean()
        found = found - (rows.weights * eta)[tied].sum()
        for number in range(d):
            phi = risk[there].sum() - number / d * risk[tied].sum()
            found = found + weight * phi.log()
    return found


def by_hand(theta: torch.Tensor, strata: int) -> tuple[efron.Rows, torch.Tensor, torch.Tensor]:
    """Rows with their times and entries, which are 0 where there is one stratum."""
    rng = torch.Generator().manual_seed(0)
    n = 40
    design = torch.randn(n, 3, generator=rng, dtype=torch.float64)
    times = torch.randint(1, 12, (n,), generator=rng).double()
    events = torch.rand(n, generator=rng) < 0.6
    ends = times[events].unique()
    place = torch.arange(n)
    entries = torch.floor(times * (place % 4) / 4) * (strata > 1)
    rows = efron.Rows(
        design=design,
        eta=design @ theta,
        weights=torch.randint(1, 4, (n,), generator=rng).double(),
        events=events,
        first=torch.searchsorted(ends, entries, right=True),
        last=torch.searchsorted(ends, times, right=True) - 1,
        stratum=place % strata,
        times=len(ends),
        strata=strata,
    )
    return rows, times, entries


def test_a_fit_without_a_site_keeps_the_strata():
    """Also those of which the others have no row."""
    rows = {site: frame.assign(arm=int(site == "east")) for site, frame in frames().items()}
    fit = fitted("untied", "shared", sites(rows, terms=["age"]), strata="arm")
    others = fitted("untied", "shared", sites(terms=["age"]).only(["north", "south", "west"]))
    close(fit.without("east").estimate, others.estimate, rtol=0, atol=1e-10)


@pytest.mark.parametrize("strata", [1, 3])
def test_slope_and_hessian_are_derivatives(strata: int):
    """Of Efron's loss in a loop, by autograd."""
    theta = torch.tensor([0.3, -0.5, 0.2], dtype=torch.float64)
    rows, *when = by_hand(theta, strata)
    found = efron.hazards(efron.moments(rows))
    close(found["loss"], loss(theta, rows, *when), rtol=1e-12)
    first = torch.autograd.functional.jacobian(lambda t: loss(t, rows, *when), theta)
    second = torch.autograd.functional.hessian(lambda t: loss(t, rows, *when), theta)
    close(found["slope"], first, atol=1e-11)
    close(efron.hessian_of(found, rows), second, atol=1e-11)
    close(efron.hessian(found, efron.squares(rows)), second, atol=1e-11)


@pytest.mark.parametrize("strata", [1, 3])
def test_score_residuals_under_ties(strata: int):
    """Beside a loop over rows, events and the tied among them; they add up to the score."""
    theta = torch.tensor([0.3, -0.5, 0.2], dtype=torch.float64)
    rows, *when = by_hand(theta, strata)
    hazards = efron.hazards(efron.moments(rows))
    found = efron.score_residuals(rows, hazards)
    risk = rows.eta.exp()
    wanted = torch.zeros_like(rows.design)
    for tied, there in risk_sets(rows, *when):
        d, weight = int(tied.sum()), rows.weights[tied].mean()
        for number in range(d):
            spared = there * (1 - number / d * tied.double())
            share = rows.weights * risk * spared
            mean = share @ rows.design / share.sum()
            for row in there.nonzero().flatten():
                step = weight * spared[row] * risk[row] / share.sum()
                jump = float(tied[row]) / d - step
                wanted[row] += rows.weights[row] * jump * (rows.design[row] - mean)
    close(found, wanted, atol=1e-12)
    close(found.sum(0), -hazards["slope"], atol=1e-12)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("errors", ["sandwich", "site"])
def test_robust_errors(errors: Any, baseline: str):
    """Lin and Wei's, where no times are tied, beside lifelines', which knows no ties there."""
    rows = pooled()
    rows["cluster"] = pd.factorize(rows["site"])[0]
    kind = {"robust": True} if errors == "sandwich" else {"cluster_col": "cluster"}
    wanted, _ = anchor(rows, "untied", baseline, **kind)
    fit = fitted("untied", baseline, errors=errors)
    few = np.sqrt(4 / 3) if errors == "site" else 1.0
    close(fit.table()["se"], few * wanted.standard_errors_, rtol=0, atol=1e-9)
    assert fit.degrees == (3 if errors == "site" else None)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("unit", [1.0, 1e-6])
def test_probability_weights(baseline: str, unit: float):
    """Robust errors by default, of w^2 s s', as lifelines' robust=True, in any unit."""
    rng = np.random.default_rng(1)
    rows = {
        site: frame.assign(w=unit / rng.uniform(0.05, 1, len(frame)))
        for site, frame in frames().items()
    }
    fit = fitted("untied", baseline, sites(rows, probability_weights="w"))
    read = pooled(rows).assign(w=lambda frame: frame["w"] / unit)
    wanted, _ = anchor(read, "untied", baseline, weights_col="w", robust=True)
    close(fit.estimate, wanted.params_, rtol=0, atol=1e-9)
    close(fit.table()["se"], wanted.standard_errors_, rtol=1e-9)
    assert dict(fit.rows) == SIZES
    assert dict(fit.events) == pooled().groupby("site")["event"].sum().to_dict()
    for question in (fit.check, fit.survival):
        with pytest.raises(ValueError, match=r"no .* of this fit under probability weights"):
            question()


@pytest.mark.parametrize("baseline", BASELINES)
def test_robust_errors_of_rows_that_count_more_than_once(baseline: str):
    """If all do twice, errors are those of twice the rows; scores by their definition above."""
    twice = {site: frame.assign(count=2) for site, frame in frames().items()}
    for errors in ("model", "sandwich"):
        once = fitted("untied", baseline, errors=errors)
        found = fitted("untied", baseline, sites(twice, frequency_weights="count"), errors=errors)
        close(found.estimate, once.estimate, rtol=0, atol=1e-9)
        close(found.covariance, once.covariance / 2, rtol=1e-8)
        assert sum(found.rows.values()) == 2 * sum(once.rows.values())
        assert found.events["west"] == 2 * once.events["west"]
        close(found.check().table["chi2"], 2 * once.check().table["chi2"], rtol=1e-8)
    each = {
        site: frame.loc[frame.index.repeat(frame["count"])] for site, frame in frames().items()
    }  # tied, which Efron's sums of weights are not: alike to a few parts in a hundred
    found = fitted("untied", baseline, sites(frequency_weights="count"), errors="sandwich")
    wanted = fitted("untied", baseline, sites(each), errors="sandwich")
    assert (found.rows, found.events) == (wanted.rows, wanted.events)
    close(found.concordance()["pairs"], wanted.concordance()["pairs"])
    close(found.concordance()["concordance"], wanted.concordance()["concordance"], rtol=0.01)
    close(found.covariance.diagonal(), wanted.covariance.diagonal(), rtol=0.03)


def rare(rows: int, share: int, events: int, spared: int) -> pd.DataFrame:
    """Rows of three sites of whom every `share`-th is rare, and of the rare `spared` have an event;
    of the others every `events`-th has one.
    """
    place = np.arange(rows)
    is_rare = place % share == share // 2
    died = np.where(is_rare, is_rare.cumsum() <= spared, place % events == events - 1)
    age = np.random.default_rng(0).normal(size=rows)
    return pd.DataFrame(
        {"site": place // 7 % 3, "untied": place + 1.0, "event": died, "rare": is_rare, "age": age}
    )


SEPARATED: dict[str, tuple[pd.DataFrame, float, float]] = {
    "two of 60": (rare(60, 30, 6, 0), 1.0, 1.0),
    "ten of 3000": (rare(3000, 300, 50, 0), 1.0, 1.0),
    "all others": (rare(300, 3, 1, 0), 1.0, 1.0),
    "weights of 1e-6": (rare(300, 30, 5, 0), 1e-6, 1.0),
    "weights that sum to 1": (rare(300, 30, 5, 0), 1 / 300, 1.0),
    "weights of 1e6": (rare(300, 30, 5, 0), 1e6, 1.0),
    "a column of 1e-9": (rare(300, 30, 5, 0), 1.0, 1e-9),
    "a column of 1e9": (rare(300, 30, 5, 0), 1.0, 1e9),
}


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("case", SEPARATED)
def test_a_level_without_events_separates(case: str, baseline: str):
    rows, weight, unit = SEPARATED[case]
    rows = rows.assign(rare=rows["rare"] * unit, w=weight)
    given = bf.stats.tables(
        {f"{site}": part for site, part in rows.groupby("site")},
        terms=["age", "rare"],
        also=["untied", "event"],
        **({} if weight == 1 else {"probability_weights": "w"}),
    )
    with pytest.raises(ValueError, match=r"^\['rare'\] separate.*prior=2.5"):
        fitted("untied", baseline, given, errors="sandwich")
    if weight == 1:
        assert fitted("untied", baseline, given, prior=2.5).estimate.isfinite().all()


@pytest.mark.parametrize(("weight", "unit"), [(1, 1), (1e-6, 1), (1e6, 1), (1, 1e-9), (1, 1e9)])
@pytest.mark.parametrize("baseline", BASELINES)
def test_one_event_does_not_separate(baseline: str, weight: float, unit: float):
    """In whatever unit weights and columns are; beside lifelines at a unit of 1."""
    rows = rare(600, 3, 1, 1)
    wanted, _ = anchor(rows, "untied", baseline, ["age", "rare"], robust=True)
    rows = rows.assign(rare=rows["rare"] * unit, w=float(weight))
    given = bf.stats.tables(
        {f"{site}": part for site, part in rows.groupby("site")},
        terms=["age", "rare"],
        also=["untied", "event"],
        probability_weights="w",
    )
    fit = fitted("untied", baseline, given)
    assert fit.table()["coef"]["rare"] * unit < -5
    scale = torch.tensor([1.0, unit], dtype=torch.float64)
    close(fit.estimate * scale, wanted.params_, rtol=1e-8)
    close(fit.table()["se"] * scale.numpy(), wanted.standard_errors_, rtol=1e-8)


def test_a_column_that_is_constant_at_a_site():
    """Under its own baseline the site says nothing of it, and its Hessian is 0, not rounding."""
    rows = {
        site: frame.assign(age=12.345 if site == "west" else frame["age"])
        for site, frame in frames().items()
    }
    given = sites(rows, terms=["age"])
    by_arm = {
        site: frame.assign(age=np.where(frame["arm"] == 1, 12.3, frame["age"]))
        for site, frame in rows.items()
    }
    apart = fitted("tied", "per_site", sites(by_arm, terms=["age"]), strata="arm")
    first = {site: frame[frame["arm"] == 0] for site, frame in by_arm.items()}
    close(apart.estimate, fitted("tied", "per_site", sites(first, terms=["age"])).estimate)
    fit = fitted("tied", "per_site", given)
    others = fitted("tied", "per_site", sites(terms=["age"]).only(["east", "north", "south"]))
    close(fit.estimate, others.estimate, rtol=0, atol=1e-10)
    close(fit.covariance, others.covariance, rtol=0, atol=1e-10)


@pytest.mark.parametrize("baseline", BASELINES)
def test_errors_by_site_need_three(baseline: str):
    """One site's scores add up to nothing, and so would its errors."""
    with pytest.raises(ValueError, match="errors='site' needs three sites at least"):
        fitted("untied", baseline, sites().only(["west"]), errors="site")
    own = fitted("untied", baseline, errors="site").by_site("age")
    assert own.loc["west", "why"] == "errors='site' needs three sites at least"
    assert own.loc["west", ["low", "high"]].isna().all()


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("time", TIMES)
def test_proportional_hazards(time: str, baseline: str):
    """Beside lifelines'."""
    fit, (wanted, rows) = fitted(time, baseline), anchor(pooled(), time, baseline)
    test = lifelines.statistics.proportional_hazard_test(wanted, rows, time_transform="log")
    found = fit.check()
    close(found.table["chi2"], test.test_statistic, rtol=1e-8)
    close(found.table["p"], test.p_value, rtol=1e-8)
    assert found.degrees == 4
    assert "Schoenfeld" in str(found)


def test_a_hazard_ratio_that_changes_is_said():
    """The treated die early, or late."""
    rng = np.random.default_rng(0)
    arm = np.arange(200) % 2
    times = np.where(arm, rng.choice([1.0, 20.0], 200), 10.0) + rng.random(200)
    rows = pd.DataFrame({"arm": arm, "age": rng.normal(size=200), "time": times, "event": 1})
    given = bf.stats.tables({"a": rows}, terms=["arm", "age"], also=["time", "event"])
    found = bf.stats.cox(given, time="time", event="event", exact_times=True).check()
    (said,) = found.said
    p = found.table.loc["arm", "p"]
    assert said.startswith(f"the hazard ratio of arm changes with time (p {p:.2g})")
    assert said in str(found)
    assert fitted("untied", "shared").check().said == (
        "no hazard ratio is seen to change with time",
    )


@pytest.mark.parametrize("baseline", BASELINES)
def test_proportional_hazards_of_all_coefficients(baseline: str):
    """Together, by the residuals of lifelines."""
    wanted, rows = anchor(pooled(), "tied", baseline)
    residuals = wanted.compute_residuals(rows, kind="schoenfeld")
    died = rows.loc[residuals.index]
    log = np.log(died["tied"])
    g = (log - log.mean()).to_numpy()
    drift, v = g @ residuals.to_numpy(), wanted.variance_matrix_.to_numpy()
    factor = len(g) / (g @ g)
    found = fitted("tied", baseline).check()
    close(found.table["chi2"], (v @ drift) ** 2 / v.diagonal() * factor, rtol=1e-7)
    close(found.statistic, drift @ v @ drift * factor, rtol=1e-7)


@pytest.mark.parametrize("time", TIMES)
def test_concordance_of_pairs_within_sites(time: str):
    fit = fitted(time, "per_site")
    found = fit.concordance()
    wanted, _ = anchor(pooled(), time, "per_site")
    close(found.loc["pairs within sites", "concordance"], wanted.concordance_index_, rtol=1e-12)
    rows = pooled()
    risk = rows[COLUMNS].to_numpy() @ fit.estimate.numpy()
    east = rows["site"] == "east"
    of_east = lifelines.utils.concordance_index(
        rows.loc[east, time], -risk[east], rows.loc[east, "event"]
    )
    close(found.loc["east", "concordance"], of_east, rtol=1e-12)


def ranked(rows: pd.DataFrame, risk: np.ndarray, time: str, entry: str | None) -> list[float]:
    """Pairs of which it is known who had an event first, those ranked right, and those alike, by
    how often rows count; of rows of one stratum that are at risk together.
    """
    t, died, w, arm = (rows[c].to_numpy(float) for c in (time, "event", "count", "arm"))
    enters = np.zeros(len(t)) if entry is None else rows[entry].to_numpy(float)
    later = (t > t[:, None]) | ((t == t[:, None]) & (died == 0))
    pairs = (died == 1)[:, None] & later & (enters < t[:, None]) & (arm == arm[:, None])
    weight = pairs * w[:, None] * w
    alike = np.isclose(risk, risk[:, None], rtol=1e-9)
    return [
        float((weight * which).sum()) for which in (1.0, ~alike & (risk < risk[:, None]), alike)
    ]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("entry", [None, "entry_tied"])
@pytest.mark.parametrize("term", ["age", "kind"])
def test_concordance_by_all_pairs(term: str, entry: str | None, baseline: str):
    """Under strata, entry times and weights; over all sites exactly where scores are few."""
    terms = [one for one in TERMS if term in (one, getattr(one, "column", None))]
    rows = entered()
    given = sites(rows, terms=terms, frequency_weights="count")
    fit = fitted("tied", baseline, given, strata="arm", entry=entry)
    found = fit.concordance()
    columns = ["age"] if term == "age" else ["b", "c"]
    parts = {site: pooled({site: frame}) for site, frame in rows.items()} | {"all": pooled(rows)}
    for site, part in parts.items():
        wanted = ranked(part, part[columns].to_numpy(float) @ fit.estimate.numpy(), "tied", entry)
        if site != "all":
            close(found.loc[site, ["pairs", "concordant", "tied"]], wanted, rtol=1e-12)
        elif baseline == "shared":
            line, apart = found.loc["all pairs"], (wanted[1] + wanted[2] / 2) / wanted[0]
            close(line["pairs"], wanted[0], rtol=1e-12)
            close(line["concordance"], apart, rtol=0, atol=1e-12 if term == "kind" else 0.002)
    close(found.loc["pairs within sites"].iloc[1:], found.iloc[: len(SIZES), 1:].sum())
    assert ("all pairs" in found.index) == (baseline == "shared")


@pytest.mark.filterwarnings("ignore:.* events share a bin", "ignore:Column.* have very low")
@pytest.mark.parametrize("unit", [1e-5, 1.0, 1e3])
def test_concordance_of_all_sites_beside_lifelines(unit: float):
    """On default settings, in whatever unit columns are; under a policy within sites alone."""
    rows = lifelines.datasets.load_rossi()
    rows["age"] *= unit
    terms = ["fin", "age", "race", "wexp", "mar", "paro", "prio"]
    parts = {f"site {place}": rows.iloc[place::4] for place in range(4)}
    wanted = lifelines.CoxPHFitter().fit(rows, "week", "arrest").concordance_index_
    options: Any = {"terms": terms, "also": ["week", "arrest"]}
    for settings in ({}, {"grid": 10}, {"exact_times": True}):
        given: Any = bf.stats.tables(parts, **options)
        fit = bf.stats.cox(given, time="week", event="arrest", **settings)
        close(fit.concordance().loc["all pairs", "concordance"], wanted, rtol=0, atol=0.005)
    own: Any = bf.stats.tables(
        parts, **options, policy=bf.stats.Policy(min_level=0, exact_times=True)
    )
    found = bf.stats.cox(own, time="week", event="arrest", exact_times=True).concordance()
    assert found.index.tolist() == [*parts, "pairs within sites"]


@pytest.mark.parametrize("baseline", BASELINES)
def test_one_table_and_any_order_of_sites_are_the_same(baseline: str):
    """To the bit by order, to 1e-10 for the split."""
    fit = fitted("tied", baseline, errors="sandwich")
    turned = sites({site: frames()[site] for site in reversed(SIZES)})
    again = fitted("tied", baseline, turned, errors="sandwich")
    assert torch.equal(fit.estimate, again.estimate)
    assert torch.equal(fit.covariance, again.covariance)
    if baseline == "shared":
        whole = sites({"all": pd.concat(frames().values(), ignore_index=True)})
        one = fitted("tied", baseline, whole, errors="sandwich")
        close(fit.estimate, one.estimate, rtol=0, atol=1e-10)
        close(fit.covariance, one.covariance, rtol=0, atol=1e-10)


@pytest.mark.parametrize("baseline", BASELINES)
def test_secure_sums_are_the_same(baseline: str):
    """Exact times travel whole, though sums are rounded."""
    hidden = fitted("untied", baseline, errors="site", aggregation=bf.SecureSum(range=2.0**20))
    plain = fitted("untied", baseline, errors="site")
    close(hidden.estimate, plain.estimate, rtol=0, atol=1e-6)
    close(hidden.covariance, plain.covariance, rtol=0, atol=1e-6)
    close(hidden.check().statistic, plain.check().statistic, rtol=1e-5)
    assert hidden.concordance().equals(plain.concordance())
    assert "SecureSum" in str(hidden.released)


def test_treated_at_one_site_alone():
    """The stratified fit does not exist, and says so; the other is that of all rows."""
    rows = pooled()
    split = {
        "treated": rows[rows["arm"] == 1],
        "one": rows[rows["arm"] == 0].iloc[::2],
        "other": rows[rows["arm"] == 0].iloc[1::2],
    }
    given = sites(split)
    fit, (wanted, _) = fitted("tied", "shared", given), anchor(rows, "tied", "shared")
    close(fit.estimate, wanted.params_, rtol=0, atol=1e-9)
    close(fit.covariance, wanted.variance_matrix_, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match=r"\['arm'\] do not differ.*baseline='shared'"):
        fitted("tied", "per_site", given)


def test_a_site_without_events():
    """Says nothing under its own baseline, and is at risk under the shared one."""
    rows = {**frames(), "silent": frames()["west"].assign(event=0)}
    own = fitted("tied", "per_site", sites(rows))
    assert own.left_out == {"silent": "none of its 90 rows has an event"}
    close(own.estimate, fitted("tied", "per_site").estimate, rtol=0, atol=1e-9)
    fit, (wanted, _) = fitted("tied", "shared", sites(rows)), anchor(pooled(rows), "tied", "shared")
    assert not fit.left_out
    assert fit.events["silent"] == 0
    close(fit.estimate, wanted.params_, rtol=0, atol=1e-9)
    close(sum(own.without("east").rows.values()), sum(SIZES.values()) - SIZES["east"])
    with pytest.raises(ValueError, match="no site has an event"):
        fitted("tied", "shared", sites({"silent": rows["silent"]}))


@pytest.mark.filterwarnings("ignore:.* events share a bin")
def test_the_fit_without_terms_and_without_a_site():
    """A likelihood ratio beside lifelines'; fits without a site keep the grid of all."""
    fit = fitted("tied", "shared")
    null = fitted("tied", "shared", bf.stats.tables(frames(), also=["tied", "event"]))
    wanted = anchor(pooled(), "tied", "shared")[0].log_likelihood_ratio_test()
    close(2 * (fit.log_likelihood - null.log_likelihood), wanted.test_statistic, rtol=1e-9)
    assert f"{wanted.test_statistic:.4f} on 4 degrees" in fit.compare(null)
    longest = pooled().groupby("site")["tied"].max()
    fit = bf.stats.cox(sites(), time="tied", event="event")
    some = fit.without(str(longest.idxmax()))
    assert longest.nlargest(2).iloc[1] <= 30
    assert "grid of" in fit.model
    assert some.model == fit.model


def test_likelihoods_of_other_baselines_do_not_compare():
    fit, own = fitted("tied", "shared"), fitted("tied", "per_site")
    with pytest.raises(
        ValueError, match="different things, the order of 'event' by 'tied', one base"
    ):
        fit.compare(own)
    with pytest.raises(ValueError, match="the density of 'tied' to 'event', and do not compare"):
        fit.compare(bf.stats.piecewise(sites(), time="tied", event="event", cuts=[5.0]))


def test_evidence_is_laplaces():
    """Beside its definition, with the Hessian of the loop by autograd."""
    fit = fitted("tied", "shared", prior=1.5)
    rows = pooled()
    x = torch.tensor(rows[COLUMNS].to_numpy(float))
    x = (x - x.mean(0)) / x.std(0, correction=0)
    times = torch.tensor(rows["tied"].to_numpy())
    weights = torch.ones(len(x), dtype=torch.float64)
    events = torch.tensor(rows["event"].to_numpy() == 1)
    none = torch.zeros(len(x), dtype=torch.int64)
    given = efron.Rows(x, weights, weights, events, none, none, none, times=0)
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.5)

    def energy(theta: torch.Tensor) -> torch.Tensor:
        return loss(theta, given, times, none) - normal.log_prob(theta).sum()

    theta = fit.estimate * torch.tensor(rows[COLUMNS].to_numpy(float)).std(0, correction=0)
    assert float(torch.autograd.functional.jacobian(energy, theta).abs().max()) < 1e-9  # type: ignore
    curvature: Any = torch.autograd.functional.hessian(energy, theta)
    volume = torch.linalg.slogdet(curvature / (2 * np.pi)).logabsdet / 2
    assert fit.evidence is not None
    close(fit.evidence, float(-energy(theta) - volume), rtol=0, atol=1e-8)
    close(fit.log_likelihood, -float(loss(theta, given, times, none)), rtol=0, atol=1e-8)


def test_rows_that_no_fit_may_hold():
    early = {**frames(), "west": frames()["west"].assign(tied=lambda f: f["tied"] - 1)}
    count = int((early["west"]["tied"] <= 0).sum())
    with pytest.raises(ValueError, match=f"'west' has {count} rows with 'tied' <= 0"):
        fitted("tied", "shared", sites(early))
    coded = {**frames(), "west": frames()["west"].assign(event=2)}
    with pytest.raises(ValueError, match="events are 0 or 1, and site 'west'"):
        fitted("tied", "per_site", sites(coded))
    with pytest.raises(ValueError, match="grid has no effect under exact_times=True"):
        fitted("tied", "shared", grid=[40.0])


@pytest.mark.parametrize("baseline", BASELINES)
def test_what_separates_is_named(baseline: str):
    """A level that has no event."""
    rows = {
        site: frame.assign(arm=(frame["event"] == 1) | (frame["arm"] == 1))
        for site, frame in frames().items()
    }
    with pytest.raises(ValueError, match=r"\['arm'\] separate.*prior=2.5"):
        fitted("tied", baseline, sites(rows))
    assert fitted("tied", baseline, sites(rows), prior=2.5).estimate.isfinite().all()


def test_errors_by_site_of_an_arm_that_is_one_site():
    """There is one site to tell its error by; of two sites with it there are others."""

    def fit(arm: Sequence[str]) -> Any:
        made = {name: rows.assign(arm=float(name in arm)) for name, rows in frames().items()}
        found = sites(made, terms=["arm"])
        return bf.stats.cox(found, time="untied", event="event", errors="site")

    with pytest.raises(ValueError, match=r"informs the coefficients of \['arm'\]"):
        fit(["east"])
    assert fit(["east", "west"]).errors.startswith("the sandwich, by sites")
