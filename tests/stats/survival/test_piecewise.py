"""Piecewise exponential regression over sites beside statsmodels' Poisson of the expanded rows, and
beside the exponential's closed form.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest

import bayesfl as bf
from tests.stats.survival.made import COLUMNS, SIZES, TIMES, frames, pooled, sites

sm = pytest.importorskip("statsmodels.api", reason="statsmodels is not installed")
close = np.testing.assert_allclose
CUTS = [2.0, 5.0, 9.0]


def expanded(time: str) -> pd.DataFrame:
    """A row for each person and interval, made in a loop."""
    found = []
    ends = [0.0, *CUTS, np.inf]
    for _, row in pooled().iterrows():
        for place, (low, high) in enumerate(pairwise(ends)):
            if row[time] > low:
                died = row["event"] == 1 and row[time] <= high
                spent = min(row[time], high) - low
                found.append({**row, "interval": place, "died": float(died), "spent": spent})
    return pd.DataFrame(found)


@pytest.mark.parametrize("intercept", ["shared", "per_site"])
@pytest.mark.parametrize("time", TIMES)
def test_the_poisson_table_of_expanded_rows(time: str, intercept: Any):
    rows = expanded(time)
    own = pd.get_dummies(rows["site"]).to_numpy(float)
    levels = pd.get_dummies(rows["interval"]).to_numpy(float)[:, 1:]
    start = np.ones((len(rows), 1)) if intercept == "shared" else own
    x = np.concatenate([start, rows[COLUMNS].to_numpy(float), levels], 1)
    log_exposure = np.log(rows["spent"].to_numpy(float))
    wanted = sm.GLM(rows["died"], x, sm.families.Poisson(), offset=log_exposure).fit(tol=1e-14)
    fit = bf.stats.piecewise(sites(), time=time, event="event", cuts=CUTS, intercept=intercept)
    first = 0 if intercept == "shared" else len(SIZES)
    close(fit.estimate, wanted.params[first:], rtol=0, atol=1e-9)
    close(fit.covariance.diagonal().sqrt(), wanted.bse[first:], rtol=0, atol=1e-8)
    close(fit.log_likelihood, wanted.llf - rows["died"] @ log_exposure, rtol=0, atol=1e-9)
    assert fit.names[-3:] == (f"{time}(2, 5]", f"{time}(5, 9]", f"{time}(9, inf)")
    assert (dict(fit.rows), fit.ratio) == (SIZES, "hazard ratio")
    assert dict(fit.events) == pooled().groupby("site")["event"].sum().to_dict()


def test_weights_offsets_and_evidence():
    """Those of Poisson's regression of expanded rows, less the log of each event's exposure."""
    rows = expanded("tied").assign(shift=lambda t: t["age"] / 20)
    levels = [f"level {k}" for k in (1, 2, 3)]
    rows = rows.assign(**{name: rows["interval"] == int(name[-1]) for name in levels})
    rows["log_spent"] = np.log(rows["spent"]) + rows["shift"]
    moved = {site: frame.assign(shift=frame["age"] / 20) for site, frame in frames().items()}
    given = sites(moved, terms=["arm"], offset="shift", frequency_weights="count")
    fit = bf.stats.piecewise(given, time="tied", event="event", cuts=CUTS)
    x = np.column_stack([np.ones(len(rows)), rows[["arm", *levels]].to_numpy(float)])
    known: dict[str, Any] = {"offset": rows["log_spent"], "freq_weights": rows["count"]}
    wanted = sm.GLM(rows["died"], x, sm.families.Poisson(), **known).fit(tol=1e-14)
    close(fit.estimate, wanted.params, rtol=0, atol=1e-9)
    close(fit.covariance.diagonal().sqrt(), wanted.bse, rtol=0, atol=1e-8)
    exposure = (rows["count"] * rows["died"]) @ np.log(rows["spent"])
    close(fit.log_likelihood, wanted.llf - exposure, rtol=0, atol=1e-8)
    named: dict[str, Any] = {"offset": "log_spent", "frequency_weights": "count"}
    plain = bf.stats.tables({"all": rows}, outcome="died", terms=["arm", *levels], **named)
    evidence = bf.stats.glm(plain, family="poisson", prior=2.5).evidence
    fit = bf.stats.piecewise(given, time="tied", event="event", cuts=CUTS, prior=2.5)
    close(fit.evidence, evidence - exposure, rtol=0, atol=1e-8)


def test_the_likelihood_is_that_of_times():
    """Without terms: of each interval, events times the log of their rate, less events; so fits of
    other cuts compare.
    """
    rows = pooled()
    given = bf.stats.tables(frames(), also=["untied", "event"])
    for cuts in ([3.0], [1.0, 4.0, 8.0]):
        fit = bf.stats.piecewise(given, time="untied", event="event", cuts=cuts)
        wanted = 0.0
        ends = [0.0, *cuts, np.inf]
        for low, high in pairwise(ends):
            spent = (rows["untied"].clip(upper=high) - low).clip(lower=0).sum()
            here = (rows["untied"] > low) & (rows["untied"] <= high)
            died = rows.loc[here, "event"].sum()
            wanted += died * np.log(died / spent) - died
        close(fit.log_likelihood, wanted, rtol=0, atol=1e-8)
        assert fit.parameters == len(cuts) + 1


def test_intervals_are_no_counts_that_vary_too_much():
    """Whose Poisson likelihood stands for that of times."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {"z": rng.normal(size=400), "t": rng.exponential(size=400) ** 3 + 1e-3, "d": 1}
    )
    given = bf.stats.tables({"a": rows}, terms=["z"], also=["t", "d"])
    fit = bf.stats.piecewise(given, time="t", event="d", cuts=[100.0])
    found = fit.diagnostics()
    assert not found.said
    assert "deviance" in str(found)


def test_secure_sums_and_any_order_of_sites_are_the_same():
    options: Any = {"time": "tied", "event": "event", "cuts": CUTS, "intercept": "per_site"}
    plain = bf.stats.piecewise(sites(), **options)
    hidden = bf.stats.piecewise(sites(), **options, aggregation=bf.SecureSum(range=2.0**20))
    turned = bf.stats.piecewise(
        sites({site: frames()[site] for site in reversed(SIZES)}), **options
    )
    close(hidden.estimate, plain.estimate, rtol=0, atol=1e-6)
    close(hidden.covariance, plain.covariance, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(turned.estimate, plain.estimate)
    assert "SecureSum" in str(hidden)


def test_what_is_left_out_and_what_is_refused():
    rows = {**frames(), "silent": frames()["west"].assign(event=0)}
    options: Any = {"time": "tied", "event": "event", "intercept": "per_site"}
    fit = bf.stats.piecewise(sites(rows), cuts=CUTS, **options)
    whole = bf.stats.piecewise(sites(), cuts=CUTS, **options)
    assert [*fit.left_out] == ["silent"]
    close(fit.estimate, whole.estimate, rtol=0, atol=1e-9)
    close(fit.log_likelihood, whole.log_likelihood, rtol=0, atol=1e-9)
    assert sum(fit.without("east").rows.values()) == sum(SIZES.values()) - SIZES["east"]
    for cuts in ([5.0, 2.0], [0.0], []):
        with pytest.raises(ValueError, match="cuts must be times that increase from above 0"):
            bf.stats.piecewise(sites(), cuts=cuts, **options)
    with pytest.raises(ValueError, match=r"\['tied\(100, inf\)'\] are constant"):
        bf.stats.piecewise(sites(), cuts=[2.0, 100.0], **options)
