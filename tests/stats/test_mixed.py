"""Mixed models over sites: the estimate beside lme4's and statsmodels', the posterior beside grids,
and what sites keep to themselves.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.stats import hierarchy
from bayesfl.stats.asking import Questions
from bayesfl.stats.mixed import Draws, Maximum, Mixed, _others
from bayesfl.stats.tables import Tables
from tests.stats.made import SIZES, TERMS, frames, sites

close = np.testing.assert_allclose


def grown(correlation: float, sites: int = 12, unit: float = 1.0) -> pd.DataFrame:
    """Rows of a line for each site, whose days are far from 0."""
    rng = np.random.default_rng(7)
    spread = np.array([[4.0, 2 * correlation], [2 * correlation, 1.0]])
    own = rng.multivariate_normal([3.0, 0.5], spread, size=sites)
    day = np.arange(6.0)
    return pd.concat(
        pd.DataFrame({"site": f"s{j:02d}", "day": day, "y": unit * (a + b * day + noise)})
        for j, ((a, b), noise) in enumerate(zip(own, rng.normal(size=(sites, 6)), strict=True))
    )


def by_site(rows: Any, **options: Any) -> Tables:
    frames = {str(site): part for site, part in rows.groupby("site")}
    return bf.stats.tables(frames, **{"outcome": "y", "terms": ["day"], **options})


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.9, -0.9, 0.0])
def test_the_restricted_estimate_is_mixedlms(correlation: float):
    """Of intercepts and slopes for columns as they are: estimates, errors and log likelihood."""
    smf = pytest.importorskip("statsmodels.formula.api", reason="statsmodels is not installed")
    rows = grown(correlation, sites=8)
    fit = bf.stats.mixed(by_site(rows), family="gaussian", random=["1", "day"], draws=200)
    wanted = smf.mixedlm("y ~ day", rows, groups="site", re_formula="~day").fit(
        reml=True, method=["bfgs", "lbfgs"], gtol=1e-10
    )
    table, cov = fit.table(), wanted.cov_re.to_numpy()
    sd = np.sqrt(cov.diagonal())
    close(fit.log_likelihood, wanted.llf, rtol=0, atol=1e-6)
    estimates = [*wanted.fe_params, *sd, cov[0, 1] / sd.prod(), wanted.scale**0.5]
    close(table["REML"].iloc[:-1], estimates, rtol=1e-3, atol=1e-4)
    close(table["REML se"].iloc[:2], wanted.bse_fe, rtol=1e-3)


@pytest.mark.slow
def test_derivatives_of_the_restricted_likelihood_are_those_of_its_values(
    monkeypatch: pytest.MonkeyPatch,
):
    """Between Newton's last steps: by the rule of trapezoids, of values and of slopes."""
    seen: list[Any] = []

    def look(self: Any, state: Any, total: Any) -> Any:
        seen.append([state["theta"].clone(), *(total[k] for k in ("loss", "slope", "hessian"))])
        return super(Maximum, self).step(state, total)

    monkeypatch.setattr(Maximum, "step", look)
    bf.stats.mixed(by_site(grown(0.5)), family="gaussian", random=["1", "day"], draws=100)
    pairs = [
        (before, after)
        for before, after in itertools.pairwise(seen)
        if 1e-4 < (after[0] - before[0]).norm() < 1e-2
    ]
    assert pairs
    for before, after in pairs[-1:]:
        way = after[0] - before[0]
        close(after[1] - before[1], (before[2] + after[2]) / 2 @ way, rtol=1e-2)
        found, wanted = (before[3] + after[3]) / 2 @ way, after[2] - before[2]
        assert float((found - wanted)[2:].norm() / wanted[2:].norm()) < 0.01


