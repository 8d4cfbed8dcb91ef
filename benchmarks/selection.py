"""Compare rules for the weights that a subnetwork keeps uncertain: is it worth it? The rules of
bayesfl.selection on one client's images.

    python benchmarks/selection.py [--quick] [--parts PART ...] [--figure]

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
results that are there); `python docs/tables.py` writes the tables of docs/studies/selection.md.
"""

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.evaluation import calibration, report
from bayesfl.evaluation.detection import auroc, entropy
from bayesfl.evaluation.metrics import classification_summary
from bayesfl.evaluation.plots.look import new_figure
from bayesfl.evaluation.surveys import Outputs
from bayesfl.posteriors import Laplace, selection
from bayesfl.posteriors.linearised import predictive
from bayesfl.posteriors.prior_precision import predictive_nll

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
import script

SCALINGS = {"[0, 1]": (0.0, 1.0), "[-1, 1]": (-1.0, 1.0)}
OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
GRID = tuple(10.0**k for k in range(-4, 7))
"""Precisions that are tried first; then the neighbours of the best by half a decade."""
TRAINING_PRECISION = 1e-4
"""Of the prior that rules see, the default of bf.algorithms.fedsi."""
FIXED = (1e-2, 1.0, 1e2)  # precisions at which some posteriors are measured without choosing
AT_FIXED = ("5 %: wasserstein", "5 %: curved_wasserstein", "5 %: random", "whole body")
TOGETHER = "every weight on its own", "last layer", "whole body", "5 %: wasserstein", "5 %: random"
"""Posteriors that are also measured at one precision for all networks of a cell."""
BINS, DRAWS = 10, 100
SHOWN = "accuracy nll nll_tempered ece near_entropy near_epistemic log10_precision".split()
PATCH = 9  # pixels that are lit
Predict = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Inputs to class probabilities [N, O], and their epistemic part [N] where there is one."""
Row = dict[str, float]  # what is measured of predictions, by name


@dataclass(frozen=True)
class Sizes:
    """The size of the study."""

    train: int = 50  # training images of each class
    test: int = 420  # test images of each class, those to choose a precision on included
    validation: int = 100  # images to choose a precision on
    outside: int = 500  # images of each kind of elsewhere, and test images that are lit
    steps: int = 2000  # mini-batches of SGD
    grid: tuple[float, ...] = GRID  # precisions


QUICK = Sizes(train=12, test=30, validation=50, outside=60, steps=100, grid=(1.0, 1e2))


@dataclass(frozen=True)
class Images:
    """The images that one network is trained (`x`), chosen for (`held`) and measured on."""

    x: Tensor
    y: Tensor
    held: Tensor
    held_y: Tensor
    test: Tensor
    test_y: Tensor
    outside: dict[str, Tensor]  # of unseen classes, of another data set, with permuted pixels
    lit: Tensor  # the first test images with the lit corner
    constant: Tensor  # which pixels are the same in all training images, [784] bool

    def changed(self, x: Tensor) -> Tensor:
        """Count the pixels of each of `x` that were constant in training and are not now."""
        return (x.flatten(1) != self.x[0].flatten())[:, self.constant].sum(1).double()


def images(dataset: str, scaling: str, seed: int, sizes: Sizes) -> Images:
    """Return client 0's images, and those of elsewhere; every scaling shows the same ones."""
    low, high = SCALINGS[scaling]

    def scaled(x: Tensor) -> Tensor:
        # label_groups gives [-1, 1], here exact at both ends.
        return ((x + 1) * 127.5).round() / 255 * (high - low) + low

    options: dict[str, Any] = {"train": sizes.train, "test": sizes.test, "seed": seed}
    clients = bf.data.label_groups(dataset, clients=2, **options)
    rng = torch.Generator().manual_seed(seed)
    x, y = clients.train.client(0)
    own, own_y = clients.test.client(0)
    order = torch.randperm(len(own), generator=rng)
    own, own_y = scaled(own[order]), own_y[order]
    held, count = sizes.validation, sizes.outside
    test = own[held:]

    def some(split: Any, client: int, count: int) -> Tensor:
        found = scaled(split.client(client)[0])
        return found[torch.randperm(len(found), generator=rng)[:count]]

    pixels = torch.randperm(test[0].numel(), generator=rng)
    outside = {
        "near": some(clients.test, 1, count),
        "permuted": test[:count].flatten(1)[:, pixels].view_as(test[:count]),
    }
    if dataset in OTHER:
        strangers = bf.data.label_groups(OTHER[dataset], clients=2, **options).test
        outside["other"] = torch.cat([some(strangers, j, count // 2) for j in (0, 1)])
    x = scaled(x)
    constant = (x == x[0]).all(0).flatten()
    side, place = math.isqrt(len(constant)), torch.arange(len(constant))
    distance = (place // side).square() + (place % side).square()
    corner = torch.where(constant, distance, 10 * side**2).argsort(stable=True)[:PATCH]
    lit = test[:count].clone()
    lit.flatten(1)[:, corner] = high
    return Images(x, y, own[:held], own_y[:held], test, own_y[held:], outside, lit, constant)


def trained(data: Images, seed: int, steps: int) -> nn.Module:
    """Return a network after SGD as the authors of FedSI train a client; no prior."""
    model = bf.models.mlp(tuple(data.x.shape[1:]), hidden=100, outputs=10, seed=seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    rng = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        for rows in torch.randperm(len(data.x), generator=rng).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimiser.step()
            done += 1
    return model


def told_apart(near: Tensor, far: Tensor) -> float:
    """Return the AUROC of scores [N] of test images against [M] of others."""
    masks = (torch.ones(1, len(of), dtype=torch.bool) for of in (near, far))
    return float(auroc(near[None], far[None], *masks)[0])


def quality(probs: Tensor, labels: Tensor) -> Row:
    """Return accuracy, NLL and ECE of probabilities [N, O]."""
    everyone = torch.ones(1, len(labels), dtype=torch.bool)
    summary = classification_summary(probs[None], labels[None], everyone, bins=BINS)
    return {name: summary[name] for name in ("accuracy", "nll", "ece")}


def temperature(probs: Tensor, labels: Tensor) -> tuple[float, calibration.Fitted]:
    """Return the one temperature of probabilities [J, N, O], and the step that applies it."""
    step, outputs = calibration.Temperature(strength=math.inf), Outputs("classification", 10)
    fitted = calibration.fit(step, script.predictions(probs, labels), outputs)
    return float(1 / fitted.state["beta"]), fitted


def measure(predict: Predict, data: Images, *, everything: bool = True) -> Row:
    """Return what is measured: everything, or not where it takes other images."""
    start = time.process_time()
    probs, epistemic = predict(data.test)
    row = quality(probs, data.test_y)
    row["predict_seconds"] = (time.process_time() - start) / len(data.test) * 1000
    _, best = temperature(predict(data.held)[0][None], data.held_y[None])
    tempered = best.apply(script.predictions(probs[None], data.test_y[None])).predictions.probs
    row["nll_tempered"] = quality(tempered, data.test_y)["nll"]
    for name in data.outside if everything else ("near",):
        there, doubt = predict(data.outside[name])
        row[f"{name}_entropy"] = told_apart(entropy(probs), entropy(there))
        if epistemic is not None and doubt is not None:
            row[f"{name}_epistemic"] = told_apart(epistemic, doubt)
    if everything:
        count = len(data.lit)
        unlit = quality(probs[:count], data.test_y[:count])["nll"]
        row["lit_nll"] = quality(predict(data.lit)[0], data.test_y[:count])["nll"]
        row["lit_change"] = row["lit_nll"] - unlit
    return row


def at_point(model: nn.Module, temperature: float = 1.0) -> Predict:
    """Return predictions of the weights as they are."""

    def predict(x: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            return (model(x).double() / temperature).softmax(-1), None

    return predict


def of_posterior(fitted: Laplace, examples: int, seed: int) -> Predict:
    """Return predictions in closed form; the epistemic part is of draws [S, N, O]."""
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(DRAWS, examples, 10, generator=rng, dtype=torch.float64)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        moments = fitted.linearised(x)
        likelihood = fitted.curvature.likelihood
        probs = predictive(likelihood, *moments, link="per_class")["probs"]
        return probs, predictive(likelihood, *moments, noise[:, : len(x)])["epistemic"]

    return predict


def dead(model: nn.Module, x: Tensor) -> Tensor:
    """Find which hidden units no example [N, ...] activates, [H] bool."""
    with torch.no_grad():
        return (model.get_submodule("body")(x) == 0).all(0)


Posterior = tuple[dict[str, Any], Row]
"""An approximation to be made: options of `Laplace.fit`, and what goes into its row."""


def posteriors(model: nn.Module, data: Images, seed: int) -> dict[str, Posterior]:
    """Return the approximations by row, subnetworks chosen."""
    body: dict[str, Any] = {"pattern": "body.*"}
    diagonal = Laplace.fit(model, data.x, precision=1.0, structure="diagonal", **body)
    evidence = selection.Evidence(
        diagonal.loc, diagonal.diagonal, torch.full_like(diagonal.loc, 1 / TRAINING_PRECISION), seed
    )
    size = len(evidence.loc)
    silent, inputs, place = dead(model, data.x), data.x[0].numel(), torch.arange(size)
    units = len(silent)
    # Weights [units, inputs], then biases.
    unit = torch.where(place < units * inputs, place // inputs, place - units * inputs)

    def about(indices: Tensor) -> Row:
        return {
            "uncurved": selection.uncurved_share(evidence, indices),
            "in_dead_units": float(silent[unit[indices]].double().mean()),
            "share": len(indices) / size,
        }

    everything = about(place)
    found: dict[str, Posterior] = {
        "every weight on its own": (body | {"structure": "diagonal"}, everything),
        "last layer": ({"pattern": "head.*"}, {}),
        "whole body": (body | {"structure": "full"}, everything),
    }
    for name in selection.RULES:
        for share in (0.01, 0.05, 0.2) if name in ("wasserstein", "random") else (0.05,):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it warns of is in the results
                chosen = selection.select(name, evidence, round(share * size))
            options = body | {"structure": "subnetwork", "indices": chosen}
            found[f"{100 * share:.0f} %: {name}"] = options, about(chosen)
    return found


@dataclass(frozen=True)
class Network:
    """The trained network of one seed, its images, and what is planned around its body."""

    model: nn.Module
    data: Images
    planned: dict[str, Posterior]
    seed: int

    def fit(self, name: str, precision: float = 1.0) -> Laplace:
        """Return a planned approximation."""
        options = self.planned[name][0]
        return Laplace.fit(self.model, self.data.x, precision=precision, **options)

    def measured(self, fitted: Laplace, on: Images, **how: bool) -> Row:
        """Return what is measured on images."""
        return measure(of_posterior(fitted, len(self.data.test), self.seed), on, **how)


def network(dataset: str, scaling: str, seed: int, sizes: Sizes) -> Network:
    data = images(dataset, scaling, seed, sizes)
    model = trained(data, seed, sizes.steps)
    return Network(model, data, posteriors(model, data, seed), seed)


def cell(net: Network, sizes: Sizes) -> dict[str, Any]:
    """Return what is measured of one network, its rows, and rows at fixed precisions."""
    model, data = net.model, net.data
    plain = at_point(model)
    best, _ = temperature(plain(data.held)[0][None], data.held_y[None])
    points = {"MAP": plain, "MAP, one temperature": at_point(model, best)}
    rows = {name: measure(point, data) for name, point in points.items()}
    chosen: Row = {}
    for name, (_, about) in net.planned.items():
        chosen[name] = chosen_together([net.fit(name)], [data], sizes.grid)
        start = time.process_time()
        fitted = net.fit(name, precision=chosen[name])
        seconds = time.process_time() - start
        cost = {"order": float(fitted.inverse.order), "seconds": seconds}
        precision = {"log10_precision": math.log10(chosen[name])}
        rows[name] = net.measured(fitted, data) | about | precision | cost
    for name, (_, about) in net.planned.items():
        if name.startswith("5 %"):
            precision = chosen["whole body"] * about["share"]
            row = net.measured(net.fit(name, precision=precision), data, everything=False)
            row |= about | {"log10_precision": math.log10(precision)}
            rows[f"{name}, scaled precision"] = row
    near, some = {"near": data.outside["near"]}, slice(sizes.outside)
    first = replace(data, test=data.test[some], test_y=data.test_y[some], outside=near)
    fixed = {"MAP": measure(plain, first)} | {
        f"{name}, precision {at:g}": net.measured(net.fit(name, precision=at), first)
        for name in AT_FIXED
        for at in FIXED
    }
    about = {
        "constant_pixels": float(data.constant.double().mean()),
        "changed_by_themselves": float((data.changed(data.test) > 0).double().mean()),
        "train_nll": quality(plain(data.x)[0], data.y)["nll"],
        "dead_units": float(dead(model, data.x).double().mean()),
        "uncurved": net.planned["whole body"][1]["uncurved"],
    }
    return {"network": about, "rows": rows, "fixed": fixed}


def chosen_together(fits: list[Laplace], all_data: list[Images], grid: tuple[float, ...]) -> float:
    """Return the precision of least NLL on all validation images, within the grid."""

    @cache
    def score(precision: float) -> float:
        total = 0.0
        for fitted, data in zip(fits, all_data, strict=True):
            there = fitted.with_precision(data.x, precision)
            total += predictive_nll(there, data.held, data.held_y, link="per_class")
        return total

    best = min(grid, key=score)
    near = [best * factor for factor in (10**-0.5, 10**0.5)]
    return min((best, *(one for one in near if grid[0] <= one <= grid[-1])), key=score)


def listed(found: Sequence[dict[str, Row]]) -> dict[str, dict[str, list[float]]]:
    """Return the measures of several networks as one: every number becomes a list."""
    return {
        name: {key: [rows[name][key] for rows in found] for key in row}
        for name, row in found[0].items()
    }


def alone(dataset: str, scaling: str, seeds: Sequence[int], sizes: Sizes) -> dict[str, Any]:
    """Return the cells of several seeds as one."""
    cells = [cell(network(dataset, scaling, seed, sizes), sizes) for seed in seeds]
    about = listed([{"": found["network"]} for found in cells])[""]
    parts = {part: listed([found[part] for found in cells]) for part in ("rows", "fixed")}
    return {"network": about, **parts}


def pooled(dataset: str, scaling: str, seeds: Sequence[int], sizes: Sizes) -> dict[str, Any]:
    """Return the measures where all networks of a cell have one precision or temperature."""
    # One seed for all draws.
    nets = [replace(network(dataset, scaling, seed, sizes), seed=0) for seed in seeds]
    data = [net.data for net in nets]
    held = torch.stack([at_point(net.model)(net.data.held)[0] for net in nets])
    best, _ = temperature(held, torch.stack([d.held_y for d in data]))
    fits = {name: [net.fit(name) for net in nets] for name in TOGETHER}
    chosen = {name: chosen_together(of, data, sizes.grid) for name, of in fits.items()}
    found = []
    for place, (net, d) in enumerate(zip(nets, data, strict=True)):
        points = {"MAP": at_point(net.model), "MAP, one temperature": at_point(net.model, best)}
        rows = {name: measure(point, d, everything=False) for name, point in points.items()}
        for name, precision in chosen.items():
            fitted = fits[name][place].with_precision(d.x, precision)
            row = net.measured(fitted, d, everything=False)
            rows[name] = row | {"log10_precision": math.log10(precision)}
        found.append(rows)
    return {"rows": listed(found)}


def control(dataset: str, scaling: str, seeds: Sequence[int], sizes: Sizes) -> dict[str, Any]:
    """Return the AUROCs of the number of changed constant pixels; no network at all."""
    found = []
    for d in [images(dataset, scaling, seed, sizes) for seed in seeds]:
        own = d.changed(d.test)
        row = {f"{name}_count": told_apart(own, d.changed(x)) for name, x in d.outside.items()}
        found.append({"changed constant pixels": row})
    return {"rows": listed(found)}


PARTS = {"alone": alone, "pooled": pooled, "control": control}
WORDS = {
    "wasserstein": "by Wasserstein distance",
    "curved_wasserstein": "by Wasserstein distance among weights with curvature",
    "magnitude": "by magnitude",
    "random": "at random",
    "predictive_variance": "by predictive variance",
}


def in_words(name: str) -> str:
    """Return a method's name in the results as a label."""
    share, _, rule = name.partition(" %: ")
    rule, comma, rest = rule.partition(", ")
    if not rule:
        return name[0].upper() + name[1:]
    return f"{int(share) / 100:g} of weights {WORDS[rule]}{comma}{rest}"


BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8F94"
SIDES = {
    "NLL on test images (nats)\nlower is better": ("nll",),
    "AUROC of unseen classes\nhigher is better": ("near_entropy", "near_epistemic"),
}
LEGEND: dict[str, dict[str, Any]] = {
    "NLL (left), AUROC by entropy (right); bars: standard error": {"color": BLUE, "marker": "o"},
    "AUROC by epistemic uncertainty": {"color": ORANGE, "marker": "s"},
    "MAP with one temperature": {"color": GREY, "linestyle": "--"},
    "number of changed constant pixels, without a network": {"color": GREEN, "linestyle": ":"},
}


def draw(saved: dict[str, Any]) -> None:
    """Draw a row of panels for each cell, a line for each method."""
    looks = list(LEGEND.values())
    panels = [
        (dataset, scaling, found["rows"])
        for dataset, by in saved["alone"]["results"].items()
        for scaling, found in by.items()
    ]
    names = [name for name in reversed(panels[0][2]) if "scaled" not in name]
    labels = [
        in_words(name).replace(" of weights", "").replace(" among weights with", " and")
        for name in names
    ]
    figure = new_figure((9, 4.6 * len(panels)))
    axes = figure.subplots(len(panels), 2, sharey=True, squeeze=False)
    for (left, right), (dataset, scaling, rows) in zip(axes, panels, strict=True):
        for ax, (title, keys) in zip((left, right), SIDES.items(), strict=True):
            for key, look, shift in zip(keys, looks, (0.15, -0.15), strict=False):
                for height, name in enumerate(names):
                    if key in rows[name]:
                        mean, error = report.mean_and_error(rows[name][key])
                        y = height + shift * (len(keys) > 1)
                        ax.errorbar(mean, y, xerr=error, markersize=5, capsize=2, **look)
            level = report.mean_and_error(rows["MAP, one temperature"][keys[0]])[0]
            ax.axvline(level, linewidth=1, **looks[2])
            ax.set_yticks(range(len(names)), labels)
            ax.set_xlabel(title)
            ax.grid(axis="x", alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        counts = saved["control"]["results"][dataset][scaling]["rows"]["changed constant pixels"]
        right.axvline(report.mean_and_error(counts["near_count"])[0], linewidth=1.5, **looks[3])
        title = f"{script.TITLES[dataset]}, pixels in {scaling}"
        left.set_title(title, loc="left", fontweight="bold")
    for label, look in LEGEND.items():
        draws = axes[0][1].errorbar if "marker" in look else axes[0][1].plot
        draws([], [], label=label, **look)
    handles = axes[0][1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)
    script.write_figure("selection", figure)


def main() -> None:
    parts = {"nargs": "+", "choices": list(PARTS), "default": list(PARTS)}
    parts["help"] = "which to run; the others' results stay (default: all)"
    given = script.arguments(__doc__, parts=parts, figure=script.FIGURE)
    sizes, seeds = (QUICK, (0,)) if given.quick else (Sizes(), (0, 1, 2))
    for part in [] if given.figure else given.parts:
        made, results = script.made(), {}
        start = time.process_time()
        for dataset in ("digits",) if given.quick else OTHER:
            results[dataset] = {}
            for scaling in SCALINGS:
                found = PARTS[part](dataset, scaling, seeds, sizes)
                results[dataset][scaling] = found
                shown = None if part == "control" else SHOWN
                table = report.table(found["rows"], columns=shown)
                print(f"\n{dataset}, {scaling}, {part}: {found.get('network', '')}\n{table}")
        seconds = {"cpu_seconds": time.process_time() - start}
        if not given.quick:
            about = {"sizes": sizes, "seeds": seeds, **seconds}
            script.write("selection", **{part: {**made, **about, "results": results}})
    saved = script.saved("selection")
    if not given.quick and PARTS.keys() <= saved.keys():
        draw(saved)


if __name__ == "__main__":
    main()
