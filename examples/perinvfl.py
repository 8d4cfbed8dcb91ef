"""Does a model stay accurate when colours mislead? Invariant learning in a federation, global and
personal, on coloured images.

    # coloured digits, no download, about two minutes on one core:
    python examples/perinvfl.py
    # the same without rotation, as the control:
    python examples/perinvfl.py --upright --out runs/upright
    # the paper's sets, or rc-fmnist:
    python examples/perinvfl.py --data rc-mnist --rounds 201 --out runs/rc-mnist

In training, colour predicts the label more often than shape does, to a different degree at each of
four clients. The images of every client are rotated by an angle of its own. The script prints the
accuracy if colour agrees with the label in a share p of 0.1 to 0.5 of the images: five cases for
one trained model, with their worst and their average. It also prints the accuracy on held-back data
of the training colours. Three references stand below the methods: the accuracy of colour alone on
the same images, that of a coin, and the most that shape alone can reach in expectation, since a
quarter of the labels is noise.

There are few digits, about 320 noisy images a client. At p = 0.1, where colour misleads most,
expect every method below the coin and some at the accuracy of colour alone. A sentence under the
table names these, and no row is marked as the best. Compare how far a method is above colour alone
at p = 0.1, and how much accuracy it loses in the training colours. A method that is near 50 in both
is close to a constant, whose slopes are 0, too. The rc sets have 35 times as many images.

For each client the script also prints the slope g_e of its training loss by the scale of its
model's outputs, which is 0 for an invariant model. It prints, too, how confident the global model
is on images rotated by each client's angle, from whichever client they are. A network that
recognises the client by the angle can have all g_e near 0 without any invariance. At each angle it
is then as confident as the colour of that client's training images justifies.

Personal learning rates and pulls are given by options. If several are given, those with the best
result on held-back data of the training colours are chosen.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import bayesfl as bf
from bayesfl import Descend
from bayesfl.base.files import atomic_write
from bayesfl.evaluation import report
from bayesfl.likelihoods import Bernoulli
from bayesfl.optim import Adam

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from command_line import one_experiment

CASES = (0.1, 0.2, 0.3, 0.4, 0.5)
COLOUR = "(colour alone)"
SETS: dict[str, dict[str, Any]] = {
    "digits": {},
    "rc-mnist": {
        "source": "mnist",
        "agreement": (0.95, 0.9, 0.85, 0.8),
        "test_agreement": 0.5,
        "test": 10_000,
    },
    "rc-fmnist": {"source": "fashion-mnist", "test": 10_000},
}
STEPS, BATCH, LEARNING_RATE, PERSONAL = 5, 200, 5e-4, 2
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "batch_size": BATCH,
    "optimiser": Adam(LEARNING_RATE),
    "likelihood": Bernoulli(),
}


def kept(phase: Descend, name: str, rate: float = LEARNING_RATE, steps: int = STEPS) -> Descend:
    """The same phase by Adam, its state kept across rounds under a name."""
    return replace(phase, steps=steps, batch_size=BATCH, optimiser=Adam(rate), persist=name)


def fedavg(model: torch.nn.Module, rate: float, lam: float, anneal: int) -> bf.Algorithm:
    """FedAvg by the steps of the others."""
    algorithm = bf.algorithms.fedavg(model, likelihood=Bernoulli())
    return replace(
        algorithm, phases=tuple(kept(phase, "w_optimiser") for phase in algorithm.phases)
    )


def fedavg_ft(model: torch.nn.Module, rate: float, lam: float, anneal: int) -> bf.Algorithm:
    """FedAvg, fine-tuned by Adam before it predicts."""
    tuned = bf.algorithms.fedavg_ft(model, likelihood=Bernoulli()).finetune
    steps = {"steps": PERSONAL * STEPS, "batch_size": BATCH, "optimiser": Adam(rate)}
    return replace(
        fedavg(model, rate, lam, anneal), finetune=tuple(replace(phase, **steps) for phase in tuned)
    )


def ditto(model: torch.nn.Module, rate: float, lam: float, anneal: int) -> bf.Algorithm:
    """Ditto, both models by Adam."""
    algorithm = bf.algorithms.ditto(model, lam=lam, likelihood=Bernoulli())
    personal, shared = algorithm.phases
    return replace(
        algorithm,
        phases=(kept(personal, "v_optimiser", rate, PERSONAL * STEPS), kept(shared, "w_optimiser")),
    )


def pfedme(model: torch.nn.Module, rate: float, lam: float, anneal: int) -> bf.Algorithm:
    """The method with its paper's rates and pull, which are of SGD."""
    return bf.algorithms.pfedme(model, batches=STEPS, batch_size=BATCH, likelihood=Bernoulli())


