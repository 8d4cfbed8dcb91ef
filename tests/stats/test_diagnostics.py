"""Diagnostics of regressions beside statsmodels, scikit-learn and plain loops over pairs."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import bayesfl as bf
from bayesfl.stats.diagnostics import concordance, excess_kurtosis
from tests.stats.made import OUTCOMES, SIZES, TERMS, frames, pooled, sites
from tests.stats.test_glm import anchor

close = np.testing.assert_allclose


@pytest.mark.filterwarnings("ignore::Warning")  # statsmodels' of the log link
@pytest.mark.parametrize("intercept", ["shared", "per_site"])
@pytest.mark.parametrize("family", [name for name in OUTCOMES if name != "negative_binomial"])
def test_deviances(family: Any, intercept: Any):
    """Those of statsmodels, of intercepts by site beside its fit to these alone."""
    sm = pytest.importorskip("statsmodels.api", reason="statsmodels is not installed")
    from tests.stats.test_glm import KINDS

    found = bf.stats.glm(sites(family), family=family, intercept=intercept).diagnostics()
    wanted, rows = anchor(family, intercept), pooled()
    null = np.ones(len(rows))
    if intercept == "per_site":
        null = pd.get_dummies(rows["site"]).to_numpy(float)
    alone = sm.GLM(rows[OUTCOMES[family]].to_numpy(float), null, KINDS[family]).fit(tol=1e-14)
    close(found.deviance, wanted.deviance, rtol=1e-9)
    close(found.null_deviance, alone.deviance, rtol=1e-9)
    if family != "gaussian":
        close(found.null_log_likelihood, alone.llf, rtol=1e-9)


def test_the_null_model_of_negative_binomial_counts():
    found = bf.stats.glm(sites("negative_binomial"), family="negative_binomial").diagnostics()
    assert (found.deviance, found.null_deviance) == (None, None)
    close(found.null_log_likelihood, anchor("negative_binomial", "shared").llnull, rtol=1e-8)


@pytest.mark.parametrize("intercept", ["shared", "per_site"])
def test_expected_and_observed_events(intercept: Any):
    """By site, beside predictions of the fit row by row."""
    fit = bf.stats.glm(sites("binomial"), family="binomial", intercept=intercept)
    found, rows = fit.diagnostics(), pooled()
    risk = np.concatenate(
        [fit.predict(frames()[site], site=site).numpy() for site in sorted(SIZES)]
    )
    by = rows.assign(risk=risk, ill=rows["ill"].astype(float)).groupby("site")
    close(found.sites["expected"], by["risk"].sum(), rtol=1e-9)
    close(found.sites["observed"], by["ill"].sum())
    assert found.sites["rows"].tolist() == [SIZES[site] for site in sorted(SIZES)]
    if intercept == "per_site":
        close(found.sites["expected"], found.sites["observed"], rtol=1e-9)
    for words in ("deviance", "DeLong", "round 1, Looks"):
        assert words in str(found)


def test_concordance_by_pairs():
    """With DeLong's variance by its definition, ties among risks, and rows that count twice."""
    rng = np.random.default_rng(0)
    risk, y = rng.integers(0, 8, 40) / 8, rng.random(40) < 0.4
    twice = rng.integers(1, 3, 40)
    each, which = np.repeat(risk, twice), np.repeat(y, twice)
    better = (each[which][:, None] > each[~which]) + 0.5 * (each[which][:, None] == each[~which])
    a, b = better.mean(1), better.mean(0)
    variance = a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)
    given = [torch.tensor(t, dtype=torch.float64) for t in (risk, y, twice)]
    close(concordance(*given), (better.mean(), variance, better.size), rtol=1e-12)
    none = torch.zeros(40, dtype=torch.float64)
    assert concordance(given[0], none, given[2]) == (0, 0, 0)


def test_equal_risks_tie_in_any_order_of_rows_and_terms():
    """Beside all pairs of whole numbers."""
    rng = np.random.default_rng(0)
    x, weights = rng.integers(-2, 3, (200, 6)), np.array([1, 2, 3, 5, 7, 11]) / 7
    y = torch.from_numpy(rng.random(200) < 0.4).double()
    exact = torch.from_numpy(x @ np.array([1, 2, 3, 5, 7, 11])).double()
    orders = [rng.permutation(6) for _ in x]
    eta = torch.tensor([sum(a[o] * weights[o]) for a, o in zip(x, orders, strict=True)])
    wanted = concordance(exact, y, torch.ones_like(y))
    close(concordance(eta.sigmoid(), y, torch.ones_like(y)), wanted, rtol=1e-12)


