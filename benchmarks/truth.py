"""Are posteriors true? Every Bayesian method, predictor and posterior of the library, on models
whose answer is known.

    python benchmarks/truth.py [--quick] [--jobs N] [--ways WAY ...] [--federations N] [--figure]

`benchmarks/beliefs.py` has the problems and the ways. What is measured: how often the truth is in
central intervals of 50 and 90 %, by client; whether the ranks of the truth among draws are uniform,
as they are where the truth is of the law that the belief takes for it (Talts, Betancourt, Simpson,
Vehtari, Gelman, "Validating Bayesian inference algorithms with simulation-based calibration", 2018,
arXiv:1804.06788); standard deviations and errors beside the reference's; rounds and bytes. Of two
data sets whose truth nobody knows, how far means and standard deviations are from the reference's.

A way that is finished is read; one that was stopped goes on, unless the code has another commit
by now. `--ways` are those that are gone on with, patterns as "linear/pfedvem*", `--federations` is
how many at most of each. Results of ways that are not there stay as they are. Results:
benchmarks/results/truth.json, and docs/images/truth.png (--figure draws it from the results that
are there).
"""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import script
from beliefs import PROBLEMS, SIZES, WAYS, Belief
from joblib import Parallel, delayed
from scipy import stats

from bayesfl.evaluation import report
from bayesfl.evaluation.binomial import clopper_pearson
from bayesfl.evaluation.plots.look import OKABE_ITO, clean, new_figure

LEVELS = {"50": 0.5, "90": 0.9}
BINS = 20
"""Bins of the ranks; both levels' intervals end at edges of bins."""
PAIRS = 10
"""Bins whose counts are compared with even ones."""
SPENT = ("rounds", "bytes", "seconds")
ERRORS, LEAST = 3.0, 1e-3
"""A way is true if its coverage is within so many standard errors of both levels, over all clients
and at each, and even counts of ranks are not less likely than this."""
Score = dict[str, Any]
TITLES = {
    "linear": "Clients' own coefficients, linear",
    "logistic": "Clients' own coefficients, logistic",
    "correlated": "Clients' own coefficients, correlated",
    "shared": "One linear model",
    "network": "One network",
    "program, normal": "A normal hierarchy in Pyro",
    "program, logistic": "A logistic hierarchy in Pyro",
}
LOOKS = ((OKABE_ITO[1], "s"), (OKABE_ITO[0], "o"))
"""Colour and marker of each level."""


def score(belief: Belief, truth: np.ndarray | None) -> Score:
    """Return what is kept of one federation.

    Args:
        belief: The belief about the quantities [R, q].
        truth: The quantities; None where nobody knows them.

    Returns:
        `rounds` and `bytes`; `sd` [R][q]; `away` [R][q], means less the truth, or means where it is
        not known; `bins` [R][BINS], counts of the truth's ranks, where it is.
    """
    found: Score = {"rounds": belief.rounds, "bytes": belief.bytes, "sd": belief.sd.tolist()}
    if truth is None:
        return found | {"away": belief.mean.tolist()}
    below = belief.below(truth)
    bins = [np.histogram(row[~np.isnan(row)], BINS, (0, 1))[0].tolist() for row in below]
    return found | {"away": (belief.mean - truth).tolist(), "bins": bins}


def evenness(counts: np.ndarray) -> float | None:
    """Return how likely mean counts [F, BINS] as uneven as these are where ranks are uniform.

    Ranks of one federation depend on each other, so that the plain chi-squared test of all counts
    would not hold. Federations do not: this is Hotelling's test of the means of their counts, which
    is the chi-squared test with the covariance that is there. None for too few federations.
    """
    pairs = counts.reshape(len(counts), PAIRS, -1).sum(-1)
    away = (pairs - pairs.sum(1, keepdims=True) / PAIRS)[:, :-1]
    n, k = away.shape
    if n < 2 * PAIRS:
        return None
    mean, covariance = away.mean(0), np.cov(away.T) + 1e-9 * np.eye(k)
    statistic = n * mean @ np.linalg.solve(covariance, mean)
    return float(stats.f.sf(statistic * (n - k) / (k * (n - 1)), k, n - k))


def covered(bins: np.ndarray, level: float) -> np.ndarray:
    """Return how many ranks [..., BINS] are in the central interval of a level, [...]."""
    edge = round(BINS * (1 - level) / 2)
    return bins[..., edge : BINS - edge].sum(-1)


