"""Measure how long a round of four rivals takes, in units of FedAvg's round of as many epochs: 20
clients of 500 examples, an MLP 784-100-10.

    python benchmarks/rivals.py [--quick]

All methods run in turn, five rounds at a time, with one worker; a turn's figure is the median of
its rounds but the first, and a row's the median of the ratios within a turn. Gradient steps stand
beside, as Fed-RoD takes two on every batch and MOON two passes forward more on each. Results:
benchmarks/results/rivals.json.
"""

import statistics
from functools import partial
from typing import Any

import script
import timing

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from bayesfl.study.budget import gradient_steps

METHODS = ("fedavg", "fedprox", "ditto", "scaffold", "moon", "fedrod", "fedamp")


def turn(method: bf.Algorithm, clients: FederatedData, rounds: int) -> float:
    options: dict[str, Any] = {"evaluate_every": None, "progress": False}
    engine = bf.Engine(workers=1)
    run = bf.simulate(method, clients, rounds=rounds, engine=engine, **options)
    return float(statistics.median(run.history["seconds"][1:]))


def main() -> None:
    quick = script.arguments(__doc__).quick
    written, clients = script.made(), timing.federation([500] * 20)
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.outputs)
    options: dict[str, Any] = {"epochs": 5, "batch_size": 50, "optimiser": SGD(0.01)}
    made = {name: getattr(bf.algorithms, name)(model, **options) for name in METHODS}
    rounds, turns = (2, 1) if quick else (5, 7)
    sides = {name: partial(turn, method, clients, rounds) for name, method in made.items()}
    seconds = timing.in_turn(sides, turns)
    rows = {
        name: {
            "seconds": statistics.median(found),
            "steps": gradient_steps(made[name], clients.outline.counts),
            "times_fedavg": timing.ratio(found, seconds["fedavg"]),
        }
        for name, found in seconds.items()
    }
    for name, row in rows.items():
        timing.show(name, row)
    if not quick:
        script.write("rivals", **written, rows=rows)


if __name__ == "__main__":
    main()