def test_concordance_by_site():
    sk = pytest.importorskip("sklearn.metrics")
    given = sites("binomial")
    fit = bf.stats.glm(given, family="binomial")
    found = fit.diagnostics(level=0.9).concordance
    assert list(found.index) == [*sorted(SIZES), "within sites"]
    areas, pairs = [], []
    for site in sorted(SIZES):
        rows = frames()[site]
        areas.append(sk.roc_auc_score(rows["ill"], fit.predict(rows)))
        pairs.append(rows["ill"].sum() * (~rows["ill"]).sum())
    close(found["auc"].iloc[:-1], areas, rtol=1e-12)
    close(found["auc"].iloc[-1], np.average(areas, weights=pairs), rtol=1e-12)
    share = np.array(pairs) / sum(pairs)
    close(found["se"].iloc[-1] ** 2, share**2 @ found["se"].iloc[:-1] ** 2, rtol=1e-12)
    close(found["95 %"] - found["auc"], 1.6448536 * found["se"], rtol=1e-6)
    silent = {**frames(), "silent": frames()["west"].assign(ill=False)}
    with_silent = bf.stats.tables(silent, outcome="ill", terms=TERMS)
    found = bf.stats.glm(with_silent, family="binomial").diagnostics().concordance
    assert found.index[found["auc"].isna()].tolist() == ["silent"]


def test_what_is_doubtful_is_said():
    """By the tests' definitions, of fits that leave out what the outcome was made with."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=600)
    shift = np.repeat([0.0, 2.0], 300)
    counts = rng.negative_binomial(1, 1 / (1 + np.exp(0.3 * x + shift)))
    rows = pd.DataFrame({"x": x, "visits": counts})
    frames = {"a": rows.iloc[:300], "b": rows.iloc[300:]}
    given = bf.stats.tables(frames, outcome="visits", terms=["x"])
    fit = bf.stats.glm(given, family="poisson")
    found = fit.diagnostics()
    mean = torch.cat([fit.predict(frames[site]) for site in "ab"]).numpy()
    pearson = ((counts - mean) ** 2 / mean).sum()
    multiple = (2 * 598 + (1 / mean).sum()) / (2 * 598)  # of the variance, at the same mean
    p = stats.chi2.sf(pearson / multiple, 598 / multiple)
    told = f"counts vary {pearson / 598:.2f} times as much as the family's (Pearson's p {p:.2g})"
    assert found.said[0].startswith(told)
    first = counts[:300].sum()
    told = f"a has {first:g} where {mean[:300].sum():.1f} are expected: give each site"
    assert found.said[1].startswith(told)
    assert all(said in str(found) for said in found.said)
    own = bf.stats.glm(given, family="negative_binomial", intercept="per_site")
    assert own.diagnostics().said == ()


@pytest.mark.parametrize("family", ["poisson", "negative_binomial"])
def test_rare_counts_are_no_alarm(family: Any):
    """Pearson's statistic has the mean and variance of the family's rows, by their tails; the
    chi-squared distribution's own variance would give an alarm in one of three.
    """
    rng = np.random.default_rng(0)
    mean = 0.005 * np.exp(1.2 * rng.normal(size=4000))
    law = stats.poisson(mean)
    if family == "negative_binomial":
        mean = 4 * mean
        law = stats.nbinom(1.25, 1 / (1 + 0.8 * mean))
    alpha = torch.tensor(0.0 if family == "poisson" else 0.8, dtype=torch.float64)
    found = excess_kurtosis(torch.from_numpy(law.var()), alpha)
    close(found, law.stats(moments="k"), rtol=1e-9)
    x = np.log(mean)
    alarms = []
    for _ in range(12 if family == "poisson" else 3):
        rows = pd.DataFrame({"x": x, "y": law.rvs(random_state=rng)})
        given = bf.stats.tables({"a": rows[:2000], "b": rows[2000:]}, outcome="y", terms=["x"])
        alarms += bf.stats.glm(given, family=family).diagnostics().said
    assert not alarms


def test_own_intercepts_are_parameters():
    """Of fifty sites with six rows each."""
    rng = np.random.default_rng(0)
    rows = {
        f"{site}": pd.DataFrame(
            {"x": rng.normal(size=6), "y": rng.negative_binomial(1, 0.1, 6) + 1}
        )
        for site in range(50)
    }
    given = bf.stats.tables(rows, outcome="y", terms=["x"])
    fit = bf.stats.glm(given, family="poisson", intercept="per_site")
    mean = np.concatenate([fit.predict(rows[site], site=site) for site in given.names])
    y = np.concatenate([rows[site]["y"] for site in given.names])
    ratio = ((y - mean) ** 2 / mean).sum() / (300 - 51)
    assert fit.diagnostics().said[0].startswith(f"counts vary {ratio:.2f} times as much")


def test_secure_sums_are_the_same():
    options: dict[str, Any] = {"family": "binomial", "intercept": "per_site"}
    plain = bf.stats.glm(sites("binomial"), **options).diagnostics()
    hidden = bf.stats.glm(
        sites("binomial"), **options, aggregation=bf.SecureSum(range=2.0**20)
    ).diagnostics()
    close(hidden.concordance, plain.concordance, rtol=0, atol=1e-6)
    close(hidden.sites, plain.sites, rtol=0, atol=1e-5)
