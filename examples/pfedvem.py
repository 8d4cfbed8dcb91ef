"""Is a hierarchical posterior over personal heads worth its cost? pFedVEM beside Local, FedAvg,
FedPer and pFedMAP.

    python examples/pfedvem.py --jobs 2  # handwritten digits, about three minutes on two slow cores
    python examples/pfedvem.py --dataset cifar100 --clients 50 --rounds 100  # the paper's data

Every client has one class of each superclass and predicts the superclass, so the meaning of a label
differs between clients. Under every method the clients that train are those that are gathered, and
go over their data equally often in a round. The script prints the table over seeds, and writes
table, figures and runs into a folder; runs that are finished there are read. The exit code is 2
after a mistake in the arguments, and 1 if a run failed; the table is of the others.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

import bayesfl as bf
from bayesfl.base.display.sheet import Sheet
from bayesfl.base.files import atomic_path
from bayesfl.evaluation import report
from bayesfl.optim import SGD

DRAWS, ROUNDS = 20, 30
WHOLE = ("local", "fedavg", "fedper")
METHODS = (*WHOLE, "pfedmap", "pfedvem", "pfedvem_held")
TITLES = {name: title for name, (_, title, _) in bf.algorithms.PAPERS.items()}
COLUMNS = (
    report.Column("passes", title="passes over data", digits=0),
    report.Column("accuracy", better="higher"),
    report.Column("before_accuracy", title="before pooling"),
    report.Column("nll", title="NLL (nats)", better="lower"),
    report.Column("ece", title="ECE, clients' mean", better="lower"),
    report.Column("pooled_ece", title="ECE, pooled", better="lower"),
    report.Column("brier", title="Brier", better="lower"),
)


@dataclass(frozen=True)
class Preset:
    """The options with which a data set is run.

    Args:
        network: (inputs, outputs=, seed=) -> a body under a head drawn from N(0, 1), the same start
            for every method.
        batch_size: Examples of a step.
        rates: Learning rate of a method, of its body where a head has a rate of its own; 0.01 where
            none was chosen. All have momentum 0.9.
        sampling: How a cohort is drawn, the same for every method.
        head_rate: Of pFedVEM's and pFedMAP's heads. The paper's 1e-3 suits clients of up to about a
            thousand examples: under a sum over the data a step is as long as they are many. For
            larger ones 1e-4 was the best of 1e-3, 3e-4, 1e-4 and 3e-5 on validation data
            (Fashion-MNIST, 20 clients, 8 rounds, seed 10).
        head_epochs: Passes over a client's data in a round for pFedVEM's and pFedMAP's heads, each
            one step, as in the paper.
        body_epochs: The same for their bodies, in batches.
        epochs: The same for whole models of other methods: as many as head and body have together.
    """

    network: Callable[..., torch.nn.Module]
    batch_size: int
    rates: Mapping[str, float] = field(default_factory=dict)
    sampling: Literal["fixed", "bernoulli"] = "fixed"
    head_rate: float = 1e-3
    head_epochs: int = 20
    body_epochs: int = 5
    epochs: int = 25


# Chosen by NLL on validation data, with seeds that the demo does not have: python
# benchmarks/sensitivity.py --rates, under "rates" in benchmarks/results/sensitivity.json.
DIGITS = {**dict.fromkeys(METHODS, 1e-2), "local": 3e-4}
SMALL = partial(bf.models.mlp, hidden=100, head_scale=1.0)
PRESETS = {
    "digits": Preset(SMALL, 10, rates=DIGITS),
    "mnist": Preset(SMALL, 50, head_rate=1e-4),
    "fashion-mnist": Preset(SMALL, 50, head_rate=1e-4),
    "cifar10": Preset(partial(bf.models.lenet, head_scale=1.0), 50, head_rate=1e-4),
    # The paper's network, of five convolutions.
    "cifar100": Preset(partial(bf.models.cifar100_cnn, head_scale=1.0), 50, sampling="bernoulli"),
}


def composed(name: str, preset: Preset) -> Callable[..., bf.Algorithm]:
    """Return the method of this name, (model) -> algorithm."""
    optimiser = SGD(preset.rates.get(name, 1e-2), momentum=0.9)
    own: dict[str, Any] = (
        {"epochs": preset.epochs, "optimiser": optimiser}
        if name in WHOLE
        else {
            "head_epochs": preset.head_epochs,
            "body_epochs": preset.body_epochs,
            "head_optimiser": SGD(preset.head_rate, momentum=0.9),
            "body_optimiser": optimiser,
        }
    )
    return partial(getattr(bf.algorithms, name), batch_size=preset.batch_size, **own)


def comparison(preset: Preset, names: Iterable[str] = METHODS, **settings: Any) -> bf.Study:
    """Return the study of these methods, who train and are gathered by one rule; settings are those
    of `bf.Study`.
    """
    return bf.Study(
        model=lambda clients, seed: preset.network(
            clients.inputs, outputs=clients.classes, seed=seed
        ),
        methods={TITLES[name]: composed(name, preset) for name in names},
        sampling=preset.sampling,
        train="cohort",
        **settings,
    )


def readings(method: str) -> dict[str, int]:
    """Return the rows that a method makes, {title: number of draws}, the mean first."""
    if not method.startswith("pFedVEM"):
        return {method: 0}
    return {f"{method}, mean": 0, f"{method}, {DRAWS} draws": DRAWS}


def table(rows: Mapping[str, Mapping[str, list[float]]]) -> Sheet:
    """Return the table of what was measured; passes, which are counted, by their mean."""
    shown = {name: {**row, "passes": fmean(row["passes"])} for name, row in rows.items()}
    there = {key for row in shown.values() for key in row}
    return report.table(shown, columns=[column for column in COLUMNS if column.key in there])


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="BAYESFL_DATA names the folder of the images; digits need no file.",
    )
    add = parser.add_argument
    add("--dataset", choices=PRESETS, default="digits")
    add("--clients", type=int, default=20, help="cifar100: a multiple of 5")
    add("--rounds", type=int, default=ROUNDS)
    add("--participation", type=float, default=1.0, help="share of the clients in a round")
    add("--algorithms", nargs="+", choices=METHODS, default=METHODS)
    add("--seeds", nargs="+", type=int, default=list(range(5)))
    add("--device", default="cpu", help="cpu or cuda")
    add("--jobs", type=int, default=1, help="number of runs at a time")
    add("--out", type=Path, default=Path("runs/pfedvem"), help="folder of the results")
    return parser.parse_args(argv)


def compare(options: argparse.Namespace) -> list[str]:
    """Run every method with every seed, print and write the table; return the errors of runs that
    failed.

    Raises:
        ValueError: Arguments that don't work out.
        FileNotFoundError: The data are not there.
    """
    study = comparison(
        PRESETS[options.dataset],
        options.algorithms,
        data=partial(bf.data.concept_drift, options.dataset, clients=options.clients),
        seeds=options.seeds,
        rounds=options.rounds,
        participation=options.participation,
        device=options.device,
        evaluate_every=max(1, options.rounds // 5),
    )
    runs = study.run(options.out / "runs", n_jobs=options.jobs, keep="result").rows
    finished = [row for row in runs if row.record.error is None]
    rows: dict[str, dict[str, list[float]]] = {}
    histories: dict[str, list[Any]] = {}
    diagrams: dict[str, Any] = {}
    for row in finished:
        result = row.load()
        history, test = result.history, result.data.test
        histories.setdefault(row.method, []).append(history)
        # Of a client, mean over clients; the cohort are those that train.
        turns = float(history["cohort"].sum()) / test.clients
        for title, draws in readings(row.method).items():
            predictions = result.predict(draws=draws)
            found = predictions.summary(test) | {"passes": row.record.budget["epochs"] * turns}
            if row.method != "Local" and options.participation == 1 and not draws:
                # Of all clients, which predict at the mean before pooling.
                found["before_accuracy"] = float(history["before_pool_accuracy"][-1])
            for key in [column.key for column in COLUMNS if column.key in found]:
                rows.setdefault(title, {}).setdefault(key, []).append(found[key])
            diagrams.setdefault(title, (predictions.probs, *test.padded_labels()))
    if finished:
        write(options, rows, sum(row.record.seconds or 0 for row in finished))
        figures = {
            "reliability.png": bf.plots.reliability_compare(diagrams, columns=4),
            "learning_curves.png": bf.plots.learning_curves(histories),
        }
        for name, figure in figures.items():
            with atomic_path(options.out / name) as temporary:
                figure.savefig(temporary, dpi=120, bbox_inches="tight")
    errors = [(row, row.record.error) for row in runs if row.record.error is not None]
    return [f"{row.method}, seed {row.seed}: {error['text']}" for row, error in errors]


def write(options: argparse.Namespace, rows: dict[str, Any], seconds: float) -> None:
    """Print and write the table."""
    print(
        f"{options.dataset}, {options.clients} clients, {options.rounds} rounds, participation "
        f"{options.participation}\nlast round, mean over clients; mean ± standard error of "
        f"{len(options.seeds)} seeds; * best\n\n{table(rows)}\n\n"
        f"table, figures and runs are in {options.out}"
    )
    saved = {
        "arguments": vars(options),
        "seconds": seconds,
        "rows": rows,
        "environment": report.environment(),
    }
    report.write_json(options.out / "table.json", saved)


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 where a run failed, or 2 where the arguments don't work out."""
    try:
        failed = compare(arguments(argv))
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for error in failed[:1]:
        print(f"error: {' '.join(error.split())}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
