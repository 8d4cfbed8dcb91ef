"""Find what a posterior over a subnetwork adds to a personal model: FedSI, FedBABU, FedAvg-FT and
pFedVEM, with and without a temperature.

    python examples/fedsi.py  # handwritten digits, under two minutes on one core
    # the paper's small MNIST:
    python examples/fedsi.py --dataset mnist --train 50 --test 950 --rounds 800

There are ten clients with five classes each. A tenth of a client's training data chooses the
predictive precision (one for all clients). Two further tenths are held back: one for temperatures,
one for conformal thresholds. The script prints:

- accuracy and calibration of every method, and the same with one temperature for all clients and
with one for each, as baselines;
- how well a method's uncertainty distinguishes a client's own images from images of labels that the
  client never saw, and from images with permuted pixels;
- the gain from declining to predict the most uncertain examples;
- how often conformal sets contain the label.

Tables and figures are written into a run folder.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bayesfl as bf
from bayesfl.base.files import atomic_path, atomic_write
from bayesfl.data import ClientData, FederatedData
from bayesfl.evaluation import detection, report
from bayesfl.evaluation.audit import audit
from bayesfl.evaluation.calibration import Conformal, Temperature, fit
from bayesfl.evaluation.metrics import classification_summary
from bayesfl.evaluation.surveys import Outputs
from bayesfl.optim import SGD

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from command_line import one_experiment, refuse_repeats

DRAWS = 100
BINS = 10  # the paper's
ALPHA = 0.1
PERMUTATIONS = 3
# at most so many of a client's test examples, and as many of what it was not trained for, tell the
# two apart
LOOKED_AT = 200


@dataclass(frozen=True)
class Preset:
    """The options with which a data set is run.

    Args:
        steps: Mini-batches on the body each round.
        batch_size: Examples of each.
        lr: SGD's learning rate on the body; the authors' code takes 0.1.
        train: Training examples of each class and client, those held back included.
        test: Test examples.
        rounds: Rounds.
        init_scale: pFedVEM's standard deviation of heads at their start: of 1 (the paper's) and 0.1
            the better on validation data (seed 10). At 1 it learns nothing on images whose pixels
            reach from -1 to 1.
    """

    steps: int
    batch_size: int
    lr: float
    train: int
    test: int
    rounds: int
    init_scale: float = 0.1


PRESETS = {
    "digits": Preset(steps=20, batch_size=10, lr=0.1, train=24, test=10, rounds=30, init_scale=1.0),
    "mnist": Preset(steps=20, batch_size=50, lr=0.1, train=50, test=950, rounds=100),
    "fashion-mnist": Preset(steps=20, batch_size=50, lr=0.1, train=50, test=950, rounds=100),
}
EXPERIMENT = ("dataset", "methods", "seeds", "rounds", "train", "test")
OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
METHODS: dict[str, Callable[..., bf.Algorithm]] = {
    "fedsi": lambda model, preset, **rule: bf.algorithms.fedsi(model, **_body(preset), **rule),
    "fedsi_predictive": lambda model, preset, **rule: bf.algorithms.fedsi(
        model, selection="predictive_variance", **_body(preset), **rule
    ),
    "fedsi_fac": lambda model, preset, **rule: bf.algorithms.fedsi_fac(
        model, **_body(preset), **rule
    ),
    "fedsi_full": lambda model, preset, **rule: bf.algorithms.fedsi_full(
        model, **_body(preset), **rule
    ),
    "fedbabu": lambda model, preset: replace(
        _plain(bf.algorithms.fedbabu(model), preset), finetune=_head(model, preset)
    ),
    "fedavg_ft": lambda model, preset: replace(
        fedavg(model, preset), finetune=_head(model, preset)
    ),
    "pfedvem": lambda model, preset: bf.algorithms.pfedvem(
        model, init_scale=preset.init_scale, **_both(preset)
    ),
    "pfedvem_held": lambda model, preset: bf.algorithms.pfedvem_held(model, **_both(preset)),
}
TITLES = {
    "fedsi": "FedSI",
    "fedsi_predictive": "FedSI, by predictive variance",
    "fedsi_fac": "FedSI-Fac",
    "fedsi_full": "FedSI, whole body",
    "fedbabu": "FedBABU",
    "fedavg_ft": "FedAvg-FT",
    "pfedvem": "pFedVEM",
    "pfedvem_held": "pFedVEM, scales held",
}
COVERED = ("FedSI", "FedSI, whole body, contrasts", "FedAvg-FT", "pFedVEM, scales held, mean")
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
    report.Column("near_entropy_fpr95", title="FPR95, entropy", better="lower"),
    report.Column("far_entropy_auroc", title="permuted: AUROC, entropy", better="higher"),
    report.Column("far_epistemic_auroc", title="epistemic", better="higher"),
    report.Column("far_entropy_fpr95", title="FPR95, entropy", better="lower"),
    report.Column("other_entropy_auroc", title="another data set: AUROC, entropy", better="higher"),
    report.Column("other_epistemic_auroc", title="epistemic", better="higher"),
)
DECISIONS = (
    report.Column("pooled_aurc", title="AURC", digits=4, better="lower"),
    report.Column(
        "accuracy_at_80", title="accuracy on the most confident four fifths", better="higher"
    ),
    report.Column("set_coverage", title=f"conformal coverage, target {1 - ALPHA:g}"),
    report.Column("set_lowest", title="lowest client"),
    report.Column("set_size", title="classes in a set", digits=2, better="lower"),
)
POSTERIOR = (
    report.Column("log10_precision", title="predictive precision, log10", digits=1),
    report.Column("uncurved", title="share without curvature", digits=2),
    report.Column("seconds", title="a round (ms)", scale=1000, digits=0),
)


def _body(preset: Preset) -> dict[str, Any]:
    return {"steps": preset.steps, "batch_size": preset.batch_size, "optimiser": SGD(preset.lr)}


def _both(preset: Preset) -> dict[str, Any]:
    return {"body_epochs": max(1, preset.steps // 5), "batch_size": preset.batch_size}


def _head(model: torch.nn.Module, preset: Preset) -> tuple[Any, ...]:
    """FedSI's fine-tuning, the same for every method that fine-tunes."""
    return bf.algorithms.fedsi(model, **_body(preset)).finetune