def client_errors(own: np.ndarray, level: float) -> np.ndarray:
    """Return the standard error of each client's coverage [J], by ranks [federations, J, BINS]:
    that between federations, or of as many independent intervals, where it is larger.
    """
    counts = own.sum(2)
    shares = covered(own, level) / np.where(counts > 0, counts, np.nan)
    between = np.nanstd(shares, 0, ddof=1) / np.sqrt((counts > 0).sum(0))
    independent = np.sqrt(level * (1 - level) / np.maximum(counts.sum(0), 1))
    return np.fmax(between, independent)


def summary(scores: Sequence[Score], references: Sequence[Score]) -> dict[str, Any]:
    """Return what the results hold of a way, over its federations and by client.

    Args:
        scores: Of the way, by federation.
        references: Of the reference, for the first federations.
    """
    made = [k for k, one in enumerate(scores) if "refused" not in one]
    kept = [scores[k] for k in made]
    found: dict[str, Any] = {
        "federations": len(scores),
        "refused": len(scores) - len(made),
        **{name: float(np.mean([one[name] for one in kept])) for name in SPENT},
    }
    away, sd = (np.array([one[name] for one in kept], dtype=float) for name in ("away", "sd"))
    nothing = {name: np.full_like(away[0], np.nan) for name in ("away", "sd")}
    beside = [references[k] if k < len(references) else nothing for k in made]
    least, exact = (np.array([one[name] for one in beside], dtype=float) for name in ("away", "sd"))
    ratio = sd / exact
    if "bins" not in kept[0]:
        # Of the clients alone, as not all ways believe something about what they have in common.
        shift, ratio = (np.abs(away - least) / exact)[:, :-1], ratio[:, :-1]
        ends = [float(np.nanmin(ratio)), float(np.nanmax(ratio))]
        return found | {"shift": float(np.nanmax(shift)), "ratios": ends}
    clients = len(SIZES)
    away, least, ratio = (t[:, :clients] for t in (away, least, ratio))
    both = ~np.isnan(away) & ~np.isnan(least)
    bins = np.array([one["bins"] for one in kept])
    own = bins[:, :clients]
    found |= {
        "error": float(np.nanmedian(np.abs(away), (1, 2)).mean()),
        "absent": int(np.isnan(away).all(2).sum()),
        "intervals": int(own.sum()),
    }
    if both.any():
        found |= {"rms": rms(away[both]), "least_rms": rms(least[both])}
    if not found["intervals"]:
        return found  # of points
    found |= {"coverage": {}, "by_client": {}, "client_errors": {}, "common": {}}
    for name, level in LEVELS.items():
        shares = covered(own, level).sum(1) / own.sum((1, 2))
        found["coverage"][name] = report.mean_and_error(shares)
        total = covered(bins.sum(0), level) / np.maximum(bins.sum((0, 2)), 1)
        found["by_client"][name] = total[:clients].tolist()
        found["client_errors"][name] = client_errors(own, level).tolist()
        if bins[:, clients:].any():
            found["common"][name] = float(total[-1])
    if not np.isnan(ratio).all():
        found["ratio"] = float(np.nanmedian(ratio))
        found["ratios"] = np.nanmedian(ratio, (0, 2)).tolist()
    found |= {"ranks": own.sum((0, 1)).tolist(), "even": evenness(own.sum(1))}
    return found | {"true": is_true(found)}


def rms(values: np.ndarray) -> float:
    return math.sqrt(np.square(values).mean())


def is_true(found: Mapping[str, Any]) -> bool | None:
    """Say whether intervals hold what they promise, as far as the federations can tell; None if too
    few do not say the opposite.
    """
    if any(math.isnan(error) for _, error in found["coverage"].values()):
        return None  # of one federation
    near = all(
        abs(share - LEVELS[name]) <= ERRORS * error
        for name, over_all in found["coverage"].items()
        for share, error in (
            over_all,
            *zip(found["by_client"][name], found["client_errors"][name], strict=True),
        )
    )
    return (None if found["even"] is None else found["even"] >= LEAST) if near else False


def one(problem: str, name: str, seed: int, *, quick: bool) -> Score:
    """Return the score of one way for one federation, or why there is none."""
    fed = replace(PROBLEMS[problem](seed), quick=quick)
    start = time.perf_counter()
    try:
        belief = WAYS[problem][name].believe(fed)
    except ValueError as error:
        return {"refused": str(error)}
    return {**score(belief, fed.truth), "seconds": time.perf_counter() - start}


