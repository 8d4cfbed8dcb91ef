"""FedSI's Tables I and II: MNIST and Fashion-MNIST, small, in the reading of 20 mini-batches a
round, each predicted under every rule.

    python benchmarks/papers/fedsi.py [--quick] [--datasets ...] [--methods ...] [--seeds ...]
    [--workers N] [--work FOLDER]

Ten clients of five classes, 50 training and 950 test examples each; a tenth of the training data
chooses the predictive precision, two tenths are held back for temperatures and conformal sets, for
every method alike. Federation, methods and measures are those of examples/fedsi.py. A cell is
trained once and predicted under each of its rules. Resumable: finished cells are in the results and
are passed over, a cell cut short goes on from its last milestone in the work folder, and several
commands may share results and folder if their cells differ. Results:
benchmarks/results/papers/fedsi.json; `python docs/tables.py` writes the page from them.
"""

import argparse
import itertools
import json
import runpy
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import bayesfl as bf
from bayesfl.evaluation import report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "papers" / "fedsi.json"
ROUNDS = 800
MILESTONES = (100, 400, ROUNDS)
# Table I (accuracy in %) and Table II (ECE, MCE, Brier score); a dash is what the paper does not
# give.
PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "mnist": {
        "Local": {"accuracy": 91.38},
        "FedAvg": {"accuracy": 88.26},
        "FedAvg-FT": {"accuracy": 93.15},
        "FedBABU": {"accuracy": 91.38},
        "FedSI-Fac": {"accuracy": 91.96, "ece": 0.045, "mce": 0.249, "brier": 0.131},
        "FedSI": {"accuracy": 93.98, "ece": 0.040, "mce": 0.242, "brier": 0.101},
    },
    "fashion-mnist": {
        "Local": {"accuracy": 86.51},
        "FedAvg": {"accuracy": 81.28},
        "FedAvg-FT": {"accuracy": 88.05},
        "FedBABU": {"accuracy": 87.70},
        "FedSI-Fac": {"accuracy": 86.55, "ece": 0.068, "mce": 0.283, "brier": 0.281},
        "FedSI": {"accuracy": 88.41, "ece": 0.057, "mce": 0.232, "brier": 0.182},
    },
}
example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "fedsi.py")))


def local(model: torch.nn.Module, preset: Any) -> bf.Algorithm:
    """Each client alone, by the same steps."""
    algorithm = bf.algorithms.local(model)
    (step,) = algorithm.phases
    changed = replace(
        step, steps=preset.steps, batch_size=preset.batch_size, optimiser=example.SGD(preset.lr)
    )
    return replace(algorithm, phases=(changed,))


METHODS = {name: made for name, made in example.METHODS.items() if name != "fedsi_predictive"} | {
    "fedavg": lambda model, preset: replace(example.fedavg(model, preset), finetune=()),
    "local": local,
    # The text of the paper: alpha = 1e-4 is a variance, and predictions have the server's prior.
    "fedsi_literal": lambda model, preset: bf.algorithms.fedsi(
        model, prior_precision=1e4, prior="global", centre=False, **example._body(preset)
    ),
}
TITLES = example.TITLES | {
    "fedavg": "FedAvg",
    "local": "Local",
    "fedsi_literal": "FedSI, to the letter",
}


def readings(name: str) -> dict[str, tuple[dict[str, Any], int | None]]:
    """Rows that a cell makes: {title: options of its predictions, number of draws}."""
    title = TITLES[name]
    if name == "fedsi_literal":
        return {title: ({}, None), f"{title}, its MAP": ({}, 0)}
    if name not in example.METHODS:
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