@pytest.mark.slow
def test_modes_that_rounding_moves_are_found(monkeypatch: pytest.MonkeyPatch):
    """Of effects of sites and of persons together, in units of hundreds: Newton's last steps are of
    the size of rounding.
    """
    counts: list[int] = []
    at = hierarchy._at
    monkeypatch.setattr(hierarchy, "_at", lambda *given: counts.append(1) or at(*given))
    rng, day = np.random.default_rng(0), np.arange(10.0)

    def person(name: str) -> pd.DataFrame:
        own = 250 + 25 * rng.normal() + (10 + 6 * rng.normal()) * day
        return pd.DataFrame({"person": name, "day": day, "y": own + 25 * rng.normal(size=10)})

    rows = {site: pd.concat([person(f"{site}{k}") for k in range(9)]) for site in "ab"}
    made = bf.stats.tables(rows, outcome="y", terms=["day"], also=["person"])
    options: Any = {"random": ["1"], "group": "person", "within": ["1", "day"]}
    bf.stats.mixed(made, family="gaussian", **options)
    assert len(counts) < 1000


@pytest.mark.slow
def test_slopes_alone_are_mixedlms():
    """An effect of a slope is 0 where the column is, wherever its mean is."""
    smf = pytest.importorskip("statsmodels.formula.api", reason="statsmodels is not installed")
    rows = grown(0.0)
    rows["y"] -= rows.groupby("site")["y"].transform("first")
    fit = bf.stats.mixed(by_site(rows), family="gaussian", random=["day"])
    wanted = smf.mixedlm("y ~ day", rows, groups="site", re_formula="0 + day").fit(reml=True)
    table = fit.table()
    close(fit.log_likelihood, wanted.llf, rtol=0, atol=1e-6)
    close(table.loc["tau day", "REML"], wanted.cov_re.iloc[0, 0] ** 0.5, rtol=1e-4)
    close(table["REML se"].iloc[:2], wanted.bse_fe, rtol=1e-3)


SLEEP: dict[
    str, list[float]
] = {  # Bates and others, "Fitting linear mixed-effects models using lme4", 2015, fm1 and fm2
    "unstructured": [251.405, 10.467, 24.740, 5.922, 0.066, 25.592, 6.825, 1.546, 1743.628],
    "diagonal": [251.405, 10.467, 25.051, 5.988, 25.565, 6.885, 1.560, 1743.669],
}


@pytest.mark.slow
@pytest.mark.parametrize("covariance", list(SLEEP))
def test_lme4s_sleepstudy(covariance: Any):
    """Published: estimates, errors and the criterion, twice the negative log likelihood."""
    path = Path(os.environ.get("BAYESFL_DATA", "data")) / "sleepstudy" / "sleepstudy.csv"
    if not path.exists():
        pytest.skip("sleepstudy is not in BAYESFL_DATA")
    rows = pd.read_csv(path).rename(columns={"subject": "site"})
    given = by_site(rows, outcome="reaction", terms=["days"])
    fit = bf.stats.mixed(given, family="gaussian", random=["1", "days"], covariance=covariance)
    table = fit.table()
    found = [*table["REML"].iloc[:-1], *table["REML se"].iloc[:2], -2 * fit.log_likelihood]
    close(found, SLEEP[covariance], rtol=0, atol=6e-4)
    assert 6.8 < table.loc["(intercept)", "sd"] < 8.5


