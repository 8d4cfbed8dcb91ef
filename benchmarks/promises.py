"""Promises: what temperatures, biases and sets do for seven methods under label skew, and whether
sets, alarms and answers keep their word.

    python benchmarks/promises.py [--quick] [--parts methods sets alarms answers speed] [--datasets
    ...] [--seeds ...] [--data-root DIR]

*methods*: twenty clients (Dirichlet 0.3), at most 300 training rows each, of which 15 % are for
validation and 20 % for calibration; digits has all its rows. Every method is trained once and
measured as it is, with a pooled temperature, with each client's own, with that and a bias, and with
sets. *sets*: coverage of thresholds on made-up scores. *alarms*: how often an alarm is false.
*answers*: how often an abstention's promise is broken. *speed*: seconds to calibrate 1,000 clients
of 100 rows, beside one prediction pass, and looks a second of an alarm.

Resumable: finished cells are passed over. Results: benchmarks/results/promises.json; `python
docs/tables.py` writes the page from them.
"""

import argparse
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bayesfl as bf
from bayesfl.composition.predictors import LinearisedLaplace
from bayesfl.evaluation import report
from bayesfl.evaluation.alarm import Alarm
from bayesfl.evaluation.calibration import Abstention, Bias, Conformal, Temperature, fit
from bayesfl.evaluation.calibration.conformal import HISTOGRAM_BINS, thresholds
from bayesfl.evaluation.metrics import classification_summary
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "promises.json"
LEVEL = 0.9
DATASETS = ("digits", "mnist", "fashion-mnist")
EDGES = torch.arange(1, HISTOGRAM_BINS + 1, dtype=torch.float64) / HISTOGRAM_BINS
STEPS = {"epochs": 2, "batch_size": 20}
HEAVY = SGD(0.05, momentum=0.9)
METHODS: dict[str, Callable[[torch.nn.Module], bf.Algorithm]] = {
    "FedAvg": lambda model: bf.algorithms.fedavg(model, optimiser=HEAVY, **STEPS),
    "FedAvg-FT": lambda model: bf.algorithms.fedavg_ft(
        model, optimiser=HEAVY, finetune_epochs=5, **STEPS
    ),
    "Ditto": lambda model: bf.algorithms.ditto(model, optimiser=SGD(0.05), **STEPS),
    "FedPer": lambda model: bf.algorithms.fedper(model, optimiser=HEAVY, **STEPS),
    "FedEM": lambda model: bf.algorithms.fedem(
        model, optimiser=replace(HEAVY, weight_decay=5e-4), **STEPS
    ),
    "FedPer, Laplace head": lambda model: replace(
        bf.algorithms.fedper(model, optimiser=HEAVY, **STEPS),
        predictor=LinearisedLaplace(block="head"),
    ),
    "pFedVEM": lambda model: bf.algorithms.pfedvem(
        model, head_epochs=5, body_epochs=2, batch_size=20, body_optimiser=HEAVY, init_scale=0.1
    ),
}


def trained(dataset: str, name: str, seed: int, options: argparse.Namespace) -> Result:
    """A method after its rounds."""
    recipe = {
        "clients": 20,
        "alpha": 0.3,
        "max_size": 300,
        "validation": 0.15,
        "calibration": 0.2,
        "root": options.data_root,
    }
    clients = bf.data.dirichlet(dataset, seed=seed, **recipe)
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.outputs, seed=seed)
    rounds = 2 if options.quick else 50
    return bf.simulate(
        METHODS[name](model), clients, rounds=rounds, seed=seed, evaluate_every=None, progress=False
    )


