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

import argparse
import copy
import gc
import json
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from engines import high_water
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.curvature import Curvature, invert
from bayesfl.evaluation import report

RESULTS = Path(__file__).parent / "results" / "curvature.json"
SLOW = 15.0  # seconds; a side that takes longer runs once
AT_LEAST = 0.1  # seconds that one measurement lasts: short work is called several times in a row
Run = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """A network, a client's data, a subnetwork, test points: random, speed does not read them.

    Args:
        model: With a body and a head.
        x: Training inputs.
        test: Test inputs.
        indices: The subnetwork, places in the whole parameter vector; all of them lie in the body,
            which comes first.
    """

    model: nn.Module
    x: Tensor
    test: Tensor
    indices: Tensor

    @property
    def plain(self) -> nn.Module:
        """The same network, a fresh copy that BackPACK may change."""
        return _sequential(self.model)


def _sequential(model: nn.Module) -> nn.Module:
    return nn.Sequential(*copy.deepcopy(model.body), copy.deepcopy(model.head))


def problem(name: str, quick: bool, *, paper: bool = False) -> Problem:
    """The MLP with 250 samples and a subnetwork of 5 %, or LeNet with 125 and 7 %; the paper's rule
    takes uncurved weights first.
    """
    rng = torch.Generator().manual_seed(0)
    shape, count, share = ((784,), 250, 3925) if name == "mlp" else ((1, 28, 28), 125, 4280)
    points = 4750
    if quick:
        count, share, points = 12, 200, 40
    model = (
        bf.models.mlp(784, hidden=100, outputs=10)
        if name == "mlp"
        else bf.models.lenet((1, 28, 28), outputs=10)
    )
    x, test = torch.rand(count, *shape, generator=rng), torch.rand(points, *shape, generator=rng)
    curvature = Curvature(model, pattern="body.*")
    if paper:
        x[:, torch.randperm(784, generator=rng)[:196]] = (
            0  # a quarter of the pixels is constant, as in MNIST
        )
        indices = curvature.diagonal(x).sort(stable=True).indices[:share].sort().values
    else:
        indices = torch.randperm(curvature.size, generator=rng)[:share].sort().values
    return Problem(model, x, test, indices)


def classes(count: int, quick: bool) -> Problem:
    """An MLP of many classes, of which the last layer is fitted, 500 samples and 50 test points."""
    rng = torch.Generator().manual_seed(0)
    samples, points = (12, 4) if quick else (500, 50)
    model = bf.models.mlp(64, hidden=64, outputs=8 if quick else count)
    x, test = (torch.rand(rows, 64, generator=rng) for rows in (samples, points))
    return Problem(model, x, test, torch.arange(0))


def _laplace(p: Problem, backend: str, structure: str, **options: object):
    """A laplace-torch object, fitted on all samples in one batch."""
    from bayesfl.data.recipes.torchvision import torchvision

    torchvision()
    from laplace import Laplace
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    data = torch.utils.data.TensorDataset(p.x, torch.zeros(len(p.x), dtype=torch.long))
    chosen = {"BackPACK": BackPackGGN, "default": CurvlinopsGGN}[backend]
    fitted = Laplace(
        p.plain,
        "classification",
        hessian_structure=structure,
        backend=chosen,
        prior_precision=1.0,
        **options,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=len(p.x))
    return fitted, lambda: fitted.fit(loader)


def _subnetwork(p: Problem, backend: str):
    return _laplace(
        p, backend, "full", subset_of_weights="subnetwork", subnetwork_indices=p.indices
    )


@dataclass(frozen=True)
class Side:
    """One way of doing a row's work.

    Args:
        make: Prepares and returns what is timed.
        scale: What multiplies the seconds, where a part of the work was timed.
        at_least: How many times slower than ours it should be.
        memory: What share of its memory ours may take.
    """

    make: Callable[[], Run]
    scale: float = 1.0
    at_least: float | None = None
    memory: float | None = None


def _diagonal(p: Problem, *, default: bool = True) -> dict[str, Side]:
    def theirs(backend: str) -> Callable[[], Run]:
        return lambda: _laplace(p, backend, "diag", subset_of_weights="all")[1]

    def ours() -> Run:
        curvature = Curvature(p.model)
        return lambda: curvature.diagonal(p.x)

    if not default:
        return {"ours": Side(ours), "laplace, BackPACK": Side(theirs("BackPACK"), at_least=1)}
    return {
        "ours": Side(ours),
        "laplace, BackPACK": Side(theirs("BackPACK"), at_least=2),
        "laplace": Side(theirs("default"), at_least=500),
    }


