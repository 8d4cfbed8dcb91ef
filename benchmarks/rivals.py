"""Measure how long a round of four rivals takes, in units of FedAvg's round of as many epochs: 20
clients of 500 examples, an MLP 784-100-10.

    python benchmarks/rivals.py [--quick]

All methods run in turn, five rounds at a time, with one worker; a turn's figure is the median of
its rounds but the first, and a row's the median of the ratios within a turn. Gradient steps stand
beside, as Fed-RoD takes two on every batch and MOON two passes forward more on each. Results:
benchmarks/results/rivals.json.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from engines import federation

import bayesfl as bf
from bayesfl.evaluation import report
from bayesfl.optim import SGD
from bayesfl.study.budget import gradient_steps

RESULTS = Path(__file__).parent / "results" / "rivals.json"
METHODS = ("fedavg", "fedprox", "ditto", "scaffold", "moon", "fedrod", "fedamp")


def main() -> None:
    """Run all methods in turn, print the ratios, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one turn: shows that it runs; nothing is written"
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    environment = report.environment()
    clients = federation([500] * 20)
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.outputs)
    options: dict[str, Any] = {"epochs": 5, "batch_size": 50, "optimiser": SGD(0.01)}
    made = {name: getattr(bf.algorithms, name)(model, **options) for name in METHODS}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    settings: dict[str, Any] = {"rounds": 2 if quick else 5, "evaluate_every": None}
    for _ in range(1 if quick else 7):
        for name, method in made.items():
            run = bf.simulate(
                method, clients, engine=bf.Engine(workers=1), progress=False, **settings
            )
            seconds[name].append(float(statistics.median(run.history["seconds"][1:])))
    rows = {
        name: {
            "seconds": statistics.median(found),
            "steps": gradient_steps(made[name], clients.outline.counts),
            "times_fedavg": statistics.median(
                own / base for own, base in zip(found, seconds["fedavg"], strict=True)
            ),
        }
        for name, found in seconds.items()
    }
    for name, row in rows.items():
        print(f"{name}: {row['seconds']:.3f} s, {row['times_fedavg']:.2f} times FedAvg's")
    if not quick:
        command = " ".join(["python", *sys.argv])
        report.write_json(RESULTS, {"command": command, "environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
