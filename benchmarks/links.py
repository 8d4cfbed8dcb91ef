"""What links and precisions of a Laplace approximation cost and give: FedSI over the whole body,
trained once, predicted in four ways.

    python benchmarks/links.py [--quick] [--figure] [--jobs N]

Ten clients of five classes, 50 training images each, of which a tenth chooses the precision, by the
paired rule under the link that predicts, and two tenths fit one temperature for all clients; 950
test images of each class; 100 rounds. AUROC: a client's own test images against those of classes
that it never saw. Accuracy and NLL under fixed precisions are of the first 200 test images of each
client. Results: benchmarks/results/links.json, and docs/images/links.png (--figure draws it from
the results that are there).
"""

import math
import warnings
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import script

import bayesfl as bf
from bayesfl.composition.predictors import PRECISIONS
from bayesfl.evaluation import calibration
from bayesfl.evaluation.plots.look import new_figure
from bayesfl.evaluation.surveys import Outputs

LINKS = {"class by class": "per_class", "contrasts": "contrasts", "100 draws": "draws"}
TITLES = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
MEASURES = {"accuracy": "accuracy", "nll": "NLL (nats)"}
example = script.names_of("examples/fedsi.py")


def measured(result: Any, outside: dict[str, Any], draws: int | None) -> dict[str, float]:
    """Return the measures of a result's predictions, with the given number of draws."""
    data = result.data
    plain = result.predict(draws=draws).summary(data.test)
    found = {key: plain[key] for key in ("accuracy", "nll", "ece", "brier")}
    seen, test = result.local_predictions(data.calibration, data.test, draws=draws)
    step = calibration.Temperature(strength=math.inf)
    fitted = calibration.fit(step, seen, Outputs(data.task, data.outputs))
    tempered = fitted.apply(test).measured().summary()
    found |= {f"{key}_tempered": tempered[key] for key in ("nll", "ece")}
    both = [result.predict(outside[name][0], draws=draws) for name in ("own", "near")]
    told = example.areas(*map(example.doubts, both), *(one.mask for one in both))
    return found | {key: told[key] for key in ("entropy_auroc", "epistemic_auroc") if key in told}


def accuracy_and_nll(result: Any, split: Any, draws: int | None) -> dict[str, float]:
    with warnings.catch_warnings():
        # Which the figure is to show.
        warnings.filterwarnings("ignore", message=".*lets the prior determine the predictions.*")
        found = result.predict(split, draws=draws).summary(split)
    return {name: found[name] for name in ("accuracy", "nll")}


def cell(result: Any, method: Any) -> dict[str, Any]:
    """Return measures by link, and precisions; `method` takes a model and how to predict."""
    outside = example.strangers(result.data, result.settings.seed)
    few, rows, tuned, fixed = outside["own"][0], {}, {}, {}

    def by(**rule: Any) -> Any:
        return replace(result, algorithm=method(result.algorithm.model, **rule))

    rows["MAP"] = measured(result, outside, 0)
    for name, link in LINKS.items():
        read = by(link=link)
        rows[name], tuned[name] = measured(read, outside, None), read.tuned
        fixed[name] = {
            f"{at:g}": accuracy_and_nll(by(link=link, predictive_precision=at), few, None)
            for at in PRECISIONS
        }
    at_mean = accuracy_and_nll(result, few, 0)
    fixed["MAP"] = {f"{at:g}": at_mean for at in PRECISIONS}
    return {"rows": rows, "precision": tuned, "fixed": fixed}


def results(folder: Path, *, quick: bool, jobs: int) -> dict[str, Any]:
    """Return the measures of every run, by data set and seed."""
    found = {}
    for dataset in ("digits",) if quick else TITLES:
        preset = example.PRESETS[dataset]
        method = partial(bf.algorithms.fedsi_full, **preset.body)
        size = {"seeds": (0,), "rounds": 2} if quick else {"seeds": (0, 1, 2), "rounds": 100}
        study = example.comparison(dataset, preset, {"FedSI": method}, **size)
        table = study.run(folder, n_jobs=jobs, keep="result")
        for run in table.rows:
            made = cell(table.result(run.method, run.seed), method)
            found[f"{dataset}/{run.seed}"] = script.cell(run, **made)
    return {"cells": found}


def draw(saved: dict[str, Any]) -> None:
    """Draw accuracy and NLL over the precision by link, a row for each data set."""
    fixed: dict[str, list[Any]] = {}
    for key, cell in saved["cells"].items():
        fixed.setdefault(key.split("/")[0], []).append(cell["fixed"])
    figure = new_figure((9, 3.4 * len(fixed)))
    panels = figure.subplots(len(fixed), 2, squeeze=False)
    for row, (dataset, seeds) in zip(panels, fixed.items(), strict=True):
        for axes, (measure, title) in zip(row, MEASURES.items(), strict=True):
            curves: dict[str, list[Any]] = {name: [] for name in ("MAP", *LINKS)}
            for seed, (name, found) in product(seeds, curves.items()):
                values = [at[measure] for at in seed[name].values()]
                found.append({"precision": [*map(float, seed[name])], measure: values})
            options: dict[str, Any] = {"metric": measure, "x": "precision"}
            bf.plots.learning_curves(curves, ax=axes, title=TITLES[dataset], **options)
            axes.set_xscale("log")
            axes.set_xlabel("prior precision of the weights in predictions")
            axes.set_ylabel(title)
            # Far from the MAP nothing is of use.
            level = np.mean([seed["MAP"]["1"][measure] for seed in seeds])
            near = (level - 0.03, level + 0.01), (0.7 * level, 2 * level)
            axes.set_ylim(*near[measure == "nll"])
    script.write_figure("links", figure)


if __name__ == "__main__":
    script.main(__doc__, "links", results, draw=draw)
