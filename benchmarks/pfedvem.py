"""Does pFedVEM fall when it trains for long, and do held scales mend it? Ten clients of five
classes, 800 rounds.

    python benchmarks/pfedvem.py [--quick] [--part {chosen,cells}] [--datasets ...] [--seeds ...]
    [--figure]

The partition is that of FedSI's small tables: 50 training and 950 test images of each of a client's
classes. Everybody trains and is gathered. At each milestone the table has a client's accuracy
before pooling (its own head and its own body, as the authors report it) and after it (the same head
on the averaged body), the negative log likelihood at the mean and by 20 draws, and means over
clients of rho, of the beliefs' widths and of the heads' distance to the centre, each for one
weight. Beside the methods that the figure draws are pFedVEM with its own start, and two ties as
strong as pFedVEM's own become, which are not learned. The part `chosen` compares widths on a fifth
of the training images, with other seeds than those of the table. Results:
benchmarks/results/pfedvem.json, where finished cells are passed over, and docs/images/pfedvem.png
(--figure draws it from the results that are there).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import bayesfl as bf
from bayesfl.base.files import atomic_path
from bayesfl.data import FederatedData
from bayesfl.evaluation import report
from bayesfl.evaluation.plots.look import new_figure
from bayesfl.optim import SGD

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "pfedvem.json"
FIGURE = ROOT / "docs" / "images" / "pfedvem.png"
MILESTONES = (20, 100, 200, 400, 800)
DRAWS = 20
METHODS: dict[str, Any] = {
    "pFedVEM": lambda model: bf.algorithms.pfedvem(model, init_scale=0.1),
    "pFedVEM, scales held": bf.algorithms.pfedvem_held,
    "pFedMAP": bf.algorithms.pfedmap,
    "FedRep": lambda model: bf.algorithms.fedrep(
        model, head_epochs=5, body_epochs=5, batch_size=50, optimiser=SGD(0.01, momentum=0.9)
    ),
    "Local": lambda model: bf.algorithms.local(
        model, epochs=5, batch_size=50, optimiser=SGD(0.01, momentum=0.9)
    ),
    "pFedVEM, start 1": bf.algorithms.pfedvem,
    "pFedVEM, scales held, prior scale 0.1": lambda model: bf.algorithms.pfedvem_held(
        model, prior_scale=0.1
    ),
    "pFedMAP, precision 100": lambda model: bf.algorithms.pfedmap(model, precision=100.0),
}
DRAWN = list(METHODS)[:5]
WIDTHS = (0.05, 0.1, 0.2, 0.3, 0.5)


def milestones(
    algorithm: bf.Algorithm, clients: FederatedData, split: str, rounds: tuple[int, ...], seed: int
) -> dict[str, Any]:
    """Train to each milestone, and measure there on a split, {round: measures}."""
    found, result = {}, None
    data = getattr(clients, split)
    for milestone in rounds:
        options: dict[str, Any] = {
            "evaluate_every": milestone if split == "test" else None,
            "seed": seed,
            "sampling": "fixed",
        }
        result = bf.simulate(
            algorithm, clients, rounds=milestone, resume=result, progress=False, **options
        )
        row = result.history[-1]
        at_mean, drawn = (result.predict(data, draws=count).summary(data) for count in (0, DRAWS))
        found[str(milestone)] = {
            **(
                {"before_accuracy": row.get("before_pool_accuracy", row["personal_accuracy"])}
                if split == "test"
                else {}
            ),
            "accuracy": at_mean["accuracy"],
            "nll": at_mean["nll"],
            "nll_drawn": drawn["nll"],
            **_scales(result),
        }
    return found


def _scales(result: Any) -> dict[str, float]:
    """Return the means over clients of rho, of the beliefs' widths and of the root mean squared
    distance of heads to the centre.
    """
    if "head" not in result.private or result.algorithm.blocks["head"].pool is None:
        return {}
    posterior = result.algorithm.blocks["head"].posterior
    loc, variance = posterior.moments(result.private["head"])
    out = {"width": float(variance.mean(-1).sqrt().mean())}
    out["distance"] = float((loc - result.server["head"]["loc"]).square().mean(-1).sqrt().mean())
    return out | (
        {"rho": float(result.private["rho2"].sqrt().mean())} if "rho2" in result.private else {}
    )


def federation(dataset: str, seed: int, *, validation: float, quick: bool) -> FederatedData:
    """Return the clients."""
    size: dict[str, Any] = {"train": 24, "test": 10} if quick else {"train": 50, "test": 950}
    return bf.data.label_groups(
        "digits" if quick else dataset, seed=seed, validation=validation, **size
    )


def draw(saved: dict[str, Any]) -> None:
    """Draw accuracies over the rounds, and rho, width and distance of pFedVEM's heads, a row of
    panels for each data set.
    """

    def curves(dataset: str, method: str, measure: str) -> list[dict[str, list[float]]]:
        cells = [
            cell["milestones"]
            for key, cell in saved["cells"].items()
            if key.rsplit("/", 1)[0] == f"{dataset}/{method}"
        ]
        return [
            {"round": [*map(int, cell)], "value": [found[measure] for found in cell.values()]}
            for cell in cells
        ]

    datasets = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
    figure = new_figure((9, 3.6 * len(datasets)))
    for (left, right), (dataset, title) in zip(
        figure.subplots(len(datasets), 2, squeeze=False), datasets.items(), strict=True
    ):
        accuracies = {method: curves(dataset, method, "accuracy") for method in DRAWN}
        accuracies["pFedVEM, before pooling"] = curves(dataset, "pFedVEM", "before_accuracy")
        bf.plots.learning_curves(accuracies, metric="value", ax=left, title=title)
        left.set_ylabel("accuracy, after pooling if not said")
        lengths = {
            "prior's scale": "rho",
            "width of beliefs": "width",
            "distance to the centre": "distance",
        }
        found = {name: curves(dataset, "pFedVEM", measure) for name, measure in lengths.items()}
        bf.plots.learning_curves(
            found, metric="value", ax=right, title=f"{title}: the heads of pFedVEM"
        )
        right.set_ylabel("for one weight")
        right.set_yscale("log")
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_xticks(MILESTONES, [str(round) for round in MILESTONES])
            axes.minorticks_off()
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
        help="a few rounds on digits: shows that it runs; nothing is written",
    )
    parser.add_argument(
        "--figure",
        action="store_true",
        help="draw the figure from the results that are there, and measure nothing",
    )
    parser.add_argument("--part", choices=["chosen", "cells"], default="cells")
    parser.add_argument(
        "--datasets",
        nargs="+",
        choices=["mnist", "fashion-mnist"],
        default=["mnist", "fashion-mnist"],
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=None,
        help="default: 0 1 2 for the table, 10 11 12 for the choice",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Before anything is written, which would count as an uncommitted change.
    environment = report.environment()
    saved: dict[str, Any] = (
        json.loads(RESULTS.read_text())
        if RESULTS.exists() and not arguments.quick
        else {"chosen": {}, "cells": {}}
    )
    if arguments.figure:
        draw(saved)
        return
    chosen = arguments.part == "chosen"
    rounds = (2, 4) if arguments.quick else (100, 200) if chosen else MILESTONES
    entries = (
        {str(width): width for width in WIDTHS}
        if chosen
        else {name: None for name in arguments.methods}
    )
    for seed in arguments.seeds or ([10, 11, 12] if chosen else [0, 1, 2]):
        for dataset in arguments.datasets[: 1 if arguments.quick else None]:
            clients = federation(
                dataset, seed, validation=0.2 if chosen else 0.0, quick=arguments.quick
            )
            model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes, seed=seed)
            for name, width in entries.items():
                key = f"{dataset}/{name}/{seed}"
                if key in saved[arguments.part]:
                    continue
                algorithm = (
                    METHODS[name](model)
                    if width is None
                    else bf.algorithms.pfedvem_held(model, init_scale=width)
                )
                found = milestones(
                    algorithm, clients, "validation" if chosen else "test", rounds, seed
                )
                last = found[str(rounds[-1])]
                print(
                    f"{key}: "
                    + ", ".join(f"{measure} {value:.4f}" for measure, value in last.items()),
                    flush=True,
                )
                saved[arguments.part][key] = {"milestones": found, "environment": environment}
                if not arguments.quick:
                    report.write_json(RESULTS, saved | {"command": "python benchmarks/pfedvem.py"})


if __name__ == "__main__":
    main()