def measured(result: Result) -> dict[str, float]:
    """NLL, ECE and accuracy as trained, by temperature, and with a bias; coverage, the worst
    client's, and sizes of five kinds of sets.
    """
    data, row = result.data, {}
    labels, mask = data.test.padded_labels()
    seen, held, test = result.local_predictions(data.validation, data.calibration, data.test)
    outputs, fitted = Outputs(data.task, data.outputs), {}

    def quality(mine: LocalPredictions, name: str) -> None:
        assert mine.predictions.probs is not None
        found = classification_summary(mine.predictions.probs, labels, mask)
        row.update({f"{key}{name}": found[key] for key in ("accuracy", "nll", "ece")})

    quality(test, "")
    for name, step in (("_t", Temperature(strength=math.inf)), ("_own", Temperature())):
        fitted[name] = fit(step, seen, outputs)
        quality(fitted[name].apply(test), name)
    seen, held, test = (fitted["_own"].apply(mine) for mine in (seen, held, test))
    bias = fit(Bias(), seen, outputs)
    seen, held, test = (bias.apply(mine) for mine in (seen, held, test))
    quality(test, "_b")
    scores, own = lac(held), lac(test)
    for name, shrink in (("shrunk", 20.0), ("pooled", math.inf), ("own", 0.0)):
        found = fit(Conformal(level=LEVEL, shrink=shrink), held, outputs)
        sets(row, name, own, found.own["threshold"][:, 0], test)
    sets(row, "quantile_of_quantiles", own, quantile_of_quantiles(scores), test)
    sets(row, "mean_of_quantiles", own, mean_of_quantiles(scores), test)
    return row


def lac(mine: LocalPredictions) -> list[Tensor]:
    """Each client's scores 1 - p of its labels."""
    found = mine.predictions
    assert found.probs is not None
    assert found.labels is not None
    scores = 1 - found.probs.double().gather(-1, found.labels.long().unsqueeze(-1)).squeeze(-1)
    return [scores[j][found.mask[j]] for j in range(len(scores))]


def sets(
    row: dict[str, float], name: str, own: list[Tensor], threshold: Tensor, test: LocalPredictions
) -> None:
    """Coverage, mean and worst over clients, and size of the sets under thresholds [J]."""
    probs = test.predictions.probs
    assert probs is not None
    share = [float((s <= t).double().mean()) for s, t in zip(own, threshold, strict=True) if len(s)]
    inside = ((1 - probs.double()) <= threshold[:, None, None]) & test.predictions.mask[..., None]
    size = inside.sum(-1).sum(-1) / test.predictions.mask.sum(-1)
    row |= {
        f"{name}_coverage": float(np.mean(share)),
        f"{name}_worst": min(share),
        f"{name}_size": float(size.nanmean()),
    }


def rank(n: int) -> int:
    """ceil((n + 1) level), at most n: a client of too few rows sends its largest score."""
    return min(n, math.ceil((n + 1) * LEVEL - 1e-9))


def quantile_of_quantiles(scores: list[Tensor]) -> Tensor:
    """FedCP-QQ (Humbert, Le Bars, Bellet and Arlot, ICML 2023): the k-th smallest of the clients'
    quantiles, the least that suffices.

    k is found by draws of uniform scores, since clients have different numbers of rows.
    """
    kept = [s for s in scores if len(s)]
    rng = np.random.default_rng(0)
    drawn = np.sort([rng.beta(rank(len(s)), len(s) + 1 - rank(len(s)), 20_000) for s in kept], 0)
    k = min(int(np.searchsorted(drawn.mean(1), LEVEL)), len(kept) - 1)
    found = torch.stack([s.sort().values[rank(len(s)) - 1] for s in kept]).sort().values
    return found[k].expand(len(scores))


def mean_of_quantiles(scores: list[Tensor]) -> Tensor:
    """The average of the clients' own quantiles."""
    return (
        torch.stack([s.sort().values[rank(len(s)) - 1] for s in scores if len(s)])
        .mean()
        .expand(len(scores))
    )


