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
by now. `--ways` are those that are gone on with, patterns as "linear/pfedvem*", and `--federations` is how
many at most of each; the results are of all that is there. Results: benchmarks/results/truth.json, and docs/images/truth.png
(--figure draws it from the results that are there).
"""

import json
import math
import time
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
ERRORS, LEAST = 3.0, 1e-3
"""A way is true if its coverage is within so many standard errors of both levels, and even counts
of ranks are not less likely than this."""
Score = dict[str, Any]
TITLES = {
    "linear": "Clients' own coefficients, linear",
    "logistic": "Clients' own coefficients, logistic",
    "shared": "One linear model",
    "network": "One network",
}
LOOKS = ((OKABE_ITO[1], "s"), (OKABE_ITO[0], "o"))
"""Colour and marker of each level."""


def score(belief: Belief, truth: np.ndarray | None, reference: Belief) -> Score:
    """Return what is counted of one federation.

    Args:
        belief: The belief about the quantities [R, q].
        truth: The quantities; None where nobody knows them.
        reference: The reference's belief.

    Returns:
        `rounds` and `bytes`; where the truth is known, `bins` [R][BINS], counts of ranks; `ratio`
        [R][q], ratios of standard deviations; `squared` and `least` [R], mean squared errors of
        belief and reference; `error`, the median absolute error. Otherwise `shift` and `ratios`,
        the largest distance of a mean in the reference's standard deviations, and the smallest and
        largest ratio of standard deviations.
    """
    found: Score = {"rounds": belief.rounds, "bytes": belief.bytes}
    ratio = belief.sd / reference.sd
    if truth is None:
        away = np.abs(belief.mean - reference.mean) / reference.sd
        ends = [float(np.nanmin(ratio)), float(np.nanmax(ratio))]
        return found | {"shift": float(np.nanmax(away)), "ratios": ends}
    below = belief.below(truth)
    bins = [np.histogram(row[~np.isnan(row)], BINS, (0, 1))[0].tolist() for row in below]
    return found | {
        "bins": bins,
        "ratio": ratio.tolist(),
        "squared": np.square(belief.mean - truth).mean(1).tolist(),
        "least": np.square(reference.mean - truth).mean(1).tolist(),
        "error": float(np.nanmedian(np.abs(belief.mean - truth)[: len(SIZES)])),
    }


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


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Return what the results hold of a way: over its federations, and by client."""
    made = [one for one in scores if "refused" not in one]
    found: dict[str, Any] = {
        "federations": len(scores),
        "refused": len(scores) - len(made),
        "seconds": float(np.mean([one["seconds"] for one in made])),
        "rounds": float(np.mean([one["rounds"] for one in made])),
        "bytes": float(np.mean([one["bytes"] for one in made])),
    }
    if "shift" in made[0]:
        return found | {name: made[0][name] for name in ("shift", "ratios")}
    clients = len(SIZES)
    bins = np.array([one["bins"] for one in made])
    counts, own = bins.sum(-1), bins[:, :clients]
    squared, least, ratio = (
        np.array([one[name] for one in made], dtype=float)[:, :clients]
        for name in ("squared", "least", "ratio")
    )
    both = ~np.isnan(squared) & ~np.isnan(least)
    found |= {
        "error": float(np.nanmean([one["error"] for one in made])),
        "rms": math.sqrt(squared[both].mean()),
        "least_rms": math.sqrt(least[both].mean()),
        "absent": int(np.isnan(squared).sum()),
        "intervals": int(counts[:, :clients].sum()),
    }
    if not found["intervals"]:
        return found  # of points
    with np.errstate(invalid="ignore"):
        shares = {
            name: covered(own, level).sum(1) / own.sum((1, 2)) for name, level in LEVELS.items()
        }
        by_row = {
            name: covered(bins.sum(0), level) / counts.sum(0) for name, level in LEVELS.items()
        }
    found["coverage"] = {name: report.mean_and_error(share) for name, share in shares.items()}
    found["by_client"] = {name: row[:clients].tolist() for name, row in by_row.items()}
    if counts.shape[1] > clients and counts[:, clients:].any():
        found["common"] = {name: float(row[-1]) for name, row in by_row.items()}
    found |= {
        "ranks": own.sum((0, 1)).tolist(),
        "even": evenness(own.sum(1)),
    }
    if not np.isnan(ratio).all():
        found["ratio"] = float(np.nanmedian(ratio))
        found["ratios"] = np.nanmedian(ratio, (0, 2)).tolist()
    return found | {"true": is_true(found)}


