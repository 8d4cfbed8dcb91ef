"""Measure how fast curvature is, beside laplace-torch with both its backends: MLP 784-100-10,
LeNet, and the Kronecker-factored last layer of an MLP 64-64-C of 300 and of 1,000 classes.

python benchmarks/curvature.py [--quick] [--rows NAME ...]

All sides of a row run in turn, repetition by repetition, on one thread and on two; slow ones once.
"times" is another side's median over ours. Peak memory is what a side adds to a process of its own,
its fit included. laplace-torch covers body and head (its backends cannot pass over frozen weights),
so our diagonal does too; subnetworks are the same weights of the body for both. Where a prediction
would take more memory than there is, or many minutes, fewer points are timed and the seconds
scaled, which the side's name says; laplace-torch's default backend takes minutes for some rows of
LeNet and is left out there. Results: benchmarks/results/curvature.json.
"""

import copy
import statistics
import warnings
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

import script
import timing
import torch
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.curvature import Curvature, invert
from bayesfl.data.recipes.torchvision import torchvision

SLOW = 15.0  # seconds; a side that takes longer runs once
AT_LEAST = 0.1  # seconds that one measurement lasts: short work is called several times in a row
Run = Callable[[], object]
BACKPACK, DEFAULT = "laplace, BackPACK", "laplace"
"""Sides of laplace-torch, by its backend."""


@dataclass(frozen=True)
class Problem:
    """A network, a client's data, a subnetwork, test points: random, speed does not read them."""

    model: nn.Module  # with a body and a head
    x: Tensor
    test: Tensor
    indices: Tensor  # the subnetwork, places in the body, which comes first


def problem(name: str, quick: bool, *, paper: bool = False) -> Problem:
    """The MLP or LeNet; the paper's rule takes uncurved weights first."""
    rng = torch.Generator().manual_seed(0)
    if name == "mlp":
        shape, count, share = (784,), 250, 3925
        model = bf.models.mlp(784, hidden=100, outputs=10)
    else:
        shape, count, share = (1, 28, 28), 125, 4280
        model = bf.models.lenet(shape, outputs=10)
    count, share, points = (12, 200, 40) if quick else (count, share, 4750)
    x, test = torch.rand(count, *shape, generator=rng), torch.rand(points, *shape, generator=rng)
    curvature = Curvature(model, pattern="body.*")
    if paper:
        # A quarter of the pixels is constant, as in MNIST.
        x[:, torch.randperm(784, generator=rng)[:196]] = 0
        order = curvature.diagonal(x).sort(stable=True).indices
    else:
        order = torch.randperm(curvature.size, generator=rng)
    return Problem(model, x, test, order[:share].sort().values)


def classes(count: int, quick: bool) -> Problem:
    """An MLP of many classes, of which the last layer is fitted."""
    rng = torch.Generator().manual_seed(0)
    samples, points = (12, 4) if quick else (500, 50)
    model = bf.models.mlp(64, hidden=64, outputs=8 if quick else count)
    x, test = (torch.rand(rows, 64, generator=rng) for rows in (samples, points))
    return Problem(model, x, test, torch.arange(0))


def laplace(p: Problem, backend: str, structure: str, **options: object) -> tuple[Any, Run]:
    """A laplace-torch object, and what fits it on all samples in one batch."""
    torchvision()
    from laplace import Laplace
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    fitted = Laplace(
        nn.Sequential(*copy.deepcopy(p.model.body), copy.deepcopy(p.model.head)),
        "classification",
        hessian_structure=structure,
        backend={BACKPACK: BackPackGGN, DEFAULT: CurvlinopsGGN}[backend],
        prior_precision=1.0,
        **options,
    )
    data = torch.utils.data.TensorDataset(p.x, torch.zeros(len(p.x), dtype=torch.long))
    return fitted, partial(fitted.fit, torch.utils.data.DataLoader(data, batch_size=len(p.x)))


def subnetwork(p: Problem, backend: str) -> Any:
    options = {"subset_of_weights": "subnetwork", "subnetwork_indices": p.indices}
    fitted, fit = laplace(p, backend, "full", **options)
    fit()
    return fitted


def inverse(p: Problem, indices: Tensor | None) -> Any:
    return invert(Curvature(p.model, pattern="body.*"), p.x, 1.0, indices=indices)


