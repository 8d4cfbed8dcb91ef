"""Compare which weights of one network stay uncertain: Laplace approximations of a trained
classifier, without federation.

    python examples/subnetwork_laplace.py  # handwritten digits, seconds
    python examples/subnetwork_laplace.py --dataset mnist --data-root DIR  # real MNIST

One network is trained on few examples (`--examples`). The script compares these posteriors around
its weights: none (the MAP), a Gaussian over every weight on its own, one with Kronecker factors
(laplace-torch's), one over the last layer, one over all weights together, and one over 5 % of them,
chosen by each rule of `bf.selection`. Every prior precision is chosen on validation data. The
script prints:

- accuracy, NLL and ECE on test data;
- how well the predictive entropy, and its epistemic part, distinguish test data from the same
images with permuted pixels;
- the share of the subnetwork that has no curvature.

Reliability diagrams are written into a run folder.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import bayesfl as bf
from bayesfl.base.files import atomic_path, atomic_write
from bayesfl.data import load
from bayesfl.evaluation import report
from bayesfl.evaluation.detection import auroc, entropy
from bayesfl.evaluation.metrics import classification_summary
from bayesfl.posteriors import Laplace, selection
from bayesfl.posteriors.prior_precision import by_validation

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from command_line import arguments

DRAWS = 200
NOTE = (
    "Permuted pixels light some that were constant in training. A subnetwork of weights without "
    "curvature sees these alone: its epistemic AUROC counts changed pixels, and says nothing about "
    "images that look like the training data."
)
COLUMNS = (
    report.Column("accuracy", better="higher"),
    report.Column("nll", title="NLL (nats)", better="lower"),
    report.Column("ece", better="lower"),
    report.Column("entropy_auroc", title="far AUROC: entropy", better="higher"),
    report.Column("epistemic_auroc", title="epistemic", better="higher"),
    report.Column("log10_precision", title="precision, log10", digits=1),
    report.Column("uncurved_share", title="share without curvature", digits=2),
    report.Column("order", title="order of the factor", digits=0),
    report.Column("seconds", digits=2),
)


def train(
    model: torch.nn.Module, x: Tensor, y: Tensor, *, precision: float, steps: int = 400
) -> torch.nn.Module:
    """The MAP under an isotropic Gaussian prior, by full-batch Adam."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        prior = 0.5 * precision * sum(p.square().sum() for p in model.parameters())
        (torch.nn.functional.cross_entropy(model(x), y, reduction="sum") + prior).div(
            len(x)
        ).backward()
        optimiser.step()
    return model.requires_grad_(True)


def told_apart(near: Tensor, far: Tensor) -> float:
    """AUROC of scores [N] of test data against [M] of what is far from them."""
    near, far = near[None], far[None]
    return float(
        auroc(
            near,
            far,
            torch.ones_like(near, dtype=torch.bool),
            torch.ones_like(far, dtype=torch.bool),
        )[0]
    )


def measures(probs: Tensor, labels: Tensor, far: Tensor) -> dict[str, float]:
    """Accuracy, NLL and ECE of probabilities [N, O], and the AUROC of their entropy against that of
    `far` [M, O].
    """
    summary = classification_summary(
        probs[None], labels[None], torch.ones(1, len(labels), dtype=torch.bool)
    )
    return {name: summary[name] for name in ("accuracy", "nll", "ece")} | {
        "entropy_auroc": told_apart(entropy(probs), entropy(far))
    }


def run(given: argparse.Namespace, seed: int) -> dict[str, tuple[dict[str, float], Tensor, Tensor]]:
    """{method: what was measured, its probabilities on the test data, their labels}."""
    source = load(given.dataset, root=given.data_root)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(source.x[: source.train]), generator=rng)[
        : given.examples + given.validation
    ]
    x, y = source.x[: source.train][order], source.y[: source.train][order].long()
    (x, held), (y, labels) = (t.split([given.examples, given.validation]) for t in (x, y))
    test, truth = source.x[source.train :][:2000], source.y[source.train :][:2000].long()
    pixels = torch.randperm(test[0].numel(), generator=rng)
    far = test.flatten(1)[:, pixels].view_as(test)
    model = train(
        bf.models.mlp(tuple(x.shape[1:]), hidden=100, outputs=10, seed=seed),
        x,
        y,
        precision=given.precision,
    )

    fit = partial(Laplace.fit, model, x, precision=1.0)
    fits: dict[str, Callable[[], Laplace]] = {
        "every weight on its own": partial(fit, structure="diagonal"),
        "Kronecker factors": partial(fit, structure="kfac"),
        "last layer": partial(fit, structure="last_layer"),
        "all weights": fit,
    } | {
        f"{given.share:g} of weights: {rule}": partial(
            fit,
            precision=given.precision,
            structure="subnetwork",
            share=given.share,
            selection=rule,
            seed=seed,
        )
        for rule in selection.RULES
    }

    with torch.no_grad():
        plain = {name: model(t).softmax(-1).double() for name, t in (("test", test), ("far", far))}
    found = {"MAP": (measures(plain["test"], truth, plain["far"]), plain["test"], truth)}
    for name, fitting in fits.items():
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the share without curvature is in the table
            fitted = by_validation(fitting(), x, held, labels)
        probs = fitted.predict(test)["probs"]
        row = measures(probs, truth, fitted.predict(far)["probs"]) | {
            "seconds": time.perf_counter() - start
        }
        noise = torch.randn(DRAWS, len(test), 10, generator=rng, dtype=torch.float64)
        row["epistemic_auroc"] = told_apart(
            *(fitted.predict(t, noise=noise)["epistemic"] for t in (test, far))
        )
        row |= {
            "log10_precision": float(fitted.precision[0].log10()),
            "order": float(fitted.inverse.order),
        }
        if (chosen := fitted.indices) is not None:
            prior = torch.full_like(fitted.loc, 1 / given.precision)
            evidence = selection.Evidence(fitted.loc, fitted.diagonal, prior)
            row["uncurved_share"] = selection.uncurved_share(evidence, chosen)
        found[name] = row, probs, truth
    return found


def compare(options: argparse.Namespace) -> None:
    """Run all seeds, print the table, write it and the diagrams."""
    runs = [run(options, seed) for seed in options.seeds]
    rows = {
        name: {key: [r[name][0][key] for r in runs] for key in runs[0][name][0]} for name in runs[0]
    }
    table = report.table(rows, columns=COLUMNS)
    print(f"{table}\n\n{NOTE}")
    report.write_json(
        options.out / "table.json",
        {"arguments": vars(options), "environment": report.environment(), "rows": rows},
    )
    atomic_write(options.out / "table.txt", f"{table}\n\n{NOTE}\n")
    figure = bf.plots.reliability_compare(
        {name: (probs, truth, None) for name, (_, probs, truth) in runs[0].items()}
    )
    with atomic_path(options.out / "reliability.png") as path:
        figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Read the command line, and compare."""
    torch.set_num_threads(1)
    compare(
        arguments(
            __doc__,
            argv,
            dataset=("digits", "small images with classes: digits, mnist, fashion-mnist"),
            data_root=None,
            examples=(150, "training examples"),
            validation=(100, "examples that choose precisions"),
            share=(0.05, "share of the weights in a subnetwork"),
            precision=(0.01, "precision of the training prior, for a sum over the data"),
            seeds=[0, 1, 2],
            out=Path("runs/subnetwork_laplace"),
        )
    )


if __name__ == "__main__":
    main()