def invariant(
    name: str, personal: bool = True, **more: Any
) -> Callable[[torch.nn.Module, float, float, int], bf.Algorithm]:
    """One of the invariant methods."""

    def make(model: torch.nn.Module, rate: float, lam: float, anneal: int) -> bf.Algorithm:
        options = {**COMMON, **more}
        if name != "group_dro":
            options["anneal"] = anneal
        if personal:
            options |= {"personal_steps": PERSONAL, "personal_optimiser": Adam(rate)}
        if personal and name != "irm_ft":
            options["lam"] = lam
        return getattr(bf.algorithms, name)(model, **options)

    return make


LOSSES = {"loss_examples": 1000}
METHODS: dict[str, Callable[[torch.nn.Module, float, float, int], bf.Algorithm]] = {
    "FedAvg": fedavg,
    "Ditto": ditto,
    "FedAvg-FT": fedavg_ft,
    "pFedMe": pfedme,
    "GroupDRO": invariant("group_dro", personal=False, **LOSSES),
    "IRM": invariant("irm", personal=False),
    "IRM-L2": invariant("irm_l2"),
    "IRM-FT": invariant("irm_ft"),
    "PerInvFL-IRM": invariant("perinvfl"),
    "PerInvFL-DRO": invariant("perinvfl", lower="group_dro", **LOSSES),
}
PULLED = ("Ditto", "IRM-L2", "PerInvFL-IRM", "PerInvFL-DRO")
RATED = (*PULLED, "FedAvg-FT", "IRM-FT")


def federation(
    name: str, seed: int, *, upright: bool, validation: float = 0.1, root: Path | None = None
) -> bf.data.FederatedData:
    """Four clients of one of the sets."""
    return bf.data.coloured(
        **SETS[name], rotate=not upright, seed=seed, validation=validation, root=root
    )


def network(clients: bf.data.FederatedData, seed: int) -> torch.nn.Module:
    """The paper's: two hidden layers of 390, one logit; smaller for digits."""
    wide = clients.inputs[-1] >= 14
    return bf.models.mlp(
        clients.inputs,
        hidden=(390, 390) if wide else (100, 100),
        outputs=1,
        start="xavier",
        seed=seed,
    )


def train(
    name: str, clients: bf.data.FederatedData, options: argparse.Namespace
) -> tuple[Any, dict[str, float]]:
    """The run of the personal rate and pull that are best on held-back data of the training
    colours, and these.
    """
    rates = options.rates if name in RATED else options.rates[:1]
    pulls = options.lams if name in PULLED else options.lams[:1]
    best: tuple[float, Any, dict[str, float]] | None = None
    for rate, lam in itertools.product(rates, pulls):
        result = bf.simulate(
            METHODS[name](network(clients, options.seed), rate, lam, options.anneal),
            clients,
            rounds=options.rounds,
            train="all",
            seed=options.seed,
            evaluate_every=None,
            engine=bf.Engine(workers=options.workers),
            device=options.device,
        )
        score = result.predict(clients.validation).summary(clients.validation)["accuracy"]
        if best is None or score > best[0]:
            best = score, result, {"rate": rate} if name in RATED else {}
            if name in PULLED:
                best[2]["lam"] = lam
    assert best is not None
    return best[1], best[2]


def summarised(cases: dict[str, float], held_back: float) -> dict[str, float]:
    """The five cases, their worst and average, and the training colours."""
    return {
        **cases,
        "worst": min(cases.values()),
        "average": sum(cases.values()) / len(cases),
        "held_back": held_back,
    }


def references(clients: bf.data.FederatedData) -> dict[str, dict[str, float]]:
    """Compute what looking at colour alone reaches on the same images, a coin, and shape alone at
    most; the last two in expectation.
    """

    def by_colour(split: Any) -> float:
        hits = []
        for j in range(clients.clients):
            x, y = split.client(j)
            hits.append(float((x.sum((-2, -1)).argmax(1) == y).double().mean()))
        return sum(hits) / len(hits)

    colour = {f"p{p}": by_colour(bf.data.recoloured(clients, p)) for p in CASES}
    found = {COLOUR: summarised(colour, by_colour(clients.validation))}
    for name, accuracy in {"(coin)": 0.5, "(shape, at most)": 1 - clients.recipe["flip"]}.items():
        found[name] = summarised(dict.fromkeys(colour, accuracy), accuracy)
    return found


def colour_alone(rows: dict[str, dict[str, float]], colour: dict[str, float]) -> str:
    """A sentence that names the methods within a point of colour alone in every column; empty where
    none is.
    """
    same = [
        name
        for name, row in rows.items()
        if all(abs(row[key] - accuracy) <= 0.01 for key, accuracy in colour.items())
    ]
    return (
        f"Within a point of colour alone in every column, so not told from it: {', '.join(same)}."
        if same
        else ""
    )


