"""Find what a posterior over a subnetwork adds to a personal model: FedSI, FedBABU, FedAvg-FT and
pFedVEM, with and without a temperature.

    python examples/fedsi.py  # handwritten digits, under two minutes on one core
    python examples/fedsi.py --dataset mnist --rounds 800  # the paper's small MNIST

There are ten clients with five classes each. A tenth of a client's training data chooses the
predictive precision (one for all clients). Two further tenths are held back: one for temperatures,
one for conformal thresholds. The script prints:

- accuracy and calibration of every method, and the same with one temperature for all clients and
  with one for each, as baselines;
- how well a method's uncertainty distinguishes a client's own images from images of labels that the
  client never saw, and from images with permuted pixels;
- the gain from declining to predict the most uncertain examples;
- how often conformal sets contain the label.

Tables, figures and runs are written into a folder; runs that are finished there are read.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.base.files import atomic_path, atomic_write
from bayesfl.base.surveys import conduct
from bayesfl.data import ClientData, FederatedData
from bayesfl.evaluation import detection, report
from bayesfl.evaluation.audit import Counting
from bayesfl.evaluation.calibration import Conformal, Temperature, fit
from bayesfl.evaluation.metrics import classification_summary
from bayesfl.evaluation.surveys import Outputs
from bayesfl.optim import SGD

DRAWS = 100
BINS = 10  # the paper's
ALPHA = 0.1
STEPS, RATE = 20, 0.1  # of the body in a round, in mini-batches; the rate is that of their code
PERMUTATIONS = 3
# at most so many of a client's test examples, and as many of what it was not trained for, tell the
# two apart
LOOKED_AT = 200


@dataclass(frozen=True)
class Preset:
    """The options with which a data set is run.

    Args:
        batch_size: Examples of a step.
        train: Training examples of each class and client, those held back included.
        test: Test examples.
        rounds: Rounds.
        init_scale: pFedVEM's standard deviation of heads at their start: of 1 (the paper's) and 0.1
            the better on validation data (seed 10). At 1 it learns nothing on images whose pixels
            reach from -1 to 1.
    """

    batch_size: int = 50
    train: int = 50
    test: int = 950
    rounds: int = 100
    init_scale: float = 0.1

    @property
    def body(self) -> dict[str, Any]:
        """Return the options of the body's steps."""
        return {"steps": STEPS, "batch_size": self.batch_size, "optimiser": SGD(RATE)}


PRESETS = {
    "digits": Preset(batch_size=10, train=24, test=10, rounds=30, init_scale=1.0),
    "mnist": Preset(),
    "fashion-mnist": Preset(),
}
OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
TITLES = {
    "fedsi": "FedSI",
    "fedsi_predictive": "FedSI, by predictive variance",
    "fedsi_fac": "FedSI-Fac",
    "fedsi_full": "FedSI, whole body",
    "fedbabu": "FedBABU",
    "fedavg_ft": "FedAvg-FT",
    "pfedvem": "pFedVEM",
    "pfedvem_held": "pFedVEM, fixed variances",
}
COVERED = ("FedSI", "FedSI, whole body, contrasts", "FedAvg-FT", "pFedVEM, fixed variances, mean")
QUALITY = (
    report.Column("accuracy", better="higher"),
    report.Column("nll", title="NLL (nats)", better="lower"),
    report.Column("nll_pooled", title="T pooled", better="lower"),
    report.Column("nll_client", title="T client", better="lower"),
    report.Column("ece", title="ECE", better="lower"),
    report.Column("ece_pooled", title="T pooled", better="lower"),
    report.Column("ece_client", title="T client", better="lower"),
    report.Column("mce", title="MCE", better="lower"),
    report.Column("brier", title="Brier", better="lower"),
)
DOUBT = (
    report.Column("near_entropy_auroc", title="unseen labels: AUROC, entropy", better="higher"),
    report.Column("near_tempered_auroc", title="T pooled", better="higher"),
    report.Column("near_epistemic_auroc", title="epistemic", better="higher"),
    report.Column("far_entropy_auroc", title="permuted: AUROC, entropy", better="higher"),
    report.Column("far_epistemic_auroc", title="epistemic", better="higher"),
    report.Column("other_entropy_auroc", title="another data set: AUROC, entropy", better="higher"),
    report.Column("other_epistemic_auroc", title="epistemic", better="higher"),
)
DECISIONS = (
    report.Column("pooled_aurc", title="AURC", digits=4, better="lower"),
    report.Column("set_coverage", title=f"conformal coverage, target {1 - ALPHA:g}"),
    report.Column("set_lowest", title="lowest client"),
    report.Column("set_size", title="classes in a set", digits=2, better="lower"),
)
POSTERIOR = (
    report.Column("log10_precision", title="predictive precision, log10", digits=1),
    report.Column("uncurved", title="share without curvature", digits=2),
    report.Column("seconds", title="a round (ms)", scale=1000, digits=0),
)