def _plain(algorithm: bf.Algorithm, preset: Preset) -> bf.Algorithm:
    """The method with the same steps as FedSI's."""
    (step,) = algorithm.phases
    return replace(
        algorithm,
        phases=(
            replace(
                step, steps=preset.steps, batch_size=preset.batch_size, optimiser=SGD(preset.lr)
            ),
        ),
    )


def fedavg(model: torch.nn.Module, preset: Preset) -> bf.Algorithm:
    """FedAvg, told apart as body and head, so that the head alone can be fine-tuned."""
    blocks = {name: bf.Block(f"{name}.*") for name in ("body", "head")}
    return replace(_plain(bf.algorithms.fedper(model), preset), blocks=blocks, adapt=())


def halves(split: ClientData) -> tuple[ClientData, ClientData]:
    """Two disjoint parts of every client's examples."""
    parts = []
    for start in (0, 1):
        rows = [split.rows(j)[start::2] for j in range(split.clients)]
        parts.append(replace(split, index=torch.cat(rows), counts=np.array([len(r) for r in rows])))
    return parts[0], parts[1]


def shown(split: ClientData, images: Callable[[int], Tensor]) -> ClientData:
    """The clients of `split`, each shown other images [n_j, ...]."""
    x = split.x.clone()
    for j in range(split.clients):
        x[split.rows(j)] = images(j)[: len(split.rows(j))].to(x)
    return replace(split, x=x)


def first(split: ClientData, count: int) -> ClientData:
    """The first `count` examples of every client."""
    rows = [split.rows(j)[:count] for j in range(split.clients)]
    return replace(split, index=torch.cat(rows), counts=np.array([len(r) for r in rows]))


