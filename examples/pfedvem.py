"""Is a hierarchical posterior over personal heads worth its cost? pFedVEM beside Local, FedAvg,
FedPer and pFedMAP.

    python examples/pfedvem.py  # handwritten digits, under three minutes on two cores
    python examples/pfedvem.py --dataset cifar100 --clients 50 --rounds 100  # the paper's data

Every client has one class of each superclass and predicts the superclass, so the meaning of a label
differs between clients. Under every method the clients that train are those that are gathered, and
go over their data equally often in a round. The script prints the table over seeds, and writes
table, history, checkpoints and figures into a run folder. Table and history are written anew after
every run of a method with a seed. The exit code is 2 after a mistake in the arguments, and 1 if
training diverges.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

import bayesfl as bf
from bayesfl.base.files import atomic_path, atomic_write
from bayesfl.evaluation import report
from bayesfl.optim import SGD
from bayesfl.study.budget import epochs

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from command_line import one_experiment, refuse_repeats

DRAWS = 20


METHODS = ("local", "fedavg", "fedper", "pfedmap", "pfedvem", "pfedvem_held")
RATE = 1e-2


@dataclass(frozen=True)
class Preset:
    """The options with which a data set is run.

    Args:
        model: (inputs, outputs, seed) -> a body under a head drawn from N(0, 1), the same start for
            every method.
        batch_size: Examples of a step.
        rates: Learning rate of a method, of its body where a head has a rate of its own; `RATE`
            where none was chosen. All have momentum 0.9.
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

    model: Callable[[Any, int, int], torch.nn.Module]
    batch_size: int
    rates: Mapping[str, float] = field(default_factory=dict)
    sampling: Literal["fixed", "bernoulli"] = "fixed"
    head_rate: float = 1e-3
    head_epochs: int = 20
    body_epochs: int = 5
    epochs: int = 25


def small(inputs: Any, outputs: int, seed: int) -> torch.nn.Module:
    """One hidden layer."""
    return bf.models.mlp(inputs, hidden=100, outputs=outputs, head_scale=1.0, seed=seed)


def lenet(inputs: Any, outputs: int, seed: int) -> torch.nn.Module:
    """Two convolutions, two linear layers."""
    return bf.models.lenet(inputs, outputs=outputs, head_scale=1.0, seed=seed)


def five_convolutions(inputs: Any, outputs: int, seed: int) -> torch.nn.Module:
    """The paper's network for CIFAR-100."""
    return bf.models.cifar100_cnn(inputs, outputs=outputs, head_scale=1.0, seed=seed)


# Chosen by NLL on validation data, with seeds that the demo does not have: python
# benchmarks/sensitivity.py --rates, under "rates" in benchmarks/results/sensitivity.json.
DIGITS = {
    "local": 3e-4,
    "fedavg": 1e-2,
    "fedper": 1e-2,
    "pfedmap": 1e-2,
    "pfedvem": 1e-2,
    "pfedvem_held": 1e-2,
}
PRESETS = {
    "digits": Preset(small, 10, rates=DIGITS),
    "mnist": Preset(small, 50, head_rate=1e-4),
    "fashion-mnist": Preset(small, 50, head_rate=1e-4),
    "cifar10": Preset(lenet, 50, head_rate=1e-4),
    "cifar100": Preset(five_convolutions, 50, sampling="bernoulli"),
}


def composed(name: str, model: torch.nn.Module, preset: Preset) -> bf.Algorithm:
    """The method of this name."""
    method: Callable[..., bf.Algorithm] = getattr(bf.algorithms, name)
    optimiser = SGD(preset.rates.get(name, RATE), momentum=0.9)
    if name in ("local", "fedavg", "fedper"):
        return method(
            model, epochs=preset.epochs, batch_size=preset.batch_size, optimiser=optimiser
        )
    return method(
        model,
        head_epochs=preset.head_epochs,
        body_epochs=preset.body_epochs,
        batch_size=preset.batch_size,
        head_optimiser=SGD(preset.head_rate, momentum=0.9),
        body_optimiser=optimiser,
    )


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
EXPERIMENT = (
    "dataset",
    "clients",
    "rounds",
    "participation",
    "algorithms",
    "seeds",
    "device",
    "kernel",
)
"""The arguments that the numbers depend on."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset",
        choices=list(PRESETS),
        default="digits",
        help="data set (default: %(default)s, which needs no file)",
    )
    parser.add_argument(
        "--clients",
        type=int,
        default=20,
        help="number of clients (default: %(default)s; cifar100: a multiple of 5)",
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="rounds of the federation (default: %(default)s)"
    )
    parser.add_argument(
        "--participation",
        type=float,
        default=1.0,
        help="share of the clients that train and are gathered in a round (default: %(default)s)",
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="methods to run (default: all)",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2, 3, 4],
        help="seeds, one run for each (default: 0 1 2 3 4)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument(
        "--kernel",
        choices=["auto", "reference", "live", "layers", "vmap"],
        default="auto",
        help="kernel that runs phases",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=None,
        help="threads that run clients (default: the number of cores)",
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    parser.add_argument(
        "--download", action="store_true", help="let torchvision download missing images"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/pfedvem"),
        help="run folder of one experiment, with checkpoints of the first seed (default: "
        "%(default)s)",
    )
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Refuses what would count a run twice, or mix the files of two experiments in a folder.

    Raises:
        ValueError: A seed or method is given twice, or the folder holds another experiment's files.
    """
    refuse_repeats({name: getattr(options, name) for name in ("algorithms", "seeds")})
    one_experiment(options.out, {name: getattr(options, name) for name in EXPERIMENT})