def score(result: Any, clients: bf.data.FederatedData) -> dict[str, float]:
    """Accuracy in the five cases, worst, average and in the training colours."""
    cases = {}
    for p in CASES:
        split = bf.data.recoloured(clients, p)
        cases[f"p{p}"] = result.predict(split).summary(split)["accuracy"]
    held = result.predict(clients.validation).summary(clients.validation)["accuracy"]
    return summarised(cases, held)


def slopes(result: Any, clients: bf.data.FederatedData) -> dict[str, float]:
    """The slope of each client's training loss by the scale of its own model's logits."""
    found = result.predict(clients.train)
    out = {}
    for j in range(clients.clients):
        probs = found.client(j).probs.double().clamp_min(1e-12)
        logit = probs[:, 1].log() - probs[:, 0].log()
        out[f"g{j}"] = float(((probs[:, 1] - clients.train.client(j)[1]) * logit).mean())
    return out


def sureness(result: Any, clients: bf.data.FederatedData) -> dict[str, float]:
    """Mean |logit| of the global model on everyone's training images, turned as each
    client's are.
    """
    turned = clients.recipe["rotate"]
    upright = torch.cat(
        [
            clients.train.client(j)[0].rot90(-j if turned else 0, (-2, -1))
            for j in range(clients.clients)
        ]
    )
    algorithm = result.algorithm
    leaves = algorithm.leaves(("w",), result.server)
    x = upright.to(result.device)
    return {
        f"turn{k}": float(algorithm.outputs(leaves, x.rot90(k, (-2, -1))).abs().mean())
        for k in range(4)
    }


EXPERIMENT = ("data", "upright", "rounds", "anneal", "methods", "rates", "lams", "seed")
COLUMNS = [
    *(report.Column(f"p{p}", title=f"p = {p}") for p in CASES),
    report.Column("worst", title="worst"),
    report.Column("average", title="average"),
    report.Column("held_back", title="training colours"),
]
LOOKS = [
    *(report.Column(f"g{j}", title=f"g, client {j}", digits=4) for j in range(4)),
    *(report.Column(f"turn{k}", title=f"|logit| at {90 * k}", digits=2) for k in range(4)),
]


def compare(options: argparse.Namespace) -> None:
    """Runs every method, prints and writes the tables.

    Raises:
        ValueError: Arguments that don't work out.
        DivergenceError: Training left the finite numbers.
    """
    one_experiment(options.out, {name: getattr(options, name) for name in EXPERIMENT})
    clients = federation(
        options.data, options.seed, upright=options.upright, root=options.data_root
    )
    rows: dict[str, dict[str, float]] = {}
    known = references(clients)
    written = {"arguments": vars(options), "environment": report.environment(), "references": known}
    for name in options.methods:
        result, chosen = train(name, clients, options)
        rows[name] = (
            score(result, clients) | slopes(result, clients) | sureness(result, clients) | chosen
        )
        report.write_json(options.out / "table.json", {**written, "rows": rows})
    chosen = [
        report.Column("rate", title="personal rate", digits=4),
        report.Column("lam", title="lambda", digits=2),
    ]
    there = {key for row in rows.values() for key in row}
    tables = [
        report.table({**rows, **known}, columns=COLUMNS),
        colour_alone(rows, known[COLOUR]),
        report.table(rows, columns=[*LOOKS, *(c for c in chosen if c.key in there)]),
    ]
    text = "\n\n".join(filter(None, tables))
    kind = "upright" if options.upright else "turned"
    print(
        f"\n{clients}, {kind}, {options.rounds} rounds, seed {options.seed}; last round, mean over "
        "clients\n"
    )
    print(text)
    atomic_write(options.out / "table.txt", text + "\n")
    print(f"\ntables are in {options.out}")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, or 1 where training diverged, or 2 where the arguments don't work out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", choices=list(SETS), default="digits", help="set of images (default: %(default)s)"
    )
    parser.add_argument("--upright", action="store_true", help="do not rotate the images")
    parser.add_argument(
        "--rounds",
        type=int,
        default=100,
        help="rounds of the federation (default: %(default)s; the paper's 201)",
    )
    parser.add_argument(
        "--anneal",
        type=int,
        default=12,
        help="round from which the penalty has its full weight (default: %(default)s)",
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
        default=[1e-3],
        help="learning rates of personal models (default: 0.001)",
    )
    parser.add_argument(
        "--lams",
        nargs="+",
        type=float,
        default=[1.0],
        help="strengths of the pull to the global model (default: 1)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of data, starts and batches (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=None,
        help="threads that run clients (default: the number of cores)",
    )
    parser.add_argument(
        "--device", default="cpu", help="device that computes, cpu or cuda (default: %(default)s)"
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/perinvfl"),
        help="folder of the tables (default: %(default)s)",
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
