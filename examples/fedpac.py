"""Find which clients should share a head: FedPAC on clients that form groups, which the method is
not told.

    python examples/fedpac.py  # digits, 20 clients, some four minutes on one core
    # the paper's:
    python examples/fedpac.py --data fashion-mnist --rounds 200 --train 600 --test 600 --batch 50

There are two federations. Under label skew, a fifth of each client's examples is of all classes,
and the rest is of the three classes of its group. Under concept shift, each group of clients gives
some classes the names of others. Local, FedAvg, FedPer, FedRep and FedPAC run on both, with the
same steps, each at the learning rate that is best on the validation data of its seed.

Every round has two results. "Before" is measured at the start of local training, with the models
that the server made in the round before. "After" is measured after local training, on every
client's own models. FedPAC's authors print both; tables that do not state which of them they show
cannot be compared.

The script prints accuracy, NLL and ECE of both, and the weight that FedPAC's programs give to heads
of a client's own group, with the weight under equal shares as a reference. It writes tables and
plots of the weights.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

import bayesfl as bf
from bayesfl.base.files import atomic_path, atomic_write
from bayesfl.data import FederatedData
from bayesfl.evaluation import report
from bayesfl.evaluation.plots.look import new_figure
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from command_line import arguments

STEPS = partial(SGD, momentum=0.5, weight_decay=5e-4)
METHODS = {  # six epochs each: one of the head and five of the body, or of both
    "Local": partial(bf.algorithms.local, epochs=6),
    "FedAvg": partial(bf.algorithms.fedavg, epochs=6),
    "FedPer": partial(bf.algorithms.fedper, epochs=6),
    "FedRep": partial(bf.algorithms.fedrep, head_epochs=1, body_epochs=5),
    "FedPAC": partial(bf.algorithms.fedpac, head_optimiser=STEPS(0.1)),
}
# What the server made of a round is what the next one starts from.
SHOWN = {"before": "personal", "after": "before_pool"}
MEASURES = {"accuracy": "higher", "nll": "lower", "ece": "lower"}
COLUMNS = [
    *(
        report.Column(f"{when}_{key}", better=better)
        for when in SHOWN
        for key, better in MEASURES.items()
    ),
    report.Column("rate", title="learning rate"),
]


def network(clients: FederatedData, seed: int) -> torch.nn.Module:
    """The paper's network for images, one hidden layer for digits."""
    if len(clients.inputs) == 3 and min(clients.inputs[1:]) >= 16:
        return bf.models.leaky_cnn(clients.inputs, outputs=clients.classes, seed=seed)
    return bf.models.mlp(clients.inputs, hidden=64, outputs=clients.classes, seed=seed)


def block(result: Result, title: str, path: Path) -> list[float]:
    """Draw the weights of FedPAC's heads, and return the mean weight on clients of the own group,
    what equal shares would give it, and the mean weight on the client itself.
    """
    head, known = result.server["head"], result.data.recipe["groups"]
    weights, cohort = (head[key].numpy() for key in ("weights", "cohort"))
    groups = cohort % (known if isinstance(known, int) else len(known))
    same = groups[:, None] == groups
    order = np.argsort(groups, kind="stable")
    axes = new_figure((4.6, 4.0)).add_subplot()
    image = axes.imshow(weights[np.ix_(order, order)], cmap="Blues", vmin=0)
    axes.set(title=title, xlabel="whose model", ylabel="client, by group")
    axes.figure.colorbar(image, label="weight")
    with atomic_path(path) as temporary:
        axes.figure.savefig(temporary)
    return [float((weights * same).sum(1).mean()), same.mean(), float(weights.diagonal().mean())]


def main(argv: list[str] | None = None) -> None:
    """Run every method on both federations for every seed, print and write the tables."""
    options = arguments(
        __doc__,
        argv,
        data=("digits", "a data set of images; digits needs no file"),
        clients=(20, "number of clients"),
        train=(50, "label skew: training examples of a client"),
        test=(60, "label skew: test examples of a client"),
        rounds=(20, "rounds of the federation; the paper has 200"),
        rates=([0.01, 0.03, 0.1], "learning rates, of which validation data choose one"),
        batch=(10, "examples in a step; the paper has 50 of 600"),
        seeds=[0, 1, 2],
        jobs=1,
        out=Path("runs/fedpac"),
    )
    federations = {
        "label skew": partial(bf.data.dominant_classes, train=options.train, test=options.test),
        "concept shift": partial(bf.data.swapped_labels, groups=4),
    }
    steps = [STEPS(rate) for rate in options.rates]
    rows: dict[str, dict[str, dict[str, list[float]]]] = {}
    blocks: dict[str, list[list[float]]] = {}
    text = [f"{options.data}, {options.clients} clients, {options.rounds} rounds; * best"]
    for kind, federation in federations.items():
        rows[kind] = {name: {column.key: [] for column in COLUMNS} for name in METHODS}
        weights = []
        for seed in options.seeds:
            study = bf.Study(
                data=partial(federation, options.data, clients=options.clients, validation=0.2),
                model=network,
                methods={
                    name: partial(make, batch_size=options.batch) for name, make in METHODS.items()
                },
                options={"*": {"optimiser": steps}, "FedPAC": {"body_optimiser": steps}},
                seeds=[seed],
                rounds=options.rounds,
                evaluate_every=options.rounds,
            )
            tried = study.run(options.out / "runs", n_jobs=options.jobs, keep="result")
            table = tried.chosen("validation_accuracy")
            for run in table.rows:
                found, (optimiser,) = run.measures("last", None), run.options.values()
                for when, prefix in SHOWN.items():
                    for key in MEASURES:
                        rows[kind][run.method][f"{when}_{key}"].append(found[f"{prefix}_{key}"])
                rows[kind][run.method]["rate"].append(optimiser.rate)
            path = options.out / f"{kind.replace(' ', '-')}-seed{seed}.png"
            title = f"{kind}, {options.data}, seed {seed}"
            weights.append(block(table.result("FedPAC", seed), title, path))
        blocks[kind] = weights
        text.append(f"{kind}\n\n{report.table(rows[kind], columns=COLUMNS)}")
        text += [
            f"seed {seed}: weight on the own group {group:.2f} (equal shares: {equal:.2f}), on its "
            f"own head {own:.2f}"
            for seed, (group, equal, own) in zip(options.seeds, weights, strict=True)
        ]
    print("\n\n".join([*text, f"tables and pictures are in {options.out}"]))
    atomic_write(options.out / "table.txt", "\n\n".join(text) + "\n")
    found = {"arguments": vars(options), "environment": report.environment()}
    report.write_json(options.out / "table.json", {**found, "rows": rows, "blocks": blocks})


if __name__ == "__main__":
    main()