@pytest.fixture(scope="module")
def line() -> Mixed:
    """A line for each of six sites."""
    given = by_site(grown(0.5, sites=6))
    return bf.stats.mixed(given, family="gaussian", random=["1", "day"], draws=300)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_any_unit_of_the_outcome(unit: float, line: Mixed):
    one, given = line, by_site(grown(0.5, sites=6, unit=unit))
    fit = bf.stats.mixed(given, family="gaussian", random=["1", "day"], draws=300)
    without = ["correlation (intercept), day", "intraclass correlation"]
    scale = np.where(one.table().index.isin(without), 1.0, unit)
    close(fit.table(), one.table().to_numpy() * scale[:, None], rtol=1e-6)
    close(fit.log_likelihood, one.log_likelihood - 34 * np.log(unit), rtol=0, atol=1e-6)
    close(fit.evidence, one.evidence - 34 * np.log(unit), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_posterior_of_correlated_effects():
    """Beside a grid over both standard deviations, the correlation and sigma: the least squares of
    sites with the same days are normal, and coefficients are integrated over in closed form.
    """
    rows, sites, days = grown(0.6, sites=8), 8, np.arange(6.0)
    fit = bf.stats.mixed(by_site(rows), family="gaussian", random=["1", "day"], draws=4000)
    x = np.column_stack([np.ones(6), (days - days.mean()) / days.std()])
    y = rows["y"].to_numpy().reshape(sites, 6)
    unit = y.std()
    own = np.linalg.lstsq(x, y.T, rcond=None)[0].T  # [sites, 2]
    within = float(((y - own @ x.T) ** 2).sum())
    axes = (np.linspace(-2.5, 3.5, 45), np.linspace(-2.5, 3.5, 45), np.linspace(-0.98, 0.98, 37))
    log_a, log_b, rho, log_s = np.meshgrid(*axes, np.linspace(-0.6, 0.8, 25), indexing="ij")
    a, b, s2 = np.exp(log_a), np.exp(log_b), np.exp(2 * log_s)
    noise = np.linalg.inv(x.T @ x)
    v11, v22, v12 = a**2 + s2 * noise[0, 0], b**2 + s2 * noise[1, 1], a * b * rho
    det = v11 * v22 - v12**2
    away = own - own.mean(0)
    (s11, s12), (_, s22) = away.T @ away
    squares = (v22 * s11 + v11 * s22 - 2 * v12 * s12) / det
    logs = -squares / 2 - (sites - 1) / 2 * np.log(det) - within / s2 / 2
    logs += -4 * sites * log_s + log_a + log_b - (a**2 + b**2) / (2.5 * unit) ** 2 / 2
    mass = np.exp(logs - logs.max())
    mass /= mass.sum()
    ratio = days.mean() / days.std()
    tau = np.sqrt(a**2 + (ratio * b) ** 2 - 2 * ratio * a * b * rho)
    found = {
        "tau (intercept)": tau,
        "tau day": b / days.std(),
        "correlation (intercept), day": (a * rho - ratio * b) / tau,
        "sigma": np.sqrt(s2),
    }
    table = fit.table()
    for name, values in found.items():
        mean = float((mass * values).sum())
        sd = float((mass * (values - mean) ** 2).sum()) ** 0.5
        close(table.loc[name, "mean"], mean, rtol=0, atol=0.15 * sd)
        close(table.loc[name, "sd"], sd, rtol=0.15)
    variance = float((mass * (v11 + ratio**2 * v22 - 2 * ratio * v12)).sum()) / sites
    mean = float(own[:, 0].mean() - ratio * own[:, 1].mean())
    close(table.loc["(intercept)", "mean"], mean, rtol=0, atol=0.1 * variance**0.5)
    close(table.loc["(intercept)", "sd"], variance**0.5, rtol=0.1)


def test_the_estimate_is_0_at_the_boundary():
    rng = np.random.default_rng(3)
    rows = grown(0.0).assign(y=lambda t: t["day"] + rng.normal(size=len(t)))
    rows["y"] -= rows.groupby("site")["y"].transform("mean")  # sites do not differ
    fit = bf.stats.mixed(by_site(rows), family="gaussian", draws=200)
    table = fit.table()
    assert table.loc["tau (intercept)", "REML"] == 0
    assert table.loc["intraclass correlation", "REML"] == 0
    assert 0.01 < table.loc["tau (intercept)", "mean"] < 0.5


@pytest.mark.slow
def test_mixed_models_of_the_same_columns_compare(line: Mixed):
    """By the restricted likelihood and the evidence; those of other columns or rows do not."""
    rows = grown(0.5, sites=6)
    given = by_site(rows)
    level = bf.stats.mixed(given, family="gaussian", draws=300)
    told = level.compare(line)
    ratio = 2 * (line.log_likelihood - level.log_likelihood)
    assert f"likelihood ratio {ratio:.4f} on 2 degrees of freedom" in told
    assert f"A over B {line.evidence - level.evidence:.4f} nats" in told  # pyright: ignore
    assert ratio > 10
    for fit in (line, level):  # of a new site, on day 0
        new = fit.predict(rows[:1])[:, 0] - fit.shared[:, 0]
        close((new / fit.levels[0].covariance[:, 0, 0].sqrt()).std(), 1.0, rtol=0.05)
    others = by_site(rows, terms=[]), by_site(rows[1:])
    for other, said in zip(others, ("different things", "different rows of"), strict=True):
        with pytest.raises(ValueError, match=said):
            level.compare(bf.stats.mixed(other, family="gaussian", draws=300))
    with pytest.raises(ValueError, match="different things"):
        bf.stats.glm(given, family="gaussian").compare(level)


def test_groups_that_cannot_tell_are_refused():
    """One row a site; as many rows as effects; one ward a site; one site."""
    rows = grown(0.0).assign(ward="all", bed=lambda t: t["day"], ill=lambda t: t["y"] > 4)
    rows["ill"] = rows["ill"].astype(int)
    line: dict[str, Any] = {"random": ["1", "day"]}
    cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (rows.groupby("site").head(1).assign(day=np.arange(12.0)), {}, "more rows than effects"),
        (rows.groupby("site").head(2), line, "more rows than effects"),
        (rows, {"group": "ward"}, "12 groups by 'ward' at 12 sites"),
        (rows, {"group": "bed"}, "no bed has more rows"),
        (rows[rows["site"] == "s00"], {}, "1 groups by 'site' at 1 sites"),
    )
    for given, options, said in cases:
        with pytest.raises(ValueError, match=said):
            bf.stats.mixed(by_site(given), family="gaussian", **options)
    one = rows.groupby("site").head(1).assign(day=np.arange(12.0))
    with pytest.raises(ValueError, match="more rows than effects"):
        bf.stats.mixed(by_site(one, outcome="ill"), family="binomial")


