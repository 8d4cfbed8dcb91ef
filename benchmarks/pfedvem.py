"""Does pFedVEM lose accuracy in long training, and do fixed variances prevent it? Ten clients of
five classes, 800 rounds.

    python benchmarks/pfedvem.py [--quick] [--part {cells,chosen}] [--figure] [--jobs N]

The partition is that of FedSI's small tables: 50 training and 950 test images of each of a client's
classes. Everybody trains and is gathered. At each milestone the table has a client's accuracy
before pooling (its own head and its own body, as the authors report it) and after it (the same head
on the averaged body), the negative log likelihood at the mean and by 20 draws, and means over
clients of rho, of the posteriors' widths and of the heads' distance to the centre, each for one
weight. Beside the methods that the figure draws are pFedVEM with its own start, and two fixed
priors as strong as pFedVEM's own becomes. The part `chosen` compares widths on a fifth
of MNIST's training images, with other seeds than those of the table. Runs that are finished are
read. Results: benchmarks/results/pfedvem.json, and docs/images/pfedvem.png (--figure draws it from
the results that are there).
"""

from functools import partial
from pathlib import Path
from typing import Any

import script

import bayesfl as bf
from bayesfl.evaluation.plots.look import new_figure
from bayesfl.optim import SGD

example = script.names_of("examples/fedsi.py")
MILESTONES = (20, 100, 200, 400, 800)
DRAWS = 20
OTHERS: dict[str, Any] = {"batch_size": 50, "optimiser": SGD(0.01, momentum=0.9)}
METHODS: dict[str, Any] = {
    "pFedVEM": partial(bf.algorithms.pfedvem, init_scale=0.1),
    "pFedVEM, fixed variances": bf.algorithms.pfedvem_held,
    "pFedMAP": bf.algorithms.pfedmap,
    "FedRep": partial(bf.algorithms.fedrep, head_epochs=5, body_epochs=5, **OTHERS),
    "Local": partial(bf.algorithms.local, epochs=5, **OTHERS),
    "pFedVEM, start 1": bf.algorithms.pfedvem,
    "pFedVEM, fixed variances, prior scale 0.1": partial(
        bf.algorithms.pfedvem_held, prior_scale=0.1
    ),
    "pFedMAP, precision 100": partial(bf.algorithms.pfedmap, precision=100.0),
}
DRAWN = list(METHODS)[:5]
WIDTHS = (0.05, 0.1, 0.2, 0.3, 0.5)
NOTED = "noted_"  # prefix of a milestone's measures in the history


def note(result: Any, milestones: tuple[int, ...]) -> None:
    """Add a milestone's measures to the history: of validation data, else of test data."""
    if result.round not in milestones:
        return
    row, splits = result.history[-1], result.data.splits
    data = splits.get("validation", splits["test"])
    at_mean, drawn = (result.predict(data, draws=count).summary(data) for count in (0, DRAWS))
    found = {"accuracy": at_mean["accuracy"], "nll": at_mean["nll"], "nll_drawn": drawn["nll"]}
    if "personal_accuracy" in row:
        found["before_accuracy"] = row.get("before_pool_accuracy", row["personal_accuracy"])
    row.update({f"{NOTED}{name}": value for name, value in (found | scales(result)).items()})


def scales(result: Any) -> dict[str, float]:
    """Return root mean squares over clients: rho, widths, distances to the centre."""
    block, head = result.algorithm.blocks.get("head"), result.private.get("head")
    if block is None or head is None or block.pool is None:
        return {}
    loc, variance = block.posterior.moments(head)
    found = {
        "width": variance.mean(-1).sqrt(),
        "distance": (loc - result.server["head"]["loc"]).square().mean(-1).sqrt(),
    }
    if "rho2" in result.private:
        found["rho"] = result.private["rho2"].sqrt()
    return {name: float(values.mean()) for name, values in found.items()}


def results(folder: Path, *, quick: bool, jobs: int, part: str) -> dict[str, Any]:
    """Return the measures at each milestone, by data set, method or width, and seed."""
    chosen = part == "chosen"
    milestones = (2, 4) if quick else (100, 200) if chosen else MILESTONES
    seeds = (10, 11, 12) if chosen else (0, 1, 2)
    widths = {str(w): partial(bf.algorithms.pfedvem_held, init_scale=w) for w in WIDTHS}
    found = {}
    for dataset in ("digits",) if quick else ("mnist",) if chosen else script.TITLES:
        preset = example.PRESETS[dataset]
        options = {"train": preset.train, "test": preset.test, "validation": 0.2 * chosen}
        table = bf.Study(
            data=partial(bf.data.label_groups, dataset, **options),
            model=example.network,
            methods=widths if chosen else METHODS,
            seeds=seeds[:1] if quick else seeds,
            rounds=milestones[-1],
            sampling="fixed",
            evaluate_every=None if chosen else milestones[0],
            on_round=[partial(note, milestones=milestones)],
        ).run(folder, n_jobs=jobs)
        for run in table.rows:
            noted = {
                str(row["round"]): {
                    name.removeprefix(NOTED): row[name] for name in row if name.startswith(NOTED)
                }
                for row in run.record.history
            }
            reached = {round: row for round, row in noted.items() if row}
            found[f"{dataset}/{run.method}/{run.seed}"] = script.cell(run, milestones=reached)
    return {part: found}


def draw(saved: dict[str, Any]) -> None:
    """Draw accuracies, and rho, width and distance of pFedVEM's heads, by data set."""

    def panel(axes: Any, title: str, label: str, curves: dict[str, tuple[str, str]]) -> None:
        found: dict[str, list[Any]] = {}
        for name, (method, measure) in curves.items():
            cells = [c for key, c in saved["cells"].items() if key.startswith(f"{method}/")]
            found[name] = [
                {"round": [*map(int, by)], "value": [row[measure] for row in by.values()]}
                for by in (cell["milestones"] for cell in cells)
            ]
        bf.plots.learning_curves(found, metric="value", ax=axes, title=title)
        axes.set_ylabel(label)
        axes.set_xscale("log")
        axes.set_xticks(MILESTONES, map(str, MILESTONES))
        axes.minorticks_off()

    figure = new_figure((9, 3.6 * len(script.TITLES)))
    panels = figure.subplots(len(script.TITLES), 2, squeeze=False)
    for (left, right), (dataset, title) in zip(panels, script.TITLES.items(), strict=True):
        ours = f"{dataset}/pFedVEM"
        accuracies = {method: (f"{dataset}/{method}", "accuracy") for method in DRAWN}
        accuracies["pFedVEM, before pooling"] = ours, "before_accuracy"
        panel(left, title, "accuracy after pooling", accuracies)
        measures = {"rho": "prior's scale", "width": "posteriors' width"}
        measures["distance"] = "distance to the centre"
        lengths = {name: (ours, measure) for measure, name in measures.items()}
        right.set_yscale("log")
        panel(right, f"{title}: the heads of pFedVEM", "for one weight", lengths)
    script.write_figure("pfedvem", figure)


if __name__ == "__main__":
    part = {"choices": ["cells", "chosen"], "default": "cells"}
    script.main(__doc__, "pfedvem", results, draw=draw, part=part)