def strangers(
    clients: FederatedData, seed: int, elsewhere: FederatedData | None = None
) -> dict[str, list[ClientData]]:
    """Some of each client's own test examples, and what it was not trained for.

    That is labels it never saw (another client's images), its own images with permuted pixels,
    those of another data set if there is one.
    """
    own = first(clients.test, LOOKED_AT)
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


def probs_of(found: Any) -> Tensor:
    """Class probabilities [J, N, O]."""
    assert found.probs is not None
    return found.probs


def measure(
    result: Any, outside: dict[str, list[ClientData]], draws: int | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Everything that is measured of a method's predictions, and what the figures need.

    Args:
        result: What the federation has learnt.
        outside: What `strangers` gives.
        draws: Of its predictions, as in `Result.predict`.
    """
    data = result.data
    labels, mask = data.test.padded_labels()
    own = result.predict(draws=draws)

    def quality(probs: Tensor, *names: str) -> dict[str, float]:
        summary = classification_summary(probs, labels, mask, bins=BINS)
        return {name: summary[name] for name in names}

    splits = (*halves(data.calibration), data.test)
    outputs, (seen, held, test) = (
        Outputs(data.task, data.outputs),
        result.local_predictions(*splits, draws=draws),
    )
    pooled = fit(Temperature(strength=math.inf), seen, outputs)
    row = quality(probs_of(own), "accuracy", "nll", "ece", "mce", "brier")
    for name, one in (("pooled", pooled), ("client", fit(Temperature(), seen, outputs))):
        tempered = quality(probs_of(one.apply(test).predictions), "nll", "ece", "mce", "brier")
        row |= {f"{key}_{name}": value for key, value in tempered.items()}
    covered = audit(
        fit(Conformal(level=1 - ALPHA), held, outputs).apply(test), outputs, names=data.client_names
    )
    row |= {
        "set_coverage": float(covered.coverage.mean()),
        "set_lowest": float(covered.coverage.min()),
        "set_size": float(covered.size.mean()),
    }
    selective = detection.selective_summary(probs_of(own), labels, mask)
    row |= {key: selective[key] for key in ("pooled_aurc", "accuracy_at_80")}

    def uncertainty(found: Any) -> dict[str, Tensor]:
        scores = {
            name: score
            for name, score in detection.scores(found).items()
            if name in ("entropy", "epistemic")
        }
        return scores | {
            "tempered": detection.entropy(
                probs_of(pooled.apply(replace(test, predictions=found)).predictions)
            )
        }

    here = result.predict(outside["own"][0], draws=draws)
    for name in [key for key in outside if key != "own"]:
        told = []
        for split in outside[name]:
            there = result.predict(split, draws=draws)
            told.append(
                detection.detection_summary(
                    uncertainty(here), uncertainty(there), here.mask, there.mask
                )
            )
        row |= {f"{name}_{key}": float(np.mean([t[key] for t in told])) for key in told[0]}
    return row, {"diagram": (probs_of(own), labels, mask), "coverage": covered}


def readings(name: str) -> dict[str, tuple[dict[str, Any], int | None]]:
    """Rows of the tables that a method makes: {title: options of its predictions, number of
    draws}.
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


def read(
    result: Any, name: str, model: torch.nn.Module, preset: Preset, rule: dict[str, Any]
) -> Any:
    """What the method has learnt, predicting by other options."""
    return replace(result, algorithm=METHODS[name](model, preset, **rule)) if rule else result


def federation(
    dataset: str, preset: Preset, seed: int, root: Path | None, download: bool = False
) -> FederatedData:
    """The clients."""
    return bf.data.label_groups(
        dataset,
        train=preset.train,
        test=preset.test,
        seed=seed,
        validation=0.1,
        calibration=0.2,
        root=root,
        download=download,
    )


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
        "--methods",
        nargs="+",
        choices=list(METHODS),
        default=list(METHODS),
        help="methods to run (default: all)",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="seeds, one run for each (default: 0 1 2)",
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of the federation (default: 30 for digits, else 100)"
    )
    parser.add_argument(
        "--train",
        type=int,
        help="training examples of each class and client (default: 24 for digits, else 50)",
    )
    parser.add_argument(
        "--test",
        type=int,
        help="test examples of each class and client (default: 10 for digits, else 950)",
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
        default=Path("runs/fedsi"),
        help="folder of the tables and figures (default: %(default)s)",
    )
    return parser.parse_args(argv)


