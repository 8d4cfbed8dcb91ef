"""Does the demo's lead survive another learning rate? The demo's federation under two of them, same seeds.

python benchmarks/sensitivity.py [--quick]

Results: benchmarks/results/sensitivity.json.
"""

import argparse
import sys
from pathlib import Path

import torch

import bayesfl as bf
from bayesfl import report

RESULTS = Path(__file__).parent / "results" / "sensitivity.json"
COLUMNS = [report.Column("accuracy", better="higher"), report.Column("nll", better="lower"), report.Column("ece", better="lower")]


def main() -> None:
    """Runs, prints and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds, one seed: shows that it runs; nothing is written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    tables: dict[str, dict[str, dict[str, list[float]]]] = {}
    for lr in (0.01, 0.05):
        rows: dict[str, dict[str, list[float]]] = {}
        for seed in range(1 if quick else 5):
            clients = bf.data.concept_drift("digits", clients=20, seed=seed)
            model = bf.models.mlp(clients.inputs, hidden=100, outputs=clients.classes, head_scale=1.0, seed=seed)
            methods = {
                "FedAvg": bf.algorithms.fedavg(model, batch_size=10, lr=lr),
                "FedPer": bf.algorithms.fedper(model, batch_size=10, lr=lr),
                "pFedMAP": bf.algorithms.pfedmap(model, batch_size=10, body_lr=lr),
                "pFedVEM, mean": bf.algorithms.pfedvem(model, batch_size=10, body_lr=lr),
            }
            for name, algorithm in methods.items():
                rounds = 2 if quick else 50
                result = bf.simulate(
                    algorithm, clients, rounds=rounds, participation=0.1, sampling="fixed", seed=seed, evaluate_every=rounds, progress=False
                )
                for column in COLUMNS:
                    rows.setdefault(name, {}).setdefault(column.key, []).append(float(result.history[f"personal_{column.key}"][-1]))
        tables[str(lr)] = rows
        print(f"learning rate {lr}\n{report.table(rows, columns=COLUMNS)}\n", flush=True)
    if not quick:
        report.write_json(
            RESULTS, {"command": " ".join(["python", *sys.argv]), "environment": report.environment(), "learning_rates": tables}
        )


if __name__ == "__main__":
    main()
