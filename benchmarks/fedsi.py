"""Measure how long a round of FedSI takes, in units of our own FedAvg round of the same steps:
MNIST small, ten clients, 500 steps a round.

python benchmarks/fedsi.py [--quick]

With the paper's rule, whose subnetworks have next to no curvature, a round is to take at most twice
FedAvg's. A rule that takes curved weights needs a Cholesky factor and an inverse of order min(|S|,
N (O - 1)) from every client: at most twice a FedAvg round with these ("FedAvg and factors": random
matrices of that order, in the same threads). All sides run in turn, round by round, after ten
rounds that let units die; seconds are wall, the ratio the median over repetitions. A side whose
approximations are made every twentieth round runs twenty rounds in its turn, and stands with their
mean. Memory is what a side adds to a process of its own. Results: benchmarks/results/fedsi.json.
"""

import statistics
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import script
import timing
import torch

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD

SETTLED, REPETITIONS = 10, 7
UNIT, FACTORS = "FedAvg", "FedAvg and factors"
EVERY = 20
SELDOM = [f"FedSI, {rule}, every {EVERY} rounds" for rule in ("at random", "curved weights")]
AIMS = {
    "FedSI": (2.0, UNIT),
    "FedSI, by predictive variance": (2.0, FACTORS),
    "FedSI, at random": (2.0, FACTORS),
    "FedSI, curved weights": (2.0, FACTORS),
    **dict.fromkeys(SELDOM, (5.0, UNIT)),
}
"""At most how many times which side."""


def federation(quick: bool) -> FederatedData:
    size = {"source": "digits"} if quick else {"source": "mnist", "train": 50, "test": 950}
    return bf.data.label_groups(**size)


def methods(clients: FederatedData) -> dict[str, bf.Algorithm]:
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes)
    steps: dict[str, Any] = {"epochs": 10, "batch_size": 50, "optimiser": SGD(0.1)}
    fedsi = partial(bf.algorithms.fedsi, model, **steps)
    curved = {"at random": "random", "curved weights": "curved_wasserstein"}
    return {
        UNIT: bf.algorithms.fedavg(model, **steps),
        "FedSI": fedsi(),
        "FedSI, by predictive variance": fedsi(selection="predictive_variance"),
        **{f"FedSI, {name}": fedsi(selection=rule) for name, rule in curved.items()},
        "FedSI-Fac": bf.algorithms.fedsi_fac(model, **steps),
        "FedSI, whole body": bf.algorithms.fedsi_full(model, **steps),
        **{
            f"FedSI, {name}, every {EVERY} rounds": fedsi(selection=rule, curvature_every=EVERY)
            for name, rule in curved.items()
        },
    }


def trained(method: bf.Algorithm, data: FederatedData, workers: int, **how: Any) -> Result:
    """The result after rounds=, those of resume= included."""
    options: dict[str, Any] = {"evaluate_every": None, "progress": False, **how}
    return bf.simulate(method, data, engine=bf.Engine(workers=workers), **options)


def factors(clients: FederatedData, workers: int, share: int) -> Callable[[], float]:
    """Seconds of a factor and an inverse for every client, in threads as the engine's are."""
    order = min(share, int(clients.train.counts[0]) * (clients.classes - 1))
    rng = torch.Generator().manual_seed(0)
    half = torch.randn(order, order, dtype=torch.float64, generator=rng)
    matrix = half @ half.T / order + torch.eye(order, dtype=torch.float64)

    def factor(client: int) -> torch.Tensor:
        return torch.cholesky_inverse(torch.linalg.cholesky(matrix))

    def run() -> None:
        with bf.Engine(workers=workers).crew(torch.device("cpu")) as crew:
            list(crew.over(range(clients.clients), factor))

    return lambda: timing.seconds(run)


def measure(
    clients: FederatedData, workers: int, repetitions: int, settled: int
) -> dict[str, dict[str, float]]:
    made = methods(clients)
    results = {name: trained(one, clients, workers, rounds=settled) for name, one in made.items()}

    def turn(name: str) -> float:
        rounds = EVERY if name in SELDOM else 1
        how = {"rounds": results[name].round + rounds, "resume": results[name]}
        results[name] = trained(made[name], clients, workers, **how)
        return statistics.mean(map(float, results[name].history["seconds"][-rounds:]))

    factor = factors(clients, workers, int(0.05 * len(results["FedSI"].server["g"])))
    sides = {name: partial(turn, name) for name in made} | {FACTORS: factor}
    seconds = timing.in_turn(sides, repetitions)
    both = zip(seconds[UNIT], seconds[FACTORS], strict=True)
    seconds[FACTORS] = [plain + more for plain, more in both]
    out = {}
    for name, taken in seconds.items():
        out[name] = {
            "seconds": statistics.median(taken),
            "times_fedavg": timing.ratio(taken, seconds[UNIT]),
            "times_fedavg_and_factors": timing.ratio(taken, seconds[FACTORS]),
        }
        share = results[name].server.get("uncurved_share") if name in results else None
        if share is not None:
            out[name]["uncurved_share"] = float(share)
    return out


def memory(name: str) -> float:
    """MiB that two rounds on two workers add to this process, which has run FedAvg."""
    warnings.simplefilter("ignore")
    clients = federation(quick=False)
    made = methods(clients)
    trained(made[UNIT], clients, 2, rounds=1)
    return timing.added(lambda: trained(made[name], clients, 2, rounds=2))


def main() -> None:
    quick = script.arguments(__doc__).quick
    # The share is in the table.
    warnings.filterwarnings("ignore", message="most of the selected weights")
    made, clients = script.made(), federation(quick)
    found: dict[str, Any] = {}
    for workers in (1, 2):
        repetitions = (1, 1) if quick else (REPETITIONS, SETTLED)
        found[str(workers)] = measure(clients, workers, *repetitions)
        print(f"{clients.source.name}, {clients.clients} clients, workers: {workers}")
        for name, figures in found[str(workers)].items():
            timing.show(name, figures)
    if not quick:
        used = {name: timing.alone(memory, name) for name in methods(clients)}
        timing.show("memory (MiB)", used)
        results = {"hash": clients.hash, "aims": AIMS, "workers": found, "memory_mib": used}
        script.write("fedsi", **made, **results)


if __name__ == "__main__":
    main()
