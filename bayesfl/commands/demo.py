"""The demonstration: three methods on handwritten digits, in about half a minute."""

from pathlib import Path

from bayesfl.algorithms import fedavg, local, pfedvem
from bayesfl.data import concept_drift
from bayesfl.federation.run.simulation import simulate
from bayesfl.models import mlp
from bayesfl.study.table import table

ROUNDS = 20
PASSES = 25
"""Passes over a client's rows in a round, the same for every method: pFedVEM's by default."""


def demo(folder: Path = Path("bayesfl-demo")) -> None:
    """Train three methods on digits of twenty clients, print their table, and write reports.

    Each client holds one digit of each pair and predicts the pair, so that no single model fits all
    clients.

    Args:
        folder: Where the reports go.
    """
    clients = concept_drift("digits", clients=20, seed=0)
    model = mlp(clients.inputs, hidden=100, outputs=clients.outputs, seed=0)
    methods = {
        "Local": local(model, epochs=PASSES),
        "FedAvg": fedavg(model, epochs=PASSES),
        "pFedVEM": pfedvem(model),
    }
    print(clients)
    runs = {
        name: simulate(method, clients, rounds=ROUNDS, evaluate_every=5, seed=0)
        for name, method in methods.items()
    }
    found = table(runs)
    print(found)
    found.report(folder / "report.html")
    runs["pFedVEM"].report(folder / "pfedvem.html")
    print(f"\nReports: {folder / 'report.html'} of all methods, {folder / 'pfedvem.html'} of one")