def test_probability_weights_are_refused(monkeypatch: pytest.MonkeyPatch):
    given = sites("gaussian")
    monkeypatch.setattr(Tables, "weighing", "probability", raising=False)
    with pytest.raises(ValueError, match="probability weights"):
        bf.stats.mixed(given, family="gaussian")


@pytest.mark.slow
def test_effects_of_wards_within_sites_beside_mixedlms():
    """Of both levels: the estimates, and what a site keeps and predicts."""
    smf = pytest.importorskip("statsmodels.formula.api", reason="statsmodels is not installed")
    rng = np.random.default_rng(1)
    site, ward = np.divmod(np.repeat(np.arange(40), 6), 5)
    rows = pd.DataFrame(
        {"site": [f"s{j}" for j in site], "ward": ward, "day": rng.normal(size=240)}
    )
    rows["y"] = rows["day"] + rng.normal(0, 1, 8)[site] + rng.normal(0, 1.5, 40)[5 * site + ward]
    rows["y"] += rng.normal(size=240)
    given = by_site(rows, also=["ward"])
    fit = bf.stats.mixed(given, family="gaussian", group="ward")
    wanted = smf.mixedlm(
        "y ~ day", rows, groups="site", re_formula="1", vc_formula={"w": "0 + C(ward)"}
    ).fit()
    table = fit.table()
    estimate = table["REML"]
    site_sd, ward_sd = float(wanted.cov_re.iloc[0, 0]) ** 0.5, float(wanted.vcomp[0]) ** 0.5
    close(estimate["tau (intercept)"], site_sd, rtol=1e-3)
    close(estimate["tau (intercept) of ward"], ward_sd, rtol=1e-3)
    close(fit.log_likelihood, wanted.llf, rtol=0, atol=1e-5)
    total = site_sd**2 + ward_sd**2 + wanted.scale
    close(estimate["intraclass correlation"], site_sd**2 / total, rtol=1e-3)
    shared = (site_sd**2 + ward_sd**2) / total
    close(estimate["intraclass correlation of ward"], shared, rtol=1e-3)
    assert list(fit.sites().loc["s0"].index.get_level_values(0)) == ["(site)", 0, 1, 2, 3, 4]
    assert list(fit.by_site("(intercept)").index[:2]) == ["s0", "s0, 0"]
    effects = wanted.random_effects["s0"]
    own = fit.own["s0"][:, :, 0].mean(0) - fit.shared[:, 0].mean()
    close(own[0], effects.iloc[0], rtol=0, atol=0.3)
    known: tuple[dict[str, Any], ...] = ({"site": "s0", "group": 0}, {"site": "s0"}, {})
    new = [fit.predict(rows[:3], **of).std(0).mean() for of in known]
    assert new[0] < new[1] < new[2]
    with pytest.raises(ValueError, match="no 9 here"):
        fit.predict(rows[:3], site="s0", group=9)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_correlations_have_an_lkj_prior(count: int):
    """The density of a correlation matrix is constant, and integrates to 1 by its partial ones."""
    places = tuple(range(count))
    model = Draws("binomial", count, (), places, None, (0.0,) * count, (1.0,) * count)
    rng = torch.Generator().manual_seed(0)
    pairs = torch.randn(5, model.sizes[2], generator=rng).double()
    psi = torch.cat([torch.zeros(5, 1 + 2 * count).double(), pairs], 1)
    root = model.phi(psi).root
    close(root.square().sum(-1), 1.0)
    if count > 1:

        def matrix(pairs: torch.Tensor) -> torch.Tensor:
            at = torch.cat([torch.zeros(1 + 2 * count).double(), pairs])
            root = model.phi(at).root
            return (root @ root.T)[*torch.tril_indices(count, count, -1)]

        volumes = [torch.linalg.slogdet(torch.func.jacrev(matrix)(one)).logabsdet for one in pairs]
        logs = model.log_prior(psi, 1.0) - torch.stack(volumes)
        close(logs, logs[0].expand(5), rtol=0, atol=1e-9)
        # Beside log tau's at 0, one over the volume: 2, pi^2 / 2, and by Joe (2006) 32 pi^2 / 27.
        half = np.log(2 / np.sqrt(2 * np.pi)) - 0.5
        volume = {2: 2, 3: np.pi**2 / 2, 4: 32 * np.pi**2 / 27}[count]
        close(logs[0], count * half - np.log(volume), rtol=0, atol=1e-9)
    wider = model.log_prior(psi, 2.0) - model.log_prior(psi, 1.0)
    close(wider, count * (0.5 - 0.125 - np.log(2)), rtol=0, atol=1e-9)