def compare(options: argparse.Namespace) -> None:
    """Runs every method with every seed, prints and writes the tables.

    Raises:
        ValueError: Arguments that don't work out.
        FileNotFoundError: The data are not there.
        DivergenceError: Training left the finite numbers.
    """
    refuse_repeats({name: getattr(options, name) for name in ("methods", "seeds")})
    one_experiment(options.out, {name: getattr(options, name) for name in EXPERIMENT})
    given = {
        name: getattr(options, name)
        for name in ("rounds", "train", "test")
        if getattr(options, name) is not None
    }
    preset = replace(PRESETS[options.dataset], **given)
    rows: dict[str, dict[str, list[float]]] = {}
    shown_first: dict[str, dict[str, Any]] = {}
    for seed in options.seeds:
        clients = federation(options.dataset, preset, seed, options.data_root, options.download)
        other = OTHER.get(options.dataset)
        elsewhere = (
            None
            if other is None
            else federation(other, preset, seed, options.data_root, options.download)
        )
        outside = strangers(clients, seed, elsewhere)
        print(f"seed {seed}: {clients}, partition {clients.hash[:12]}", flush=True)
        model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes, seed=seed)
        for name in options.methods:
            result = bf.simulate(
                METHODS[name](model, preset),
                clients,
                rounds=preset.rounds,
                train="cohort",
                sampling="fixed",
                seed=seed,
                evaluate_every=None,
                engine=bf.Engine(workers=options.workers),
            )
            posterior = {"seconds": float(np.median(result.history["seconds"]))}
            if "uncurved_share" in result.server:
                posterior["uncurved"] = float(result.server["uncurved_share"])
            for title, (rule, draws) in readings(name).items():
                reading = read(result, name, model, preset, rule)
                row, figures = measure(reading, outside, draws)
                if draws is None:
                    row["log10_precision"] = math.log10(reading.tuned)
                for key, value in (row | posterior).items():
                    rows.setdefault(title, {}).setdefault(key, []).append(value)
                shown_first.setdefault(title, figures)
            record = {
                "arguments": vars(options),
                "preset": vars(preset),
                "environment": report.environment(),
                "rows": rows,
            }
            report.write_json(options.out / "table.json", record)
    there = {key for row in rows.values() for key in row}
    tables = [
        [column for column in columns if column.key in there]
        for columns in (QUALITY, DOUBT, DECISIONS, POSTERIOR)
    ]
    text = "\n\n".join(report.table(rows, columns=columns) for columns in tables)
    print(
        f"\n{options.dataset}, {preset.rounds} rounds; mean over clients, then mean ± standard "
        f"error of {len(options.seeds)} seeds; * best"
    )
    print(f"\n{text}")
    atomic_write(options.out / "tables.txt", text + "\n")
    diagrams = {title: figures["diagram"] for title, figures in shown_first.items()}
    covered = {title: figures["coverage"] for title, figures in shown_first.items()}
    pictures = {
        "reliability.png": bf.plots.reliability_compare(diagrams, bins=BINS, columns=3),
        "risk_coverage.png": bf.plots.risk_coverage(diagrams).figure,
        "coverage.png": bf.plots.coverage(
            {title: found for title, found in covered.items() if title in COVERED} or covered
        ),
    }
    for name, figure in pictures.items():
        with atomic_path(options.out / name) as temporary:
            figure.savefig(temporary, dpi=120, bbox_inches="tight")
    print(f"\ntables and figures are in {options.out}")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, or 1 where training diverged, or 2 where the arguments don't work out."""
    options = arguments(argv)
    torch.set_num_threads(1)
    try:
        compare(options)
    except (bf.DivergenceError, ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, bf.DivergenceError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
