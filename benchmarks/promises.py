"""Promises: what temperatures, biases and sets do for seven methods under label skew, and whether
sets, alarms and answers keep their word.

    python benchmarks/promises.py [--quick] [--jobs N]

*methods*: twenty clients (Dirichlet 0.3), at most 300 training rows each, of which 15 % are for
validation and 20 % for calibration; digits has all its rows. Every method is trained once and
measured as it is, with a pooled temperature, with each client's own, with that and a bias, and with
sets. *sets*: coverage of thresholds on made-up scores. *alarms*: how often an alarm is false.
*answers*: how often an abstention's promise is broken. *images*: coverage of FedAvg's own sets from
calibration rows of the training images and from as many of the test images. *speed*: seconds to
calibrate 1,000 clients of 100 rows, beside one prediction pass, and looks a second of an alarm.

Results: benchmarks/results/promises.json; `python docs/tables.py` writes the page from them.
"""

import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import script
import timing
import torch
from torch import Tensor

import bayesfl as bf
from bayesfl.composition.predictors import LinearisedLaplace
from bayesfl.evaluation import report
from bayesfl.evaluation.alarm import Alarm
from bayesfl.evaluation.calibration import Abstention, Bias, Conformal, Temperature, fit
from bayesfl.evaluation.calibration.conformal import HISTOGRAM_BINS, thresholds
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD
from bayesfl.study.grid import Make

LEVEL = 0.9
DATASETS = ("digits", "mnist", "fashion-mnist")
EDGES = torch.arange(1, HISTOGRAM_BINS + 1, dtype=torch.float64) / HISTOGRAM_BINS
STEPS = {"epochs": 2, "batch_size": 20}
SPLIT = {"head_epochs": 5, "body_epochs": 2, "batch_size": 20, "init_scale": 0.1}
HEAVY = SGD(0.05, momentum=0.9)
PARTS: dict[str, Any] = {"alpha": 0.3, "max_size": 300, "validation": 0.15, "calibration": 0.2}
SHRINKS = {"own": 0.0, "shrunk": 20.0, "pooled": math.inf}
METHODS: dict[str, Make] = {
    "FedAvg": partial(bf.algorithms.fedavg, optimiser=HEAVY, **STEPS),
    "FedAvg-FT": partial(bf.algorithms.fedavg_ft, optimiser=HEAVY, finetune_epochs=5, **STEPS),
    "Ditto": partial(bf.algorithms.ditto, optimiser=SGD(0.05), **STEPS),
    "FedPer": partial(bf.algorithms.fedper, optimiser=HEAVY, **STEPS),
    "FedEM": partial(bf.algorithms.fedem, optimiser=replace(HEAVY, weight_decay=5e-4), **STEPS),
    "FedPer, Laplace head": lambda model: replace(
        bf.algorithms.fedper(model, optimiser=HEAVY, **STEPS),
        predictor=LinearisedLaplace(block="head"),
    ),
    "pFedVEM": partial(bf.algorithms.pfedvem, body_optimiser=HEAVY, **SPLIT),
}


def methods(dataset: str, folder: Path, *, quick: bool, jobs: int) -> dict[str, Any]:
    """What the steps do for every method on a data set, seed by seed."""
    table = bf.Study(
        data=partial(bf.data.dirichlet, dataset, clients=20, **PARTS),
        model=lambda clients, seed: bf.models.mlp(
            clients.inputs, hidden=100, outputs=clients.outputs, seed=seed
        ),
        methods=METHODS,
        seeds=(0,) if quick else (0, 1, 2),
        rounds=2 if quick else 50,
        evaluate_every=None,
    ).run(folder, n_jobs=jobs, keep="result")
    return {
        f"methods/{dataset}/{run.method}/{run.seed}": script.cell(
            run, row=measured(table.result(run.method, run.seed)), seconds=run.record.seconds
        )
        for run in table.rows
    }