def test_intraclass_correlations_of_outcomes_that_are_not_normal():
    """By Nakagawa and others, table 1: beside the variance of the logistic, and of log counts."""
    noise = {
        "binomial": np.pi**2 / 3,
        "poisson": np.log(1 + 1 / 1.6),
        "negative_binomial": np.log(1 + 1 / 1.6 + 0.5),
    }
    for family, variance in noise.items():
        model = Draws(family, 0, (), (0,), None, (), ())
        at = torch.tensor([0.3, np.log(0.8), np.log(0.5)], dtype=torch.float64)[: model.size]
        found = _others(model, model.phi(at), 1.6)["intraclass correlation"]
        close(found, 0.64 / (0.64 + variance), rtol=1e-12)


def test_a_random_intercept_of_outcomes_0_and_1(monkeypatch: pytest.MonkeyPatch):
    """Its standard deviation is that of a quadrature with 40 nodes, within two per cent."""
    survey = Maximum("binomial", 0, (), (0,), None, (), (), sites=40, at=(0.0, 0.5))
    rng = np.random.default_rng(0)
    ill = {f"s{j}": rng.random(8) < 1 / (1 + np.exp(-rng.normal(0, 1.5))) for j in range(40)}
    given = bf.stats.tables(
        {site: pd.DataFrame({"ill": y.astype(int)}) for site, y in ill.items()}, outcome="ill"
    )
    found = Questions(given).conduct(survey)["theta"]
    monkeypatch.setattr("bayesfl.stats.hierarchy.NODES", 40)
    wanted = Questions(given).conduct(survey)["theta"]
    assert 0.5 < abs(wanted[1]) < 3
    close(abs(found[1]), abs(wanted[1]), rtol=0.02)
    close(found[0], wanted[0], rtol=0, atol=0.01)


@pytest.fixture(scope="module")
def plain() -> Tables:
    """Normal outcomes of seven small sites without a column."""
    rng = np.random.default_rng(5)
    rows = {
        f"s{j}": pd.DataFrame({"y": rng.normal(shift, 1, 6)})
        for j, shift in enumerate(rng.normal(1, 0.7, 7))
    }
    return bf.stats.tables(rows, outcome="y")


@pytest.fixture(scope="module")
def intercepts(plain: Tables) -> Mixed:
    """The posterior of their intercepts."""
    return bf.stats.mixed(plain, family="gaussian", tau_scale=1.0, draws=6000)


