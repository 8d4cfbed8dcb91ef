"""Measure how long a round of FedSI takes, in units of our own FedAvg round of the same steps:
MNIST small, ten clients, 500 steps a round.

python benchmarks/fedsi.py [--quick] [--workers N ...] [--data-root FOLDER]

With the paper's rule, whose subnetworks have next to no curvature, a round is to take at most twice
FedAvg's. A rule that takes curved weights needs a Cholesky factor and an inverse of order min(|S|,
N (O - 1)) from every client: at most twice a FedAvg round with these ("FedAvg and factors": random
matrices of that order, in the same threads). All sides run in turn, round by round, after ten
rounds that let units die; seconds are wall, the ratio the median over repetitions. A side whose
approximations are made every twentieth round runs twenty rounds in its turn, and stands with their
mean. Memory is what a side adds to a process of its own. Results: benchmarks/results/fedsi.json.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engines import high_water

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.evaluation import report
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD

RESULTS = Path(__file__).parent / "results" / "fedsi.json"
SETTLED = 10
UNIT, FACTORS = "FedAvg", "FedAvg and factors"
EVERY = 20
SELDOM = [f"FedSI, {rule}, every {EVERY} rounds" for rule in ("at random", "curved weights")]
AIMS = {
    "FedSI": (2.0, UNIT),
    **{
        f"FedSI, {rule}": (2.0, FACTORS)
        for rule in ("by predictive variance", "at random", "curved weights")
    },
    **dict.fromkeys(SELDOM, (5.0, UNIT)),
}


def federation(quick: bool, root: Path | None) -> FederatedData:
    """The paper's small MNIST, or digits."""
    return (
        bf.data.label_groups("digits")
        if quick
        else bf.data.label_groups("mnist", train=50, test=950, root=root)
    )


def methods(clients: FederatedData) -> dict[str, bf.Algorithm]:
    """FedAvg and FedSI, by the same steps."""
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes)
    steps: dict[str, Any] = {"epochs": 10, "batch_size": 50, "optimiser": SGD(0.1)}
    plain = bf.algorithms.fedavg(model, **steps)
    fedsi = bf.algorithms.fedsi
    return {
        UNIT: plain,
        "FedSI": fedsi(model, **steps),
        "FedSI, by predictive variance": fedsi(model, selection="predictive_variance", **steps),
        "FedSI, at random": fedsi(model, selection="random", **steps),
        "FedSI, curved weights": fedsi(model, selection="curved_wasserstein", **steps),
        "FedSI-Fac": bf.algorithms.fedsi_fac(model, **steps),
        "FedSI, whole body": bf.algorithms.fedsi_full(model, **steps),
        f"FedSI, at random, every {EVERY} rounds": fedsi(
            model, selection="random", curvature_every=EVERY, **steps
        ),
        f"FedSI, curved weights, every {EVERY} rounds": fedsi(
            model, selection="curved_wasserstein", curvature_every=EVERY, **steps
        ),
    }


def further(result: Result, rounds: int) -> tuple[Result, float]:
    """The result some rounds later, and the seconds that a round took, their mean."""
    options: dict[str, Any] = {
        "evaluate_every": None,
        "progress": False,
        "resume": result,
        "engine": result.engine,
    }
    result = bf.simulate(result.algorithm, result.data, rounds=result.round + rounds, **options)
    return result, statistics.mean(
        float(seconds) for seconds in result.history["seconds"][-rounds:]
    )


def started(algorithm: bf.Algorithm, clients: FederatedData, workers: int, rounds: int) -> Result:
    """After `rounds` rounds."""
    return bf.simulate(
        algorithm,
        clients,
        rounds=rounds,
        evaluate_every=None,
        progress=False,
        engine=bf.Engine(workers=workers),
    )


