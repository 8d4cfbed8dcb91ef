"""Measure how long a round of other methods takes, in units of FedAvg's round of as many gradient
steps: 10 clients of 500 examples, an MLP 784-100-10, 25 steps a client in batches of 50.

    python benchmarks/rivals.py [--quick]

All methods run in turn, three rounds at a time, with one worker; a turn's figure is the median of
the processor's seconds of its rounds but the first, and a row's the median of the ratios within a
turn. Optimisers are the methods' own. Results: benchmarks/results/rivals.json.
"""

import itertools
import statistics
import time
from functools import partial
from typing import Any

import script
import timing

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.study.budget import gradient_steps, with_steps

METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("fedavg", "fedprox", "ditto", "scaffold", "moon", "fedrod", "fedamp")},
    **{name: {} for name in ("apfl", "l2gd", "knn_per", "pfedhn", "fedpa", "pfedbayes", "bpfed")},
    "fedfomo": {"rows": "train"},
    **{name: {} for name in ("fedpop", "fola", "qlsd", "fedep", "pvi", "fedivon")},
}


def turn(method: bf.Algorithm, clients: FederatedData, rounds: int) -> float:
    times: list[float] = []
    bf.simulate(
        method,
        clients,
        rounds=rounds,
        engine=bf.Engine(workers=1),
        evaluate_every=None,
        progress=False,
        on_round=[lambda _: times.append(time.process_time())],
    )
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def main() -> None:
    quick = script.arguments(__doc__).quick
    written, clients = script.made(), timing.federation([500] * 10)
    model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.outputs)
    counts = clients.outline.counts
    made = {
        name: with_steps(getattr(bf.algorithms, name)(model, batch_size=50, **more), 25, counts)[0]
        for name, more in METHODS.items()
    }
    rounds, turns = (2, 1) if quick else (3, 5)
    sides = {name: partial(turn, method, clients, rounds) for name, method in made.items()}
    seconds = timing.in_turn(sides, turns)
    rows = {
        name: {
            "seconds": statistics.median(found),
            "steps": gradient_steps(made[name], counts),
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
