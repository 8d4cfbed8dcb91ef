"""The same digits: fits over sites beside statsmodels' and lifelines' on one table of all rows.

    python benchmarks/same_digits.py [--quick]

Data that ship with statsmodels: `fair` (a survey on marriages) by occupation, `randhie` (the RAND
health insurance experiment) by state of health; with lifelines: `rossi` (recidivism), dealt to four
sites, and `lung` by institution. Differences are the largest over coefficients, or times, in their
units, and over their standard errors; of log likelihoods in nats. Rivals iterate until their own
changes are below 1e-12, or to their Hessian's optimum.

A million rows of 100 sites are made up, to be timed: 50 columns of a logistic regression. Both have
all cores. Results: benchmarks/results/same_digits.json.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import formulaic
import lifelines
import lifelines.statistics
import numpy as np
import pandas as pd
import statsmodels.api as sm
import statsmodels.formula.api as smf
import torch

import bayesfl as bf
from bayesfl.evaluation import report

RESULTS = Path(__file__).parent / "results" / "same_digits.json"
CHOSEN: dict[str, tuple[str, str, list[str]]] = {
    "gaussian": ("fair", "rate_marriage", ["age", "yrs_married", "religious", "educ"]),
    "binomial": ("fair", "affair", ["age", "yrs_married", "religious", "rate_marriage"]),
    "log_binomial": ("fair", "often", ["age", "religious"]),
    "poisson": ("randhie", "mdvis", ["lncoins", "idp", "lpi", "physlm", "disea"]),
    "negative_binomial": ("randhie", "mdvis", ["lncoins", "idp", "lpi", "physlm", "disea"]),
}
"""By family the data set, the outcome and the columns."""
PUBLISHED: dict[str, tuple[str, dict[str, tuple[float, float]]]] = {
    "rossi": (
        "Fox and Weisberg, Cox Proportional-Hazards Regression for Survival Data in R, 2018",
        {
            "fin": (-0.37942, 0.19138),
            "age": (-0.05744, 0.02200),
            "race": (0.31390, 0.30799),
            "wexp": (-0.14980, 0.21222),
            "mar": (-0.43370, 0.38187),
            "paro": (-0.08487, 0.19576),
            "prio": (0.09150, 0.02865),
        },
    ),
    "lung": (
        "R's package survival, coxph(Surv(time, status) ~ age + sex + ph.ecog)",
        {
            "age": (0.011067, 0.009267),
            "sex": (-0.552612, 0.167739),
            "ph.ecog": (0.463728, 0.113577),
        },
    ),
}
"""Coefficients and errors as published, of all rows together."""
KINDS = {
    "gaussian": sm.families.Gaussian(),
    "binomial": sm.families.Binomial(),
    "log_binomial": sm.families.Binomial(sm.families.links.Log()),
    "poisson": sm.families.Poisson(),
}


def rows_of(name: str) -> pd.DataFrame:
    """Return the rows of a data set with their site."""
    rows = getattr(sm.datasets, name).load_pandas().data
    if name == "fair":
        affairs = rows["affairs"]
        return rows.assign(
            site="occupation " + rows["occupation"].astype(int).astype(str),
            affair=(affairs > 0).astype(int),
            often=(affairs > 3).astype(int),
        )
    state = np.select([rows["hlthg"] == 1, rows["hlthf"] == 1, rows["hlthp"] == 1], [1, 2, 3], 0)
    names = np.array(["excellent", "good", "fair", "poor"])
    return rows.assign(site=names[state])


def pooled(family: str, intercept: str, rows: pd.DataFrame) -> tuple[Any, Any, float]:
    """Return statsmodels' coefficients and errors of the intercept, if shared, and the columns, and
    the log likelihood.
    """
    _, outcome, terms = CHOSEN[family]
    x, y = rows[terms].to_numpy(float), rows[outcome].to_numpy(float)
    if intercept == "shared":
        x = np.column_stack([np.ones(len(x)), x])
    q = x.shape[1]
    if intercept == "per_site":
        x = np.column_stack([x, pd.get_dummies(rows["site"]).to_numpy(float)])
    if family == "negative_binomial":
        fit = sm.NegativeBinomial(y, x).fit(disp=0, method="newton", maxiter=500)
    elif family == "gaussian":
        fit = sm.OLS(y, x).fit()
    else:
        fit = sm.GLM(y, x, KINDS[family]).fit(tol=1e-14, maxiter=500)
    return np.asarray(fit.params)[:q], np.asarray(fit.bse)[:q], float(fit.llf)


def by_formula(rows: pd.DataFrame) -> dict[str, Any]:
    """Compare a formula over sites with the design that formulaic makes of all rows."""
    devout = "C(religious, levels=[1, 2, 3, 4])"
    spline = "bs(educ, knots=[12, 16], lower_bound=8, upper_bound=21)"
    formula = f"np.log(yrs_married) ~ {devout} + {devout}:age + {spline} + {{children > 0}}"
    frames = {site: part for site, part in rows.groupby("site")}
    sites = bf.stats.tables(frames, formula=formula)
    fit, seconds = timed(bf.stats.glm, sites, family="gaussian")
    start = time.perf_counter()
    made = formulaic.model_matrix(formula, rows)
    wanted = sm.OLS(made.lhs.to_numpy(float), made.rhs.to_numpy(float)).fit()
    return {
        "rows": len(rows),
        "sites": len(frames),
        "coefficient": float(np.abs(fit.estimate.numpy() - wanted.params).max()),
        "error": float(np.abs(fit.covariance.diagonal().sqrt().numpy() - wanted.bse).max()),
        "log_likelihood": abs(fit.log_likelihood - float(wanted.llf)),
        "seconds": seconds,
        "rival_seconds": time.perf_counter() - start,
    }


def tables_of(rows: pd.DataFrame, outcome: str, terms: list[str]) -> Any:
    """Return the rows by site."""
    frames = {site: part for site, part in rows.groupby("site")}
    return bf.stats.tables(frames, outcome=outcome, terms=terms)


def regression(family: Any, intercept: Any, rows: pd.DataFrame) -> dict[str, Any]:
    """Fit both ways, and return the largest differences."""
    _, outcome, terms = CHOSEN[family]
    sites = tables_of(rows, outcome, terms)
    fit, seconds = timed(bf.stats.glm, sites, family=family, intercept=intercept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statsmodels' of the log link
        wanted, theirs = timed(pooled, family, intercept, rows)
    coefficients, errors, log_likelihood = wanted
    q = len(coefficients)
    own = fit.covariance.diagonal().sqrt()[:q].numpy()
    return {
        "rows": len(rows),
        "sites": len(sites.names),
        "coefficient": float(np.abs(fit.estimate[:q].numpy() - coefficients).max()),
        "error": float(np.abs(own - errors).max()),
        "log_likelihood": abs(fit.log_likelihood - log_likelihood),
        "seconds": seconds,
        "rival_seconds": theirs,
    }


def own_effects(rows: pd.DataFrame, random: list[str]) -> dict[str, Any]:
    """Compare the restricted maximum of the likelihood of a mixed model by site."""
    _, outcome, terms = CHOSEN["gaussian"]
    sites = tables_of(rows, outcome, terms)
    fit, seconds = timed(bf.stats.mixed, sites, family="gaussian", random=["1", *random])
    formula, effects = f"{outcome} ~ {' + '.join(terms)}", " + ".join(["~ 1", *random])
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = smf.mixedlm(formula, rows, groups=rows["site"], re_formula=effects)
        wanted = model.fit(reml=True, method=["bfgs", "lbfgs"], gtol=1e-10)
    ours = fit.table().loc[terms]
    return {
        "rows": len(rows),
        "sites": len(sites.names),
        "coefficient": float(np.abs(ours["REML"] - wanted.params[terms]).max()),
        "error": float(np.abs(ours["REML se"] - wanted.bse[terms]).max()),
        "log_likelihood": abs(fit.log_likelihood - float(wanted.llf)),
        "seconds": seconds,
        "rival_seconds": time.perf_counter() - start,
    }


def weighted(rows: pd.DataFrame) -> dict[str, Any]:
    """Compare a linear regression and its robust errors under probability weights, made up."""
    rows = rows.assign(w=1 / np.random.default_rng(0).uniform(0.05, 1, len(rows)))
    _, outcome, terms = CHOSEN["gaussian"]
    frames = {site: part for site, part in rows.groupby("site")}
    sites = bf.stats.tables(frames, outcome=outcome, terms=terms, probability_weights="w")
    fit, seconds = timed(bf.stats.glm, sites, family="gaussian")
    law = sm.WLS(rows[outcome], sm.add_constant(rows[terms]), weights=rows["w"])
    wanted, theirs = timed(law.fit, cov_type="HC0")
    return {
        "rows": len(rows),
        "sites": len(frames),
        "coefficient": float(np.abs(fit.estimate.numpy() - wanted.params.to_numpy()).max()),
        "error": float(np.abs(fit.table()["se"].to_numpy() - wanted.bse.to_numpy()).max()),
        "seconds": seconds,
        "rival_seconds": theirs,
    }


def timed(fit: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    """Return what a function returns, and how long it took."""
    start = time.perf_counter()
    found = fit(*args, **options)
    return found, time.perf_counter() - start


def recidivists(quick: bool) -> pd.DataFrame:
    """Return the rows of `rossi`, dealt to four sites."""
    rows = lifelines.datasets.load_rossi()
    rows = rows.assign(site=[f"site {place % 4}" for place in range(len(rows))])
    return rows.iloc[::3] if quick else rows


def survival(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Compare Cox's regression, its curves and tests, and the piecewise exponential model."""
    terms = ["fin", "age", "race", "wexp", "mar", "paro", "prio"]
    frames = {site: part for site, part in rows.groupby("site")}
    sites = bf.stats.tables(frames, terms=terms, also=["week", "arrest"])
    when: dict[str, Any] = {"time": "week", "event": "arrest"}
    size = {"rows": len(rows), "sites": len(frames)}
    found: dict[str, dict[str, Any]] = {}
    for baseline in ("shared", "per_site"):
        exact = {"exact_times": True} if baseline == "shared" else {}
        fit, seconds = timed(bf.stats.cox, sites, **when, baseline=baseline, **exact)
        strata = {"strata": "site"} if baseline == "per_site" else {}
        columns = [*terms, "week", "arrest", *strata.values()]
        wanted, theirs = timed(
            lifelines.CoxPHFitter().fit,
            rows[columns],
            "week",
            "arrest",
            fit_options={"precision": 1e-12},
            **strata,
        )
        error = fit.covariance.diagonal().sqrt().numpy()
        found[f"Cox, {baseline} baseline"] = size | {
            "coefficient": float(np.abs(fit.estimate.numpy() - wanted.params_[terms]).max()),
            "error": float(np.abs(error - wanted.standard_errors_[terms]).max()),
            "log_likelihood": abs(fit.log_likelihood - wanted.log_likelihood_),
            "seconds": seconds,
            "rival_seconds": theirs,
        }
    found |= truncated(rows, frames, when, size)
    by = bf.stats.tables(frames, terms=[bf.stats.levels("fin", [0, 1])], also=["week", "arrest"])
    curves, seconds = timed(bf.stats.kaplan_meier, by, **when, by="fin", exact_times=True)
    start = time.perf_counter()
    apart = []
    for group, part in enumerate(part for _, part in rows.groupby("fin")):
        one = lifelines.KaplanMeierFitter().fit(part["week"], part["arrest"])
        wanted = one.survival_function_at_times(curves.times.numpy()).to_numpy()
        apart.append(np.abs(curves.survival[group].numpy() - wanted).max())
    found["Kaplan-Meier, two groups"] = size | {
        "coefficient": float(max(apart)),
        "seconds": seconds,
        "rival_seconds": time.perf_counter() - start,
    }
    test, seconds = timed(bf.stats.logrank, by, **when, by="fin", exact_times=True)
    wanted, theirs = timed(
        lifelines.statistics.multivariate_logrank_test, rows["week"], rows["fin"], rows["arrest"]
    )
    found["log-rank, chi-squared"] = size | {
        "coefficient": abs(test.statistic - wanted.test_statistic),
        "seconds": seconds,
        "rival_seconds": theirs,
    }
    cuts = [12, 26, 40]
    fit, seconds = timed(bf.stats.piecewise, sites, **when, cuts=cuts)
    start = time.perf_counter()
    starts, ends = np.array([0, *cuts]), np.array([*cuts, np.inf])
    week = rows["week"].to_numpy(float)
    row, interval = (week[:, None] > starts).nonzero()
    exposure = np.minimum(week[row], ends[interval]) - starts[interval]
    event = rows["arrest"].to_numpy()[row] * (week[row] <= ends[interval])
    x = np.column_stack(
        [np.ones(len(row)), rows[terms].to_numpy(float)[row], np.eye(len(starts))[interval][:, 1:]]
    )
    wanted = sm.GLM(event, x, sm.families.Poisson(), exposure=exposure).fit(tol=1e-14, maxiter=500)
    found["piecewise exponential"] = size | {
        "coefficient": float(np.abs(fit.estimate.numpy() - wanted.params).max()),
        "error": float(np.abs(fit.covariance.diagonal().sqrt().numpy() - wanted.bse).max()),
        "log_likelihood": abs(
            fit.log_likelihood - float(wanted.llf) + float(event @ np.log(exposure))
        ),
        "seconds": seconds,
        "rival_seconds": time.perf_counter() - start,
    }
    return found


