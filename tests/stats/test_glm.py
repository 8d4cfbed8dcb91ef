"""Generalised linear models over sites beside statsmodels' on one table of all rows."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special, stats

import bayesfl as bf
from bayesfl.stats.families import FAMILIES, _remainder
from tests.stats.made import OUTCOMES, SIZES, TERMS, frames, pooled, sites

sm = pytest.importorskip("statsmodels.api", reason="statsmodels is not installed")
KINDS = {
    "binomial": sm.families.Binomial(),
    "log_binomial": sm.families.Binomial(sm.families.links.Log()),
    "poisson": sm.families.Poisson(),
    "gaussian": sm.families.Gaussian(),
}
close = np.testing.assert_allclose


def design(family: str, intercept: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns of all rows, the intercept first or one of each site last, and outcomes."""
    rows = pooled()
    x = sites(family).design(rows).numpy()
    own = pd.get_dummies(rows["site"]).to_numpy(float)
    columns = [np.ones((len(rows), 1)), x] if intercept == "shared" else [x, own]
    return np.concatenate(columns, 1), rows[OUTCOMES[family]].to_numpy(float)


def anchor(family: str, intercept: str, **options: Any) -> Any:
    x, y = design(family, intercept)
    if family == "negative_binomial":
        return sm.NegativeBinomial(y, x, **options).fit(disp=0, method="newton", maxiter=500)
    return sm.GLM(y, x, KINDS[family], **options).fit(tol=1e-14, maxiter=500)


@pytest.mark.filterwarnings("ignore::Warning")  # statsmodels' of the log link
@pytest.mark.parametrize("intercept", ["shared", "per_site"])
@pytest.mark.parametrize("family", list(OUTCOMES))
def test_the_pooled_table(family: Any, intercept: Any):
    """Coefficients, errors, likelihood, and own intercepts."""
    fit, wanted = (
        bf.stats.glm(sites(family), family=family, intercept=intercept),
        anchor(family, intercept),
    )
    q, own = len(fit.names) - (family == "negative_binomial"), len(fit.own_intercepts)
    params, errors = np.asarray(wanted.params), np.asarray(wanted.bse)
    if family == "gaussian":
        errors = sm.OLS(*design(family, intercept)[::-1]).fit().bse
    # Scoring converges linearly at the log link.
    close(fit.estimate[:q], params[:q], rtol=0, atol=1e-6 if family == "log_binomial" else 1e-8)
    close(fit.covariance.diagonal().sqrt()[:q], errors[:q], rtol=0, atol=1e-7)
    close(fit.log_likelihood, wanted.llf, rtol=0, atol=1e-9)
    if fit.ratio is not None:
        ends = np.exp(np.asarray(wanted.conf_int())[:q])
        close(fit.table()[["exp(2.5 %)", "exp(97.5 %)"]].iloc[:q], ends, rtol=1e-5)
    assert own == (0 if intercept == "shared" else len(SIZES))
    close(list(fit.own_intercepts.values()), params[q : q + own], rtol=0, atol=1e-7)
    if family == "negative_binomial":
        alpha = float(fit.estimate[-1].exp())
        close(alpha, params[-1], rtol=1e-7)
        close(alpha * float(fit.covariance[-1, -1].sqrt()), errors[-1], rtol=1e-5)
    k = len(params) + (family == "gaussian")
    assert (fit.parameters, sum(fit.rows.values())) == (k, sum(SIZES.values()))


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("intercept", ["shared", "per_site"])
@pytest.mark.parametrize("family", ["binomial", "gaussian", "poisson"])
def test_robust_errors(family: Any, intercept: Any):
    fit = bf.stats.glm(sites(family), family=family, intercept=intercept, errors="sandwich")
    x, y = design(family, intercept)
    wanted = sm.GLM(y, x, KINDS[family]).fit(tol=1e-14, maxiter=500, cov_type="HC0")
    close(fit.covariance.diagonal().sqrt(), wanted.bse[: len(fit.names)], rtol=0, atol=1e-7)