def _factor(p: Problem, times: float) -> dict[str, Side]:
    def theirs(backend: str) -> Callable[[], Run]:
        def make() -> Run:
            def run() -> object:
                fitted, fit = _subnetwork(p, backend)
                fit()
                return fitted.posterior_scale

            return run

        return make

    def ours() -> Run:
        return lambda: invert(Curvature(p.model, pattern="body.*"), p.x, 1.0, indices=p.indices)

    return {
        "ours": Side(ours),
        "laplace, BackPACK": Side(theirs("BackPACK"), at_least=times, memory=1 / 3),
        "laplace": Side(theirs("default"), at_least=times, memory=1 / 3),
    }


def _predict(
    p: Problem, *, whole: bool, one_call: float, batches: float, default: bool
) -> dict[str, Side]:
    def theirs(backend: str, batch: int, points: int) -> Callable[[], Run]:
        def make() -> Run:
            fitted, fit = _subnetwork(p, backend)
            fit()
            return lambda: [fitted(x, link_approx="probit") for x in p.test[:points].split(batch)]

        return make

    def ours(indices: Tensor | None) -> Callable[[], Run]:
        def make() -> Run:
            inverse = invert(Curvature(p.model, pattern="body.*"), p.x, 1.0, indices=indices)

            def run() -> Tensor:
                mean, covariance = inverse.predict(p.test)
                return (
                    (1 + torch.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).rsqrt() * mean
                ).softmax(-1)

            return run

        return make

    count = len(p.test)
    some, few = min(1000, count), min(500, count)
    sides = {"ours": Side(ours(p.indices))}
    if whole:
        sides["ours, whole body"] = Side(ours(None))
    sides["laplace, BackPACK, one call"] = Side(
        theirs("BackPACK", count, count), at_least=one_call, memory=0.1
    )
    sides[f"laplace, BackPACK, 100 a call ({some} points, scaled)"] = Side(
        theirs("BackPACK", 100, some), count / some, at_least=batches
    )
    if default:
        sides[f"laplace, 100 a call ({few} points, scaled)"] = Side(
            theirs("default", 100, few), count / few, at_least=batches
        )
    return sides


def _last_layer(p: Problem) -> Callable[[], bf.posteriors.Laplace]:
    return lambda: bf.posteriors.Laplace.fit(p.model, p.x, structure="kfac", pattern="head.*")


def _kfac_fit(p: Problem) -> dict[str, Side]:
    return {
        "ours": Side(lambda: _last_layer(p)),
        "laplace": Side(
            lambda: _laplace(p, "default", "kron", subset_of_weights="last_layer")[1], at_least=1
        ),
    }


def _kfac_predict(p: Problem, points: int) -> dict[str, Side]:
    """The other side predicts `points` test points, as it forms their Jacobian."""

    def ours() -> Run:
        fitted = _last_layer(p)()
        return lambda: fitted.predict(p.test)

    def theirs() -> Run:
        fitted, fit = _laplace(p, "default", "kron", subset_of_weights="last_layer")
        fit()
        return lambda: fitted(p.test[:points], link_approx="probit")

    count = len(p.test)
    name = "laplace" if points >= count else f"laplace ({points} points, scaled)"
    return {"ours": Side(ours), name: Side(theirs, max(1.0, count / points), at_least=1)}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        title: What is done.
        sides: {name: how}; "ours" is the unit.
        repetitions: Of all sides that are not slow, after one that warms up.
    """

    title: str
    sides: dict[str, Side]
    repetitions: int


def rows(quick: bool) -> dict[str, Row]:
    """The table's rows by name."""
    mlp = problem("mlp", quick)
    paper = problem("mlp", quick, paper=True)
    lenet = problem("lenet", quick)
    few, many = (2, 2) if quick else (5, 15)
    size = f"|S| = {len(mlp.indices)}, {len(mlp.x)} samples"
    points = f"probit predictions for {len(mlp.test)} points"
    many_classes = {300: classes(300, quick), 1000: classes(1000, quick)}
    last = {
        f"kfac_{what}_{count}": Row(
            f"{title}, {count:,} classes", sides(p), few if what == "fit" else 3
        )
        for count, p in many_classes.items()
        for what, title, sides in (
            ("fit", "kfac of the last layer, fit of 500 samples", _kfac_fit),
            (
                "predict",
                "kfac of the last layer, predictions for 50 points",
                partial(_kfac_predict, points=50 if count == 300 else 5),
            ),
        )
    }
    return {
        "diagonal": Row(f"diagonal GGN, MLP, {len(mlp.x)} samples", _diagonal(mlp), many),
        "factor": Row(f"fit and factor, MLP, random {size}", _factor(mlp, 10), few),
        "predict": Row(
            f"{points}, MLP, random {size}",
            _predict(mlp, whole=True, one_call=3, batches=10, default=True),
            3,
        ),
        "paper": Row(
            f"{points}, MLP, S by the paper's rule (weights without curvature first)",
            _predict(paper, whole=False, one_call=50, batches=50, default=False),
            3,
        ),
        "lenet_diagonal": Row(
            f"diagonal GGN, LeNet, {len(lenet.x)} samples", _diagonal(lenet, default=False), few
        ),
        "lenet_factor": Row(
            f"fit and factor, LeNet, random |S| = {len(lenet.indices)}", _factor(lenet, 1), few
        ),
        "lenet_predict": Row(
            f"{points}, LeNet", _predict(lenet, whole=True, one_call=1, batches=1, default=False), 3
        ),
    } | last


