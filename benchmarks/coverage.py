"""How often intervals of mixed models have the truth in them: simulated federations of eight small
sites, whose coefficients differ.

    python benchmarks/coverage.py [--quick] [--federations 200] [--families gaussian binomial]

A federation has sites of 20 to 120 rows, an intercept and three correlated columns; a site's four
coefficients are beta + tau * normal noise, beta standard normal. Three ways to 90 % intervals of a
site's own coefficients: `bf.stats.mixed`, a regression of its own rows alone, and, of normal
outcomes, the exact posterior that knows tau, sigma and the law of beta, which nobody does. The
error is the median over a federation's 32 coefficients of the distance from the truth. Results:
benchmarks/results/coverage.json, where finished federations are passed over.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats

import bayesfl as bf
from bayesfl.evaluation import report

RESULTS = Path(__file__).parent / "results" / "coverage.json"
SIZES = (20, 30, 40, 50, 60, 80, 100, 120)
TAU = np.array([0.8, 0.5, 0.3, 0.6])
COLUMNS = ["a", "b", "c"]
LEVEL = 0.9


def federation(family: str, seed: int) -> tuple[dict[str, pd.DataFrame], np.ndarray, np.ndarray]:
    """Return the sites' rows, the federation's coefficients [4], and the sites' own [8, 4]."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(3, 3))
    root = np.linalg.cholesky(mixing @ mixing.T / 3 + 0.5 * np.eye(3))
    beta = rng.normal(size=4)
    own = beta + TAU * rng.normal(size=(len(SIZES), 4))
    frames = {}
    for place, n in enumerate(SIZES):
        x = rng.normal(size=(n, 3)) @ root.T
        eta = own[place, 0] + x @ own[place, 1:]
        normal = eta + rng.normal(size=n)
        y = normal if family == "gaussian" else rng.random(n) < 1 / (1 + np.exp(-eta))
        frames[f"site {place}"] = pd.DataFrame(x, columns=COLUMNS).assign(y=y)
    return frames, beta, own


def scored(low: np.ndarray, middle: np.ndarray, high: np.ndarray, truth: np.ndarray) -> Any:
    """Return how many of each site's coefficients [8, 4] are in their intervals, and the errors."""
    inside, error = (low <= truth) & (truth <= high), np.abs(middle - truth)
    return {
        "covered": inside.sum(1).tolist(),
        "squared": np.square(error).mean(1).round(5).tolist(),
        "error": round(float(np.median(error)), 5),
    }


def exact(frames: dict[str, pd.DataFrame], truth: np.ndarray) -> Any:
    """Score the exact posterior of normal outcomes under the law that made them."""
    j = len(SIZES)
    prior = np.kron(np.ones((j, j)), np.eye(4)) + np.kron(np.eye(j), np.diag(TAU**2))
    precision, slope = np.linalg.inv(prior), np.zeros(4 * j)
    for place, frame in enumerate(frames.values()):
        x = np.column_stack([np.ones(len(frame)), frame[COLUMNS]])
        part = slice(4 * place, 4 * place + 4)
        precision[part, part] += x.T @ x
        slope[part] = x.T @ frame["y"].to_numpy()
    covariance = np.linalg.inv(precision)
    middle = (covariance @ slope).reshape(j, 4)
    reach = stats.norm.ppf((1 + LEVEL) / 2) * np.sqrt(covariance.diagonal()).reshape(j, 4)
    return scored(middle - reach, middle, middle + reach, truth)


def alone(sites: Any, family: Any, truth: np.ndarray) -> Any:
    """Score the sites' own regressions; a site whose own does not exist covers nothing."""
    bounds = np.full((3, *truth.shape), np.nan)
    for place, name in enumerate(sites.names):
        try:
            fit = bf.stats.glm(sites.only([name]), family=family)
        except ValueError:  # its outcome is separated
            continue
        table = fit.table(LEVEL)
        bounds[:, place] = table.iloc[:, [4, 0, 5]].to_numpy().T
    there = ~np.isnan(bounds[1, :, 0])
    found = scored(*bounds[:, there], truth[there])
    for key in ("covered", "squared"):
        values = iter(found[key])
        found[key] = [next(values) if exists else None for exists in there]
    return found


def run(family: Any, seed: int) -> dict[str, Any]:
    """Score one federation."""
    frames, beta, own = federation(family, seed)
    sites = bf.stats.tables(frames, outcome="y", terms=COLUMNS)
    fit = bf.stats.mixed(sites, family=family, random=["1", *COLUMNS], seed=seed)
    edges = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    draws = np.stack([fit.own[name][:, 0].numpy() for name in sites.names])
    low, high = np.quantile(draws, edges, axis=1)
    row = {"mixed": scored(low, draws.mean(1), high, own), "alone": alone(sites, family, own)}
    if family == "gaussian":
        row["exact"] = exact(frames, own)
    low, high = np.quantile(fit.shared.numpy(), edges, axis=0)
    row["shared"] = int(((low <= beta) & (beta <= high)).sum())
    return row | {"k_hat": round(fit.k_hat, 3), "effective": round(fit.effective, 1)}


def main() -> None:
    """Scores the federations, and prints the shares that are covered."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--federations", type=int, default=200)
    parser.add_argument("--families", nargs="+", default=["gaussian", "binomial"])
    parser.add_argument(
        "--quick", action="store_true", help="two federations: shows that it runs; writes nothing"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": report.environment(),
        "sizes": SIZES,
        "cells": {},
    }
    if RESULTS.exists() and not options.quick:
        record["cells"] = json.loads(RESULTS.read_text())["cells"]
    count = 2 if options.quick else options.federations
    for family in options.families:
        for seed in range(count):
            key = f"{family}/{seed}"
            if key not in record["cells"]:
                try:
                    record["cells"][key] = run(family, seed)
                except ValueError as error:
                    record["cells"][key] = {"refused": str(error)}
                if not options.quick and (seed % 10 == 9 or seed == count - 1):
                    report.write_json(RESULTS, record)
        cells = [record["cells"][f"{family}/{seed}"] for seed in range(count)]
        made = [cell for cell in cells if "mixed" in cell]
        for way in ("mixed", "alone", "exact"):
            covered = [n for cell in made if way in cell for n in cell[way]["covered"]]
            there = [n for n in covered if n is not None]
            if there:
                share = sum(there) / (4 * len(there))
                print(f"{family}, {way}: {share:.3f} of {4 * len(there)} covered", flush=True)
        print(f"{family}: {len(cells) - len(made)} of {len(cells)} refused", flush=True)


if __name__ == "__main__":
    main()