def on_made_up_scores(runs: int) -> dict[str, dict[str, float]]:
    """Coverage of own, shrunk and pooled thresholds where clients are alike, and where the scales
    of their scores differ.
    """
    found: dict[str, dict[str, float]] = {}
    rng = torch.Generator().manual_seed(0)
    for n in (5, 10, 30, 100):
        one = torch.ones(1, n, dtype=torch.bool)
        covered: dict[str, list[float]] = {"own": [], "shrunk": [], "pooled": []}
        for _ in range(runs):
            scores = torch.rand(400 + n, generator=rng, dtype=torch.float64)
            counts = torch.bincount(
                torch.bucketize(scores, EDGES), minlength=HISTOGRAM_BINS + 1
            ).double()
            for name, shrink in (("own", 0.0), ("shrunk", 20.0), ("pooled", math.inf)):
                t = thresholds(scores[None, :n], one, EDGES, counts, level=LEVEL, shrink=shrink)
                covered[name].append(min(float(t), 1.0))
        found[f"alike, n = {n}"] = {
            name: float(np.mean(values)) for name, values in covered.items()
        }
    clients, rows, edges = 20, 30, 16 * EDGES
    kinds: dict[str, list[np.ndarray]] = {"own": [], "shrunk": [], "pooled": []}
    for _ in range(max(1, runs // 20)):
        scale = torch.exp(0.6 * torch.randn(clients, 1, generator=rng, dtype=torch.float64))
        scores = scale * torch.randn(clients, rows, generator=rng, dtype=torch.float64).abs()
        counts = torch.bincount(
            torch.bucketize(scores.flatten(), edges), minlength=HISTOGRAM_BINS + 1
        ).double()
        for name, shrink in (("own", 0.0), ("shrunk", 20.0), ("pooled", math.inf)):
            t = thresholds(
                scores,
                torch.ones_like(scores, dtype=torch.bool),
                edges,
                counts,
                level=LEVEL,
                shrink=shrink,
            )
            # P(|N(0, scale^2)| <= t)
            kinds[name].append(torch.erf(t / scale[:, 0] / 2**0.5).numpy())
    unlike = found.setdefault("20 clients of 30 rows, log scales of spread 0.6", {})
    for name, parts in kinds.items():
        coverage = np.stack(parts)
        row = {
            "coverage": coverage.mean(),
            "worst": coverage.min(1).mean(),
            "below .85": (coverage < 0.85).mean(),
        }
        unlike |= {f"{name}, {key}": float(value) for key, value in row.items()}
    return found


def false_alarms(streams: int, looks: int) -> dict[str, float]:
    """Shares of streams without any change in which somebody who looks after every row is
    alarmed.
    """
    rng = np.random.default_rng(0)
    found = {
        "alarm": 0,
        "alarm, ties": 0,
        "test of 5 % at every look": 0,
        "any of twenty clients at 1 / delta": 0,
    }
    every, group, soon = np.arange(1, looks + 1), False, []
    for stream in range(streams):
        reference, scores = rng.normal(size=100), rng.normal(size=looks)
        raised = Alarm(reference, client=stream).see(scores).raised
        found["alarm"] += raised
        group = raised or (group and stream % 20 != 0)
        found["any of twenty clients at 1 / delta"] += group and stream % 20 == 19
        found["alarm, ties"] += Alarm(reference.round(1), client=stream).see(scores.round(1)).raised
        miss = rng.uniform(size=looks) < 0.1
        z = (miss.cumsum() - 0.1 * every) / np.sqrt(0.09 * every)
        found["test of 5 % at every look"] += bool((z[29:] > 1.645).any())
        if stream < 200:
            soon.append(
                Alarm(reference, client=stream).see(rng.normal(size=200) + 1.5).raised_after
                or looks
            )
    share = {name: count / streams for name, count in found.items()}
    share["any of twenty clients at 1 / delta"] *= 20
    return share | {"looks until a shift by 1.5 deviations is seen, median": float(np.median(soon))}


def broken_answers(runs: int, rows: int = 2000) -> dict[str, float]:
    """How often the true share of wrong answers is above 5 %: by `Abstention`, and by the threshold
    that looks right on these rows.
    """
    rng, found = np.random.default_rng(0), {"fixed sequence": 0, "looks right": 0}
    answered = []
    for _ in range(runs):
        doubt = rng.uniform(0, 0.5**0.5, rows) ** 2
        wrong = rng.uniform(size=rows) < doubt
        probs = torch.from_numpy(np.stack([1 - doubt, doubt], -1))[None]
        blank = torch.full((1, rows), torch.nan)
        given = Predictions(
            mask=~blank.isfinite(),
            epistemic=blank,
            probs=probs,
            labels=torch.from_numpy(wrong.astype(np.int64))[None],
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="no answer is given")
            state = fit(
                Abstention(),
                LocalPredictions(given, np.zeros(1, np.int64)),
                Outputs("classification", 2),
            ).state
        threshold = float(state["threshold"])
        # E[d | d <= t] = t / 3.
        found["fixed sequence"] += threshold > 0 and min(threshold, 0.5) / 3 > 0.05
        order = np.argsort(doubt)
        right = np.flatnonzero(wrong[order].cumsum() / np.arange(1, rows + 1) <= 0.05)
        found["looks right"] += doubt[order][right.max()] / 3 > 0.05
        answered.append(float((doubt <= threshold).mean()))
    return {f"broken, {name}": count / runs for name, count in found.items()} | {
        "answered, fixed sequence": float(np.mean(answered))
    }


def speed() -> dict[str, float]:
    """Seconds for 1,000 clients of 100 rows and ten classes, and looks a second."""
    clients, rows = 1000, 100
    x = np.random.default_rng(0).normal(size=(clients, 2 * rows, 20)).astype(np.float32)
    y = x[..., :10].argmax(-1)
    about = {"outputs": 10, "task": "classification", "validation": 1 / 2}
    data = bf.data.from_arrays(list(x), list(y), test=(list(x[:, :1]), list(y[:, :1])), **about)
    method = bf.algorithms.fedavg(bf.models.mlp(20, hidden=100, outputs=10))
    result = bf.simulate(method, data, rounds=1, evaluate_every=None, progress=False)
    times: dict[str, list[float]] = {"prediction": [], "calibration": [], "alarm": []}
    steps = Temperature(), Bias(), Conformal(split="validation")
    outputs = Outputs(data.task, data.outputs)
    for _ in range(5):
        start = time.perf_counter()
        (mine,) = result.local_predictions(data.validation)
        times["prediction"].append(time.perf_counter() - start)
        start = time.perf_counter()
        for step in steps:
            mine = fit(step, mine, outputs).apply(mine)
        times["calibration"].append(time.perf_counter() - start)
        watch = Alarm(np.random.default_rng(0).normal(size=100))
        scores = np.random.default_rng(1).normal(size=100_000)
        start = time.perf_counter()
        watch.see(scores)
        times["alarm"].append(time.perf_counter() - start)
    return {
        "prediction_seconds": float(np.median(times["prediction"])),
        "calibration_seconds": float(np.median(times["calibration"])),
        "looks_per_second": 100_000 / float(np.median(times["alarm"])),
    }


def main() -> None:
    """Runs the cells that are missing, writing each as it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small, on digits: shows that it runs; nothing is written",
    )
    parts = ("methods", "sets", "alarms", "answers", "speed")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells: dict[str, Callable[[], dict[str, Any]]] = {}
    if "methods" in options.parts:
        for seed, dataset, name in itertools.product(options.seeds, options.datasets, METHODS):
            cells[f"methods/{dataset}/{name}/{seed}"] = lambda d=dataset, n=name, s=seed: measured(
                trained(d, n, s, options)
            )
    if options.quick:
        cells = {
            key: cell
            for key, cell in cells.items()
            if key.startswith("methods/digits/") and key.endswith("/0")
        }
    small = options.quick
    others: dict[str, Callable[[], dict[str, Any]]] = {
        "sets": lambda: on_made_up_scores(20 if small else 4000),
        "alarms": lambda: false_alarms(20 if small else 10_000, 100 if small else 2000),
        "answers": lambda: broken_answers(5 if small else 2000),
        "speed": speed,
    }
    cells |= {
        name: cell
        for name, cell in others.items()
        if name in options.parts and not (small and name == "speed")
    }
    for key, cell in cells.items():
        saved = (
            json.loads(RESULTS.read_text())
            if RESULTS.exists()
            else {"command": "python benchmarks/promises.py", "cells": {}}
        )
        if key in saved["cells"] and not options.quick:
            continue
        start = time.perf_counter()
        with warnings.catch_warnings():
            # Said by its number, an end of the range.
            warnings.filterwarnings("ignore", message=".*does not bound")
            found = cell()
        print(key, json.dumps(found), f"{time.perf_counter() - start:.0f} s", flush=True)
        if not options.quick:
            saved["cells"][key] = {
                "row": found,
                "seconds": time.perf_counter() - start,
                "environment": report.environment(),
            }
            report.write_json(RESULTS, saved)


if __name__ == "__main__":
    main()
