"""Can a few shared models, mixed for every client, distinguish kinds of examples? FedEM on data
whose true mixtures are known.

    python examples/fedem.py  # 60 clients, under two minutes on one core
    python examples/fedem.py --clients 300 --rounds 200  # the paper's synthetic experiment

Every example follows one of three linear rules, and the shares of the rules differ between clients.
The script compares FedEM, D-FedEM (no server), Local, FedAvg, FedProx, FedAvg-FT (FedAvg+),
clustered FL and IFCA. It prints:

- the accuracy of every method, as the mean over clients and for the worst tenth of them, at the
  learning rate that is best on validation data;
- the clusters into which clustered FL has split;
- the distance of the learned mixture weights from the true ones (L1, after the best matching of
  components), and the distance of equal shares as a reference.

The table and a plot of the weights are written into a run folder.

In this script, momentum starts anew in each round, FedProx's mu is 1, and FedAvg-FT fine-tunes at
the first round's learning rate. `benchmarks/papers/fedem.py` follows the authors' code in all
three, so its figures differ.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bayesfl as bf
from bayesfl.base.files import atomic_path, atomic_write
from bayesfl.evaluation import report
from bayesfl.likelihoods import Bernoulli
from bayesfl.optim import SGD, multistep

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from command_line import one_experiment

STEPS: dict[str, Any] = {"epochs": 1, "batch_size": 128, "likelihood": Bernoulli()}
PLAIN = partial(SGD, weight_decay=5e-4)
HEAVY = partial(PLAIN, momentum=0.9)
METHODS: dict[str, Callable[[torch.nn.Module, float], bf.Algorithm]] = {
    "FedEM": lambda model, rate: bf.algorithms.fedem(
        model, optimiser=HEAVY(multistep(rate)), **STEPS
    ),
    "D-FedEM": lambda model, rate: bf.algorithms.d_fedem(
        model, optimiser=HEAVY(multistep(rate)), **STEPS
    ),
    "Clustered FL": lambda model, rate: bf.algorithms.clustered(
        model, optimiser=HEAVY(multistep(rate)), **STEPS
    ),
    "IFCA": lambda model, rate: bf.algorithms.ifca(
        model, clusters=3, optimiser=HEAVY(multistep(rate)), **STEPS
    ),
    "Local": lambda model, rate: bf.algorithms.local(
        model, optimiser=HEAVY(multistep(rate)), **STEPS
    ),
    "FedAvg": lambda model, rate: bf.algorithms.fedavg(
        model, optimiser=HEAVY(multistep(rate)), **STEPS
    ),
    "FedProx": lambda model, rate: bf.algorithms.fedprox(
        model, mu=1.0, optimiser=PLAIN(multistep(rate)), **STEPS
    ),
    "FedAvg-FT": lambda model, rate: bf.algorithms.fedavg_ft(
        model, optimiser=HEAVY(multistep(rate)), finetune_optimiser=HEAVY(rate), **STEPS
    ),
}
EXPERIMENT = ("clients", "rounds", "test", "methods", "rates", "seed")
MIXTURES = ("FedEM", "D-FedEM")
COLUMNS = (
    report.Column("accuracy", better="higher"),
    report.Column("accuracy_decile", title="worst tenth", better="higher"),
    report.Column("nll", title="NLL (nats)", better="lower"),
    report.Column("rate", title="learning rate", digits=2),
    report.Column("clusters", digits=0),
    report.Column("l1", title="mixture weights: distance to the true ones", better="lower"),
    report.Column("l1_guess", title="distance of equal weights"),
)


def matched(learned: np.ndarray, true: np.ndarray) -> np.ndarray:
    """The learned weights [J, M] with their components in the order that is nearest to the true
    ones.
    """
    orders = itertools.permutations(range(true.shape[1]))
    return min(
        (learned[:, list(order)] for order in orders),
        key=lambda weights: float(np.abs(weights - true).sum()),
    )


def chosen(
    make: Callable[[torch.nn.Module, float], bf.Algorithm],
    model: torch.nn.Module,
    clients: Any,
    options: argparse.Namespace,
) -> Any:
    """The run of the rate that is best on validation data, and that rate."""
    best: tuple[float, Any, float] | None = None
    for rate in options.rates:
        result = bf.simulate(
            make(model, rate),
            clients,
            rounds=options.rounds,
            train="cohort",
            sampling="fixed",
            seed=options.seed,
            evaluate_every=None,
            engine=bf.Engine(workers=options.workers),
        )
        score = result.predict(clients.validation).summary(clients.validation)["accuracy"]
        if best is None or score > best[0]:
            best = (score, result, rate)
    assert best is not None
    return best[1], best[2]


def picture(weights: dict[str, np.ndarray], path: Path) -> None:
    """The mixture weights of every client as stacked bars, the truth above what was learned,
    clients in the order of their largest.
    """
    from matplotlib.figure import Figure

    true = weights["true"]
    order = np.lexsort((true.max(1), true.argmax(1)))
    figure = Figure(figsize=(8, 1.6 * len(weights)), layout="constrained")
    axes = figure.subplots(len(weights), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, rows) in zip(axes, weights.items(), strict=True):
        bottom = np.zeros(len(rows))
        for m in range(rows.shape[1]):
            label = f"component {m}"
            axis.bar(
                np.arange(len(rows)),
                rows[order, m],
                bottom=bottom,
                width=1.0,
                color=bf.plots.OKABE_ITO[m],
                label=label,
            )
            bottom += rows[order, m]
        axis.set(ylabel=f"{name}: weight", ylim=(0, 1), xlim=(-0.5, len(rows) - 0.5), xticks=[])
    axes[-1].set_xlabel("clients, those with the same largest true weight together")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=weights["true"].shape[1],
        frameon=False,
    )
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)


def compare(options: argparse.Namespace) -> None:
    """Runs every method with every rate, prints and writes the table.

    Raises:
        ValueError: Arguments that don't work out.
        DivergenceError: Training left the finite numbers.
    """
    one_experiment(options.out, {name: getattr(options, name) for name in EXPERIMENT})
    clients = bf.data.linear_mixture(clients=options.clients, test=options.test, validation=0.2)
    true = np.array(clients.recipe["weights"])
    model = torch.nn.Linear(clients.inputs[0], 1)
    rows: dict[str, dict[str, float]] = {}
    weights, splits = {"true": true}, ""
    for name in options.methods:
        result, rate = chosen(METHODS[name], model, clients, options)
        rows[name] = {
            key: value
            for key, value in result.predict().summary(clients.test).items()
            if key in ("accuracy", "accuracy_decile", "nll")
        }
        rows[name]["rate"] = rate
        if "cluster" in result.server:
            sizes = sorted(torch.bincount(result.server["cluster"]).tolist(), reverse=True)
            rows[name]["clusters"] = len(sizes)
            splits = (
                f"{name}, clusters of {', '.join(map(str, sizes))} clients"
                if len(sizes) > 1
                else f"{name} did not split"
            )
        if name in MIXTURES:
            weights[name] = matched(result.private["pi"].numpy(), true)
            rows[name]["l1"] = float(np.abs(weights[name] - true).sum(1).mean())
            rows[name]["l1_guess"] = float(np.abs(1 / true.shape[1] - true).sum(1).mean())
        report.write_json(
            options.out / "table.json",
            {"arguments": vars(options), "environment": report.environment(), "rows": rows},
        )
    table = report.table(
        rows, columns=[c for c in COLUMNS if any(c.key in row for row in rows.values())]
    )
    table += f"\n\n{splits}." if splits else ""
    print(
        f"\n{clients}, {options.rounds} rounds, seed {options.seed}; last round, mean over "
        f"clients; * best\n\n{table}"
    )
    atomic_write(options.out / "table.txt", table + "\n")
    picture(weights, options.out / "weights.png")
    print(f"\ntable and picture are in {options.out}")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, or 1 where training diverged, or 2 where the arguments don't work out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clients",
        type=int,
        default=60,
        help="number of clients (default: %(default)s; the paper's 300)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=100,
        help="rounds of the federation (default: %(default)s; the paper's 200)",
    )
    parser.add_argument(
        "--test",
        type=int,
        default=500,
        help="test examples of each client (default: %(default)s; the paper's 5,000)",
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
        default=[0.03, 0.3, 1.0],
        help="learning rates, of which one is chosen on validation data (default: 0.03 0.3 1.0)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of starts and batches (default: %(default)s); the data are always the same",
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
        default=Path("runs/fedem"),
        help="folder of the table and the plot (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    # Of the linear layer that is the start of methods with one model.
    torch.manual_seed(options.seed)
    try:
        compare(options)
    except (bf.DivergenceError, ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, bf.DivergenceError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