def measured(result: Result) -> dict[str, float]:
    """Quality as trained, by temperature, and with a bias; five kinds of sets."""
    data, row = result.data, {}
    seen, held, test = result.local_predictions(data.validation, data.calibration, data.test)
    outputs = Outputs(data.task, data.outputs)

    def quality(mine: LocalPredictions, name: str) -> None:
        found = mine.measured().summary()
        row.update({f"{key}{name}": found[key] for key in ("accuracy", "nll", "ece")})

    quality(test, "")
    quality(fit(Temperature(strength=math.inf), seen, outputs).apply(test), "_t")
    for name, step in (("_own", Temperature()), ("_b", Bias())):
        fitted = fit(step, seen, outputs)
        seen, held, test = (fitted.apply(mine) for mine in (seen, held, test))
        quality(test, name)
    kinds = {
        name: fit(Conformal(level=LEVEL, shrink=shrink), held, outputs).own["threshold"][:, 0]
        for name, shrink in SHRINKS.items()
    }
    kinds["quantile_of_quantiles"] = quantile_of_quantiles(lac(held)).expand(data.clients)
    kinds["mean_of_quantiles"] = quantiles(lac(held)).mean().expand(data.clients)
    clients, doubt = test.clients, 1 - test.predictions.probs.double()
    for name, limits in kinds.items():
        both = zip(lac(test), limits, strict=True)
        share = [float((own <= limit).double().mean()) for own, limit in both if len(own)]
        size = clients.mean((doubt <= limits[clients.owner, None]).sum(-1))
        row[f"{name}_coverage"], row[f"{name}_worst"] = float(np.mean(share)), min(share)
        row[f"{name}_size"] = float(size.nanmean())
    return row


def lac(mine: LocalPredictions) -> list[Tensor]:
    """Each client's scores 1 - p of its labels."""
    scores = 1 - mine.predictions.probs.double().gather(-1, mine.labels[:, None])[:, 0]
    return list(scores.split(mine.clients.counts.tolist()))


def rank(n: int) -> int:
    """ceil((n + 1) level), at most n: a client of too few rows sends its largest score."""
    return min(n, math.ceil((n + 1) * LEVEL - 1e-9))


def quantiles(scores: list[Tensor]) -> Tensor:
    """The own quantile of every client that has scores."""
    return torch.stack([own.sort().values[rank(len(own)) - 1] for own in scores if len(own)])


def quantile_of_quantiles(scores: list[Tensor]) -> Tensor:
    """FedCP-QQ (Humbert, Le Bars, Bellet and Arlot, ICML 2023): the k-th smallest of the clients'
    quantiles, the least that suffices.

    k is found by draws of uniform scores, since clients have different numbers of rows.
    """
    sizes, rng = [len(own) for own in scores if len(own)], np.random.default_rng(0)
    drawn = np.sort([rng.beta(rank(n), n + 1 - rank(n), 20_000) for n in sizes], 0)
    k = min(int(np.searchsorted(drawn.mean(1), LEVEL)), len(sizes) - 1)
    return quantiles(scores).sort().values[k]


