"""Posteriors of any log density over sites, beside references on the pooled rows.

    python benchmarks/densities.py [--quick] [--rows NAME ...]

Eight schools, kidiq (test scores of 434 children) and sblri (100 simulated rows) have reference
draws in posteriordb, of Stan; each school is a site, the rows of the others are dealt to five. They
are read from the folder `posteriordb` of BAYESFL_DATA. The logistic hierarchy over the four
hospitals of the heart disease data, with an intercept and five slopes of each, stands beside Pyro's
NUTS on the pooled rows, which takes ten minutes. Differences are in the reference's standard
deviations; seconds are of CPU, on one thread. Results: benchmarks/results/densities.json.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions
import script
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor
from torch.distributions import HalfCauchy, HalfNormal, Normal, constraints

import bayesfl as bf
from bayesfl.data.recipes import readers

dist: Any = pyro.distributions  # whose methods of distributions have no types
SITES = 5
"""The rows of regressions are dealt to so many."""
COLUMNS = {"age": 0, "sex": 1, "greatest rate": 5, "angina": 6, "ST depression": 7}
"""Columns of the heart disease data."""
Reference = dict[str, tuple[Tensor, Tensor]]
"""Mean and standard deviation by parameter."""


def posteriordb(name: str) -> dict[str, Any]:
    """Return data and reference of a row of posteriordb."""
    return json.loads((readers.default_root() / "posteriordb" / f"{name}.json").read_text())


def of_parts(reference: dict[str, Any], parameters: dict[str, int]) -> Reference:
    """Return means and standard deviations of parameters of some sizes, whose entries are numbered
    from one.
    """
    found = {}
    for name, size in parameters.items():
        keys = [f"{name}[{k + 1}]" for k in range(size)] if size else [name]
        each = ([reference[key][what] for key in keys] for what in ("mean", "sd"))
        mean, sd = (torch.tensor(t).double() for t in each)
        found[name] = (mean, sd) if size else (mean[0], sd[0])
    return found


def schools(sigma: Tensor, y: Any = None) -> None:
    """Eight schools, centred."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    theta = pyro.sample("theta", dist.Normal(mu, tau))
    pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def standardised(sigma: Tensor, y: Any = None) -> None:
    """Eight schools, non-centred."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mu + tau * z, sigma), obs=y)


def schools_density(shared: Any, own: Any, rows: Any) -> Tensor:
    """Eight schools, as a plain density."""
    sigma, y = rows
    effect = Normal(shared["mu"], shared["tau"]).log_prob(own["theta"])
    return effect + Normal(own["theta"], sigma).log_prob(y)


def schools_prior(shared: Any) -> Tensor:
    """Its prior."""
    return Normal(0, 5).log_prob(shared["mu"]) + HalfCauchy(5).log_prob(shared["tau"])


def of_schools(kind: str, draws: int) -> tuple[Any, Reference, dict[str, float]]:
    """Fit eight schools in one of three ways."""
    reference = json.loads((script.ROOT / "tests" / "pyro" / "references.json").read_text())
    y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12])
    sigma = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18])
    rows = {f"school {j}": (sigma[j], y[j]) for j in range(8)}
    if kind == "plain":
        shared = {"mu": constraints.real, "tau": constraints.positive}
        own = {"theta": constraints.real}
        fit = bf.stats.posterior(
            schools_density, rows, shared=shared, local=own, prior=schools_prior, draws=draws
        )
    else:
        model = {"centred": schools, "standardised": standardised}[kind]
        fit = bf.pyro.fit(model, rows, shared=["mu", "tau"], draws=draws)
    return fit, of_parts(reference["posteriordb"], {"mu": 0, "tau": 0}), {}


def of_regression(name: str, draws: int) -> tuple[Any, Reference, dict[str, float]]:
    """Fit a linear regression of posteriordb, whose rows are dealt to sites."""
    known = posteriordb(name)
    data = {key: torch.tensor(one).double() for key, one in known["data"].items()}
    if name.startswith("kidiq"):
        columns = [torch.ones_like(data["mom_iq"]), data["mom_hs"], data["mom_iq"]]
        x, y = torch.stack(columns, 1), data["kid_score"]
    else:
        x, y = data["X"], data["y"]

    def density(shared: Any, own: Any, rows: Any) -> Tensor:
        return Normal(rows[0] @ shared["beta"], shared["sigma"]).log_prob(rows[1]).sum()

    def prior(shared: Any) -> Tensor:
        if name.startswith("kidiq"):
            return HalfCauchy(2.5).log_prob(shared["sigma"])
        wide = Normal(0, 10).log_prob(shared["beta"]).sum()
        return wide + HalfNormal(10).log_prob(shared["sigma"])

    rows = {f"part {j}": (x[j::SITES], y[j::SITES]) for j in range(SITES)}
    shared = {"beta": (constraints.real, x.shape[1]), "sigma": constraints.positive}
    fit = bf.stats.posterior(density, rows, shared=shared, prior=prior, draws=draws)
    return fit, of_parts(known["reference"], {"beta": x.shape[1], "sigma": 0}), {}


def hospitals(x: Tensor, y: Any = None) -> None:
    """A logistic regression whose coefficients differ between hospitals."""
    p = x.shape[1]
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0).expand([p]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([p]).to_event(1))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([p]).to_event(1))
    with pyro.plate("patients", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ (mu + tau * z)), obs=y)


def of_heart(_: str, draws: int) -> tuple[Any, Reference, dict[str, float]]:
    """Fit the hierarchy over four hospitals, and sample its posterior from the pooled rows."""
    data = readers.load("heart")
    x = data.x[:, list(COLUMNS.values())].double()
    x = torch.cat([torch.ones(len(x), 1).double(), (x - x.mean(0)) / x.std(0)], 1)
    y, of = data.y.double(), data.owners
    rows = {name: (x[of == j], y[of == j]) for j, name in enumerate(data.owner_names)}
    fit = bf.pyro.fit(hospitals, rows, shared=["mu", "tau"], draws=draws)

    def pooled() -> None:
        p = x.shape[1]
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0).expand([p]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([p]).to_event(1))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(rows), p]).to_event(2))
        logits = (x * (mu + tau * z)[of]).sum(1)
        pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    began = time.process_time()
    kernel = NUTS(pooled, jit_compile=True, ignore_jit_warnings=True, target_accept_prob=0.9)
    chain = MCMC(kernel, num_samples=8000, warmup_steps=1000, disable_progbar=True)
    chain.run()
    seconds = time.process_time() - began
    torch.set_default_dtype(torch.float32)
    effective = min(
        float(of["n_eff"].min())
        for name, of in chain.diagnostics().items()
        if name != "divergences" and "n_eff" in of
    )
    found = {name: (t.mean(0), t.std(0)) for name, t in chain.get_samples().items() if name != "z"}
    return fit, found, {"rival_seconds": seconds, "rival_effective": effective}


ROWS: dict[str, tuple[Callable[[str, int], tuple[Any, Reference, dict[str, float]]], str, str]] = {
    "eight schools, centred": (of_schools, "centred", "posteriordb"),
    "eight schools, non-centred": (of_schools, "standardised", "posteriordb"),
    "eight schools, plain density": (of_schools, "plain", "posteriordb"),
    "kidiq, plain density": (of_regression, "kidiq-kidscore_momhsiq", "posteriordb"),
    "sblri, plain density": (of_regression, "sblri-blr", "posteriordb"),
    "heart disease, hierarchy": (of_heart, "", "NUTS in Pyro, pooled rows"),
}
"""By row: what fits it, with which word, and the reference."""


def main() -> None:
    """Fit each row and write it."""
    given = script.arguments(
        __doc__, rows={"nargs": "+", "choices": list(ROWS), "default": list(ROWS)}
    )
    made = script.made()
    for name in given.rows[:3] if given.quick else given.rows:
        fits, word, against = ROWS[name]
        began = time.process_time()
        fit, reference, more = fits(word, 200 if given.quick else 1000)
        seconds = time.process_time() - began - more.get("rival_seconds", 0.0)
        apart, ratios = [], []
        for key, (mean, sd) in reference.items():
            apart.append(((fit.draws[key].mean(0) - mean) / sd).abs().max())
            ratios.append((fit.draws[key].std(0) / sd).flatten())
        row = {
            "reference": against,
            "sites": len(fit.rows),
            "rows": sum(fit.rows.values()),
            "mean": float(torch.stack(apart).max()),
            "least_sd": float(torch.cat(ratios).min()),
            "most_sd": float(torch.cat(ratios).max()),
            "questions": len(fit.released.questions),
            "bytes": max(fit.released.bytes.values()),
            "k_hat": fit.k_hat,
            "effective": fit.effective,
            "seconds": seconds,
            **more,
        }
        print(f"{name}: {json.dumps(row)}", flush=True)
        if not given.quick:
            script.write_rows("densities", {name: {**row, **made}})


if __name__ == "__main__":
    main()