def test_the_posterior(plain: Tables, intercepts: Mixed):
    """Means and standard deviations beside a grid over (beta, log tau, log sigma), and of a site's
    own intercept, which is normal at each point of it.
    """
    fit = intercepts
    y = np.stack([site.y.numpy() for site in plain.sites if site.y is not None])
    unit = y.std()
    beta = np.linspace(-1, 3, 81)[:, None, None]
    tau = np.exp(np.linspace(-6, 2.5, 171))[None, :, None]
    sigma = np.exp(np.linspace(-0.8, 0.8, 81))[None, None]
    mean, within = y.mean(1), ((y - y.mean(1, keepdims=True)) ** 2).sum()
    wide = sigma**2 / 6 + tau**2
    logs = -0.5 * ((mean[:, None, None, None] - beta) ** 2 / wide + np.log(wide)).sum(0)
    logs = logs - within / (2 * sigma**2) - 7 * 5 * np.log(sigma)
    logs = logs + np.log(tau) - (tau / unit) ** 2 / 2
    mass = np.exp(logs - logs.max())
    mass /= mass.sum()

    def moments(values: np.ndarray) -> tuple[float, float]:
        first = float((mass * values).sum())
        return first, float((mass * values**2).sum() - first**2) ** 0.5

    own = (tau**2 * mean[0] + sigma**2 / 6 * beta) / wide
    spread = tau**2 * sigma**2 / 6 / wide
    own_mean, own_sd = moments(own)
    own_sd = (own_sd**2 + float((mass * spread).sum())) ** 0.5
    table, at_sites = fit.table(), fit.sites()
    for (exact, sd), row in (
        (moments(beta), table.loc["(intercept)"]),
        (moments(tau), table.loc["tau (intercept)"]),
        (moments(sigma), table.loc["sigma"]),
        ((own_mean, own_sd), at_sites.iloc[0]),
    ):
        close(row["mean"], exact, rtol=0, atol=0.1 * sd)
        close(row["sd"], sd, rtol=0.1)
    assert fit.k_hat < 0.7 < fit.effective


def test_weights_are_the_ratio_of_posterior_and_proposal(plain: Tables, intercepts: Mixed):
    """The evidence is the mean weight: beside the integral over a fine grid."""
    y = np.stack([site.y.numpy() for site in plain.sites if site.y is not None])
    unit = float(y.std())
    axes = [torch.linspace(*ends, steps) for ends, steps in (((-1, 3), 41), ((-6, 2), 81))]
    axes = [*axes, torch.linspace(-0.8, 0.8, 41)]
    grid = torch.cartesian_prod(*axes).double()
    survey = Draws("gaussian", 0, (), (0,), None, (), (), at={"phi": grid})
    logs = Questions(plain).conduct(survey)["log_likelihood"] + survey.log_prior(grid, unit)
    cell = np.prod([float(axis[1] - axis[0]) for axis in axes])
    close(intercepts.evidence, float(logs.logsumexp(0)) + np.log(cell), rtol=0, atol=0.05)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_few_sites_whose_intercepts_hardly_differ(seed: int):
    """Of three sites tau may be large, and the intercept is then known badly: beside the integral
    over a grid of tau and sigma, with the intercept in closed form.
    """
    rng = np.random.default_rng(0)
    rows = {site: pd.DataFrame({"y": rng.normal(size=60)}) for site in "abc"}
    given = bf.stats.tables(rows, outcome="y")
    fit = bf.stats.mixed(given, family="gaussian", seed=seed)
    means = np.array([rows[site]["y"].mean() for site in "abc"])
    within = sum(60 * rows[site]["y"].var(ddof=0) for site in "abc")
    unit = float(np.std([rows[site]["y"] for site in "abc"]))
    log_tau, log_sigma = np.meshgrid(np.linspace(-7, 3, 301), np.linspace(-0.4, 0.4, 81))
    tau, sigma2 = np.exp(log_tau).ravel(), np.exp(2 * log_sigma).ravel()
    variance = tau**2 + sigma2 / 60  # of a site's mean
    squares = ((means - means.mean()) ** 2).sum()
    logs = -np.log(variance) - squares / variance / 2 - within / sigma2 / 2
    logs += -177 / 2 * np.log(sigma2) + np.log(tau) - (tau / 2.5 / unit) ** 2 / 2
    mass = np.exp(logs - logs.max())
    places = rng.choice(len(mass), 400_000, p=mass / mass.sum())
    intercept = rng.normal(means.mean(), np.sqrt(variance[places] / 3))
    found = fit.table(0.9)
    sd = intercept.std()
    close(found.loc["(intercept)", "mean"], means.mean(), rtol=0, atol=0.1 * sd)
    low, high = np.quantile(intercept, [0.05, 0.95])
    close(found.loc["(intercept)", ["5 %", "95 %"]].astype(float), [low, high], atol=0.25 * sd)
    above = np.quantile(tau[places], [0.5, 0.95])
    taus = fit.levels[0].covariance.flatten().sqrt().numpy()
    close(np.quantile(taus, [0.5, 0.95]), above, rtol=0.25)