def corrected(x: np.ndarray, residual: np.ndarray, w: np.ndarray, site: np.ndarray) -> Any:
    """CR2's covariance and Bell and McCaffrey's degrees of freedom by matrices of all rows, whose
    working variance is 1 / w.
    """
    bread = np.linalg.inv(x.T @ (w[:, None] * x))
    root = np.sqrt(w)[:, None] * x
    annihilator = np.eye(len(x)) - root @ bread @ root.T
    pulls, meat = [], np.zeros_like(bread)
    for one in np.unique(site):
        at = site == one
        values, vectors = np.linalg.eigh(annihilator[np.ix_(at, at)])
        factor = np.where(values > 1e-9, 1 / np.sqrt(np.maximum(values, 1e-9)), 0)
        adjusted = np.zeros_like(root)
        adjusted[at] = (vectors * factor) @ vectors.T @ root[at]
        score = adjusted.T @ (np.sqrt(w) * residual)
        meat += np.outer(score, score)
        pulls.append(annihilator @ adjusted @ bread)
    degrees = []
    for column in range(x.shape[1]):
        p = np.stack([pull[:, column] for pull in pulls], 1)
        form = p.T @ p
        degrees.append(np.trace(form) ** 2 / (form**2).sum())
    return bread @ meat @ bread, np.array(degrees)


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("intercept", ["shared", "per_site"])
@pytest.mark.parametrize("family", ["binomial", "gaussian", "poisson"])
def test_errors_by_site_are_those_for_few_sites(family: Any, intercept: Any):
    fit = bf.stats.glm(sites(family), family=family, intercept=intercept, errors="site")
    x, y = design(family, intercept)
    fitted = sm.GLM(y, x, KINDS[family]).fit(tol=1e-14, maxiter=500)
    w = np.ones(len(y)) if family == "gaussian" else fitted.family.variance(fitted.fittedvalues)
    covariance, degrees = corrected(x, (y - fitted.fittedvalues) / w, w, pooled()["site"])
    q = len(fit.names)
    close(fit.covariance, covariance[:q, :q], rtol=1e-6, atol=1e-12)
    close(fit.table()["df"], degrees[:q], rtol=1e-7)
    row = fit.table().loc["age"]
    reach = stats.t(row["df"]).ppf(0.975) * row["se"]
    close(row.iloc[5], row["coef"] + reach)


def test_errors_by_site_need_three():
    """And more than one that says something of a coefficient."""
    options: Any = {"family": "gaussian", "errors": "site"}
    with pytest.raises(ValueError, match="errors='site' needs three sites at least"):
        bf.stats.glm(sites("gaussian").only(["east", "west"]), **options)
    rows = {
        site: frame.assign(here=(site == "west") * frame["age"]) for site, frame in frames().items()
    }
    given = bf.stats.tables(rows, outcome="score", terms=["age", "here"])
    with pytest.raises(ValueError, match=r"informs the coefficients of \['here'\]"):
        bf.stats.glm(given, **options, intercept="per_site")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "least"), [(3, 0.90), (5, 0.93)])
