"""What FedSI loses where its Laplace approximations are made anew only every few rounds:
Fashion-MNIST, ten clients, 100 rounds.

    python benchmarks/curvature_every.py [--quick] [--seeds ...]

Ten clients of five classes, 50 training images each, by the paper's rule, and by the one that
selects weights with curvature: the latter with approximations of every round and of every twentieth
alone, and with predictions under the server's variances, too. A tenth of the images chooses the
predictive precision, two tenths are held back and measure, with other seeds than those of the
tables; no test image is looked at. What a round costs is measured by benchmarks/fedsi.py. Results:
benchmarks/results/curvature_every.json; finished cells are passed over.
"""

import argparse
import json
import runpy
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import bayesfl as bf
from bayesfl.evaluation import report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "curvature_every.json"
EVERY = {"wasserstein": (1, 2, 5, 10, 20, 50), "curved_wasserstein": (1, 20)}
example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "fedsi.py")))


def run(
    dataset: str,
    seed: int,
    root: Path | None,
    selection: str,
    environment: dict[str, Any],
    *,
    quick: bool,
) -> dict[str, Any]:
    """One cell: measures for each number of rounds between fits."""
    preset, rounds = example.PRESETS[dataset], 2 if quick else 100
    clients = example.federation(dataset, preset, seed, root)
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes, seed=seed)
    options: dict[str, Any] = {
        "rounds": rounds,
        "seed": seed,
        "evaluate_every": None,
        "progress": False,
        "engine": bf.Engine(workers=1),
    }
    fedsi = partial(bf.algorithms.fedsi, model, selection=selection, **example._body(preset))
    rows = {}
    for every in (1, 2) if quick else EVERY[selection]:
        result = bf.simulate(fedsi(curvature_every=every), clients, **options)
        ways = [
            ("map", result, 0),
            ("per_class", result, None),
            ("contrasts", replace(result, algorithm=fedsi(link="contrasts")), None),
        ]
        if selection != "wasserstein":
            ways.append(
                ("global", replace(result, algorithm=fedsi(link="contrasts", prior="global")), None)
            )
        row = {}
        for name, how, draws in ways:
            found = how.predict(clients.calibration, draws=draws).summary(clients.calibration)
            row |= {f"{name}_{key}": found[key] for key in ("accuracy", "nll")}
        rows[str(every)] = row
        print(
            f"{dataset}/{selection}/{seed}: every {every}: "
            + ", ".join(f"{key} {value:.4f}" for key, value in row.items()),
            flush=True,
        )
    return {"rows": rows, "environment": environment}


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
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Before anything is written, which would count as an uncommitted change.
    environment = report.environment()
    warnings.filterwarnings("ignore", message="most of the selected weights")
    saved: dict[str, Any] = (
        json.loads(RESULTS.read_text())
        if RESULTS.exists() and not arguments.quick
        else {"cells": {}}
    )
    for selection in EVERY:
        for seed in arguments.seeds[: 1 if arguments.quick else None]:
            dataset = "digits" if arguments.quick else "fashion-mnist"
            key = f"{dataset}/{selection}/{seed}"
            if key not in saved["cells"]:
                saved["cells"][key] = run(
                    dataset,
                    seed,
                    arguments.data_root,
                    selection,
                    environment,
                    quick=arguments.quick,
                )
                if not arguments.quick:
                    report.write_json(
                        RESULTS, saved | {"command": "python benchmarks/curvature_every.py"}
                    )


if __name__ == "__main__":
    main()
