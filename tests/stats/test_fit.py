"""What a fit says beyond its table: sites one by one."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import bayesfl as bf
from tests.stats.made import SIZES, TERMS, frames, sites

close = np.testing.assert_allclose


@pytest.mark.parametrize("intercept", ["shared", "per_site"])
def test_each_sites_own_estimate(intercept: Any):
    """Beside statsmodels' fits to the rows of each site."""
    sm = pytest.importorskip("statsmodels.api", reason="statsmodels is not installed")
    given = sites("binomial")
    fit = bf.stats.glm(given, family="binomial", intercept=intercept)
    found = fit.by_site("kind[b]", level=0.9)
    assert list(found.index) == [*sorted(SIZES), "all sites"]
    for site in given.sites:
        x = np.column_stack([np.ones(len(site.x)), site.x])
        own = sm.GLM(site.y.numpy(), x, sm.families.Binomial()).fit(tol=1e-14)
        row = found.loc[site.name]
        close(row["estimate"], own.params[2], rtol=0, atol=1e-8)
        close([row["low"], row["high"]], own.conf_int(0.1)[2], rtol=0, atol=1e-7)
    assert found["rows"].tolist() == [
        *(SIZES[site] for site in sorted(SIZES)),
        sum(fit.rows.values()),
    ]
    joint = fit.table(0.9).loc["kind[b]"]
    assert found.loc["all sites", "low"] == joint["5 %"]
    assert set(found["why"]) == {""}


def test_a_site_without_an_own_fit_is_named_with_the_reason():
    rows = {**frames(), "silent": frames()["west"].assign(ill=False)}
    rows["level"] = frames()["west"].assign(age=50.0)
    rows["apart"] = frames()["west"].assign(ill=frames()["west"]["age"] > 55)
    given = bf.stats.tables(rows, outcome="ill", terms=TERMS)
    for intercept in ("per_site", "shared"):
        fit = bf.stats.glm(given, family="binomial", intercept=intercept)
        why = fit.by_site("age")["why"]
        assert why["level"] == "the columns ['age'] are constant over all sites"
        assert why["apart"].endswith("'age'] separate the outcome")
        assert why["west"] == why["all sites"] == ""
        silent = {"per_site": "none of its 90 rows has an event", "shared": "separate the outcome"}
        assert silent[intercept] in why["silent"]
        bf.plots.forest(fit, "age").canvas.draw()
    alone = bf.stats.tables({"silent": rows["silent"]}, outcome="ill", terms=TERMS)
    with pytest.raises(ValueError, match=r"no site has information.*silent, none of its 90"):
        bf.stats.glm(alone, family="binomial", intercept="per_site")
    with pytest.raises(KeyError, match="weight"):
        fit.by_site("weight")


def test_quasi_separation_is_no_dependence():
    """A level without a person who is well: its coefficient grows, those of others do not."""
    rng = np.random.default_rng(1)
    rare = np.arange(60) < 6
    rows = pd.DataFrame({"rare": rare, "age": rng.normal(size=60), "ill": rng.random(60) < 0.5})
    rows.loc[rare, "ill"] = True
    given = bf.stats.tables({"a": rows}, outcome="ill", terms=["rare", "age"])
    for intercept in ("shared", "per_site"):
        with pytest.raises(ValueError, match=r"'rare'\] separate the outcome"):
            bf.stats.glm(given, family="binomial", intercept=intercept)


def test_errors_by_site_need_three():
    given = sites("binomial").only(["west"])
    with pytest.raises(ValueError, match="needs three sites at least"):
        bf.stats.glm(given, family="binomial", errors="site")


def test_likelihoods_of_other_outcomes_do_not_compare():
    """Or of one by its density and by its probability."""
    rows = {site: frame.assign(well=~frame["ill"]) for site, frame in frames().items()}

    def fit(outcome: str, family: Any) -> Any:
        return bf.stats.glm(bf.stats.tables(rows, outcome=outcome, terms=TERMS), family=family)

    ill = fit("ill", "binomial")
    assert "AIC" in ill.compare(fit("ill", "poisson"))
    for outcome, family in (("well", "binomial"), ("ill", "gaussian")):
        kind = "density" if family == "gaussian" else "probability"
        with pytest.raises(ValueError, match=f"of 'ill' and the {kind} of '{outcome}', and do not"):
            ill.compare(fit(outcome, family))


