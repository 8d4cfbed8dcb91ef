"""What FedSI loses where its Laplace approximations are made anew only every few rounds:
Fashion-MNIST, ten clients, 100 rounds.

    python benchmarks/curvature_every.py [--quick] [--jobs N]

Ten clients of five classes, 50 training images each, by the paper's rule, and by the one that
selects weights with curvature: the latter with approximations of every round and of every twentieth
alone, and with predictions under the server's variances, too. A tenth of the images chooses the
predictive precision, two tenths are held back and measure, with other seeds than those of the
tables; no test image decides anything. What a round costs is measured by benchmarks/fedsi.py.
Results: benchmarks/results/curvature_every.json.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import script

import bayesfl as bf

EVERY = {"wasserstein": (1, 2, 5, 10, 20, 50), "curved_wasserstein": (1, 20)}
"""Rounds between approximations, by rule of selection."""
WAYS: dict[str, tuple[dict[str, Any], int | None]] = {
    "map": ({}, 0),
    "per_class": ({}, None),
    "contrasts": ({"link": "contrasts"}, None),
    "global": ({"link": "contrasts", "prior": "global"}, None),
}
"""Options of predictions, and number of draws."""
example = script.names_of("examples/fedsi.py")


def results(folder: Path, *, quick: bool, jobs: int) -> dict[str, Any]:
    """Return the measures by data set, rule and seed, for each number of rounds between fits."""
    warnings.filterwarnings("ignore", message="most of the selected weights")
    dataset = "digits" if quick else "fashion-mnist"
    preset = example.PRESETS[dataset]
    methods = {rule: partial(bf.algorithms.fedsi, selection=rule, **preset.body) for rule in EVERY}
    grid = {rule: {"curvature_every": (1, 2) if quick else every} for rule, every in EVERY.items()}
    size = {"seeds": (10,), "rounds": 2} if quick else {"seeds": (10, 11, 12), "rounds": 100}
    study = example.comparison(dataset, preset, methods, options=grid, **size)
    table = study.run(folder, n_jobs=jobs, keep="result")
    found: dict[str, Any] = {}
    for run in table.rows:
        assert run.load is not None, run.record.error
        result, row = run.load(), {}
        held_back = result.data.calibration
        for name, (rule, draws) in WAYS.items():
            if name == "global" and run.method == "wasserstein":
                continue
            reading = example.read(result, methods[run.method], rule)
            measures = reading.predict(held_back, draws=draws).summary(held_back)
            row |= {f"{name}_{key}": measures[key] for key in ("accuracy", "nll")}
        key, every = f"{dataset}/{run.method}/{run.seed}", str(run.options["curvature_every"])
        cell = found.setdefault(key, {"rows": {}, "environment": run.record.environment})
        cell["rows"][every] = row
    return {"cells": found}


if __name__ == "__main__":
    script.main(__doc__, "curvature_every", results)
