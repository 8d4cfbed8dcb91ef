"""Can a few shared models, mixed for every client, distinguish kinds of examples? FedEM on data
whose true mixtures are known.

    python examples/fedem.py  # 60 clients, under two minutes on one core
    python examples/fedem.py --clients 300 --rounds 200  # the paper's synthetic experiment

Every example follows one of three linear rules, and the shares of the rules differ between clients.
The script compares FedEM, D-FedEM (no server), Local, FedAvg, FedProx, FedAvg-FT (FedAvg+),
clustered FL and IFCA. It prints:

- the measures of every method, at the learning rate that is best on validation data;
- the accuracy of the worst tenth of the clients;
- the distance of the learned mixture weights from the true ones (L1, after the best matching of
  components), and the distance of equal shares as a reference;
- the clusters into which clustered FL has split.

A plot of the weights is drawn for the first seed.

In this script, momentum starts anew in each round, FedProx's mu is 1, and FedAvg-FT fine-tunes at
the first round's learning rate. `benchmarks/papers/fedem.py` follows the authors' code in all
three, so its figures differ.
"""

import itertools
import sys
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
from command_line import arguments

STEPS: dict[str, Any] = {"epochs": 1, "batch_size": 128, "likelihood": Bernoulli()}
PLAIN = partial(SGD, weight_decay=5e-4)
HEAVY = partial(PLAIN, momentum=0.9)


def heavy(method: Any, **options: Any) -> Any:
    """A method of (model, rate) whose steps have momentum."""
    return lambda model, rate: method(model, optimiser=HEAVY(multistep(rate)), **STEPS, **options)


METHODS = {
    "FedEM": heavy(bf.algorithms.fedem),
    "D-FedEM": heavy(bf.algorithms.d_fedem),
    "Clustered FL": heavy(bf.algorithms.clustered),
    "IFCA": heavy(bf.algorithms.ifca, clusters=3),
    "Local": heavy(bf.algorithms.local),
    "FedAvg": heavy(bf.algorithms.fedavg),
    "FedProx": lambda model, rate: bf.algorithms.fedprox(
        model, mu=1.0, optimiser=PLAIN(multistep(rate)), **STEPS
    ),
    "FedAvg-FT": lambda model, rate: bf.algorithms.fedavg_ft(
        model, optimiser=HEAVY(multistep(rate)), finetune_optimiser=HEAVY(rate), **STEPS
    ),
}


def matched(learned: np.ndarray, true: np.ndarray) -> np.ndarray:
    """The learned weights [J, M] with their components in the order that is nearest to the true
    ones.
    """
    orders = itertools.permutations(range(true.shape[1]))
    return min(
        (learned[:, list(order)] for order in orders),
        key=lambda weights: float(np.abs(weights - true).sum()),
    )


def distance(weights: np.ndarray, true: np.ndarray) -> float:
    """Mean over clients of the L1 distance between weights [J, M]."""
    return float(np.abs(weights - true).sum(1).mean())


def picture(weights: dict[str, np.ndarray], path: Path) -> None:
    """The mixture weights of every client as stacked bars, the truth above what was learned,
    clients in the order of their largest.
    """
    from matplotlib.figure import Figure

    true = weights["true"]
    order = np.lexsort((true.max(1), true.argmax(1)))
    figure = Figure(figsize=(8, 1.6 * len(weights)), layout="constrained")
    axes = figure.subplots(len(weights), 1, sharex=True)
    for axis, (name, rows) in zip(axes, weights.items(), strict=True):
        height = np.zeros(len(rows))
        for m, share in enumerate(rows[order].T):
            colour = bf.plots.OKABE_ITO[m]
            axis.bar(np.arange(len(rows)), share, 1.0, height, color=colour, label=f"component {m}")
            height += share
        axis.set(ylabel=f"{name}: weight", ylim=(0, 1), xlim=(-0.5, len(rows) - 0.5), xticks=[])
    axes[-1].set_xlabel("clients, those with the same largest true weight together")
    entries = axes[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside upper center", ncols=true.shape[1], frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Run every method with every rate, print and write the tables."""
    options = arguments(
        __doc__,
        argv,
        clients=(60, "number of clients; the paper has 300"),
        rounds=(100, "rounds of the federation; the paper has 200"),
        test=(500, "test examples of each client; the paper has 5,000"),
        rates=([0.03, 0.3, 1.0], "learning rates, of which validation data choose one"),
        seeds=([0], "seeds of starts and batches; the data are always the same"),
        jobs=1,
        out=Path("runs/fedem"),
    )
    clients = bf.data.linear_mixture(clients=options.clients, test=options.test, validation=0.2)
    study = bf.Study(
        data=lambda seed: clients,
        model=lambda clients: torch.nn.Linear(clients.inputs[0], 1),
        methods=METHODS,
        options={"*": {"rate": options.rates}},
        seeds=options.seeds,
        rounds=options.rounds,
        train="cohort",
        sampling="fixed",
        evaluate_every=options.rounds,
    )
    tried = study.run(options.out / "runs", n_jobs=options.jobs, keep="result")
    table = tried.chosen("validation_accuracy")
    rows = {
        name: {"worst tenth": row["personal_accuracy_decile"]}
        for name, row in table.summary(["personal_accuracy_decile"]).runs.items()
    }
    true = np.array(clients.recipe["weights"])
    weights = {"true": true}
    for name in ("FedEM", "D-FedEM"):
        learned = [
            matched(table.result(name, seed).private["pi"].numpy(), true) for seed in options.seeds
        ]
        weights[name] = learned[0]
        rows[name]["L1 from the true weights"] = [distance(each, true) for each in learned]
        rows[name]["L1 of equal weights"] = [distance(np.full_like(true, 1 / len(true[0])), true)]
    cluster = table.result("Clustered FL", options.seeds[0]).server["cluster"]
    sizes = ", ".join(map(str, sorted(torch.bincount(cluster).tolist(), reverse=True)))
    text = f"{clients}\n\n{table}\n\n{report.table(rows)}\n\nClustered FL has clusters of {sizes}."
    print(f"{text}\n\ntable and picture are in {options.out}")
    atomic_write(options.out / "table.txt", text + "\n")
    picture(weights, options.out / "weights.png")


if __name__ == "__main__":
    main()
