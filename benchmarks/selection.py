"""Compare rules for the weights that a subnetwork keeps uncertain: is it worth it? The rules of
bayesfl.selection on one client's images.

    python benchmarks/selection.py [--quick] [--parts PART ...] [--figure] [--data-root DIR]

One MLP 784-100-10 for each data set, scaling of the inputs ([0, 1] or the FedSI paper's [-1, 1])
and seed, trained on 250 images of five classes. Around its body stand Laplace approximations: of
every weight on its own, of all together, of a share that a rule chooses; beside them the MAP, the
MAP at one temperature, and the last layer alone. Predictions are class-wise, as the FedSI paper's.
Precision and temperature are those of least NLL on the same 100 validation images. Measured are
test images of the five classes, images of the other five, of the other data set, and with permuted
pixels; and test images on which a corner that was constant in training is lit (part `alone`). In
part `pooled` the three networks of a cell share one precision, or temperature, chosen on the 300
validation images of all, as the clients of a federation would. Part `control` needs no network: it
tells images apart by how many pixels they change that were constant in training.

Results: benchmarks/results/selection.json and docs/images/selection.png (--figure draws it from the
results that are there); `python docs/tables.py` writes docs/selection.md's tables from them.
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.base.files import atomic_path
from bayesfl.evaluation import calibration, report
from bayesfl.evaluation.detection import auroc, entropy
from bayesfl.evaluation.metrics import classification_summary
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from bayesfl.posteriors import Laplace, selection
from bayesfl.posteriors.linearised import predictive
from bayesfl.posteriors.prior_precision import predictive_nll

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "selection.json"
FIGURE = ROOT / "docs" / "images" / "selection.png"
PARTS = ("alone", "pooled", "control")
SCALINGS = {"[0, 1]": (0.0, 1.0), "[-1, 1]": (-1.0, 1.0)}
OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
GRID = tuple(10.0**k for k in range(-4, 7))
"""Precisions that are tried first; then the neighbours of the best by half a decade."""
TRAINING_PRECISION = 1e-4
"""Of the prior that rules see, the default of bf.algorithms.fedsi; it decides what counts as
curvature, not the order of weights.
"""
FIXED = (1e-2, 1.0, 1e2)
"""Precisions at which some posteriors are measured without choosing."""
TOGETHER = (
    "every weight on its own",
    "last layer",
    "whole body",
    "5 %: wasserstein",
    "5 %: random",
)
"""Posteriors that are also measured at one precision for all networks of a cell."""
BINS = 10
DRAWS = 100
SHOWN = (
    "accuracy",
    "nll",
    "nll_tempered",
    "ece",
    "near_entropy",
    "near_epistemic",
    "log10_precision",
)
PATCH = 9  # pixels that are lit
Predict = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Inputs to class probabilities [N, O], and their epistemic part [N] where there is one."""


@dataclass(frozen=True)
class Sizes:
    """The size of the study.

    Args:
        train: Training images of each class.
        test: Test images of each class, those to choose a precision on included.
        validation: Images to choose a precision on.
        outside: Images of each kind that no class of training is in, and test images that are lit.
        steps: Mini-batches of SGD.
        grid: Precisions.
    """

    train: int = 50
    test: int = 420
    validation: int = 100
    outside: int = 500
    steps: int = 2000
    grid: tuple[float, ...] = GRID


QUICK = Sizes(train=12, test=30, validation=50, outside=60, steps=100, grid=(1.0, 1e2))


@dataclass(frozen=True)
class Images:
    """The images that one network is trained and measured on.

    Args:
        x: Training images.
        y: Their labels.
        held: Validation images.
        held_y: Their labels.
        test: Test images.
        test_y: Their labels.
        outside: Images of elsewhere: of unseen classes (`near`), of another data set (`other`),
            with permuted pixels (`permuted`).
        lit: The first test images with the lit corner.
        constant: Which pixels are the same in all training images, [784] bool.
        about: What is worth knowing of them.
    """

    x: Tensor
    y: Tensor
    held: Tensor
    held_y: Tensor
    test: Tensor
    test_y: Tensor
    outside: dict[str, Tensor]
    lit: Tensor
    constant: Tensor
    about: dict[str, float]

    def changed(self, x: Tensor) -> Tensor:
        """Count how many of the pixels that are constant in training are not so in each of `x`,
        [N].
        """
        return (x.flatten(1) != self.x[0].flatten())[:, self.constant].sum(1).double()


