"""What FedSI loses where its Laplace approximations are made anew only every few rounds: Fashion-MNIST, ten clients, 100 rounds.

    python benchmarks/curvature_every.py [--quick] [--seeds ...]

Ten clients of five classes, 50 training images each, by the paper's rule. A tenth of the images chooses the predictive precision, two
tenths are held back and measure, with other seeds than those of the tables; no test image is looked at. What a round
costs is measured by benchmarks/fedsi.py. Results: benchmarks/results/curvature_every.json; finished cells are passed over.
"""

import argparse
import json
import runpy
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import bayesfl as bf
from bayesfl.evaluation import report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "curvature_every.json"
EVERY = (1, 2, 5, 10, 20, 50)
example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "fedsi.py")))


def run(dataset: str, seed: int, root: Path | None, *, quick: bool) -> dict[str, Any]:
    """One cell: measures for each number of rounds between fits."""
    preset, rounds = example.PRESETS[dataset], 2 if quick else 100
    clients = example.federation(dataset, preset, seed, root)
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes, seed=seed)
    options: dict[str, Any] = {"rounds": rounds, "seed": seed, "evaluate_every": None, "progress": False, "engine": bf.Engine(workers=1)}
    rows = {}
    for every in (1, 2) if quick else EVERY:
        result = bf.simulate(bf.algorithms.fedsi(model, curvature_every=every, **example._body(preset)), clients, **options)
        linked = replace(result, algorithm=bf.algorithms.fedsi(model, link="contrasts", **example._body(preset)))
        row = {}
        for name, how, draws in (("map", result, 0), ("per_class", result, None), ("contrasts", linked, None)):
            found = how.predict(clients.calibration, draws=draws).summary(clients.calibration)
            row |= {f"{name}_{key}": found[key] for key in ("accuracy", "nll")}
        rows[str(every)] = row
        print(f"{dataset}/{seed}: every {every}: " + ", ".join(f"{key} {value:.4f}" for key, value in row.items()), flush=True)
    return {"rows": rows, "environment": report.environment()}


def main() -> None:
    """Runs the cells that are missing, writing each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds on digits: shows that it runs; nothing is written")
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    parser.add_argument("--data-root", type=Path, default=None, help="folder of the data (default: BAYESFL_DATA, else the user's cache)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="most of the selected weights")
    if arguments.quick:
        run("digits", 10, None, quick=True)
        return
    saved: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    for seed in arguments.seeds:
        if f"fashion-mnist/{seed}" not in saved["cells"]:
            saved["cells"][f"fashion-mnist/{seed}"] = run("fashion-mnist", seed, arguments.data_root, quick=False)
            report.write_json(RESULTS, saved | {"command": "python benchmarks/curvature_every.py"})


if __name__ == "__main__":
    main()