def methods(preset: Preset) -> dict[str, Callable[..., bf.Algorithm]]:
    """Return the methods, {name: (model, rule of its predictions) -> algorithm}."""
    fedsi = partial(bf.algorithms.fedsi, **preset.body)
    both: dict[str, Any] = {"body_epochs": STEPS // 5, "batch_size": preset.batch_size}
    return {
        "fedsi": fedsi,
        "fedsi_predictive": partial(fedsi, selection="predictive_variance"),
        "fedsi_fac": partial(bf.algorithms.fedsi_fac, **preset.body),
        "fedsi_full": partial(bf.algorithms.fedsi_full, **preset.body),
        "fedbabu": lambda model: replace(
            plain(bf.algorithms.fedbabu(model), preset), finetune=fedsi(model).finetune
        ),
        "fedavg_ft": lambda model: replace(fedavg(model, preset), finetune=fedsi(model).finetune),
        "pfedvem": partial(bf.algorithms.pfedvem, init_scale=preset.init_scale, **both),
        "pfedvem_held": partial(bf.algorithms.pfedvem_held, **both),
    }


def plain(algorithm: bf.Algorithm, preset: Preset) -> bf.Algorithm:
    """Return the method with the same steps as FedSI's."""
    (step,) = algorithm.phases
    return replace(algorithm, phases=(replace(step, **preset.body),))


def fedavg(model: nn.Module, preset: Preset) -> bf.Algorithm:
    """Return FedAvg, told apart as body and head, so that the head alone can be fine-tuned."""
    blocks = {name: bf.Block(f"{name}.*") for name in ("body", "head")}
    return replace(plain(bf.algorithms.fedper(model), preset), blocks=blocks, adapt=())


def federation(dataset: str, preset: Preset) -> Callable[..., FederatedData]:
    """Return the clients' data, (seed=) -> data."""
    sizes: dict[str, Any] = {"train": preset.train, "test": preset.test}
    return partial(bf.data.label_groups, dataset, **sizes, validation=0.1, calibration=0.2)


def network(clients: FederatedData, seed: int) -> nn.Module:
    """Return the paper's network."""
    return bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes, seed=seed)


def comparison(
    dataset: str,
    preset: Preset,
    methods: Mapping[str, Callable[..., bf.Algorithm]],
    **settings: Any,
) -> bf.Study:
    """Return the study of these methods; settings are those of `bf.Study`. All clients train."""
    options = {"data": federation(dataset, preset), "model": network, "methods": methods}
    return bf.Study(**{"evaluate_every": None, "sampling": "fixed", **options, **settings})


def part(split: ClientData, which: slice) -> ClientData:
    """Return some of every client's examples."""
    rows = [split.rows(j)[which] for j in range(split.clients)]
    return replace(split, index=torch.cat(rows), counts=np.array([len(r) for r in rows]))


def shown(split: ClientData, images: Callable[[int], Tensor]) -> ClientData:
    """Return the clients of `split`, each shown other images [n_j, ...]."""
    x = split.x.clone()
    for j in range(split.clients):
        x[split.rows(j)] = images(j)[: len(split.rows(j))].to(x)
    return replace(split, x=x)