def images(dataset: str, scaling: str, seed: int, sizes: Sizes, root: Path | None) -> Images:
    """Client 0's images, and those of elsewhere; every scaling shows the same ones."""
    low, high = SCALINGS[scaling]

    def scaled(x: Tensor) -> Tensor:
        # label_groups gives [-1, 1], here exact at both ends.
        return ((x + 1) * 127.5).round() / 255 * (high - low) + low

    options: dict[str, Any] = {
        "clients": 2,
        "train": sizes.train,
        "test": sizes.test,
        "seed": seed,
        "root": root,
    }
    clients = bf.data.label_groups(dataset, **options)
    rng = torch.Generator().manual_seed(seed)
    x, y = clients.train.client(0)
    own, own_y = clients.test.client(0)
    order = torch.randperm(len(own), generator=rng)
    own, own_y = scaled(own[order]), own_y[order]
    test, count = own[sizes.validation :], sizes.outside

    def some(split: Any, client: int, count: int) -> Tensor:
        found = scaled(split.client(client)[0])
        return found[torch.randperm(len(found), generator=rng)[:count]]

    pixels = torch.randperm(test[0].numel(), generator=rng)
    outside = {
        "near": some(clients.test, 1, count),
        "permuted": test[:count].flatten(1)[:, pixels].view_as(test[:count]),
    }
    if dataset in OTHER:
        strangers = bf.data.label_groups(OTHER[dataset], **options).test
        outside["other"] = torch.cat([some(strangers, j, count // 2) for j in (0, 1)])
    x = scaled(x)
    constant = (x == x[0]).all(0).flatten()
    side = math.isqrt(len(constant))
    place = torch.arange(len(constant))
    distance = (place // side).square() + (place % side).square()
    corner = torch.where(constant, distance, 10 * side**2).argsort(stable=True)[:PATCH]
    lit = test[:count].flatten(1).clone()
    lit[:, corner] = high
    data = Images(
        x=x,
        y=y,
        held=own[: sizes.validation],
        held_y=own_y[: sizes.validation],
        test=test,
        test_y=own_y[sizes.validation :],
        outside=outside,
        lit=lit.view_as(test[:count]),
        constant=constant,
        about={},
    )
    about = {
        "constant_pixels": float(constant.double().mean()),
        "changed_by_themselves": float((data.changed(test) > 0).double().mean()),
    }
    return replace(data, about=about)


def train(model: nn.Module, x: Tensor, y: Tensor, seed: int, steps: int) -> nn.Module:
    """SGD of rate 0.1 on mini-batches of 50, as the authors of FedSI train a client; no prior."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    rng = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        for rows in torch.randperm(len(x), generator=rng).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
            done += 1
    return model


def told_apart(near: Tensor, far: Tensor) -> float:
    """AUROC of scores [N] of test images against [M] of others."""
    near, far = near[None], far[None]
    return float(
        auroc(
            near,
            far,
            torch.ones_like(near, dtype=torch.bool),
            torch.ones_like(far, dtype=torch.bool),
        )[0]
    )


def quality(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL and ECE of probabilities [N, O]."""
    summary = classification_summary(
        probs[None], labels[None], torch.ones(1, len(labels), dtype=torch.bool), bins=BINS
    )
    return {name: summary[name] for name in ("accuracy", "nll", "ece")}


def temperature(probs: Tensor, labels: Tensor) -> float:
    """The one temperature that serves labels [N] best."""
    return float(1 / fitted_temperature(probs[None], labels[None]).state["beta"])


def fitted_temperature(probs: Tensor, labels: Tensor) -> calibration.Fitted:
    """One temperature of several networks' probabilities [J, N, O] for labels [J, N]."""
    step = calibration.Temperature(strength=math.inf)
    return calibration.fit(step, mine(probs, labels), Outputs("classification", probs.shape[-1]))


def mine(probs: Tensor, labels: Tensor) -> LocalPredictions:
    """Probabilities [J, N, O] and labels [J, N] as predictions of as many clients."""
    everyone = torch.ones(labels.shape, dtype=torch.bool)
    return LocalPredictions(
        Predictions(
            mask=everyone, epistemic=torch.full(labels.shape, torch.nan), probs=probs, labels=labels
        ),
        np.arange(len(probs)),
    )


def on_lit(predict: Predict, data: Images, probs: Tensor) -> dict[str, float]:
    """NLL on test images with the lit corner, and by how much that is more than on the same images
    without, given as `probs` [N, O].
    """
    count = len(data.lit)
    before, after = (
        quality(found, data.test_y[:count])["nll"]
        for found in (probs[:count], predict(data.lit)[0])
    )
    return {"lit_nll": after, "lit_change": after - before}


def measure(predict: Predict, data: Images, *, everything: bool = True) -> dict[str, float]:
    """Compute what is measured of predictions: everything, or of images from elsewhere and lit ones
    those of unseen classes alone.
    """
    start = time.process_time()
    probs, epistemic = predict(data.test)
    row = quality(probs, data.test_y) | {
        "predict_seconds": (time.process_time() - start) / len(data.test) * 1000
    }
    best = fitted_temperature(predict(data.held)[0][None], data.held_y[None])
    tempered = best.apply(mine(probs[None], data.test_y[None])).predictions.probs
    row |= {
        "temperature": float(1 / best.state["beta"]),
        "nll_tempered": quality(tempered[0], data.test_y)["nll"],
    }
    for name in data.outside if everything else ("near",):
        there, doubt = predict(data.outside[name])
        row[f"{name}_entropy"] = told_apart(entropy(probs), entropy(there))
        if epistemic is not None and doubt is not None:
            row[f"{name}_epistemic"] = told_apart(epistemic, doubt)
    return row | on_lit(predict, data, probs) if everything else row


def at_point(model: nn.Module, temperature: float = 1.0) -> Predict:
    """Predictions of the weights as they are."""

    def predict(x: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            return (model(x).double() / temperature).softmax(-1), None

    return predict


def of_posterior(fitted: Laplace, noise: Tensor) -> Predict:
    """Predictions in closed form; the epistemic part from draws of the outputs by standard normals
    [S, N, O].
    """

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        moments = fitted.linearised(x)
        likelihood = fitted.curvature.likelihood
        probs = predictive(likelihood, *moments, link="per_class")["probs"]
        return probs, predictive(likelihood, *moments, noise[:, : len(x)])["epistemic"]

    return predict


def dead(model: nn.Module, x: Tensor) -> Tensor:
    """Find which hidden units no example [N, ...] activates, [H] bool."""
    body = model.get_submodule("body")
    with torch.no_grad():
        return (body(x) == 0).all(0)


@dataclass(frozen=True)
class Posterior:
    """An approximation to be made, and what is known of it beforehand.

    Args:
        options: Of `Laplace.fit`.
        about: What goes into its row.
    """

    options: dict[str, Any]
    about: dict[str, float]


def posteriors(model: nn.Module, data: Images, seed: int, *, few: bool) -> dict[str, Posterior]:
    """{row: the approximation}, subnetworks chosen."""
    body: dict[str, Any] = {"pattern": "body.*"}
    diagonal = Laplace.fit(model, data.x, structure="diagonal", **body)
    evidence = selection.Evidence(
        diagonal.loc, diagonal.diagonal, torch.full_like(diagonal.loc, 1 / TRAINING_PRECISION), seed
    )
    size = len(evidence.loc)
    silent, inputs, place = dead(model, data.x), data.x[0].numel(), torch.arange(size)
    units = len(silent)
    # Weights [units, inputs], then biases.
    unit = torch.where(place < units * inputs, place // inputs, place - units * inputs)

    def about(indices: Tensor) -> dict[str, float]:
        return {
            "uncurved": selection.uncurved_share(evidence, indices),
            "in_dead_units": float(silent[unit[indices]].double().mean()),
            "median_curvature": float(evidence.curvature[indices].median()),
            "share": len(indices) / size,
        }

    everything = about(place)
    found = {
        "every weight on its own": Posterior(body | {"structure": "diagonal"}, everything),
        "last layer": Posterior({"pattern": "head.*"}, {}),
        "whole body": Posterior(body | {"structure": "full"}, everything),
    }
    shares = {"wasserstein": (0.01, 0.05, 0.2), "random": (0.01, 0.05, 0.2)}
    for name in selection.RULES:
        for share in (0.05,) if few else shares.get(name, (0.05,)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it warns of is in the results
                chosen = selection.select(name, evidence, round(share * size))
            found[f"{100 * share:.0f} %: {name}"] = Posterior(
                body | {"structure": "subnetwork", "indices": chosen}, about(chosen)
            )
    return found


def cell(
    dataset: str, scaling: str, seed: int, sizes: Sizes, root: Path | None, *, few: bool
) -> dict[str, Any]:
    """One network: {"network": about it, "rows": {row: measures}, "fixed": {row: measures at a
    precision that nobody chose}}.
    """
    data = images(dataset, scaling, seed, sizes, root)
    model = bf.models.mlp(tuple(data.x.shape[1:]), hidden=100, outputs=10, seed=seed)
    train(model, data.x, data.y, seed, sizes.steps)
    plain = at_point(model)
    best = temperature(plain(data.held)[0], data.held_y)
    rows = {
        "MAP": measure(plain, data),
        "MAP, one temperature": measure(at_point(model, best), data) | {"temperature": best},
    }
    planned = posteriors(model, data, seed, few=few)
    noise = torch.randn(
        DRAWS,
        len(data.test),
        10,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    chosen: dict[str, float] = {}
    for name, posterior in planned.items():
        chosen[name] = chosen_together(
            [Laplace.fit(model, data.x, **posterior.options)], [data], sizes.grid
        )
        start = time.process_time()
        fitted = Laplace.fit(model, data.x, precision=chosen[name], **posterior.options)
        seconds = time.process_time() - start
        rows[name] = measure(of_posterior(fitted, noise), data) | posterior.about
        rows[name] |= {
            "log10_precision": math.log10(chosen[name]),
            "at_edge": float(chosen[name] in (sizes.grid[0], sizes.grid[-1])),
            "order": float(fitted.inverse.order),
            "seconds": seconds,
        }
    for name in [name for name in planned if name.startswith("5 %")]:
        precision = chosen["whole body"] * planned[name].about["share"]
        fitted = Laplace.fit(model, data.x, precision=precision, **planned[name].options)
        row = measure(of_posterior(fitted, noise), data, everything=False) | planned[name].about
        rows[f"{name}, scaled precision"] = row | {"log10_precision": math.log10(precision)}
    first = replace(
        data,
        test=data.test[: sizes.outside],
        test_y=data.test_y[: sizes.outside],
        outside={"near": data.outside["near"]},
    )
    fixed = {"MAP": measure(plain, first)}
    for name in ("5 %: wasserstein", "5 %: curved_wasserstein", "5 %: random", "whole body"):
        for precision in FIXED:
            fitted = Laplace.fit(model, data.x, precision=precision, **planned[name].options)
            fixed[f"{name}, precision {precision:g}"] = measure(of_posterior(fitted, noise), first)
    network = data.about | {
        "train_nll": quality(plain(data.x)[0], data.y)["nll"],
        "dead_units": float(dead(model, data.x).double().mean()),
        "uncurved": planned["whole body"].about["uncurved"],
    }
    return {"network": network, "rows": rows, "fixed": fixed}


def chosen_together(fits: list[Laplace], all_data: list[Images], grid: tuple[float, ...]) -> float:
    """The precision of least NLL on the validation images of all networks, by decades and then by
    half a decade, within the grid.
    """

    @cache
    def score(precision: float) -> float:
        total = 0.0
        for fitted, data in zip(fits, all_data, strict=True):
            total += predictive_nll(
                fitted.with_precision(data.x, precision), data.held, data.held_y, link="per_class"
            )
        return total

    best = min(grid, key=score)
    return min(
        (
            best,
            *(
                best * factor
                for factor in (10**-0.5, 10**0.5)
                if grid[0] <= best * factor <= grid[-1]
            ),
        ),
        key=score,
    )


def pooled(
    dataset: str, scaling: str, seeds: tuple[int, ...], sizes: Sizes, root: Path | None
) -> dict[str, dict[str, list[float]]]:
    """{row: measures of each network} where all networks of a cell have one precision or
    temperature.
    """
    all_data = [images(dataset, scaling, seed, sizes, root) for seed in seeds]
    models = [
        bf.models.mlp(tuple(data.x.shape[1:]), hidden=100, outputs=10, seed=seed)
        for data, seed in zip(all_data, seeds, strict=True)
    ]
    networks = list(
        zip(
            [
                train(m, d.x, d.y, s, sizes.steps)
                for m, d, s in zip(models, all_data, seeds, strict=True)
            ],
            all_data,
            strict=True,
        )
    )
    held = torch.stack([at_point(m)(d.held)[0] for m, d in networks])
    labels = torch.stack([d.held_y for d in all_data])
    best = float(1 / fitted_temperature(held, labels).state["beta"])
    found = {"MAP": [measure(at_point(m), d, everything=False) for m, d in networks]}
    found["MAP, one temperature"] = [
        measure(at_point(m, best), d, everything=False) | {"temperature": best} for m, d in networks
    ]
    planned = [
        posteriors(m, d, seed, few=True) for (m, d), seed in zip(networks, seeds, strict=True)
    ]
    noise = torch.randn(
        DRAWS,
        len(all_data[0].test),
        10,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    for name in TOGETHER:
        fits = [
            Laplace.fit(m, d.x, **of[name].options)
            for (m, d), of in zip(networks, planned, strict=True)
        ]
        precision = chosen_together(fits, all_data, sizes.grid)
        found[name] = []
        for fitted, data in zip(fits, all_data, strict=True):
            row = measure(
                of_posterior(fitted.with_precision(data.x, precision), noise),
                data,
                everything=False,
            )
            found[name].append(row | {"log10_precision": math.log10(precision)})
    return {
        name: {key: [row[key] for row in rows] for key in rows[0]} for name, rows in found.items()
    }


def control(
    dataset: str, scaling: str, seeds: tuple[int, ...], sizes: Sizes, root: Path | None
) -> dict[str, dict[str, list[float]]]:
    """{row: AUROCs} of the number of pixels that an image changes though they were constant in
    training; no network at all.
    """
    all_data = [images(dataset, scaling, seed, sizes, root) for seed in seeds]
    found = {
        name: [told_apart(d.changed(d.test), d.changed(d.outside[name])) for d in all_data]
        for name in all_data[0].outside
    }
    return {"changed constant pixels": {f"{name}_count": values for name, values in found.items()}}


def collected(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Cells of several seeds as one: every number becomes a list."""
    together: dict[str, Any] = {
        "network": {key: [c["network"][key] for c in cells] for key in cells[0]["network"]}
    }
    for part in ("rows", "fixed"):
        together[part] = {
            name: {key: [c[part][name][key] for c in cells] for key in row}
            for name, row in cells[0][part].items()
        }
    return together


WORDS = {
    "wasserstein": "by Wasserstein distance",
    "curved_wasserstein": "by Wasserstein distance among weights with curvature",
    "magnitude": "by magnitude",
    "random": "at random",
    "predictive_variance": "by predictive variance",
}
DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}


def in_words(name: str) -> str:
    """Return a method's name in the results as a label: `5 %: random, scaled precision` is 0.05 of
    weights at random, scaled precision.
    """
    share, _, rule = name.partition(" %: ")
    rule, comma, rest = rule.partition(", ")
    return (
        f"{int(share) / 100:g} of weights {WORDS[rule]}{comma}{rest}"
        if rule
        else name[0].upper() + name[1:]
    )


def draw(saved: dict[str, Any]) -> None:
    """The figure: a row of panels for each cell, NLL on the left, AUROC of unseen classes on the
    right; a line for each method.
    """
    from matplotlib.figure import Figure

    blue, orange, green, grey = "#0072B2", "#D55E00", "#009E73", "#8A8F94"
    panels = [
        (dataset, scaling, found)
        for dataset, by in saved["alone"]["results"].items()
        for scaling, found in by.items()
    ]
    names = [name for name in panels[0][2]["rows"] if "scaled" not in name]
    unseen = {"near_entropy": (blue, "o"), "near_epistemic": (orange, "s")}
    marks = (
        ("nll", "NLL on test images (nats)\nlower is better", {"nll": (blue, "o")}),
        ("near_entropy", "AUROC of unseen classes\nhigher is better", unseen),
    )
    figure = Figure(figsize=(9, 4.6 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 2, sharey=True, squeeze=False)
    for line, (dataset, scaling, found) in enumerate(panels):
        for ax, (base, title, kinds) in zip(axes[line], marks, strict=True):
            for height, name in enumerate(reversed(names)):
                for place, (key, (colour, marker)) in enumerate(kinds.items()):
                    if key in found["rows"][name]:
                        mean, error = report.mean_and_error(found["rows"][name][key])
                        ax.errorbar(
                            mean,
                            height + (0.15 - 0.3 * place) * (len(kinds) > 1),
                            xerr=error,
                            color=colour,
                            marker=marker,
                            markersize=5,
                            capsize=2,
                        )
            ax.axvline(
                report.mean_and_error(found["rows"]["MAP, one temperature"][base])[0],
                color=grey,
                linewidth=1,
                linestyle="--",
            )
            ax.set_yticks(
                range(len(names)),
                [in_words(name).replace(" among", "\namong") for name in reversed(names)],
                linespacing=0.9,
            )
            ax.set_xlabel(title)
            ax.grid(axis="x", alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        counted = saved["control"]["results"][dataset][scaling]["rows"]["changed constant pixels"][
            "near_count"
        ]
        axes[line][1].axvline(
            report.mean_and_error(counted)[0], color=green, linewidth=1.5, linestyle=":"
        )
        axes[line][0].set_title(
            f"{DATASETS[dataset]}, pixels in {scaling}", loc="left", fontweight="bold"
        )
    legend = axes[0][1]
    legend.errorbar(
        [],
        [],
        color=blue,
        marker="o",
        label="NLL (left), AUROC by entropy (right); bars: standard error",
    )
    legend.errorbar([], [], color=orange, marker="s", label="AUROC by epistemic uncertainty")
    legend.plot([], [], color=grey, linestyle="--", label="MAP with one temperature")
    legend.plot(
        [],
        [],
        color=green,
        linestyle=":",
        label="number of changed constant pixels, without a network",
    )
    figure.legend(
        *legend.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False
    )
    with atomic_path(FIGURE) as path:
        figure.savefig(path, dpi=110, format="png")


def main() -> None:
    """Runs all cells, prints their tables, writes results and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="digits, one seed, little training: shows that it runs; nothing is written",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="which to run; the others' results stay (default: all)",
    )
    parser.add_argument(
        "--figure", action="store_true", help="draw the figure from the results that are there"
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    arguments = parser.parse_args()
    if arguments.figure:
        return draw(json.loads(RESULTS.read_text()))
    torch.set_num_threads(1)
    quick = arguments.quick
    sizes, seeds = (QUICK, (0,)) if quick else (Sizes(), (0, 1, 2))
    places = [
        (dataset, scaling) for dataset in (("digits",) if quick else OTHER) for scaling in SCALINGS
    ]
    saved: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() and not quick else {}
    )
    for part in arguments.parts:
        results: dict[str, dict[str, Any]] = {}
        start = time.process_time()
        for dataset, scaling in places:
            found: dict[str, Any]
            if part == "alone":
                found = collected(
                    [
                        cell(dataset, scaling, seed, sizes, arguments.data_root, few=quick)
                        for seed in seeds
                    ]
                )
            else:
                found = {
                    "rows": (pooled if part == "pooled" else control)(
                        dataset, scaling, seeds, sizes, arguments.data_root
                    )
                }
            results.setdefault(dataset, {})[scaling] = found
            shown = None if part == "control" else SHOWN
            print(
                f"\n{dataset}, {scaling}, {part}: "
                f"{found.get('network', '')}\n{report.table(found['rows'], columns=shown)}",
                flush=True,
            )
        saved[part] = {
            "command": " ".join(["python", *sys.argv]),
            "environment": report.environment(),
            "sizes": sizes,
            "seeds": seeds,
            "cpu_seconds": time.process_time() - start,
            "results": results,
        }
        if not quick:
            report.write_json(RESULTS, saved)
    if not quick and set(PARTS) <= set(saved):
        draw(json.loads(RESULTS.read_text()))
    return None


if __name__ == "__main__":
    main()