@dataclass(frozen=True)
class Side:
    """One way of doing a row's work."""

    make: Callable[[], Run]  # prepares and returns what is timed
    scale: float = 1.0  # of the seconds, where a part of the work was timed
    at_least: float | None = None  # how many times slower than ours it should be
    memory: float | None = None  # what share of its memory ours may take


def diagonal(p: Problem, **at_least: float) -> dict[str, Side]:
    def theirs(backend: str) -> Run:
        return laplace(p, backend, "diag", subset_of_weights="all")[1]

    return {"ours": Side(lambda: partial(Curvature(p.model).diagonal, p.x))} | {
        backend: Side(partial(theirs, backend), at_least=times)
        for backend, times in at_least.items()
    }


def factor(p: Problem, times: float) -> dict[str, Side]:
    def theirs(backend: str) -> Run:
        return lambda: subnetwork(p, backend).posterior_scale

    return {"ours": Side(lambda: partial(inverse, p, p.indices))} | {
        backend: Side(partial(theirs, backend), at_least=times, memory=1 / 3)
        for backend in (BACKPACK, DEFAULT)
    }


def predict(
    p: Problem, *, one_call: float, batches: float, whole: bool = False, default: bool = False
) -> dict[str, Side]:
    """Probit predictions, which BackPACK makes in one call, too."""

    def theirs(backend: str, batch: int, points: int) -> Run:
        fitted = subnetwork(p, backend)
        return lambda: [fitted(x, link_approx="probit") for x in p.test[:points].split(batch)]

    def ours(indices: Tensor | None) -> Run:
        found = inverse(p, indices)

        def run() -> Tensor:
            mean, covariance = found.predict(p.test)
            variance = covariance.diagonal(dim1=1, dim2=2)
            return ((1 + torch.pi / 8 * variance).rsqrt() * mean).softmax(-1)

        return run

    def by_hundreds(backend: str, most: int) -> dict[str, Side]:
        points = min(most, count)
        make = partial(theirs, backend, 100, points)
        name = f"{backend}, 100 a call ({points} points, scaled)"
        return {name: Side(make, count / points, at_least=batches)}

    count = len(p.test)
    one = Side(partial(theirs, BACKPACK, count, count), at_least=one_call, memory=0.1)
    return {
        "ours": Side(partial(ours, p.indices)),
        **({"ours, whole body": Side(partial(ours, None))} if whole else {}),
        f"{BACKPACK}, one call": one,
        **by_hundreds(BACKPACK, 1000),
        **(by_hundreds(DEFAULT, 500) if default else {}),
    }


def last_layer(p: Problem) -> bf.posteriors.Laplace:
    return bf.posteriors.Laplace.fit(
        p.model, p.x, precision=1.0, structure="kfac", pattern="head.*"
    )


def their_last_layer(p: Problem) -> tuple[Any, Run]:
    return laplace(p, DEFAULT, "kron", subset_of_weights="last_layer")


def kfac_fit(p: Problem) -> dict[str, Side]:
    theirs = Side(lambda: their_last_layer(p)[1], at_least=1)
    return {"ours": Side(lambda: partial(last_layer, p)), DEFAULT: theirs}


def kfac_predict(p: Problem, points: int) -> dict[str, Side]:
    """The other side predicts `points` test points, as it forms their Jacobian."""

    def theirs() -> Run:
        fitted, fit = their_last_layer(p)
        fit()
        return lambda: fitted(p.test[:points], link_approx="probit")

    count = len(p.test)
    name = DEFAULT if points >= count else f"{DEFAULT} ({points} points, scaled)"
    return {
        "ours": Side(lambda: partial(last_layer(p).predict, p.test)),
        name: Side(theirs, max(1.0, count / points), at_least=1),
    }


@dataclass(frozen=True)
class Row:
    """One line of the table; "ours" is the unit of its sides."""

    title: str
    sides: dict[str, Side]
    repetitions: int  # of all sides that are not slow, after one that warms up