def factors(clients: FederatedData, workers: int, share: int) -> Callable[[], float]:
    """Seconds of a Cholesky factor and an inverse for every client, in worker threads as the
    engine's are.
    """
    order = min(share, int(clients.train.counts[0]) * (clients.classes - 1))
    half = torch.randn(
        order, order, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    matrix = half @ half.T / order + torch.eye(order, dtype=torch.float64)

    def run() -> float:
        start = time.perf_counter()
        with bf.Engine(workers=workers).crew(torch.device("cpu")) as crew:
            list(
                crew.over(
                    range(clients.clients),
                    lambda _: torch.cholesky_inverse(torch.linalg.cholesky(matrix)),
                )
            )
        return time.perf_counter() - start

    return run


def measure(
    clients: FederatedData, workers: int, repetitions: int, settled: int
) -> dict[str, dict[str, float]]:
    """Seconds and ratios of all sides."""
    results = {
        name: started(algorithm, clients, workers, settled)
        for name, algorithm in methods(clients).items()
    }
    factor = factors(clients, workers, int(0.05 * len(results["FedSI"].server["g"])))
    seconds: dict[str, list[float]] = {name: [] for name in (*results, FACTORS)}
    for _ in range(repetitions):
        for name, result in results.items():
            results[name], taken = further(result, EVERY if name in SELDOM else 1)
            seconds[name].append(taken)
        seconds[FACTORS].append(seconds[UNIT][-1] + factor())
    out = {}
    for name, taken in seconds.items():
        ratios = {
            unit: statistics.median(a / b for a, b in zip(taken, seconds[unit], strict=True))
            for unit in (UNIT, FACTORS)
        }
        out[name] = {
            "seconds": statistics.median(taken),
            "times_fedavg": ratios[UNIT],
            "times_fedavg_and_factors": ratios[FACTORS],
        }
        share = results[name].server.get("uncurved_share") if name in results else None
        if share is not None:
            out[name]["uncurved_share"] = float(share)
    return out


def _peak(name: str, quick: bool, root: Path | None, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    clients = federation(quick, root)
    result = started(methods(clients)[UNIT], clients, 2, 1)
    before = high_water()
    result = started(methods(clients)[name], clients, 2, 2)
    assert result.round == 2
    pipe.send(high_water() - before)


def peak_memory(name: str, quick: bool, root: Path | None) -> float:
    """MiB that two rounds on two workers add to a process of their own that has run FedAvg."""
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_peak, args=(name, quick, root, there)
    )
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


def main() -> None:
    """Runs all sides, prints the table, writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="digits and few rounds: shows that it runs; nothing is written",
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The share is in the table.
    warnings.filterwarnings("ignore", message="most of the selected weights")
    environment, clients = report.environment(), federation(arguments.quick, arguments.data_root)
    found: dict[str, Any] = {}
    for workers in arguments.workers:
        rounds = (1, 1) if arguments.quick else (arguments.repetitions, SETTLED)
        found[str(workers)] = measure(clients, workers, *rounds)
        print(f"{clients.source.name}, {clients.clients} clients, workers: {workers}")
        for name, f in found[str(workers)].items():
            aim = " (at most {:g} times {})".format(*AIMS[name]) if name in AIMS else ""
            share = (
                f"  share without curvature {f['uncurved_share']:.2f}"
                if "uncurved_share" in f
                else ""
            )
            both = (
                f"{f['times_fedavg']:7.2f} FedAvg  {f['times_fedavg_and_factors']:6.2f} {FACTORS}"
            )
            print(f"  {name:38s} {f['seconds']:8.3f} s {both}{aim}{share}", flush=True)
    memory = (
        {}
        if arguments.quick
        else {
            name: peak_memory(name, arguments.quick, arguments.data_root)
            for name in methods(clients)
        }
    )
    for name, value in memory.items():
        print(f"  memory  {name:38s} {value:7.0f} MiB", flush=True)
    if not arguments.quick:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "environment": environment,
            "hash": clients.hash,
        }
        report.write_json(RESULTS, record | {"aims": AIMS, "workers": found, "memory_mib": memory})


if __name__ == "__main__":
    main()