def test_intervals_by_site_cover(count: int, least: float):
    """Of a slope without effect beside sites that differ, in 200 federations."""
    hit = 0
    for seed in range(200):
        rng = np.random.default_rng(10 * seed + count)
        rows = {}
        for site in range(count):
            x = rng.normal(size=40) + rng.normal()
            rows[site] = pd.DataFrame({"x": x, "y": rng.normal(0, 0.7) + rng.normal(size=40)})
        given = bf.stats.tables(rows, outcome="y", terms=["x"])
        row = bf.stats.glm(given, family="gaussian", errors="site").table().loc["x"]
        hit += row.iloc[4] <= 0 <= row.iloc[5]
    assert hit / 200 >= least


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("unit", [1.0, 1e-6])
@pytest.mark.parametrize("family", ["binomial", "gaussian", "log_binomial", "poisson"])
def test_probability_weights(family: Any, unit: float):
    """The estimate and HC0 of a weighted regression, in any unit, and no likelihood."""
    rng = np.random.default_rng(1)
    rows = {
        site: frame.assign(w=unit / rng.uniform(0.05, 1, len(frame)))
        for site, frame in frames().items()
    }
    w = np.concatenate([rows[site]["w"] for site in sorted(SIZES)]) / unit
    options: Any = {"outcome": OUTCOMES[family], "terms": TERMS}
    given = bf.stats.tables(rows, **options, probability_weights="w")
    fit = bf.stats.glm(given, family=family)
    x, y = design(family, "shared")
    if family == "gaussian":
        wanted = sm.WLS(y, x, weights=w).fit(cov_type="HC0")
    else:  # its freq_weights make w s s' of robust errors
        wanted = sm.GLM(y, x, KINDS[family], var_weights=w).fit(tol=1e-14, maxiter=500)
        mean = wanted.fittedvalues
        slope = w * (mean - y) / (1 - mean if family == "log_binomial" else 1)
        bread = wanted.cov_params() / wanted.scale
        wanted.bse = np.sqrt(np.diag(bread @ (x.T * slope**2) @ x @ bread))
    off = 1e-6 if family == "log_binomial" else 1e-10
    close(fit.estimate, wanted.params, rtol=0, atol=off)
    close(fit.table()["se"], wanted.bse, rtol=10 * off)
    assert (sum(fit.rows.values()), fit.errors) == (sum(SIZES.values()), "the sandwich, by rows")
    assert "under probability weights" in str(fit)
    for call, words in (
        (lambda: fit.aic, "AIC rests on the likelihood"),
        (lambda: fit.compare(fit), "AIC rests"),
        (lambda: fit.diagnostics(), "no diagnostics of this fit under probability weights"),
        (lambda: bf.stats.glm(given, family=family, errors="model"), "errors='model' rests"),
        (lambda: bf.stats.mixed(given, family="gaussian"), "a mixed model rests"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    if family == "binomial":
        with pytest.raises(ValueError, match="prior= rests"):
            bf.stats.glm(given, family=family, prior=1.0)
        by = bf.stats.glm(given, family=family, errors="site")
        known = wanted.fittedvalues * (1 - wanted.fittedvalues) * w
        residual = (y - wanted.fittedvalues) * w / known
        covariance, _ = corrected(x, residual, known, pooled()["site"])
        close(by.covariance, covariance, rtol=1e-6, atol=1e-12)


def test_weights_that_are_refused():
    rows = {site: frame.assign(w=0.5 + frame["count"]) for site, frame in frames().items()}
    options: Any = {"outcome": "ill", "terms": TERMS}
    for weights, error, words in (
        ({"weights": "w"}, TypeError, "did you mean frequency_weights= or probability_weights="),
        ({"frequency_weights": "w"}, ValueError, "'w' that are not whole numbers"),
        ({"frequency_weights": "count", "probability_weights": "w"}, ValueError, "the product"),
    ):
        with pytest.raises(error, match=words):
            bf.stats.tables(rows, **options, **weights)


def test_offsets_and_weights():
    rows = {
        site: frame.assign(log_exposure=np.log(frame["exposure"]))
        for site, frame in frames().items()
    }
    given = bf.stats.tables(
        rows, outcome="visits", terms=TERMS, offset="log_exposure", frequency_weights="count"
    )
    fit = bf.stats.glm(given, family="poisson", intercept="per_site")
    all_rows = pooled()
    wanted = anchor(
        "poisson",
        "per_site",
        offset=np.log(all_rows["exposure"].to_numpy()),
        freq_weights=all_rows["count"].to_numpy(),
    )
    close(fit.estimate, wanted.params[:3], rtol=0, atol=1e-9)
    close(fit.covariance.diagonal().sqrt(), wanted.bse[:3], rtol=0, atol=1e-7)
    means = np.concatenate([fit.predict(rows[site], site=site) for site in sorted(SIZES)])
    close(means, wanted.fittedvalues, rtol=1e-8)
    with pytest.raises(ValueError, match="no column 'log_exposure'"):
        fit.predict(frames()["west"], site="west")


@pytest.mark.parametrize("intercept", ["shared", "per_site"])
@pytest.mark.parametrize("errors", ["model", "sandwich", "site"])
@pytest.mark.parametrize("family", list(OUTCOMES))
def test_weights_say_how_often_a_row_counts(family: Any, errors: Any, intercept: Any):
    """All is as of a table in which each row stands so often."""
    each = {site: frame.loc[frame.index.repeat(frame["count"])] for site, frame in frames().items()}
    options: Any = {"family": family, "errors": errors, "intercept": intercept}
    found = bf.stats.glm(sites(family, frequency_weights="count"), **options)
    given = bf.stats.tables(each, outcome=OUTCOMES[family], terms=TERMS)
    wanted = bf.stats.glm(given, **options)
    assert found.rows == wanted.rows
    if wanted.degrees is not None:
        close(found.degrees, wanted.degrees, rtol=1e-7)
    close(found.estimate, wanted.estimate, rtol=0, atol=1e-8)
    close(found.covariance, wanted.covariance, rtol=1e-7, atol=1e-10)
    for name in ("log_likelihood", "aic", "scale"):
        close(getattr(found, name), getattr(wanted, name), rtol=1e-9)
    if errors == "model":
        a, b = found.diagnostics(), wanted.diagnostics()
        assert (a.said, a.sites["rows"].tolist()) == (b.said, b.sites["rows"].tolist())
        if a.deviance is not None:
            close([a.deviance, a.null_deviance], [b.deviance, b.null_deviance], rtol=1e-9)


def test_a_site_of_one_level_is_known_by_its_weights():
    """One with both levels whose events weigh as much as it has rows stays."""
    rows = {site: frame.assign(w=1.0) for site, frame in frames().items()}
    rows["both"] = (
        rows["west"]
        .head(40)
        .assign(ill=np.arange(40) % 4 < 2, w=np.where(np.arange(40) % 4 < 2, 2.0, 1.0))
    )
    rows["ill"] = rows["west"].assign(ill=True, w=1.0 + (np.arange(90) < 18))
    given = bf.stats.tables(rows, outcome="ill", terms=TERMS, frequency_weights="w")
    fit = bf.stats.glm(given, family="binomial", intercept="per_site")
    assert fit.left_out == {"ill": "all of its 108 rows have an event"}
    assert fit.rows["both"] == 60


@pytest.mark.parametrize("intercept", ["shared", "per_site"])
@pytest.mark.parametrize("errors", ["model", "sandwich", "site"])
def test_the_unit_of_a_gaussian_outcome_does_not_matter(errors: Any, intercept: Any):
    """Also far from 0, and under secure sums, which round to a step."""
    options: Any = {"family": "gaussian", "errors": errors, "intercept": intercept}
    wanted = bf.stats.glm(sites("gaussian"), **options)
    deviance = wanted.diagnostics().deviance
    assert deviance is not None
    slopes = -3
    for unit, centre, aggregation, off in (
        (1e-5, 0.0, bf.SecureSum(), 1e-5),
        (1e-6, 3.0, None, 1e-8),
        (1.0, 1e9, None, 1e-6),
        (1e5, 0.0, None, 1e-8),
    ):
        rows = {
            site: frame.assign(score=centre + unit * frame["score"], moved=unit * frame["exposure"])
            for site, frame in frames().items()
        }
        given = bf.stats.tables(rows, outcome="score", terms=TERMS)
        fit = bf.stats.glm(given, **options, aggregation=aggregation)
        close(fit.estimate[slopes:] / unit, wanted.estimate[slopes:], rtol=0, atol=off)
        errors_found, errors_wanted = (
            one.covariance.diagonal().sqrt()[slopes:] for one in (fit, wanted)
        )
        close(errors_found / unit, errors_wanted, rtol=off)
        start = fit.own_intercepts["west"] if intercept == "per_site" else float(fit.estimate[0])
        known = wanted.own_intercepts.get("west", float(wanted.estimate[0]))
        close((start - centre) / unit, known, rtol=0, atol=100 * off)
        close(fit.scale / unit**2, wanted.scale, rtol=off)
        close(
            fit.log_likelihood + sum(fit.rows.values()) * np.log(unit),
            wanted.log_likelihood,
            rtol=off,
        )
        found = fit.diagnostics().deviance
        assert found is not None
        close(found / unit**2, deviance, rtol=off)
        offset = bf.stats.tables(rows, outcome="score", terms=TERMS, offset="moved")
        moved = bf.stats.glm(offset, **options, aggregation=aggregation)
        less = {
            site: frame.assign(score=frame["score"] - frame["moved"])
            for site, frame in rows.items()
        }
        again = bf.stats.glm(bf.stats.tables(less, outcome="score", terms=TERMS), **options)
        close(moved.estimate[slopes:] / unit, again.estimate[slopes:] / unit, rtol=0, atol=10 * off)


@pytest.mark.parametrize("aggregation", [None, bf.SecureSum()])
def test_a_constant_gaussian_outcome_is_named(aggregation: Any):
    given = bf.stats.tables(
        {site: frame.assign(score=0.1) for site, frame in frames().items()},
        outcome="score",
        terms=TERMS,
    )
    options: Any = {"family": "gaussian", "aggregation": aggregation}
    with pytest.raises(ValueError, match="the outcome 'score' is constant over all sites"):
        bf.stats.glm(given, **options)
    levels = {
        site: frame.assign(score=float(n)) for n, (site, frame) in enumerate(frames().items())
    }
    given = bf.stats.tables(levels, outcome="score", terms=TERMS)
    with pytest.raises(ValueError, match="no residuals of 'score'"):
        bf.stats.glm(given, **options, intercept="per_site")


def test_as_many_coefficients_as_rows_have_no_errors():
    """Of one site among others, too."""
    few = pd.DataFrame({"x": [0.0, 1.0], "score": [1.0, 3.0]})
    rows = {"few": few, "more": frames()["west"].assign(x=frames()["west"]["age"])}
    given = bf.stats.tables(rows, outcome="score", terms=["x"])
    why = bf.stats.glm(given, family="gaussian").by_site("x").loc["few", "why"]
    assert why == "2 coefficients of 2 rows leave no residuals of 'score'"


@pytest.mark.parametrize("intercept", ["shared", "per_site"])
def test_a_rare_level_that_separates_is_no_dependence(intercept: Any):
    """Three rows of many thousand, all ill, or none with a visit."""
    rng = np.random.default_rng(0)
    n = 6000
    rows = {
        site: pd.DataFrame(
            {
                "rare": np.arange(n) < 2,
                "age": rng.normal(size=n),
                "ill": (rng.random(n) < 0.3) | (np.arange(n) < 2),
                "visits": rng.poisson(1.0, n) * (np.arange(n) >= 2),
            }
        )
        for site in "ab"
    }
    for family, outcome in (("binomial", "ill"), ("poisson", "visits")):
        given = bf.stats.tables(rows, outcome=outcome, terms=["age", "rare"])
        kind: Any = family
        with pytest.raises(ValueError, match=r"^\['rare'\] separate the outcome.*prior=2.5"):
            bf.stats.glm(given, family=kind, intercept=intercept)
    none = {site: frame.assign(visits=0) for site, frame in rows.items()}
    if intercept == "shared":
        with pytest.raises(ValueError, match="separate the outcome"):
            bf.stats.glm(bf.stats.tables(none, outcome="visits", terms=["age"]), family="poisson")


@pytest.mark.parametrize("intercept", ["shared", "per_site"])
def test_one_table_and_any_order_of_sites_are_the_same(intercept: Any):
    """To the bit by order, to 1e-10 for the split."""
    fit = bf.stats.glm(sites("binomial"), family="binomial", intercept=intercept)
    turned = bf.stats.tables(
        {site: frames()[site] for site in reversed(SIZES)}, outcome="ill", terms=TERMS
    )
    again = bf.stats.glm(turned, family="binomial", intercept=intercept)
    assert torch.equal(fit.estimate, again.estimate)
    assert torch.equal(fit.covariance, again.covariance)
    if intercept == "shared":
        whole = bf.stats.tables({"all": pooled()}, outcome="ill", terms=TERMS)
        one = bf.stats.glm(whole, family="binomial")
        close(fit.estimate, one.estimate, rtol=0, atol=1e-10)
        close(fit.covariance, one.covariance, rtol=0, atol=1e-10)


def test_secure_sums_are_the_same():
    plain = bf.stats.glm(sites("binomial"), family="binomial", intercept="per_site")
    hidden = bf.stats.glm(
        sites("binomial"),
        family="binomial",
        intercept="per_site",
        aggregation=bf.SecureSum(range=2.0**20),
    )
    close(hidden.estimate, plain.estimate, rtol=0, atol=1e-6)
    close(hidden.covariance, plain.covariance, rtol=0, atol=1e-6)
    assert "SecureSum" in str(hidden.released)


@pytest.mark.parametrize("family", list(OUTCOMES))
def test_slopes_and_information_are_derivatives(family: str):
    """Of the loss, by autograd; the information of the log link is its mean over outcomes."""
    rule = FAMILIES[family]
    rng = torch.Generator().manual_seed(0)
    eta = -1.5 + 0.3 * torch.randn(7, generator=rng, dtype=torch.float64)
    own = torch.full((len(rule.own),), -0.4, dtype=torch.float64)
    at = torch.cat([eta, own])

    def losses(where: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return rule.pieces(where[:7], y, where[7:]).loss

    def second(y: torch.Tensor) -> Any:
        return torch.autograd.functional.hessian(lambda where: losses(where, y).sum(), at)

    y = torch.tensor([0.0, 1, 0, 1, 1, 0, 0], dtype=torch.float64)
    found = rule.pieces(eta, y, own)
    first = torch.autograd.functional.jacobian(lambda where: losses(where, y).sum(), at)
    close(found.slope[:, 0], first[:7], atol=1e-12)
    close(found.slope[:, 1:].sum(0), first[7:], atol=1e-12)
    if family == "log_binomial":
        p = rule.mean(eta)
        wanted = (
            p * second(torch.ones_like(y)).diagonal()
            + (1 - p) * second(torch.zeros_like(y)).diagonal()
        )
        close(found.information[:, 0, 0], wanted, atol=1e-12)
        return
    wanted = second(y)
    close(found.information[:, 0, 0], wanted.diagonal()[:7], atol=1e-12)
    close(found.information[:, 0, 1:].T, wanted[7:, :7], atol=1e-12)
    close(found.information[:, 1:, 1:].sum(0), wanted[7:, 7:], atol=1e-12)


@pytest.mark.parametrize("intercept", ["shared", "per_site"])
def test_evidence_is_laplaces(intercept: Any):
    """Beside its definition on one table: the mode, and a Hessian by autograd, of all parameters
    together.
    """
    fit = bf.stats.glm(sites("binomial"), family="binomial", intercept=intercept, prior=1.5)
    x, y = (torch.from_numpy(t) for t in design("binomial", intercept))
    p = len(sites("binomial").columns)
    columns = slice(1, None) if intercept == "shared" else slice(0, p)
    x[:, columns] = (x[:, columns] - x[:, columns].mean(0)) / x[:, columns].std(0, correction=0)
    spread = torch.full((x.shape[1],), 10.0, dtype=torch.float64)
    spread[columns] = 1.5
    normal = torch.distributions.Normal(torch.zeros_like(spread), spread)

    def energy(w: torch.Tensor) -> torch.Tensor:
        eta = x @ w
        return (torch.nn.functional.softplus(eta) - y * eta).sum() - normal.log_prob(w).sum()

    w = torch.zeros_like(spread)
    for _ in range(50):
        slope = torch.autograd.functional.jacobian(energy, w)
        curvature = torch.autograd.functional.hessian(energy, w)
        w = w - torch.linalg.solve(curvature, slope)
    curvature: Any = torch.autograd.functional.hessian(energy, w)
    volume = torch.linalg.slogdet(curvature / (2 * np.pi)).logabsdet / 2
    assert fit.evidence is not None
    close(fit.evidence, float(-energy(w) - volume), rtol=0, atol=1e-8)
    close(fit.log_likelihood, float(-energy(w) - normal.log_prob(w).sum()), rtol=0, atol=1e-7)


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("intercept", ["shared", "per_site"])
@pytest.mark.parametrize("family", ["binomial", "poisson", "log_binomial", "negative_binomial"])
def test_offsets_of_any_size(family: Any, intercept: Any):
    """They move intercepts alone, and slopes of rows that also differ are statsmodels'."""
    wanted = bf.stats.glm(sites(family), family=family, intercept=intercept)
    for by in (-30.0, -11.5, 8.0, 300.0):
        rows = {site: frame.assign(o=by) for site, frame in frames().items()}
        given = bf.stats.tables(rows, outcome=OUTCOMES[family], terms=TERMS, offset="o")
        fit = bf.stats.glm(given, family=family, intercept=intercept)
        moved = fit.estimate.clone()
        if intercept == "shared":
            moved[0] += by
        close(moved, wanted.estimate, rtol=0, atol=1e-6)
        close(fit.table()["se"], wanted.table()["se"], rtol=1e-5)
        close(fit.log_likelihood, wanted.log_likelihood, rtol=1e-9)


@pytest.mark.parametrize(
    ("n", "mu", "alpha", "slope"),
    [(40, 50, 0.1, 0.5), (150, 5000, 0.01, 1.0), (150, 2e4, 0.02, 1.0), (500, 5e6, 1e-4, 0.1)],
)
def test_large_counts(n: int, mu: float, alpha: float, slope: float):
    """Their likelihood, and its maximum near the truth."""
    for seed in (0, 6):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=n)
        y = rng.poisson(mu * np.exp(slope * x) * rng.gamma(1 / alpha, alpha, n)).astype(float)
        rows = pd.DataFrame({"x": x, "y": y})
        given = bf.stats.tables(
            {"a": rows[: n // 3], "b": rows[n // 3 :]}, outcome="y", terms=["x"]
        )
        fit = bf.stats.glm(given, family="negative_binomial")
        first, second, log_alpha = fit.estimate.tolist()
        mean, r = np.exp(first + second * x), np.exp(-log_alpha)
        close(fit.log_likelihood, stats.nbinom(r, r / (r + mean)).logpmf(y).sum(), rtol=1e-7)
        close(fit.estimate[:2], [np.log(mu), slope], atol=5 * np.sqrt((alpha + 1 / mu) / n) + 1e-3)
        close(1 / r, alpha, rtol=5 / np.sqrt(n))


def test_counts_that_vary_as_poissons():
    """No estimate of alpha."""
    for seed in (0, 3):
        rng = np.random.default_rng(0)
        rows = pd.DataFrame({"x": rng.normal(size=90)})
        rows["y"] = np.random.default_rng(seed).poisson(5, 90)
        given = bf.stats.tables({"a": rows[:45], "b": rows[45:]}, outcome="y", terms=["x"])
        with pytest.raises(ValueError, match=r"no more than Poisson's.*family='poisson'"):
            bf.stats.glm(given, family="negative_binomial")


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("intercept", ["shared", "per_site"])
@pytest.mark.parametrize("family", ["binomial", "gaussian"])
@pytest.mark.parametrize(
    ("centres", "unit", "aggregation"),
    [
        ((1.7e9, 1.7e9), 3e3, None),
        ((2e5, 2e5), 1.0, None),
        ((0.0, 0.0), 1e-6, bf.SecureSum()),
        ((5e-5, 4e-5), 1e-6, bf.SecureSum()),
        ((0.0, 1e6), 1.0, None),
        ((0.0, 0.0), 1e-12, None),
    ],
)
def test_columns_far_from_zero(
    centres: Any, unit: float, aggregation: Any, family: Any, intercept: Any
):
    """The fit is that to the columns less their centres, in their units."""
    rng = np.random.default_rng(0)
    plain, far = {}, {}
    for site, centre in zip("ab", centres, strict=True):
        x = rng.integers(-50, 50, 80) / 16.0
        y = (rng.random(80) < 1 / (1 + np.exp(-x / 3))).astype(float)
        plain[site], far[site] = (
            pd.DataFrame({"x": x, "ill": y, "score": x + rng.normal(size=80)}) for _ in "ab"
        )
        far[site] = plain[site].assign(x=centre + unit * x)
    if centres[0] != centres[1] and intercept == "shared":
        pytest.skip("another model")
    outcome = OUTCOMES[family]
    wanted, found = (
        bf.stats.glm(
            bf.stats.tables(rows, outcome=outcome, terms=["x"]),
            family=family,
            intercept=intercept,
            aggregation=hides,
        )
        for rows, hides in ((plain, None), (far, aggregation))
    )
    off = 1e-9 if aggregation is None else 1e-5
    # What the sum of a centre and a small number keeps of this.
    off += 1e-15 * max(map(abs, centres)) / unit
    close(unit * found.table().loc["x", "coef"], wanted.table().loc["x", "coef"], rtol=off)
    close(unit * found.table().loc["x", "se"], wanted.table().loc["x", "se"], rtol=off)


def test_separation_does_not_depend_on_units():
    """Of weights, whose sum may be 1, or of columns; rows that are nearly separated are not."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=80)
    rows = pd.DataFrame({"x": x, "ill": x > 0, "nearly": (x > 0) ^ (np.arange(80) % 40 == 3)})
    relative = np.where(rows["ill"] == rows["nearly"], 1.0, 1e-4)
    outcome, design = rows["nearly"].to_numpy(float), sm.add_constant(x)
    wanted = sm.GLM(outcome, design, sm.families.Binomial(), var_weights=relative)
    slope = wanted.fit(tol=1e-14, maxiter=500).params[1]
    for unit in (1.0, 1e-6, 1e6):
        for weight in (1.0, 1e-9, 1e9):
            frame = rows.assign(x=unit * x, w=weight * relative)
            parts = {"a": frame[:40], "b": frame[40:]}
            options: Any = {"terms": ["x"], "probability_weights": "w"}
            with pytest.raises(ValueError, match=r"\['x'\] separate"):
                bf.stats.glm(bf.stats.tables(parts, outcome="ill", **options), family="binomial")
            given = bf.stats.tables(parts, outcome="nearly", **options)
            fit = bf.stats.glm(given, family="binomial")
            close(unit * float(fit.table()["coef"]["x"]), slope, rtol=1e-7)


def test_what_separates_is_named():
    rng = np.random.default_rng(0)
    rows = {
        site: pd.DataFrame({"x": rng.normal(size=40), "z": rng.normal(size=40)}) for site in "ab"
    }
    for frame in rows.values():
        frame["y"] = frame["x"] > 0
    given = bf.stats.tables(rows, outcome="y", terms=["x", "z"])
    with pytest.raises(ValueError, match=r"\['x'\] separate.*prior=2.5"):
        bf.stats.glm(given, family="binomial")
    assert bf.stats.glm(given, family="binomial", prior=2.5).estimate.isfinite().all()
    twice = {site: frame.assign(w=2 * frame["z"]) for site, frame in rows.items()}
    given = bf.stats.tables(twice, outcome="x", terms=["z", "w"])
    with pytest.raises(ValueError, match=r"\['z', 'w'\] are linearly"):
        bf.stats.glm(given, family="gaussian")
    noise = {site: frame.assign(u=rng.random(40) < 0.5) for site, frame in twice.items()}
    given = bf.stats.tables(noise, outcome="u", terms=["z", "w"])
    for aggregation in (None, bf.SecureSum()):
        with pytest.raises(ValueError, match=r"\['z', 'w'\] are linearly"):
            bf.stats.glm(given, family="binomial", aggregation=aggregation)
    level = {site: frame.assign(one=1) for site, frame in rows.items()}
    given = bf.stats.tables(level, outcome="y", terms=["one"])
    with pytest.raises(ValueError, match=r"\['one'\] are constant"):
        bf.stats.glm(given, family="binomial")


def test_a_site_of_one_level_is_left_out_by_name():
    rows = {**frames(), "silent": frames()["west"].assign(ill=False)}
    given = bf.stats.tables(rows, outcome="ill", terms=TERMS)
    fit = bf.stats.glm(given, family="binomial", intercept="per_site")
    alone = bf.stats.glm(sites("binomial"), family="binomial", intercept="per_site")
    close(fit.estimate, alone.estimate, rtol=0, atol=1e-9)
    assert fit.left_out == {"silent": "none of its 90 rows has an event"}
    assert "left out: silent" in str(fit)
    named = {site: frame.rename(columns={"age": "(intercept)"}) for site, frame in rows.items()}
    again = bf.stats.tables(named, outcome="ill", terms=["(intercept)", *TERMS[1:]])
    for intercept, site in (("shared", None), ("per_site", "west")):
        kind: Any = {"family": "binomial", "intercept": intercept}
        means = bf.stats.glm(again, **kind).predict(named["west"], site=site)
        close(means, bf.stats.glm(given, **kind).predict(rows["west"], site=site), rtol=1e-12)
    shared = bf.stats.glm(given, family="binomial")  # where it says as much as any
    assert not shared.left_out


def test_outcomes_outside_a_family_are_refused():
    refused: list[tuple[Any, str]] = [("binomial", "visits"), ("poisson", "score")]
    for family, outcome in refused:
        given = bf.stats.tables(frames(), outcome=outcome, terms=TERMS)
        with pytest.raises(ValueError, match="outcomes of this family are"):
            bf.stats.glm(given, family=family)
    with pytest.raises(ValueError, match="prior= is for families"):
        bf.stats.glm(sites("gaussian"), family="gaussian", prior=1.0)


def test_stirlings_remainder_with_its_derivatives():
    """On both sides of where the series begins; what is left of scipy's functions is small."""
    x = torch.linspace(10, 40, 61, dtype=torch.float64)
    found, at = _remainder(x), x.numpy()
    log = np.log(at)
    wanted = (
        special.gammaln(at) - (at - 0.5) * log + at - np.log(2 * np.pi) / 2,
        special.digamma(at) - log + 0.5 / at,
        special.polygamma(1, at) - 1 / at - 0.5 / at**2,
    )
    for ours, theirs, tolerance in zip(found, wanted, (1e-13, 1e-14, 1e-12), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=tolerance)
