"""FedSI's Tables I and II: MNIST and Fashion-MNIST, small, in the reading of 20 mini-batches a
round, each predicted under every rule.

Ten clients of five classes, 50 training and 950 test examples each; a tenth of the training data
chooses the predictive precision, two tenths are held back for temperatures and conformal sets, for
every method alike. Federation, methods and measures are those of examples/fedsi.py. A run is
trained once and predicted under each of its rules.

Chen, Liu, Wu, Fan, Cao, "FedSI: federated subnetwork inference for efficient uncertainty
quantification", 2024.
"""

import time
from functools import partial
from typing import Any

import numpy as np
from torch import nn

import bayesfl as bf
from benchmarks import script
from benchmarks.papers import Part, Size

MILESTONES = (100, 400, 800)
PLACE = "Table I (accuracy in %) and Table II (ECE, MCE, Brier score)"
PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "mnist": {
        "Local": {"accuracy": 91.38},
        "FedAvg": {"accuracy": 88.26},
        "FedAvg-FT": {"accuracy": 93.15},
        "FedBABU": {"accuracy": 91.38},
        "pFedBayes": {"accuracy": 84.61, "ece": 0.046, "mce": 0.257, "brier": 0.100},
        "BPFed": {"accuracy": 92.96, "ece": 0.043, "mce": 0.291, "brier": 0.123},
        "FedPop": {"accuracy": 87.63, "ece": 0.049, "mce": 0.716, "brier": 0.137},
        "FedSI-Fac": {"accuracy": 91.96, "ece": 0.045, "mce": 0.249, "brier": 0.131},
        "FedSI": {"accuracy": 93.98, "ece": 0.040, "mce": 0.242, "brier": 0.101},
    },
    "fashion-mnist": {
        "Local": {"accuracy": 86.51},
        "FedAvg": {"accuracy": 81.28},
        "FedAvg-FT": {"accuracy": 88.05},
        "FedBABU": {"accuracy": 87.70},
        "pFedBayes": {"accuracy": 76.74, "ece": 0.062, "mce": 0.287, "brier": 0.190},
        "BPFed": {"accuracy": 86.54, "ece": 0.093, "mce": 0.299, "brier": 0.209},
        "FedPop": {"accuracy": 83.75, "ece": 0.103, "mce": 0.280, "brier": 0.237},
        "FedSI-Fac": {"accuracy": 86.55, "ece": 0.068, "mce": 0.283, "brier": 0.281},
        "FedSI": {"accuracy": 88.41, "ece": 0.057, "mce": 0.232, "brier": 0.182},
    },
}
example = script.names_of("examples/fedsi.py")


def local(model: nn.Module, preset: Any) -> bf.Algorithm:
    """Return each client alone, by the same steps."""
    return example.plain(bf.algorithms.local(model), preset)


def methods(preset: Any) -> dict[str, Any]:
    """Return the methods of the example and of the paper's tables."""
    # The text of the paper: alpha = 1e-4 is a variance; predictions have the server's prior.
    letter = {"prior_precision": 1e4, "prior": "global", "centre": False, **preset.body}
    # Their papers' steps and rates; FedPop's body makes as many steps as that of the others.
    batch: dict[str, Any] = {"batch_size": preset.batch_size}
    found = {
        **example.methods(preset),
        "pfedbayes": partial(bf.algorithms.pfedbayes, **batch),
        "bpfed": partial(bf.algorithms.bpfed, **batch),
        "fedpop": partial(bf.algorithms.fedpop, kept=example.STEPS),
        "fedavg": partial(example.fedavg, preset=preset),
        "local": partial(local, preset=preset),
        "fedsi_literal": partial(bf.algorithms.fedsi, **letter),
    }
    del found["fedsi_predictive"]
    return found


MORE = {
    "fedavg": "FedAvg",
    "local": "Local",
    "fedsi_literal": "FedSI, to the letter",
    "pfedbayes": "pFedBayes",
    "bpfed": "BPFed",
    "fedpop": "FedPop",
}
TITLES = example.TITLES | MORE


def readings(name: str) -> dict[str, tuple[dict[str, Any], int | None]]:
    """Return the rows that a run makes: {title: options of its predictions, number of draws}."""
    title = TITLES[name]
    if name == "fedsi_literal":
        return {title: ({}, None), f"{title}, its MAP": ({}, 0)}
    if name in ("pfedbayes", "bpfed", "fedpop"):
        return {title: ({}, example.DRAWS)}
    if name not in example.TITLES:
        return {title: ({}, 0)}
    rows = example.readings(name)
    if name.startswith("fedsi"):
        rows |= {
            f"{title}, {example.DRAWS} draws": ({"link": "draws"}, None),
            "FedSI's MAP" if name == "fedsi" else f"{title}, its MAP": ({}, 0),
        }
        if name != "fedsi_full":
            rows[f"{title}, the server's prior"] = ({"prior": "global", "centre": False}, None)
    return rows


def note(result: Any, milestones: tuple[int, ...]) -> None:
    """Add the accuracy at the mean to the history's row of a milestone, in per cent."""
    if result.round in milestones:
        found = result.predict(draws=0).summary(result.data.test)
        result.history[-1]["map_accuracy"] = 100 * found["accuracy"]


def measured(run: Any, result: Any, *, dataset: str) -> dict[str, Any]:
    """Return a run's cell of the results; it is confronted with images of clients elsewhere."""
    start, last = time.perf_counter(), result.history[-1]
    preset, other = example.PRESETS[dataset], example.OTHER.get(dataset)
    make = methods(preset)[run.method]
    elsewhere = example.federation(other, preset)(seed=run.seed) if other else None
    outside = example.strangers(result.data, run.seed, elsewhere)
    rows = {}
    for title, (rule, draws) in readings(run.method).items():
        reading = example.read(result, make, rule)
        rows[title] = example.measure(reading, outside, draws)[0]
        if draws is None and reading.tuned is not None:
            rows[title]["precision"] = reading.tuned
        if run.method.startswith("pfedvem"):
            rows[title]["before_accuracy"] = last["before_pool_accuracy"]
    marks = (row for row in result.history if "map_accuracy" in row)
    cell: dict[str, Any] = {
        "rows": rows,
        "map_accuracy": {row["round"]: row["map_accuracy"] for row in marks},
        "round_seconds": float(np.median(result.history["seconds"])),
        "seconds": {"training": run.record.seconds, "measuring": time.perf_counter() - start},
        "hash": result.data.hash,
    }
    if "uncurved_share" in result.server:
        cell["uncurved_share"] = float(result.server["uncurved_share"])
    return cell


def parts(size: Size) -> dict[str, Part]:
    """Return the two small sets; digits for a toy."""
    quick = size == "quick"
    milestones = (1, 2) if quick else MILESTONES
    return {
        dataset: Part(
            data=example.federation(dataset, preset),
            model=example.network,
            methods=methods(preset),
            rounds=milestones[-1],
            seconds=1 if quick else 900,
            seeds=(0,) if quick else (0, 1, 2),
            grid={"bpfed": {"zeta": (1.0,) if quick else (0.001, 1.0)}},  # code, Bayes' rule
            settings={"sampling": "fixed", "on_round": [partial(note, milestones=milestones)]},
            measure=partial(measured, dataset=dataset),
        )
        for dataset in (("digits",) if quick else PUBLISHED)
        for preset in [example.PRESETS[dataset]]
    }