def run(dataset: str, method: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell: {"rows": {title: measures}, and how it came about}."""
    preset = example.PRESETS[dataset]
    rounds = (1, 2) if arguments.quick else MILESTONES
    clients = example.federation(dataset, preset, seed, arguments.data_root)
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes, seed=seed)
    algorithm = METHODS[method](model, preset)
    options = {
        "train": "cohort",
        "sampling": "fixed",
        "seed": seed,
        "progress": False,
        "engine": bf.Engine(workers=arguments.workers),
    }
    result, curve, before, start = None, {}, {}, time.perf_counter()
    for milestone in rounds:
        folder = arguments.work / dataset / f"{method}-{seed}-{milestone}"
        if folder.exists():
            result = bf.load(folder, algorithm, clients)
        else:
            # What is looked at before pooling is measured in training alone, at the round of the
            # milestone.
            every = milestone if method.startswith("pfedvem") else None
            result = bf.simulate(
                algorithm, clients, rounds=milestone, resume=result, evaluate_every=every, **options
            )
            result.save(folder)
        curve[milestone] = 100 * result.predict(draws=0).summary(clients.test)["accuracy"]
        before[milestone] = 100 * result.history[-1].get("before_pool_accuracy", float("nan"))
    assert result is not None
    trained = time.perf_counter() - start
    other = example.OTHER.get(dataset)
    elsewhere = (
        None if other is None else example.federation(other, preset, seed, arguments.data_root)
    )
    outside = example.strangers(clients, seed, elsewhere)
    rows = {}
    for title, (rule, draws) in readings(method).items():
        reading = example.read(result, method, model, preset, rule)
        rows[title] = example.measure(reading, outside, draws)[0]
        if draws is None and reading.tuned is not None:
            rows[title]["precision"] = reading.tuned
        if np.isfinite(before[rounds[-1]]):
            rows[title]["before_accuracy"] = before[rounds[-1]] / 100
    cell: dict[str, Any] = {
        "rows": rows,
        "map_accuracy": curve,
        "round_seconds": float(np.median(result.history["seconds"])),
        "seconds": {"training": trained, "measuring": time.perf_counter() - start - trained},
        "hash": clients.hash,
        "environment": report.environment(),
    }
    if "uncurved_share" in result.server:
        cell["uncurved_share"] = float(result.server["uncurved_share"])
    return cell


def main() -> None:
    """Runs the cells that are missing, writing each as it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two rounds on digits: shows that it runs; nothing is written",
    )
    parser.add_argument(
        "--datasets", nargs="+", choices=list(example.PRESETS), default=list(PUBLISHED)
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--workers", type=int, default=None, help="threads that run clients (default: the cores)"
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/papers/fedsi"),
        help="folder of the milestones (default: %(default)s)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The share is in the results.
    warnings.filterwarnings("ignore", message="most of the selected weights")
    if arguments.quick:
        with tempfile.TemporaryDirectory() as folder:
            for method in arguments.methods:
                show(
                    f"digits/{method}",
                    run(
                        "digits",
                        method,
                        0,
                        argparse.Namespace(**vars(arguments) | {"work": Path(folder)}),
                    ),
                )
        return
    for seed, dataset, method in itertools.product(
        arguments.seeds, arguments.datasets, arguments.methods
    ):
        key = f"{dataset}/{method}/{seed}"
        if key in finished():
            continue
        cell = run(dataset, method, seed, arguments)
        show(key, cell)
        saved = {"command": "python benchmarks/papers/fedsi.py", "published": PUBLISHED}
        cells = finished() | {key: cell}
        report.write_json(
            RESULTS, saved | {"cells": {key: cells[key] for key in sorted(cells, key=place)}}
        )


def place(key: str) -> tuple[int, int, int]:
    """A cell's place in the results, and so its rows' place in the tables: by data set, seed and
    method.
    """
    dataset, method, seed = key.split("/")
    return list(PUBLISHED).index(dataset), int(seed), list(METHODS).index(method)


def finished() -> dict[str, Any]:
    """The cells that are in the results now."""
    return json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}


def show(key: str, cell: dict[str, Any]) -> None:
    """One line for each row of a finished cell."""
    for title, row in cell["rows"].items():
        print(
            f"{key}: {title}: "
            + ", ".join(f"{name} {row[name]:.4f}" for name in ("accuracy", "nll", "ece", "brier")),
            flush=True,
        )


if __name__ == "__main__":
    main()