def is_true(found: Mapping[str, Any]) -> bool:
    """Say whether intervals hold what they promise, as far as the federations can tell."""
    near = all(
        abs(share - LEVELS[name]) <= ERRORS * error
        for name, (share, error) in found["coverage"].items()
    )
    return near and (found["even"] is None or found["even"] >= LEAST)


def one(problem: str, name: str, seed: int, *, quick: bool, reference: Score | None) -> Score:
    """Return the score of one way for one federation; the reference's has its belief, too."""
    fed = replace(PROBLEMS[problem](seed), quick=quick)
    start = time.perf_counter()
    try:
        belief = WAYS[problem][name].believe(fed)
    except ValueError as error:
        return {"refused": str(error)}
    seconds = time.perf_counter() - start
    if reference is not None:
        known = Belief(np.array(reference["mean"]), np.array(reference["sd"]))
        return score(belief, fed.truth, known) | {"seconds": seconds}
    if name == next(iter(WAYS[problem])):
        own = {"mean": belief.mean.tolist(), "sd": belief.sd.tolist(), "seconds": seconds}
        return score(belief, fed.truth, belief) | own
    unknown = np.full(belief.mean.shape, np.nan)
    return score(belief, fed.truth, Belief(unknown, unknown)) | {"seconds": seconds}


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {"scores": []}


def way(
    folder: Path, problem: str, name: str, *, wanted: int, quick: bool, jobs: int
) -> dict[str, Any]:
    """Return the scores of a way for so many federations at least, and where they were made."""
    file, environment = folder / problem / f"{name}.json", report.environment()
    kept = read(file)
    done: list[Score] = kept["scores"]
    if len(done) >= wanted:
        return kept
    if done and kept["environment"]["commit"] != environment["commit"]:
        done = []
    first = folder / problem / f"{next(iter(WAYS[problem]))}.json"
    references = [] if first == file else read(first)["scores"]
    while len(done) < wanted:
        seeds = range(len(done), min(wanted, len(done) + 5 * jobs))
        done = done + Parallel(n_jobs=jobs)(
            delayed(one)(
                problem,
                name,
                seed,
                quick=quick,
                reference=references[seed] if seed < len(references) else None,
            )
            for seed in seeds
        )
        kept = {"scores": done, "environment": environment}
        file.parent.mkdir(parents=True, exist_ok=True)
        report.write_json(file, kept)
    return kept


def results(
    folder: Path, *, quick: bool, jobs: int, ways: Sequence[str], federations: int
) -> dict[str, Any]:
    """Return what is found of each way, by problem and way."""
    cells = {}
    for problem, known in WAYS.items():
        for name, (_, count, _) in known.items():
            chosen = any(fnmatchcase(f"{problem}/{name}", pattern) for pattern in ways)
            wanted = min(count, 2 if quick else federations) if chosen else 0
            try:
                kept = way(folder, problem, name, wanted=wanted, quick=quick, jobs=jobs)
            except FileNotFoundError as error:  # of data that do not ship with the library
                print(f"{problem} is left out: {error}")
                break
            if kept["scores"]:
                cells[f"{problem}/{name}"] = {
                    **summary(kept["scores"]),
                    "environment": kept["environment"],
                }
    return {"sizes": SIZES, "cells": cells}


def draw(saved: dict[str, Any]) -> None:
    """Draw each way's coverage, problem by problem, with exact binomial intervals of 95 %.

    Quantities of one federation depend on each other: the binomial is of as many independent ones
    as have the standard error that was found between federations, or of the federations where they
    all agree.
    """
    rows = [(key, cell) for key, cell in saved["cells"].items() if "coverage" in cell]
    problems = dict.fromkeys(key.split("/")[0] for key, _ in rows)
    figure = new_figure((7.2, 0.31 * (len(rows) + 1.5 * len(problems)) + 0.7))
    ax, place, ticks = figure.subplots(), 0.0, {}
    for level in LEVELS.values():
        ax.axvline(level, color="0.6", linewidth=1)
    for problem in problems:
        place += 1.5
        ax.text(-0.01, place - 0.9, TITLES[problem], weight="bold", fontsize="large")
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
                label = f"{name} % intervals" if not ticks else None
                ax.plot(share, place, marker, color=colour, markersize=7, label=label)
            ticks[place] = key.split("/")[1]
            place += 1
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.set(
        xlim=(0, 1.02), ylim=(place, -0.2), xlabel="share of intervals that have the truth in them"
    )
    ax.set_xticks([0, 0.25, 0.5, 0.75, 0.9, 1], ["0", "0.25", "0.5", "0.75", "0.9", "1"])
    clean(ax)
    ax.tick_params(labelsize="medium")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
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