def way(
    folder: Path, problem: str, name: str, *, wanted: int, quick: bool, jobs: int
) -> dict[str, Any]:
    """Return the scores of a way for so many federations at least, and where they were made."""
    file, environment = folder / problem / f"{name}.json", report.environment()
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"scores": []}
    done: list[Score] = kept["scores"]
    if len(done) >= wanted:
        return kept
    if done and kept["environment"]["commit"] != environment["commit"]:
        done = []
    while len(done) < wanted:
        seeds = range(len(done), min(wanted, len(done) + 5 * jobs))
        done = done + Parallel(n_jobs=jobs)(
            delayed(one)(problem, name, seed, quick=quick) for seed in seeds
        )
        kept = {"scores": done, "environment": environment}
        file.parent.mkdir(parents=True, exist_ok=True)
        report.write_json(file, kept)
    return kept


def results(
    folder: Path, *, quick: bool, jobs: int, ways: Sequence[str], federations: int
) -> dict[str, Any]:
    """Return what is found of each way, by problem and way."""
    all_ways = {f"{problem}/{name}" for problem, ways in WAYS.items() for name in ways}
    before = script.saved("truth").get("cells", {})
    cells = {key: cell for key, cell in before.items() if key in all_ways}
    for problem, known in WAYS.items():
        references: list[Score] = []
        for name, (_, count, _) in known.items():
            chosen = any(fnmatchcase(f"{problem}/{name}", pattern) for pattern in ways)
            wanted = min(count, 2 if quick else federations) if chosen else 0
            try:
                kept = way(folder, problem, name, wanted=wanted, quick=quick, jobs=jobs)
            except FileNotFoundError as error:  # of data that do not ship with the library
                print(f"{problem} is left out: {error}")
                break
            if name == next(iter(known)):
                references = kept["scores"]
            if kept["scores"]:
                found = summary(kept["scores"], references)
                cells[f"{problem}/{name}"] = {**found, "environment": kept["environment"]}
    return {"sizes": SIZES, "cells": cells}


def draw(saved: dict[str, Any]) -> None:
    """Draw each way's coverage, problem by problem, with exact binomial intervals of 95 %.

    Quantities of one federation depend on each other: the binomial is of as many independent ones
    as have the standard error that was found between federations, or of the federations where they
    all agree.
    """
    rows = [
        (key, cell)
        for key, cell in saved["cells"].items()
        if "coverage" in cell and cell["federations"] > 1
    ]
    problems = Counter(key.split("/")[0] for key, _ in rows)
    middle = (len(rows) + 1.5 * len(problems)) / 2
    columns: tuple[list[str], list[str]] = [], []
    height = 0.0
    for problem in filter(problems.get, TITLES):
        columns[height + problems[problem] / 2 > middle].append(problem)
        height += problems[problem] + 1.5
    lengths = [sum(problems[one] + 1.5 for one in column) for column in columns]
    figure = new_figure((11, 0.31 * max(lengths) + 0.7))
    for ax, column in zip(figure.subplots(1, 2), columns, strict=True):
        place, ticks = 0.0, {}
        for level in LEVELS.values():
            ax.axvline(level, color="0.6", linewidth=1)
        for problem in column:
            place += 1.5
            over = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            ax.text(0.01, place - 0.9, TITLES[problem], weight="bold", fontsize="large", bbox=over)
            for key, cell in rows:
                if not key.startswith(f"{problem}/"):
                    continue
                for (name, (share, error)), (colour, marker) in zip(
                    cell["coverage"].items(), LOOKS, strict=True
                ):
                    trials = share * (1 - share) / error**2 if error else cell["federations"]
                    trials = np.array(max(1, round(min(trials, cell["intervals"]))))
                    low, high = clopper_pearson(np.round(share * trials), trials, 0.05)
                    ax.plot([low, high], [place, place], color=colour, linewidth=2)
                    label = None if ticks else f"{name} % intervals"
                    ax.plot(share, place, marker, color=colour, markersize=6, label=label)
                ticks[place] = key.split("/")[1]
                place += 1
        ax.set_yticks(list(ticks), list(ticks.values()))
        ax.set(xlim=(0, 1.02), ylim=(max(lengths), -0.2))
        ax.set_xlabel("share of intervals that contain the truth")
        ax.set_xticks([0, 0.25, 0.5, 0.75, 0.9, 1], ["0", "0.25", "0.5", "0.75", "0.9", "1"])
        clean(ax)
        ax.tick_params(labelsize="medium")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)
    script.write_figure("truth", figure)


if __name__ == "__main__":
    script.main(
        __doc__,
        "truth",
        results,
        draw=draw,
        ways={"nargs": "+", "default": ["*"], "help": "patterns of the ways that are gone on with"},
        federations={"type": int, "default": 1000, "help": "how many at most of each way"},
    )