def test_separated_outcomes_have_no_posterior():
    rare = np.arange(60) < 3
    rng = np.random.default_rng(0)
    rows = {
        site: pd.DataFrame({"rare": rare, "ill": np.where(rare, 1, rng.random(60) < 0.5)})
        for site in "abc"
    }
    given = bf.stats.tables(rows, outcome="ill", terms=["rare"])
    with pytest.raises(ValueError, match=r"'rare'.* separate the outcome"):
        bf.stats.mixed(given, family="binomial")


@pytest.fixture(scope="module")
def fit() -> Mixed:
    return bf.stats.mixed(sites("binomial"), family="binomial", random=["1", "age"], draws=300)


def test_a_fit_says_what_it_rests_on(fit: Mixed):
    assert list(fit.table().index) == [
        "(intercept)",
        "age",
        "kind[b]",
        "kind[c]",
        "tau (intercept)",
        "tau age",
        "correlation (intercept), age",
        "intraclass correlation",
    ]
    ratios = fit.table()[["exp(mean)", "exp(2.5 %)", "exp(97.5 %)"]]
    close(ratios.iloc[:4], fit.table()[["mean", "2.5 %", "97.5 %"]].iloc[:4].map(np.exp))
    assert ratios.iloc[4:].isna().all(axis=None)
    assert fit.rows == dict(sorted(SIZES.items()))
    for words in (
        "own effects of each site",
        "k-hat",
        "effective draws",
        "Draws: log_likelihood [300]",
    ):
        assert words in str(fit)
    sent = 8 * sum(
        int(np.prod(shape)) for asked in fit.released.questions for shape in asked.answer.values()
    )
    assert fit.released.bytes == dict.fromkeys(SIZES, sent)


def test_own_coefficients_lie_between_own_fits_and_the_federations(fit: Mixed):
    """For the intercept at the columns' means, whose posteriors are normal enough."""
    at_sites = fit.sites()
    assert list(at_sites.index.levels[0]) == sorted(SIZES)
    assert at_sites.index.levels[1].tolist() == ["(intercept)", "age"]
    shrunk = at_sites["mean"].xs("age", level=1).std()
    own = [
        float(
            bf.stats.glm(sites("binomial").only([site]), family="binomial").table()["coef"]["age"]
        )
        for site in sorted(SIZES)
    ]
    assert shrunk < np.std(own)


def test_predictions(fit: Mixed):
    own = fit.own["west"][:, 0]
    at = fit.names.index("kind[b]")
    assert float((own - fit.shared)[:, at].abs().max()) < 1e-12  # is no own effect
    rows = frames()["west"].head(5)
    x = torch.cat([torch.ones(5, 1).double(), sites("binomial").design(rows)], 1).numpy()
    wanted = 1 / (1 + np.exp(-own.numpy() @ x.T))
    close(fit.predict(rows, site="west"), wanted, rtol=0, atol=1e-12)
    new = fit.predict(rows)
    assert (new.std(0) > fit.predict(rows, site="west").std(0)).all()
    with pytest.raises(ValueError, match="no 'moon' here"):
        fit.predict(rows, site="moon")


def test_secure_sums_and_any_order_are_the_same(fit: Mixed):
    options: dict[str, Any] = {"family": "binomial", "random": ["1", "age"], "draws": 300}
    hidden = bf.stats.mixed(
        sites("binomial"), **options, aggregation=bf.SecureSum(range=2.0**20, step=2.0**-30)
    )
    close(hidden.table(), fit.table(), rtol=0, atol=1e-3)
    turned = {site: frames()[site] for site in reversed(SIZES)}
    turned = bf.stats.tables(turned, outcome="ill", terms=TERMS)
    again = bf.stats.mixed(turned, **options)
    assert torch.equal(again.shared, fit.shared)
    assert all(torch.equal(again.own[site], fit.own[site]) for site in SIZES)