def rows(quick: bool) -> dict[str, Row]:
    """The table's rows by name."""
    mlp, lenet = problem("mlp", quick), problem("lenet", quick)
    paper = problem("mlp", quick, paper=True)
    few, many = (2, 2) if quick else (5, 15)
    size = f"|S| = {len(mlp.indices)}, {len(mlp.x)} samples"
    points = f"probit predictions for {len(mlp.test)} points"
    by_rule = f"{points}, MLP, S by the paper's rule (weights without curvature first)"
    ggn = f"diagonal GGN, MLP, {len(mlp.x)} samples"
    lenet_ggn = f"diagonal GGN, LeNet, {len(lenet.x)} samples"
    lenet_factor = f"fit and factor, LeNet, random |S| = {len(lenet.indices)}"
    both = predict(mlp, one_call=3, batches=10, whole=True, default=True)
    whole = predict(lenet, one_call=1, batches=1, whole=True)
    table = {
        "diagonal": Row(ggn, diagonal(mlp, **{BACKPACK: 2, DEFAULT: 500}), many),
        "factor": Row(f"fit and factor, MLP, random {size}", factor(mlp, 10), few),
        "predict": Row(f"{points}, MLP, random {size}", both, 3),
        "paper": Row(by_rule, predict(paper, one_call=50, batches=50), 3),
        "lenet_diagonal": Row(lenet_ggn, diagonal(lenet, **{BACKPACK: 1}), few),
        "lenet_factor": Row(lenet_factor, factor(lenet, 1), few),
        "lenet_predict": Row(f"{points}, LeNet", whole, 3),
    }
    last = "kfac of the last layer"
    for count, known in ((300, 50), (1000, 5)):
        p = classes(count, quick)
        fit = Row(f"{last}, fit of 500 samples, {count:,} classes", kfac_fit(p), few)
        title = f"{last}, predictions for 50 points, {count:,} classes"
        table[f"kfac_fit_{count}"] = fit
        table[f"kfac_predict_{count}"] = Row(title, kfac_predict(p, known), 3)
    return table


def measure(row: Row, threads: int) -> dict[str, dict[str, float]]:
    """Seconds of all sides in turn, and how many times ours they take."""
    torch.set_num_threads(threads)
    runs = {name: side.make() for name, side in row.sides.items()}
    first = {name: timing.seconds(run) for name, run in runs.items()}
    again = {
        name: partial(timing.seconds, run, calls=max(1, int(AT_LEAST / first[name])))
        for name, run in runs.items()
        if first[name] < SLOW
    }
    seconds = timing.in_turn(again, row.repetitions)
    torch.set_num_threads(1)
    median = {
        name: side.scale * statistics.median(seconds.get(name, [first[name]]))
        for name, side in row.sides.items()
    }
    ours = median["ours"]
    return {name: {"seconds": s, "times_ours": s / ours} for name, s in median.items()}


def memory(name: str, side: str) -> float:
    """MiB that a side adds to this process."""
    warnings.simplefilter("ignore")
    make = rows(False)[name].sides[side].make
    laplace(problem("mlp", True), BACKPACK, "diag", subset_of_weights="all")  # the imports
    return timing.added(lambda: make()())


def peak_memory(name: str, side: str) -> float | None:
    """The same of a process of its own; None where it did not survive."""
    try:
        return timing.alone(memory, name, side)
    except BrokenProcessPool:
        return None


def main() -> None:
    names, stall = list(rows(True)), "torch's own threads, which stall beside busy neighbours"
    given = script.arguments(
        __doc__,
        rows={"nargs": "+", "choices": names, "default": names},
        threads={"nargs": "+", "type": int, "default": [1, 2], "help": stall},
    )
    warnings.simplefilter("ignore")  # the other library's
    made, table = script.made(), rows(given.quick)
    for name in given.rows:
        row = table[name]
        print(row.title)
        sides: dict[str, dict[str, Any]] = {
            side: {
                "threads": {},
                "memory_mib": None if given.quick else peak_memory(name, side),
                "aim_times_ours": way.at_least,
                "aim_memory_share": way.memory,
            }
            for side, way in row.sides.items()
        }
        for count in given.threads:
            for side, figures in measure(row, count).items():
                sides[side]["threads"][str(count)] = figures
                timing.show(f"{side}, threads {count}", figures)
        if not given.quick:
            for side, about in sides.items():
                timing.show(side, {key: about[key] for key in about if key != "threads"})
            found = {"title": row.title, "repetitions": row.repetitions, "sides": sides}
            script.write_rows("curvature", {name: {**found, **made}})


if __name__ == "__main__":
    main()