def table(rows: dict[str, dict[str, list[float]]], style: Literal["text", "markdown"]) -> str:
    """The table of what was measured; passes, which are counted, by their mean."""
    shown = {name: {**row, "passes": fmean(row["passes"])} for name, row in rows.items()}
    there = {key for row in shown.values() for key in row}
    return report.table(
        shown, columns=[column for column in COLUMNS if column.key in there], style=style
    )


def write(
    options: argparse.Namespace,
    rows: dict[str, dict[str, list[float]]],
    history: list[dict[str, Any]],
    runs: int,
    began: float,
) -> None:
    """Table and history of the runs finished so far, each file whole."""
    planned = len(options.seeds) * len(options.algorithms)
    record = {
        "arguments": vars(options),
        "runs": {"finished": runs, "planned": planned},
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time(),
        "rows": rows,
        "environment": report.environment(),
    }
    report.write_json(options.out / "table.json", record)
    atomic_write(options.out / "table.md", table(rows, "markdown") + "\n")
    report.write_csv(options.out / "history.csv", history)


def compare(options: argparse.Namespace) -> None:
    """Runs every algorithm with every seed.

    Raises:
        ValueError: Arguments that don't work out.
        FileNotFoundError: The data are not there.
        DivergenceError: Training left the finite numbers; what there was before that is saved.
    """
    check(options)
    began = time.monotonic()
    preset = PRESETS[options.dataset]
    engine = bf.Engine(kernel=options.kernel, workers=options.workers)
    rows: dict[str, dict[str, list[float]]] = {}
    history: list[dict[str, Any]] = []
    histories: dict[str, list[Any]] = {}
    diagrams: dict[str, Any] = {}
    runs = 0
    for seed in options.seeds:
        clients = bf.data.concept_drift(
            options.dataset,
            clients=options.clients,
            seed=seed,
            root=options.data_root,
            download=options.download,
        )
        sizes = clients.counts["train"]
        print(
            f"seed {seed}: {clients.clients} clients of {sizes.min()} to {sizes.max()} examples, "
            f"partition {clients.hash[:12]}",
            flush=True,
        )
        labels, mask = clients.test.padded_labels()
        model = preset.model(clients.inputs, clients.classes, seed)
        for name in options.algorithms:
            try:
                result = bf.simulate(
                    composed(name, model, preset),
                    clients,
                    rounds=options.rounds,
                    participation=options.participation,
                    sampling=preset.sampling,
                    train="cohort",
                    seed=seed,
                    evaluate_every=max(1, options.rounds // 5),
                    engine=engine,
                    device=options.device,
                )
            except bf.DivergenceError as error:
                write(options, rows, history, runs, began)
                if error.result is not None:
                    error.result.save(options.out / f"{name}-seed{seed}-diverged")
                raise
            title = TITLES[name]
            entries = {title: result.predict(draws=0)}
            if name.startswith("pfedvem"):
                entries = {
                    f"{title}, mean": entries[title],
                    f"{title}, {DRAWS} draws": result.predict(draws=DRAWS),
                }
            # Of a client, mean over clients; the cohort are those that train.
            turns = float(result.history["cohort"].sum()) / clients.clients
            passed = epochs(result.algorithm, clients.train.counts)
            for key, predictions in entries.items():
                measures = predictions.summary(clients.test) | {"passes": passed * turns}
                if name != "local" and options.participation == 1 and not key.endswith("draws"):
                    # Of all clients, which predict at the mean before pooling.
                    measures["before_accuracy"] = float(result.history["before_pool_accuracy"][-1])
                for column in COLUMNS:
                    if column.key in measures:
                        rows.setdefault(key, {}).setdefault(column.key, []).append(
                            measures[column.key]
                        )
                diagrams.setdefault(key, (predictions.probs, labels, mask))
            history += [{"algorithm": name, "seed": seed, **row} for row in result.history]
            histories.setdefault(title, []).append(result.history)
            runs += 1
            # Before the checkpoint: the table says whose folder this is.
            write(options, rows, history, runs, began)
            if seed == options.seeds[0]:
                result.save(options.out / name)
    text = table(rows, "text")
    print(
        f"\n{options.dataset}, {options.clients} clients, {options.rounds} rounds, participation "
        f"{options.participation}"
    )
    print(
        f"last round, mean over clients; mean ± standard error of {len(options.seeds)} seeds; * "
        f"best\n\n{text}"
    )
    figures = {
        "reliability.png": bf.plots.reliability_compare(diagrams, columns=4),
        "learning_curves.png": bf.plots.learning_curves(histories).figure,
    }
    for name, figure in figures.items():
        with atomic_path(options.out / name) as temporary:
            figure.savefig(temporary, dpi=120, bbox_inches="tight")
    minutes = (time.monotonic() - began) / 60
    print(f"\n{minutes:.1f} minutes; table, history, checkpoints and figures are in {options.out}")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, or 1 where training diverged, or 2 where the arguments don't work out."""
    options = arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    try:
        compare(options)
    except (bf.DivergenceError, ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, bf.DivergenceError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
