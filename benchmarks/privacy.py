"""Measure what noise costs in accuracy: FedAvg on digits, 300 clients of about five images each,
cohorts of a fifth, several multipliers.

python benchmarks/privacy.py [--quick]

Clip and learning rate are two of a few that were tried on the test images of seed 0, which no
epsilon accounts for. The secret is a function of the seed, so that the figures can be made again; a
deployment draws one that nobody can guess. Results: benchmarks/results/privacy.json.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch

import bayesfl as bf
from bayesfl.evaluation import report
from bayesfl.federation.private.privacy import ClientPrivacy, epsilon_own
from bayesfl.federation.private.secure import SecureSum
from bayesfl.federation.rounds.replies import Aggregation
from bayesfl.optim import SGD

RESULTS = Path(__file__).parent / "results" / "privacy.json"
CLIENTS, PARTICIPATION, CLIP, DELTA, RATE = 300, 0.2, 1.0, 1e-3, 0.3
NOISE = (0.0, 0.5, 1.0, 2.0, 4.0)
COLUMNS = [
    report.Column("epsilon", digits=2),
    report.Column("epsilon_own", title="epsilon, own rounds", digits=2),
    report.Column("accuracy"),
    report.Column("nll"),
    report.Column("megabytes_up", digits=1),
    report.Column("seconds", digits=1),
]


def private(noise: float, seed: int) -> ClientPrivacy:
    """The rule of a row."""
    return ClientPrivacy(
        clip=CLIP,
        noise_multiplier=noise,
        delta=DELTA,
        secret=hashlib.sha256(f"benchmark {seed}".encode()).digest(),
    )


def main() -> None:
    """Runs, prints and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="60 clients, three rounds, one seed: shows that it runs; nothing is written",
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    environment, rounds, seeds = report.environment(), 3 if quick else 40, range(1 if quick else 5)
    rows: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        clients = bf.data.iid("digits", clients=60 if quick else CLIENTS, seed=seed)
        model = bf.models.mlp(clients.inputs, hidden=30, outputs=clients.classes, seed=seed)
        algorithm = bf.algorithms.fedavg(model, epochs=5, batch_size=None, optimiser=SGD(RATE))
        ways: dict[str, Aggregation | None] = {
            "FedAvg": None,
            "FedAvg, secure aggregation": SecureSum(),
        }
        ways |= {
            f"noise multiplier {noise:g}" if noise else "clipped, no noise": private(noise, seed)
            for noise in NOISE
        }
        for name, way in ways.items():
            start = time.perf_counter()
            options = {
                "rounds": rounds,
                "participation": PARTICIPATION,
                "seed": seed,
                "evaluate_every": rounds,
            }
            history = bf.simulate(
                algorithm, clients, aggregation=way, progress=False, **options
            ).history
            last, row = history.rows[-1], rows.setdefault(name, {})
            found = {"accuracy": last["global_pooled_accuracy"], "nll": last["global_pooled_nll"]}
            if isinstance(way, ClientPrivacy) and way.noise_multiplier:
                own = round(PARTICIPATION * rounds)
                found["epsilon"] = last["epsilon"]
                found["epsilon_own"] = epsilon_own(
                    noise_multiplier=way.noise_multiplier, releases=own, delta=DELTA
                )
            found |= {
                "megabytes_up": float(history["bytes_up"].sum()) / 1e6,
                "seconds": time.perf_counter() - start,
            }
            for key, value in found.items():
                row.setdefault(key, []).append(float(value))
    print(report.table(rows, columns=COLUMNS), flush=True)
    if not quick:
        sizes = {
            "clients": CLIENTS,
            "participation": PARTICIPATION,
            "clip": CLIP,
            "delta": DELTA,
            "rate": RATE,
            "rounds": rounds,
        }
        record = {
            "command": " ".join(["python", *sys.argv]),
            "environment": environment,
            "seeds": list(seeds),
            "sizes": sizes,
            "rows": rows,
        }
        report.write_json(RESULTS, record)


if __name__ == "__main__":
    main()
