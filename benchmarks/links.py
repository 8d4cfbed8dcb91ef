"""What links and precisions of a Laplace approximation cost and give: FedSI over the whole body,
trained once, predicted in four ways.

    python benchmarks/links.py [--quick] [--datasets ...] [--seeds ...] [--figure]

Ten clients of five classes, 50 training images each, of which a tenth chooses the precision, by the
paired rule under the link that predicts, and two tenths fit one temperature for all clients; 950
test images of each class; 100 rounds. AUROC: a client's own test images against those of classes
that it never saw. Accuracy and NLL under fixed precisions are of the first 200 test images of each
client. Results: benchmarks/results/links.json, where finished cells are passed over, and
docs/images/links.png (--figure draws it from the results that are there).
"""

import argparse
import json
import math
import runpy
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import bayesfl as bf
from bayesfl.base.files import atomic_path
from bayesfl.composition.predictors import PRECISIONS
from bayesfl.evaluation import calibration, detection, report
from bayesfl.evaluation.plots.look import new_figure
from bayesfl.evaluation.surveys import Outputs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "links.json"
FIGURE = ROOT / "docs" / "images" / "links.png"
LINKS = {"MAP": None, "class by class": "per_class", "contrasts": "contrasts", "100 draws": "draws"}
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "fedsi.py")))


def measured(result: Any, outside: dict[str, Any], draws: int | None) -> dict[str, float]:
    """Return the measures of a result's predictions, with the given number of draws."""
    data = result.data
    own, labels, mask = result.predict(draws=draws), *data.test.padded_labels()
    found = {
        key: value
        for key, value in own.summary(data.test).items()
        if key in ("accuracy", "nll", "ece", "brier")
    }
    seen, test = result.local_predictions(data.calibration, data.test, draws=draws)
    one = calibration.fit(
        calibration.Temperature(strength=math.inf), seen, Outputs(data.task, data.outputs)
    )
    tempered = bf.metrics.classification_summary(one.apply(test).predictions.probs, labels, mask)
    found |= {f"{key}_tempered": tempered[key] for key in ("nll", "ece")}
    here, there = (result.predict(outside[name][0], draws=draws) for name in ("own", "near"))
    for score in ("entropy",) if draws == 0 else ("entropy", "epistemic"):
        inside_, outside_ = (detection.scores(where).get(score) for where in (here, there))
        if inside_ is not None and outside_ is not None:
            told = detection.detection_summary(
                {score: inside_}, {score: outside_}, here.mask, there.mask
            )
            found[f"{score}_auroc"] = told[f"{score}_auroc"]
    return found


def accuracy_and_nll(result: Any, split: Any, draws: int | None) -> dict[str, float]:
    """Return accuracy and NLL on a part of the test images."""
    found = result.predict(split, draws=draws).summary(split)
    return {name: found[name] for name in ("accuracy", "nll")}


def under_precision(
    model: torch.nn.Module,
    result: Any,
    link: str,
    precision: float,
    body: dict[str, Any],
    split: Any,
) -> dict[str, float]:
    """Return accuracy and NLL under a given precision."""
    algorithm = bf.algorithms.fedsi_full(model, link=link, predictive_precision=precision, **body)
    with warnings.catch_warnings():
        # Which the figure is to show.
        warnings.filterwarnings("ignore", message=".*leaves the predictions to the prior.*")
        return accuracy_and_nll(replace(result, algorithm=algorithm), split, None)


def run(dataset: str, seed: int, root: Path | None, *, quick: bool) -> dict[str, Any]:
    """One cell: measures under each link, and the precisions that were chosen."""
    preset = example.PRESETS[dataset]
    clients = example.federation(dataset, preset, seed, root)
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes, seed=seed)
    body = example._body(preset)
    result = bf.simulate(
        bf.algorithms.fedsi_full(model, **body),
        clients,
        rounds=2 if quick else 100,
        seed=seed,
        evaluate_every=None,
        progress=False,
    )
    outside, rows, tuned, fixed = example.strangers(clients, seed), {}, {}, {}
    for name, link in LINKS.items():
        by = (
            result
            if link is None
            else replace(result, algorithm=bf.algorithms.fedsi_full(model, link=link, **body))
        )
        rows[name] = measured(by, outside, 0 if link is None else None)
        if link is not None:
            tuned[name] = by.tuned
            fixed[name] = {
                f"{precision:g}": under_precision(
                    model, result, link, precision, body, outside["own"][0]
                )
                for precision in PRECISIONS
            }
        print(
            f"{dataset}/{seed}: {name}: "
            + ", ".join(f"{key} {value:.4f}" for key, value in rows[name].items()),
            tuned.get(name),
            flush=True,
        )
    fixed["MAP"] = dict.fromkeys(
        next(iter(fixed.values())), accuracy_and_nll(result, outside["own"][0], 0)
    )
    return {"rows": rows, "precision": tuned, "fixed": fixed, "environment": report.environment()}


def draw(saved: dict[str, Any]) -> None:
    """Draw accuracy and NLL over the precision under each link, a row of panels for each
    data set.
    """
    cells: dict[str, list[Any]] = {}
    for key, cell in saved["cells"].items():
        cells.setdefault(key.split("/")[0], []).append(cell["fixed"])
    figure = new_figure((9, 3.4 * len(cells)))
    panels = figure.subplots(len(cells), 2, squeeze=False)
    for row, (dataset, found) in zip(panels, cells.items(), strict=True):
        for axes, measure in zip(row, ("accuracy", "nll"), strict=True):
            curves = {
                name: [
                    {
                        "precision": [*map(float, by[name])],
                        measure: [at[measure] for at in by[name].values()],
                    }
                    for by in found
                ]
                for name in LINKS
            }
            bf.plots.learning_curves(
                curves, metric=measure, x="precision", ax=axes, title=TITLES[dataset]
            )
            axes.set_xscale("log")
            axes.set_xlabel("prior precision of the weights in predictions")
            axes.set_ylabel({"accuracy": "accuracy", "nll": "NLL (nats)"}[measure])
            # Far from it nothing is of use.
            level = np.mean([by["MAP"]["1"][measure] for by in found])
            axes.set_ylim(
                *(
                    (level - 0.03, level + 0.01)
                    if measure == "accuracy"
                    else (0.7 * level, 2 * level)
                )
            )
    with atomic_path(FIGURE) as path:
        figure.savefig(path, dpi=110, format="png")


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
        "--figure",
        action="store_true",
        help="draw the figure from the results that are there, and measure nothing",
    )
    parser.add_argument(
        "--datasets",
        nargs="+",
        choices=["mnist", "fashion-mnist"],
        default=["fashion-mnist", "mnist"],
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        run("digits", 0, None, quick=True)
        return
    saved: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    if arguments.figure:
        draw(saved)
        return
    for seed in arguments.seeds:
        for dataset in arguments.datasets:
            if f"{dataset}/{seed}" not in saved["cells"]:
                saved["cells"][f"{dataset}/{seed}"] = run(
                    dataset, seed, arguments.data_root, quick=False
                )
                report.write_json(RESULTS, saved | {"command": "python benchmarks/links.py"})


if __name__ == "__main__":
    main()