def truncated(
    rows: pd.DataFrame, frames: dict[str, pd.DataFrame], when: dict[str, Any], size: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """Compare Cox's regression with strata by a column and with entry times; and its predictions
    of untied times, as lifelines' estimate of a baseline has no Efron's ties.
    """
    found: dict[str, dict[str, Any]] = {}
    enter = {
        site: part.assign(enter=np.floor(part["week"] * (part["prio"] % 3) / 3.5), site=site)
        for site, part in frames.items()
    }
    pooled = pd.concat(enter.values())
    for name, options, theirs in (
        ("strata by a column", {"strata": "race"}, {"strata": "race"}),
        ("entry times", {"entry": "enter"}, {"entry_col": "enter"}),
    ):
        terms = [t for t in ("fin", "age", "race", "wexp", "prio") if t not in options.values()]
        sites = bf.stats.tables(enter, terms=terms, also=["week", "arrest"])
        fit, seconds = timed(bf.stats.cox, sites, **when, exact_times=True, **options)
        wanted, rival = timed(
            lifelines.CoxPHFitter().fit,
            pooled[[*terms, "week", "arrest", *theirs.values()]],
            "week",
            "arrest",
            fit_options={"precision": 1e-20, "r_precision": 1e-20},
            **theirs,
        )
        error = fit.covariance.diagonal().sqrt().numpy()
        found[f"Cox, {name}"] = size | {
            "coefficient": float(np.abs(fit.estimate.numpy() - wanted.params_[terms]).max()),
            "error": float(np.abs(error - wanted.standard_errors_[terms]).max()),
            "log_likelihood": abs(fit.log_likelihood - wanted.log_likelihood_),
            "seconds": seconds,
            "rival_seconds": rival,
        }
    untied = rows.assign(week=rows["week"] + np.arange(len(rows)) / (2 * len(rows)))
    terms = ["fin", "age", "prio"]
    parts = {site: untied.loc[part.index] for site, part in frames.items()}
    sites = bf.stats.tables(parts, terms=terms, also=["week", "arrest"])
    fit = bf.stats.cox(sites, **when, exact_times=True)
    ours, seconds = timed(fit.survival, untied)
    curves = ours["survival"].unstack()
    wanted = lifelines.CoxPHFitter().fit(
        untied[[*terms, "week", "arrest"]],
        "week",
        "arrest",
        fit_options={"precision": 1e-20, "r_precision": 1e-20},
    )
    theirs, rival = timed(wanted.predict_survival_function, untied, times=curves.columns.to_numpy())
    found["Cox, predicted survival"] = size | {
        "coefficient": float(np.abs(curves.loc[untied.index].to_numpy() - theirs.T).max().max()),
        "seconds": seconds,
        "rival_seconds": rival,
    }
    return found


def published() -> list[dict[str, Any]]:
    """Return Cox's regressions over sites beside what others printed of all rows."""
    data = {
        "rossi": (recidivists(False), "week", "arrest"),
        "lung": (lifelines.datasets.load_lung(), "time", "status"),
    }
    data["lung"][0]["site"] = data["lung"][0]["inst"].fillna(0)
    found = []
    for name, (source, wanted) in PUBLISHED.items():
        rows, when, event = data[name]
        terms = list(wanted)
        rows = rows.dropna(subset=terms)
        frames = {f"site {site}": part for site, part in rows.groupby("site")}
        sites = bf.stats.tables(frames, terms=terms, also=[when, event])
        fit = bf.stats.cox(sites, time=when, event=event, exact_times=True)
        ours = fit.table()
        for term, (coefficient, error) in wanted.items():
            found.append(
                {
                    "data": name,
                    "source": source,
                    "term": term,
                    "published": [coefficient, error],
                    "ours": [float(ours.loc[term, "coef"]), float(ours.loc[term, "se"])],
                }
            )
    return found


def many(sites: int, each: int, columns: int = 50) -> dict[str, Any]:
    """Time a logistic regression of made-up rows, and statsmodels' of the pooled ones."""
    rng = np.random.default_rng(0)
    n = sites * each
    x = rng.standard_normal((n, columns))
    own = np.repeat(rng.standard_normal(sites) / 2, each)
    eta = x @ (rng.standard_normal(columns) / 5) + own
    y = (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(float)
    terms = [f"x{place}" for place in range(columns)]
    rows = pd.DataFrame(x, columns=terms).assign(y=y)
    frames = {f"site {j}": rows.iloc[j * each : (j + 1) * each] for j in range(sites)}
    tables = bf.stats.tables(frames, outcome="y", terms=terms)
    torch.set_num_threads(os.cpu_count() or 1)
    shared, seconds = timed(bf.stats.glm, tables, family="binomial")
    _, own_seconds = timed(bf.stats.glm, tables, family="binomial", intercept="per_site")
    design = sm.add_constant(x)
    pooled, rival = timed(sm.Logit(y, design).fit, disp=0)
    return {
        "rows": n,
        "sites": sites,
        "columns": columns,
        "coefficient": float(np.abs(shared.estimate.numpy() - pooled.params).max()),
        "shared": seconds,
        "per_site": own_seconds,
        "rival": rival,
    }


def main() -> None:
    """Compares all, prints, and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a part of the rows: shows that it runs; writes nothing",
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    environment, rows = report.environment(), {}
    data = {name: rows_of(name) for name in ("fair", "randhie")}
    if quick:
        data = {name: one.sample(1500, random_state=0) for name, one in data.items()}
    for family, (name, *_) in CHOSEN.items():
        for intercept in ("shared", "per_site"):
            rows[f"{family}, {intercept}"] = regression(family, intercept, data[name])
    rows["gaussian, probability weights"] = weighted(data["fair"])
    rows["gaussian, formula"] = by_formula(data["fair"])
    rows["gaussian, random intercept"] = own_effects(data["fair"], [])
    if not quick:
        # Of ages far from 0, MixedLM does not converge.
        decades = data["fair"].assign(age=(data["fair"]["age"] - 30) / 10)
        rows["gaussian, random intercept and slope"] = own_effects(decades, ["age"])
    rows |= survival(recidivists(quick))
    for name, row in rows.items():
        apart = ", ".join(
            f"{key} {row[key]:.0e}"
            for key in ("coefficient", "error", "log_likelihood")
            if key in row
        )
        print(
            f"{name:28} {row['rows']:6d} rows, {row['sites']} sites: {apart}; "
            f"{row['seconds']:.2f} and {row['rival_seconds']:.2f} s"
        )
    found = {"rows": rows, "published": published()}
    found["many"] = many(4, 250, columns=10) if quick else many(100, 10_000)
    print(found["many"])
    if not quick:
        record = {"command": " ".join(["python", *sys.argv]), "environment": environment}
        report.write_json(RESULTS, record | found)


if __name__ == "__main__":
    main()