def test_groups_within_sites():
    """Each group has effects and its name; one group a site is the site."""
    rows = {
        site: frame.assign(ward=np.array([3, 7, 9])[np.arange(len(frame)) % 3])
        for site, frame in frames().items()
    }
    given = bf.stats.tables(rows, outcome="score", terms=["age"], also=["ward"])
    alone: dict[str, Any] = {"family": "gaussian", "group": "ward", "random": ()}
    fit = bf.stats.mixed(given, **alone)
    assert {t.shape[1] for t in fit.own.values()} == {3}
    assert list(fit.sites().loc["east"].index.get_level_values(0)) == [3, 7, 9]
    assert list(fit.by_site("(intercept)").index[:2]) == ["east, 3", "east, 7"]
    gap = {**rows, "east": rows["east"].assign(ward=rows["east"]["ward"].where(lambda w: w > 3))}
    for wrong, said in ((gap, "rows without 'ward'"), (frames(), "no column 'ward'")):
        with pytest.raises(ValueError, match=said):
            bf.stats.mixed(
                bf.stats.tables(wrong, outcome="score", terms=["age"]),
                family="gaussian",
                group="ward",
            )
    one = {site: frame.assign(ward="all") for site, frame in rows.items()}
    given = bf.stats.tables(one, outcome="score", terms=["age"], also=["ward"])
    single = bf.stats.mixed(given, **alone)
    close(single.table(), bf.stats.mixed(given, family="gaussian").table(), rtol=0, atol=1e-9)


def test_a_term_that_is_no_column_is_refused():
    with pytest.raises(ValueError, match=r"random= names 'weight'.*'age'"):
        bf.stats.mixed(sites("binomial"), family="binomial", random=["weight"])


@pytest.mark.parametrize("family", ["gaussian", "binomial"])
def test_modes_of_the_caller_change_nothing(family: Any):
    """Its second derivatives are taken whether or not the caller takes gradients."""
    given = sites(family).only(["east", "south"])
    wanted = bf.stats.mixed(given, family=family, draws=100).table()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = bf.stats.mixed(given, family=family, draws=100).table()
        pd.testing.assert_frame_equal(found, wanted, check_exact=True)


def test_an_offset_is_in_the_outcomes_unit():
    """The fit is that to outcomes less the offset."""
    rng = np.random.default_rng(0)
    given = {}
    for place, site in enumerate("abc"):
        known, x = rng.normal(0, 30, 30), rng.normal(size=30)
        y = 20 * x + 50 * place + rng.normal(0, 9, 30)
        given[site] = pd.DataFrame({"x": x, "known": known, "less": y, "y": y + known})
    fits = [
        bf.stats.mixed(bf.stats.tables(given, terms=["x"], **named), family="gaussian", draws=300)
        for named in ({"outcome": "y", "offset": "known"}, {"outcome": "less"})
    ]
    offset, less = (fit.table()["REML"].to_numpy() for fit in fits)
    np.testing.assert_allclose(offset, less, rtol=1e-6)


def test_draws_of_huge_rates_do_not_end_a_fit():
    """Of rare counts and two effects the proposal reaches rates whose Hessians are singular."""
    rng = np.random.default_rng(3)
    rows = {}
    for site in "abcdef":
        x = rng.normal(50, 5, size=20)
        a, b = rng.normal(0, 0.4), rng.normal(0.3, 0.3)
        rows[site] = pd.DataFrame({"x": x, "y": rng.poisson(np.exp(a - 3 + b * (x - 50) / 5))})
    given = bf.stats.tables(rows, outcome="y", terms=["x"])
    fit = bf.stats.mixed(given, family="poisson", random=["1", "x"], draws=300)
    plain = bf.stats.glm(given, family="poisson").table().loc["x", "coef"]
    found = fit.table().loc["x"]
    assert abs(found["mean"] - plain) < found["sd"]
