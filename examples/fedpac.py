"""Find which clients should share a head: FedPAC on clients that form groups, which the method is
not told.

    python examples/fedpac.py  # digits, 20 clients, some four minutes on one core
    # the paper's:
    python examples/fedpac.py --data fashion-mnist --rounds 200 --train 600 --test 600 --batch 50

There are two federations. Under label skew, a fifth of each client's examples is of all classes,
and the rest is of the three classes of its group. Under concept shift, each group of clients gives
some classes the names of others. Local, FedAvg, FedPer, FedRep and FedPAC run on both, with the
same steps, each at the learning rate that is best on validation data.

Every round has two results. "Before" is measured at the start of local training, with the models
that the server made in the round before. "After" is measured after local training, on every
client's own models. FedPAC's authors print both; tables that do not state which of them they show
cannot be compared.

The script prints accuracy, NLL and ECE of both, and the weight that FedPAC's programs give to heads
of a client's own group, with the weight under equal shares as a reference. It writes tables and
plots of the weights into a run folder.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bayesfl as bf
from bayesfl.base.files import atomic_path, atomic_write
from bayesfl.data import FederatedData
from bayesfl.evaluation import report
from bayesfl.optim import SGD

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from command_line import one_experiment

EPOCHS = 6  # one of the head and five of the body, or of both
STEPS = partial(SGD, momentum=0.5, weight_decay=5e-4)
Make = Callable[[torch.nn.Module, float, int], bf.Algorithm]
METHODS: dict[str, Make] = {
    "Local": lambda model, rate, batch: bf.algorithms.local(
        model, epochs=EPOCHS, optimiser=STEPS(rate), batch_size=batch
    ),
    "FedAvg": lambda model, rate, batch: bf.algorithms.fedavg(
        model, epochs=EPOCHS, optimiser=STEPS(rate), batch_size=batch
    ),
    "FedPer": lambda model, rate, batch: bf.algorithms.fedper(
        model, epochs=EPOCHS, optimiser=STEPS(rate), batch_size=batch
    ),
    "FedRep": lambda model, rate, batch: bf.algorithms.fedrep(
        model, head_epochs=1, body_epochs=EPOCHS - 1, optimiser=STEPS(rate), batch_size=batch
    ),
    "FedPAC": lambda model, rate, batch: bf.algorithms.fedpac(
        model, body_optimiser=STEPS(rate), head_optimiser=STEPS(0.1), batch_size=batch
    ),
}
EXPERIMENT = (
    "data",
    "clients",
    "train",
    "test",
    "groups",
    "rounds",
    "methods",
    "rates",
    "batch",
    "seeds",
)
MEASURES = (
    ("accuracy", "accuracy", "higher"),
    ("nll", "NLL (nats)", "lower"),
    ("ece", "ECE", "lower"),
)
COLUMNS = (
    *(
        report.Column(f"before_{key}", title=f"before: {title}", better=better)
        for key, title, better in MEASURES
    ),
    *(
        report.Column(f"after_{key}", title=f"after: {title}", better=better)
        for key, title, better in MEASURES
    ),
    report.Column("rate", title="learning rate", digits=3),
)


def federations(options: argparse.Namespace, seed: int) -> dict[str, tuple[FederatedData, int]]:
    """Both federations, and how many groups of clients each has."""
    rest: dict[str, Any] = {"clients": options.clients, "seed": seed, "validation": 0.2}
    skewed = bf.data.dominant_classes(options.data, train=options.train, test=options.test, **rest)
    shifted = bf.data.swapped_labels(options.data, groups=options.groups, **rest)
    return {
        "label skew": (skewed, len(skewed.recipe["groups"])),
        "concept shift": (shifted, options.groups),
    }


def network(clients: FederatedData, seed: int) -> torch.nn.Module:
    """The paper's network for images, one hidden layer for digits."""
    if len(clients.inputs) == 3 and min(clients.inputs[1:]) >= 16:
        return bf.models.leaky_cnn(clients.inputs, outputs=clients.classes, seed=seed)
    return bf.models.mlp(clients.inputs, hidden=64, outputs=clients.classes, seed=seed)


def chosen(
    make: Make, clients: FederatedData, seed: int, options: argparse.Namespace
) -> tuple[Any, float]:
    """The run of the rate that is best on validation data, and that rate."""
    best: tuple[float, Any, float] | None = None
    for rate in options.rates:
        result = bf.simulate(
            make(network(clients, seed), rate, options.batch),
            clients,
            rounds=options.rounds,
            seed=seed,
            evaluate_every=options.rounds,
            engine=bf.Engine(workers=options.workers),
        )
        score = result.history["validation_accuracy"][-1]
        if best is None or score > best[0]:
            best = (score, result, rate)
    assert best is not None
    return best[1], best[2]