def on_made_up_scores(runs: int) -> dict[str, dict[str, float]]:
    """Coverage of thresholds where clients are alike, and where their scores' scales differ."""
    rng = torch.Generator().manual_seed(0)

    def kinds(own: Tensor, everyone: Tensor, edges: Tensor) -> dict[str, Tensor]:
        """Thresholds [J] of scores [J, N], with the histogram of everyone's."""
        clients = Segments(torch.full((len(own),), own.shape[1]))
        places = torch.bucketize(everyone.flatten(), edges)
        counts = torch.bincount(places, minlength=HISTOGRAM_BINS + 1).double()
        return {
            name: thresholds(own.flatten(), clients, edges, counts, level=LEVEL, shrink=shrink)
            for name, shrink in SHRINKS.items()
        }

    found: dict[str, dict[str, float]] = {}
    for n in (5, 10, 30, 100):
        covered: dict[str, list[float]] = {name: [] for name in SHRINKS}
        for _ in range(runs):
            scores = torch.rand(400 + n, generator=rng, dtype=torch.float64)
            for name, t in kinds(scores[None, :n], scores, EDGES).items():
                covered[name].append(min(float(t), 1.0))
        found[f"alike, n = {n}"] = {name: float(np.mean(each)) for name, each in covered.items()}
    clients, rows = 20, 30
    parts: dict[str, list[np.ndarray]] = {name: [] for name in SHRINKS}
    for _ in range(max(1, runs // 20)):
        scale = torch.exp(0.6 * torch.randn(clients, 1, generator=rng, dtype=torch.float64))
        scores = scale * torch.randn(clients, rows, generator=rng, dtype=torch.float64).abs()
        for name, t in kinds(scores, scores, 16 * EDGES).items():
            # P(|N(0, scale^2)| <= t)
            parts[name].append(torch.erf(t / scale[:, 0] / 2**0.5).numpy())
    unlike = found["20 clients of 30 rows, log scales of spread 0.6"] = {}
    for name, each in parts.items():
        coverage = np.stack(each)
        unlike[f"{name}, coverage"] = float(coverage.mean())
        unlike[f"{name}, worst"] = float(coverage.min(1).mean())
        unlike[f"{name}, below .85"] = float((coverage < 0.85).mean())
    return found


def false_alarms(streams: int, looks: int) -> dict[str, float]:
    """Shares of unchanged streams that alarm somebody who looks after every row."""
    of_twenty, at_every_look = "any of twenty clients at 1 / delta", "test of 5 % at every look"
    found = dict.fromkeys(("alarm", "alarm, ties", at_every_look, of_twenty), 0)
    rng = np.random.default_rng(0)
    every, group, soon = np.arange(1, looks + 1), False, []
    for stream in range(streams):
        reference, scores = rng.normal(size=100), rng.normal(size=looks)
        alarmed = Alarm(reference, client=stream).see(scores).raised
        found["alarm"] += alarmed
        group = alarmed or (group and stream % 20 != 0)
        found[of_twenty] += group and stream % 20 == 19
        ties = Alarm(reference.round(1), client=stream).see(scores.round(1))
        found["alarm, ties"] += ties.raised
        miss = rng.uniform(size=looks) < 0.1
        z = (miss.cumsum() - 0.1 * every) / np.sqrt(0.09 * every)
        found[at_every_look] += bool((z[29:] > 1.645).any())
        if stream < 200:
            shifted = Alarm(reference, client=stream).see(rng.normal(size=200) + 1.5)
            soon.append(shifted.raised_after or looks)
    median = {"looks until a shift by 1.5 deviations is seen, median": float(np.median(soon))}
    share = {name: count / streams for name, count in found.items()}
    return share | {of_twenty: 20 * share[of_twenty]} | median


def broken_answers(runs: int, rows: int = 2000) -> dict[str, float]:
    """How often more than 5 % of answers are wrong, and how many rows are answered."""
    rng, found, answered = np.random.default_rng(0), Counter(), []
    for _ in range(runs):
        doubt = rng.uniform(0, 0.5**0.5, rows) ** 2
        wrong = rng.uniform(size=rows) < doubt
        probs = torch.from_numpy(np.stack([1 - doubt, doubt], -1))
        given = script.predictions(probs[None], torch.from_numpy(wrong.astype(np.int64))[None])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="no answer is given")
            state = fit(Abstention(), given, Outputs("classification", 2)).state
        threshold = float(state["threshold"])
        # E[d | d <= t] = t / 3.
        found["broken, fixed sequence"] += threshold > 0 and min(threshold, 0.5) / 3 > 0.05
        order = np.argsort(doubt)
        right = np.flatnonzero(wrong[order].cumsum() / np.arange(1, rows + 1) <= 0.05)
        found["broken, looks right"] += bool(doubt[order][right.max()] / 3 > 0.05)
        answered.append(float((doubt <= threshold).mean()))
    share = {name: count / runs for name, count in found.items()}
    return share | {"answered, fixed sequence": float(np.mean(answered))}


def by_images(splits: int) -> dict[str, float]:
    """Coverage of FedAvg's sets from a client's own scores, on Fashion-MNIST: mean over clients,
    random splits of the test images and three seeds.
    """
    rng, found = torch.Generator().manual_seed(0), {"training": [], "test": []}
    for seed in (0, 1, 2):
        data = bf.data.dirichlet("fashion-mnist", clients=20, seed=seed, **PARTS)
        model = bf.models.mlp(data.inputs, hidden=100, outputs=data.outputs, seed=seed)
        method = METHODS["FedAvg"](model)
        result = bf.simulate(
            method, data, rounds=50, seed=seed, evaluate_every=None, progress=False
        )
        for held, test in zip(
            *map(lac, result.local_predictions(data.calibration, data.test)), strict=True
        ):
            if len(held) < 10:
                continue
            for _ in range(splits):
                mixed = test[torch.randperm(len(test), generator=rng)]
                other, rest = mixed.split([len(held), len(test) - len(held)])
                for name, scores in (("training", held), ("test", other)):
                    limit = scores.sort().values[rank(len(held)) - 1]
                    found[name].append(float((rest <= limit).double().mean()))
    return {name: statistics.fmean(values) for name, values in found.items()}


def speed() -> dict[str, float]:
    """Seconds for 1,000 clients of 100 rows and ten classes, and looks a second."""
    clients, rows = 1000, 100
    x = np.random.default_rng(0).normal(size=(clients, 2 * rows, 20)).astype(np.float32)
    y = x[..., :10].argmax(-1)
    about = {"outputs": 10, "task": "classification", "validation": 1 / 2}
    data = bf.data.from_arrays(list(x), list(y), test=(list(x[:, :1]), list(y[:, :1])), **about)
    method = bf.algorithms.fedavg(bf.models.mlp(20, hidden=100, outputs=10))
    result = bf.simulate(method, data, rounds=1, evaluate_every=None, progress=False)
    (mine,) = result.local_predictions(data.validation)
    outputs = Outputs(data.task, data.outputs)
    watch = np.random.default_rng(0).normal(size=100)
    scores = np.random.default_rng(1).normal(size=100_000)

    def calibrate() -> None:
        now = mine
        for step in (Temperature(), Bias(), Conformal(split="validation")):
            now = fit(step, now, outputs).apply(now)

    return {
        "prediction_seconds": median(lambda: result.local_predictions(data.validation)),
        "calibration_seconds": median(calibrate),
        "looks_per_second": len(scores) / median(lambda: Alarm(watch).see(scores)),
    }


def median(work: Callable[[], object]) -> float:
    return statistics.median(timing.seconds(work) for _ in range(5))


def results(folder: Path, *, quick: bool, jobs: int) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    with warnings.catch_warnings():
        # Said by its number, an end of the range.
        warnings.filterwarnings("ignore", message=".*does not bound")
        for dataset in DATASETS[:1] if quick else DATASETS:
            cells |= methods(dataset, folder, quick=quick, jobs=jobs)
    parts = {
        "sets": partial(on_made_up_scores, 20 if quick else 4000),
        "alarms": partial(false_alarms, *((20, 100) if quick else (10_000, 2000))),
        "answers": partial(broken_answers, 5 if quick else 2000),
        "images": partial(by_images, 20),
        "speed": speed,
    }
    for name, part in parts.items():
        if not (quick and name in ("images", "speed")):
            start, row = time.perf_counter(), part()
            made = {"seconds": time.perf_counter() - start, "environment": report.environment()}
            cells[name] = {"row": row, **made}
    return {"cells": cells}


if __name__ == "__main__":
    script.main(__doc__, "promises", results)
