"""Mixed models over sites: the mode beside statsmodels', the posterior beside a grid, and what
sites keep to themselves.
"""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.stats import newton
from bayesfl.stats.asking import Questions
from bayesfl.stats.mixed import Draws, Mixed, Mode, log_prior
from bayesfl.stats.tables import Tables
from tests.stats.made import SIZES, TERMS, frames, pooled, sites

close = np.testing.assert_allclose


def test_the_mode_is_the_maximum_of_the_likelihood():
    """Without a prior, beside statsmodels on all rows: a random intercept."""
    smf = pytest.importorskip("statsmodels.formula.api", reason="statsmodels is not installed")
    rows = pooled()
    wanted = smf.mixedlm("score ~ age + C(kind)", rows, groups=rows["site"]).fit(
        reml=False, method=["bfgs", "lbfgs"], gtol=1e-10
    )
    given = sites("gaussian")
    x = torch.cat([site.x for site in given.sites])
    centre, scale = x.mean(0), x.std(0, correction=0)
    survey = Mode(
        family="gaussian",
        columns=3,
        effects=(0,),
        group=None,
        centre=tuple(centre.tolist()),
        scale=tuple(scale.tolist()),
        at=(0.0, 0, 0, 0, -1, 0),
    )
    found = newton.minimum(Questions(given).conduct(survey))
    slopes = found.theta[1:4] / scale
    order = ["age", "C(kind)[T.b]", "C(kind)[T.c]"]
    close(slopes, wanted.params[order], rtol=0, atol=1e-6)
    close(float(found.theta[4].exp()) ** 2, float(wanted.cov_re.iloc[0, 0]), rtol=1e-4)
    close(float(found.theta[5].exp()) ** 2, wanted.scale, rtol=1e-5)
    close(-found.loss, wanted.llf, rtol=0, atol=1e-6)


def test_a_random_intercept_of_outcomes_0_and_1(monkeypatch: pytest.MonkeyPatch):
    """Its standard deviation is that of a quadrature with 40 nodes, within two per cent."""
    survey = Mode(
        family="binomial", columns=0, effects=(0,), group=None, centre=(), scale=(), at=(0.0, -1.0)
    )
    rng = np.random.default_rng(0)
    ill = {f"s{j}": rng.random(8) < 1 / (1 + np.exp(-rng.normal(0, 1.5))) for j in range(40)}
    given = bf.stats.tables(
        {site: pd.DataFrame({"ill": y.astype(int)}) for site, y in ill.items()}, outcome="ill"
    )
    found = newton.minimum(Questions(given).conduct(survey)).theta
    monkeypatch.setattr("bayesfl.stats.hierarchy.NODES", 40)
    wanted = newton.minimum(Questions(given).conduct(survey)).theta
    assert 0.5 < wanted[1].exp() < 3
    close(found[1].exp(), wanted[1].exp(), rtol=0.02)
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


def test_the_posterior(plain: Tables):
    """Means and standard deviations beside a grid over (beta, log tau, log sigma), and of a site's
    own intercept, which is normal at each point of it.
    """
    fit = bf.stats.mixed(plain, family="gaussian", tau_scale=1.0, draws=6000)
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


def test_weights_are_the_ratio_of_posterior_and_proposal(plain: Tables):
    """The evidence is the mean weight: beside the integral over a fine grid."""
    fit = bf.stats.mixed(plain, family="gaussian", tau_scale=1.0, draws=6000)
    y = np.stack([site.y.numpy() for site in plain.sites if site.y is not None])
    unit = float(y.std())
    axes = [torch.linspace(*ends, steps) for ends, steps in (((-1, 3), 41), ((-6, 2), 81))]
    axes = [*axes, torch.linspace(-0.8, 0.8, 41)]
    grid = torch.cartesian_prod(*axes).double()
    model: dict[str, Any] = {"columns": 0, "effects": (0,), "group": None, "centre": ()}
    survey = Draws("gaussian", **model, scale=(), at=tuple(map(tuple, grid.tolist())))
    logs = Questions(plain).conduct(survey)["log_likelihood"] + log_prior(grid[:, 1:2], unit)
    cell = np.prod([float(axis[1] - axis[0]) for axis in axes])
    close(fit.evidence, float(logs.logsumexp(0)) + np.log(cell), rtol=0, atol=0.05)


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
    close(np.quantile(fit.tau.numpy(), [0.5, 0.95]), above, rtol=0.25)


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
    return bf.stats.mixed(sites("binomial"), family="binomial", random=["1", "age"])


def test_a_fit_says_what_it_rests_on(fit: Mixed):
    assert list(fit.table().index) == [
        "(intercept)",
        "age",
        "kind[b]",
        "kind[c]",
        "tau (intercept)",
        "tau age",
    ]
    assert fit.rows == dict(sorted(SIZES.items()))
    for words in (
        "own effects of each site",
        "k-hat",
        "effective draws",
        "Draws: log_likelihood [1000]",
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
        float(bf.stats.glm(sites("binomial").only([site]), family="binomial").coefficients["age"])
        for site in sorted(SIZES)
    ]
    assert shrunk < np.std(own)


def test_arviz_and_predictions(fit: Mixed):
    posterior = fit.to_arviz().posterior
    assert posterior["own"].dims == ("chain", "draw", "site", "term")
    own = posterior["own"].sel(site="west")
    at_mean = posterior["own"] - posterior["beta"]
    assert float(abs(at_mean.sel(term="kind[b]")).max()) < 1e-12  # is no own effect
    rows = frames()["west"].head(5)
    x = torch.cat([torch.ones(5, 1).double(), sites("binomial").design(rows)], 1).numpy()
    wanted = 1 / (1 + np.exp(-own.values[0] @ x.T))
    close(fit.predict(rows, site="west"), wanted, rtol=0, atol=1e-12)
    new = fit.predict(rows)
    assert (new.std(0) > fit.predict(rows, site="west").std(0)).all()
    with pytest.raises(ValueError, match="no site of one group"):
        fit.predict(rows, site="moon")


def test_secure_sums_and_any_order_are_the_same(fit: Mixed):
    options: dict[str, Any] = {"family": "binomial", "random": ["1", "age"]}
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
    fit = bf.stats.mixed(given, family="gaussian", group="ward")
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
    single = bf.stats.mixed(given, family="gaussian", group="ward")
    close(single.table(), bf.stats.mixed(given, family="gaussian").table(), rtol=0, atol=1e-9)


def test_a_term_that_is_no_column_is_refused():
    with pytest.raises(ValueError, match=r"random= names 'weight'.*'age'"):
        bf.stats.mixed(sites("binomial"), family="binomial", random=["weight"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["gaussian", "binomial"])
def test_modes_of_the_caller_change_nothing(mode: Any, family: Any):
    """Its second derivatives are taken whether or not the caller takes gradients."""
    wanted = bf.stats.mixed(sites(family), family=family, draws=200).table()
    with mode():
        found = bf.stats.mixed(sites(family), family=family, draws=200).table()
    pd.testing.assert_frame_equal(found, wanted, check_exact=True)