def within(weights: np.ndarray, groups: np.ndarray) -> tuple[float, float, float]:
    """Mean weight on clients of the own group, what equal shares would give it, and the mean weight
    on the client itself.
    """
    same = groups[:, None] == groups[None]
    return (
        float((weights * same).sum(1).mean()),
        float(same.mean()),
        float(weights.diagonal().mean()),
    )


def compare(options: argparse.Namespace) -> None:
    """Runs every method on both federations for every seed, prints and writes the tables.

    Raises:
        ValueError: Arguments that don't work out.
        DivergenceError: Training left the finite numbers.
    """
    one_experiment(options.out, {name: getattr(options, name) for name in EXPERIMENT})
    rows: dict[str, dict[str, dict[str, list[float]]]] = {}
    blocks: dict[str, list[tuple[float, float, float]]] = {}
    for seed in options.seeds:
        for kind, (clients, count) in federations(options, seed).items():
            groups = np.arange(clients.clients) % count
            for name in options.methods:
                result, rate = chosen(METHODS[name], clients, seed, options)
                row = rows.setdefault(kind, {}).setdefault(name, {})
                for key, _, _ in MEASURES:
                    # What the server made of a round is what the next one starts from.
                    row.setdefault(f"before_{key}", []).append(
                        float(result.history[f"personal_{key}"][-1])
                    )
                    row.setdefault(f"after_{key}", []).append(
                        float(result.history[f"before_pool_{key}"][-1])
                    )
                row.setdefault("rate", []).append(rate)
                if name == "FedPAC":
                    head = result.server["head"]
                    weights, cohort = (head[key].cpu().numpy() for key in ("weights", "cohort"))
                    blocks.setdefault(kind, []).append(within(weights, groups[cohort]))
                    ax = bf.plots.collaboration(
                        weights,
                        groups=groups[cohort].tolist(),
                        title=f"{kind}, {options.data}, seed {seed}",
                    )
                    with atomic_path(
                        options.out / f"{kind.replace(' ', '-')}-seed{seed}.png"
                    ) as temporary:
                        ax.figure.savefig(temporary)
                found = {
                    "arguments": vars(options),
                    "environment": report.environment(),
                    "rows": rows,
                    "blocks": blocks,
                }
                report.write_json(options.out / "table.json", found)
    text = [
        f"{options.data}, {options.clients} clients, {options.rounds} rounds, seeds "
        f"{options.seeds}; mean over clients; * best"
    ]
    for kind, by in rows.items():
        text.append(f"{kind}\n\n{report.table(by, columns=COLUMNS)}")
        for seed, (own_group, equal, own) in zip(options.seeds, blocks.get(kind, []), strict=False):
            text.append(
                f"seed {seed}: weight on the own group {own_group:.2f} (equal shares: "
                f"{equal:.2f}), on its own head {own:.2f}"
            )
    print("\n" + "\n\n".join(text))
    atomic_write(options.out / "table.txt", "\n\n".join(text) + "\n")
    print(f"\ntables and pictures are in {options.out}")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, or 1 where training diverged, or 2 where the arguments don't work out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        default="digits",
        help="name of a data set of images (default: %(default)s, which needs no file)",
    )
    parser.add_argument(
        "--clients",
        type=int,
        default=20,
        help="number of clients (default: %(default)s, as in the paper)",
    )
    parser.add_argument(
        "--train",
        type=int,
        default=50,
        help="label skew: training examples of a client (default: %(default)s)",
    )
    parser.add_argument(
        "--test",
        type=int,
        default=60,
        help="label skew: test examples of a client (default: %(default)s)",
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=4,
        help="concept shift: groups of clients (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=20,
        help="rounds of the federation (default: %(default)s; the paper's 200)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        default=list(METHODS),
        help="methods to run (default: all)",
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=[0.01, 0.03, 0.1],
        help="learning rates, chosen on validation data (default: 0.01 0.03 0.1)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=10,
        help="examples in a step (default: %(default)s; the paper's 50 of 600)",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="seeds of partitions, starts and batches (default: 0 1 2)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=None,
        help="threads that run clients (default: the number of cores)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/fedpac"),
        help="folder of tables and plots (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        compare(options)
    except (bf.DivergenceError, ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, bf.DivergenceError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
