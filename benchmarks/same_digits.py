"""The same digits: regressions over sites beside statsmodels' on one table of all rows.

    python benchmarks/same_digits.py [--quick]

Data that ship with statsmodels: `fair` (a survey on marriages) by occupation, `randhie` (the RAND
health insurance experiment) by state of health. Differences are the largest over coefficients, in
the coefficients' units, and over their standard errors; of log likelihoods in nats. statsmodels
iterates until its own changes are below 1e-14, or to its Hessian's optimum. Results:
benchmarks/results/same_digits.json.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import statsmodels.api as sm
import statsmodels.formula.api as smf
import torch

import bayesfl as bf
from bayesfl.evaluation import report
from bayesfl.stats import newton
from bayesfl.stats.asking import Questions
from bayesfl.stats.mixed import Mode

RESULTS = Path(__file__).parent / "results" / "same_digits.json"
CHOSEN: dict[str, tuple[str, str, list[str]]] = {
    "gaussian": ("fair", "rate_marriage", ["age", "yrs_married", "religious", "educ"]),
    "binomial": ("fair", "affair", ["age", "yrs_married", "religious", "rate_marriage"]),
    "log_binomial": ("fair", "often", ["age", "religious"]),
    "poisson": ("randhie", "mdvis", ["lncoins", "idp", "lpi", "physlm", "disea"]),
    "negative_binomial": ("randhie", "mdvis", ["lncoins", "idp", "lpi", "physlm", "disea"]),
}
"""By family the data set, the outcome and the columns."""
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


def tables_of(rows: pd.DataFrame, outcome: str, terms: list[str]) -> Any:
    """Return the rows by site."""
    frames = {site: part for site, part in rows.groupby("site")}
    return bf.stats.tables(frames, outcome=outcome, terms=terms)


def regression(family: Any, intercept: Any, rows: pd.DataFrame) -> dict[str, Any]:
    """Fit both ways, and return the largest differences."""
    _, outcome, terms = CHOSEN[family]
    sites = tables_of(rows, outcome, terms)
    start = time.perf_counter()
    fit = bf.stats.glm(sites, family=family, intercept=intercept)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statsmodels' of the log link
        coefficients, errors, log_likelihood = pooled(family, intercept, rows)
    q = len(coefficients)
    own = fit.covariance.diagonal().sqrt()[:q].numpy()
    return {
        "rows": len(rows),
        "sites": len(sites.names),
        "coefficient": float(np.abs(fit.estimate[:q].numpy() - coefficients).max()),
        "error": float(np.abs(own - errors).max()),
        "log_likelihood": abs(fit.log_likelihood - log_likelihood),
        "seconds": seconds,
        "statsmodels_seconds": time.perf_counter() - start,
    }


def random_intercept(rows: pd.DataFrame) -> dict[str, Any]:
    """Compare the maximum of the likelihood of a random intercept by site, without a prior."""
    _, outcome, terms = CHOSEN["gaussian"]
    sites = tables_of(rows, outcome, terms)
    x = torch.cat([site.x for site in sites.sites])
    centre, scale = x.mean(0), x.std(0, correction=0)
    survey = Mode(
        family="gaussian",
        columns=len(terms),
        effects=(0,),
        group=None,
        centre=tuple(centre.tolist()),
        scale=tuple(scale.tolist()),
        at=(float(rows[outcome].mean()), *[0.0] * len(terms), -1.0, 0.0),
    )
    start = time.perf_counter()
    found = newton.minimum(Questions(sites).conduct(survey))
    seconds = time.perf_counter() - start
    formula = f"{outcome} ~ {' + '.join(terms)}"
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = smf.mixedlm(formula, rows, groups=rows["site"])
        wanted = model.fit(reml=False, method=["bfgs", "lbfgs"], gtol=1e-10)
    ours = found.theta[1 : 1 + len(terms)] / scale
    covariance = torch.linalg.inv(found.hessian)[1 : 1 + len(terms), 1 : 1 + len(terms)]
    errors = covariance.diagonal().sqrt() / scale
    return {
        "rows": len(rows),
        "sites": len(sites.names),
        "coefficient": float(np.abs(ours.numpy() - wanted.params[terms].to_numpy()).max()),
        "error": float(np.abs(errors.numpy() - wanted.bse[terms].to_numpy()).max()),
        "log_likelihood": abs(-found.loss - float(wanted.llf)),
        "seconds": seconds,
        "statsmodels_seconds": time.perf_counter() - start,
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
    rows["gaussian, random intercept"] = random_intercept(data["fair"])
    for name, row in rows.items():
        print(
            f"{name:28} {row['rows']:6d} rows, {row['sites']} sites: coefficients "
            f"{row['coefficient']:.0e}, errors {row['error']:.0e}, log likelihood "
            f"{row['log_likelihood']:.0e}; {row['seconds']:.2f} and "
            f"{row['statsmodels_seconds']:.2f} s"
        )
    if not quick:
        record = {"command": " ".join(["python", *sys.argv]), "environment": environment}
        report.write_json(RESULTS, record | {"rows": rows})


if __name__ == "__main__":
    main()