def strangers(
    clients: FederatedData, seed: int, elsewhere: FederatedData | None = None
) -> dict[str, list[ClientData]]:
    """Return some of each client's own test examples, and what it was not trained for.

    That is labels it never saw (another client's images), its own images with permuted pixels,
    those of another data set if there is one.
    """
    own = part(clients.test, slice(LOOKED_AT))
    seen = [set(clients.train.client(j)[1].tolist()) for j in range(clients.clients)]
    count = clients.clients
    other = [
        next(k % count for k in range(j + 1, j + count) if not seen[k % count] & seen[j])
        for j in range(count)
    ]
    rng = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(own.x[0].numel(), generator=rng) for _ in range(PERMUTATIONS)]
    far = [
        shown(own, lambda j, o=o: own.client(j)[0].flatten(1)[:, o].unflatten(1, own.x.shape[1:]))
        for o in orders
    ]
    found = {"own": [own], "near": [shown(own, lambda j: own.client(other[j])[0])], "far": far}
    if elsewhere is not None:
        found["other"] = [shown(own, lambda j: elsewhere.test.client(j)[0])]
    return found


def measure(
    result: Any, outside: dict[str, list[ClientData]], draws: int | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return everything that is measured of a method's predictions, and what the figures need.

    Args:
        result: What the federation has learnt.
        outside: What `strangers` gives.
        draws: Of its predictions, as in `Result.predict`.
    """
    data, outputs = result.data, Outputs(result.data.task, result.data.outputs)
    labels, mask = data.test.padded_labels()
    own = result.predict(draws=draws).probs
    held_back = [part(data.calibration, slice(start, None, 2)) for start in (0, 1)]
    seen, held, test = result.local_predictions(*held_back, data.test, draws=draws)
    pooled = fit(Temperature(strength=math.inf), seen, outputs)
    each = fit(Temperature(), seen, outputs)

    row = classification_summary(own, labels, mask, bins=BINS)
    row = {name: row[name] for name in ("accuracy", "nll", "ece", "mce", "brier")}
    for name, one in (("pooled", pooled), ("client", each)):
        probs = one.apply(test).padded().probs
        tempered = classification_summary(probs, labels, mask, bins=BINS)
        row |= {f"{key}_{name}": tempered[key] for key in ("nll", "ece", "mce", "brier")}
    sets = fit(Conformal(level=1 - ALPHA), held, outputs).apply(test)
    survey = Counting("client", data.client_names)
    state = conduct(survey, survey.openly(sets), outputs)
    covered = survey.audit(state, level=1 - ALPHA, risk=None, delta=0.05)
    row |= {
        "set_coverage": float(covered.coverage.mean()),
        "set_lowest": float(covered.coverage.min()),
        "set_size": float(covered.size.mean()),
    }
    selective = detection.doubt(own), own.argmax(-1) == labels, mask
    row["pooled_aurc"] = detection.risk_coverage(*selective).aurc

    def uncertainty(found: Any) -> dict[str, Tensor]:
        rows, clients = found.rows()
        known = replace(test, predictions=rows, clients=clients)
        tempered = pooled.apply(known).padded().probs
        assert tempered is not None
        return doubts(found) | {"tempered": detection.entropy(tempered)}

    here = result.predict(outside["own"][0], draws=draws)
    inside = uncertainty(here)
    for name in [key for key in outside if key != "own"]:
        told = []
        for split in outside[name]:
            there = result.predict(split, draws=draws)
            told.append(areas(inside, uncertainty(there), here.mask, there.mask))
        row |= {f"{name}_{key}": float(np.mean([t[key] for t in told])) for key in told[0]}
    return row, {"diagram": (own, labels, mask), "coverage": covered}


def doubts(found: Any) -> dict[str, Tensor]:
    """Return the entropy, and the epistemic uncertainty where predictions have one, [J, N]."""
    known = {"entropy": detection.entropy(found.probs)}
    if bool(found.epistemic[found.mask].isfinite().any()):
        known["epistemic"] = found.epistemic.double()
    return known


def areas(
    inside: Mapping[str, Tensor], outside: Mapping[str, Tensor], *masks: Tensor
) -> dict[str, float]:
    """Return the AUROC of each score that both mappings have, averaged over the clients that have
    own examples and outsiders.
    """
    both = masks[0].any(-1) & masks[1].any(-1)
    return {
        f"{name}_auroc": float(detection.auroc(own, outside[name], *masks)[both].mean())
        for name, own in inside.items()
        if name in outside
    }


def readings(name: str) -> dict[str, tuple[dict[str, Any], int | None]]:
    """Return the rows of the tables that a method makes: {title: options of its predictions, number
    of draws}.
    """
    title = TITLES[name]
    if name.startswith("pfedvem"):
        return {f"{title}, mean": ({}, 0), f"{title}, {DRAWS} draws": ({}, DRAWS)}
    if name.startswith("fedsi"):
        rows: dict[str, tuple[dict[str, Any], int | None]] = {
            title: ({}, None),
            f"{title}, contrasts": ({"link": "contrasts"}, None),
        }
        return rows | ({"FedSI's MAP": ({}, 0)} if name == "fedsi" else {})
    return {title: ({}, 0)}


def read(result: Any, make: Callable[..., bf.Algorithm], rule: dict[str, Any]) -> Any:
    """Return what a method has learnt, predicting by other options."""
    return replace(result, algorithm=make(result.algorithm.model, **rule)) if rule else result


def compare(options: argparse.Namespace) -> None:
    """Run every method with every seed, print and write the tables.

    Raises:
        ValueError: Arguments that don't work out, or a run that failed.
        FileNotFoundError: The data are not there.
    """
    preset, other = PRESETS[options.dataset], OTHER.get(options.dataset)
    made = methods(preset)
    rounds = preset.rounds if options.rounds is None else options.rounds
    study = comparison(options.dataset, preset, made, seeds=options.seeds, rounds=rounds)
    table = study.run(options.out / "runs", n_jobs=options.jobs, keep="result")
    rows: dict[str, dict[str, list[float]]] = {}
    figures: dict[str, dict[str, Any]] = {}
    for run in table.rows:
        result = table.result(run.method, run.seed)
        elsewhere = federation(other, preset)(seed=run.seed) if other else None
        outside = strangers(result.data, run.seed, elsewhere)
        posterior = {"seconds": float(np.median(result.history["seconds"]))}
        if "uncurved_share" in result.server:
            posterior["uncurved"] = float(result.server["uncurved_share"])
        for title, (rule, draws) in readings(run.method).items():
            reading = read(result, made[run.method], rule)
            row, shown_there = measure(reading, outside, draws)
            if draws is None:
                row["log10_precision"] = math.log10(reading.tuned)
            for key, value in (row | posterior).items():
                rows.setdefault(title, {}).setdefault(key, []).append(value)
            figures.setdefault(title, shown_there)
    there = {key for row in rows.values() for key in row}
    text = "\n\n".join(
        str(report.table(rows, columns=[column for column in columns if column.key in there]))
        for columns in (QUALITY, DOUBT, DECISIONS, POSTERIOR)
    )
    print(
        f"{options.dataset}, {rounds} rounds; mean over clients, then mean ± standard error of "
        f"{len(options.seeds)} seeds; * best\n\n{text}"
    )
    saved = {"arguments": vars(options), "environment": report.environment(), "rows": rows}
    report.write_json(options.out / "table.json", saved)
    atomic_write(options.out / "tables.txt", text + "\n")
    diagrams = {title: figure["diagram"] for title, figure in figures.items()}
    pictures = {
        "reliability.png": bf.plots.reliability_compare(diagrams, bins=BINS, columns=3),
        "risk_coverage.png": bf.plots.risk_coverage(diagrams),
        "coverage.png": bf.plots.coverage({title: figures[title]["coverage"] for title in COVERED}),
    }
    for name, figure in pictures.items():
        with atomic_path(options.out / name) as temporary:
            figure.savefig(temporary, dpi=120, bbox_inches="tight")
    print(f"\ntables, figures and runs are in {options.out}")


def main() -> None:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="BAYESFL_DATA names the folder of the images; digits need no file.",
    )
    add = parser.add_argument
    add("--dataset", choices=PRESETS, default="digits")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--rounds", type=int, help="default: 30 for digits, else 100")
    add("--jobs", type=int, default=1, help="number of runs at a time")
    add("--out", type=Path, default=Path("runs/fedsi"), help="folder of the results")
    torch.set_num_threads(1)
    try:
        compare(parser.parse_args())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