def _clock(run: Run, calls: int = 1) -> float:
    """Seconds of a call, the mean of `calls` in a row."""
    gc.collect()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def measure(row: Row, threads: int) -> dict[str, dict[str, float]]:
    """Seconds of all sides in turn, and how many times ours they take."""
    torch.set_num_threads(threads)
    runs = {name: side.make() for name, side in row.sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    first = {name: _clock(run) for name, run in runs.items()}
    for _ in range(row.repetitions):
        for name, run in runs.items():
            if first[name] < SLOW:
                seconds[name].append(_clock(run, calls=max(1, int(AT_LEAST / first[name]))))
    torch.set_num_threads(1)
    median = {
        name: row.sides[name].scale * statistics.median(seconds[name] or [first[name]])
        for name in runs
    }
    return {
        name: {"seconds": value, "times_ours": value / median["ours"]}
        for name, value in median.items()
    }


def _peak(name: str, side: str, pipe) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = rows(False)[name].sides[side]
    _laplace(problem("mlp", True), "BackPACK", "diag", subset_of_weights="all")  # the imports
    before = high_water()
    chosen.make()()
    pipe.send(high_water() - before)


def peak_memory(name: str, side: str) -> float | None:
    """MiB that a side adds to a process of its own; None where the process did not survive."""
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_peak, args=(name, side, there))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        return None
    finally:
        process.join()


def main() -> None:
    """Runs the rows, prints the table, writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, few repetitions, no memory: shows that it runs; nothing is written",
    )
    parser.add_argument("--rows", nargs="+", choices=list(rows(True)), default=list(rows(True)))
    parser.add_argument(
        "--threads",
        nargs="+",
        type=int,
        default=[1, 2],
        help="torch's own threads, which stall beside busy neighbours",
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # the other library's
    environment = report.environment()
    print(f"torch {torch.__version__}, {environment['cores']} cores", flush=True)
    results: dict[str, dict] = (
        json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() and not arguments.quick else {}
    )
    table = rows(arguments.quick)
    for name in arguments.rows:
        row = table[name]
        memory = {} if arguments.quick else {side: peak_memory(name, side) for side in row.sides}
        print(row.title)
        threads: dict[str, dict[str, dict[str, float]]] = {}
        for count in arguments.threads:
            threads[str(count)] = measure(row, count)
            for side, f in threads[str(count)].items():
                wanted = row.sides[side].at_least
                aim = f" (aim {wanted:g})" if wanted else ""
                print(
                    f"  {count} thread{'s' * (count > 1)}  {side:58s} {f['seconds']:9.4f} s  "
                    f"{f['times_ours']:8.1f}{aim}",
                    flush=True,
                )
        for side, value in memory.items():
            wanted = row.sides[side].memory
            share = (
                ""
                if value is None or memory["ours"] is None
                else f"  ours takes {memory['ours'] / value:.2f} of it"
            )
            aim = f" (aim {wanted:.2f})" if wanted else ""
            print(
                f"  memory     {side:58s} "
                f"{'died' if value is None else f'{value:9.0f} MiB'}{share}{aim}",
                flush=True,
            )
        sides = {
            side: {
                "threads": {count: figures[side] for count, figures in threads.items()},
                "memory_mib": memory.get(side),
                "aim_times_ours": row.sides[side].at_least,
                "aim_memory_share": row.sides[side].memory,
            }
            for side in row.sides
        }
        results[name] = {
            "title": row.title,
            "repetitions": row.repetitions,
            "sides": sides,
            "command": " ".join(["python", *sys.argv]),  # rows may be measured anew one by one
            "environment": environment,
        }
        if not arguments.quick:
            report.write_json(RESULTS, {"rows": results})


if __name__ == "__main__":
    main()