@pytest.mark.parametrize("fit", ["glm", pytest.param("mixed", marks=pytest.mark.slow)])
def test_each_site_left_out_in_turn(fit: str):
    found = {
        "glm": lambda given: bf.stats.glm(given, family="binomial", intercept="per_site"),
        "mixed": lambda given: bf.stats.mixed(given, family="binomial", draws=100),
    }[fit]
    whole = found(sites("binomial"))
    table = whole.leave_one_out("age", level=0.9)
    assert list(table.index) == [*(f"without {site}" for site in sorted(SIZES)), "all sites"]
    assert table["rows"].tolist() == [*(330 - SIZES[site] for site in sorted(SIZES)), 330]
    others = found(sites("binomial").only(["east", "south", "west"]))
    row = others.table(0.9).loc["age"]
    first = 2 if fit == "mixed" else 4
    wanted = [row.iloc[0], *row.iloc[first : first + 2]]
    assert table.loc["without north", ["estimate", "low", "high"]].tolist() == wanted
    axes = bf.plots.forest(whole, "age", without=True).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()][1] == "without north (210)"
    assert whole.without("north").table().equals(others.table())


@pytest.mark.slow
def test_posteriors_of_sites():
    """Of a mixed model: those of `sites`, between the site's own estimate and the joint one."""
    fit = bf.stats.mixed(sites("gaussian"), family="gaussian", random=["1", "age"])
    found = fit.by_site("age")
    assert list(found.index) == [*sorted(SIZES), "the federation"]
    wanted = fit.sites().xs("age", level=1)
    close(found["estimate"].iloc[:-1], wanted["mean"], rtol=0, atol=1e-12)
    close(found[["low", "high"]].iloc[:-1], wanted[["2.5 %", "97.5 %"]], rtol=0, atol=1e-12)
    assert found.loc["the federation", "low"] == fit.table().loc["age", "2.5 %"]
    with pytest.raises(ValueError, match=r"'kind\[b\]' has no own effects"):
        fit.by_site("kind[b]")
    bf.plots.forest(fit, "age").canvas.draw()
    rows = {site: frame.assign(ward=np.arange(len(frame)) % 2) for site, frame in frames().items()}
    given = bf.stats.tables(rows, outcome="score", terms=["age"], also=["ward"])
    wards = bf.stats.mixed(given, family="gaussian", group="ward")
    named = wards.by_site("(intercept)")
    assert list(named.index[:3]) == ["east", "east, 0", "east, 1"]
    assert named["rows"].isna().tolist() == [False, True, True] * 4 + [False]
    bf.plots.forest(wards, "(intercept)").canvas.draw()


@pytest.mark.parametrize("aggregation", [None, bf.SecureSum()])
def test_fits_to_other_rows_do_not_compare(aggregation: Any):
    """As many rows, but others, or in another order; fits to the same rows do, also by `also`."""
    rows = {
        site: frame.assign(
            u=frame["age"].where(np.arange(len(frame)) >= 15),
            v=frame["score"].where(np.arange(len(frame)) < len(frame) - 15),
            time=frame["exposure"],
        )
        for site, frame in frames().items()
    }

    def fit(given: Any, terms: list[str], also: list[str], kind: str = "glm") -> Any:
        options: Any = {"terms": terms, "also": [*also, "time"], "missing": "complete"}
        if kind == "cox":
            made = bf.stats.tables(given, **options)
            call: Any = bf.stats.cox
            return call(
                made, time="time", event="ill", baseline="per_site", aggregation=aggregation
            )
        made = bf.stats.tables(given, outcome="ill", **options)
        if kind == "piecewise":
            return bf.stats.piecewise(
                made, time="time", event="ill", cuts=[1.0], aggregation=aggregation
            )
        return bf.stats.glm(made, family="binomial", aggregation=aggregation)

    for kind in ("glm", "cox", "piecewise"):
        with pytest.raises(ValueError, match=r"rows of \['east', .*'west'\], for example"):
            fit(rows, ["u"], [], kind).compare(fit(rows, ["v"], [], kind))
        told = fit(rows, ["u"], ["v"], kind).compare(fit(rows, ["u", "v"], [], kind))
        assert "likelihood ratio" in told
    turned = rows | {"east": rows["east"].iloc[::-1]}
    with pytest.raises(ValueError, match=r"different rows of \['east'\]"):
        fit(rows, ["age"], []).compare(fit(turned, ["age"], []))
    longer = rows | {"east": rows["east"].assign(ill=~rows["east"]["ill"])}
    with pytest.raises(ValueError, match=r"different rows of \['east'\]"):
        fit(rows, ["age"], []).compare(fit(longer, ["age"], []))


def test_other_rows_of_the_same_outcomes_do_not_compare():
    rng = np.random.default_rng(0)
    at = np.arange(60)
    rows = pd.DataFrame({"x": rng.normal(size=60), "z": rng.normal(size=60), "ill": at % 2})
    lost = {"u": rows["x"].where(at >= 2), "v": rows["z"].where(at < 58)}
    given = {site: rows.assign(**lost) for site in "ab"}
    fits = [
        bf.stats.glm(
            bf.stats.tables(given, outcome="ill", terms=[term], missing="complete"),
            family="binomial",
        )
        for term in "uv"
    ]
    with pytest.raises(ValueError, match=r"different rows of \['a', 'b'\]"):
        fits[0].compare(fits[1])
