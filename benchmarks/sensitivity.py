"""Does the demo's lead survive another learning rate, or the same clients at work for every method?
The demo's federation, same seeds.

By their papers FedAvg and FedPer train the two clients of a cohort, pFedMAP and pFedVEM all twenty,
of whom the cohort is gathered.

python benchmarks/sensitivity.py [--quick]

Results: benchmarks/results/sensitivity.json.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import bayesfl as bf
from bayesfl.evaluation import report
from bayesfl.optim import SGD

RESULTS = Path(__file__).parent / "results" / "sensitivity.json"
SETTINGS: dict[str, dict[str, Any]] = {
    "as in the demo": {"rate": 0.01},
    "learning rate 0.05": {"rate": 0.05},
    "all clients train, for every method": {"rate": 0.01, "train": "all"},
    "the cohort alone trains, for every method": {"rate": 0.01, "train": "cohort"},
}
COLUMNS = [
    report.Column("accuracy", better="higher"),
    report.Column("nll", better="lower"),
    report.Column("ece", better="lower"),
]


def methods(clients: bf.data.FederatedData, rate: float, seed: int) -> dict[str, bf.Algorithm]:
    """The demo's, all from one start."""
    model = bf.models.mlp(
        clients.inputs, hidden=100, outputs=clients.classes, head_scale=1.0, seed=seed
    )
    heavy = SGD(rate, momentum=0.9)
    return {
        "FedAvg": bf.algorithms.fedavg(model, batch_size=10, optimiser=heavy),
        "FedPer": bf.algorithms.fedper(model, batch_size=10, optimiser=heavy),
        "pFedMAP": bf.algorithms.pfedmap(model, batch_size=10, body_optimiser=heavy),
        "pFedVEM, mean": bf.algorithms.pfedvem(model, batch_size=10, body_optimiser=heavy),
        "pFedVEM, scales held, mean": bf.algorithms.pfedvem_held(
            model, batch_size=10, body_optimiser=heavy
        ),
    }


def main() -> None:
    """Runs, prints and writes the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two rounds, one seed: shows that it runs; nothing is written",
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    tables: dict[str, dict[str, dict[str, list[float]]]] = {}
    rounds = 2 if quick else 50
    for setting, options in SETTINGS.items():
        rows: dict[str, dict[str, list[float]]] = {}
        for seed in range(1 if quick else 5):
            clients = bf.data.concept_drift("digits", clients=20, seed=seed)
            for name, algorithm in methods(clients, options["rate"], seed).items():
                result = bf.simulate(
                    algorithm,
                    clients,
                    rounds=rounds,
                    participation=0.1,
                    sampling="fixed",
                    train=options.get("train"),
                    seed=seed,
                    evaluate_every=rounds,
                    progress=False,
                )
                for column in COLUMNS:
                    rows.setdefault(name, {}).setdefault(column.key, []).append(
                        float(result.history[f"personal_{column.key}"][-1])
                    )
        tables[setting] = rows
        print(f"{setting}\n{report.table(rows, columns=COLUMNS)}\n", flush=True)
    if not quick:
        report.write_json(
            RESULTS,
            {
                "command": " ".join(["python", *sys.argv]),
                "environment": report.environment(),
                "settings": tables,
            },
        )


if __name__ == "__main__":
    main()
