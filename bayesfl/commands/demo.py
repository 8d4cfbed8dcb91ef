"""The demonstration: three methods on handwritten digits, in about half a minute."""

from functools import partial
from pathlib import Path

from torch import nn

from bayesfl.algorithms import fedavg, local, pfedvem
from bayesfl.data import FederatedData, concept_drift
from bayesfl.models import mlp
from bayesfl.study.study import Study

FOLDER = Path("bayesfl-demo")
ROUNDS = 20
PASSES = 25
"""Passes over a client's rows in a round, the same for every method: pFedVEM's by default."""


def network(clients: FederatedData) -> nn.Module:
    """Return the network that every method trains."""
    return mlp(clients.inputs, hidden=100, outputs=clients.outputs)


def demo(folder: Path = FOLDER) -> None:
    """Train three methods on digits of twenty clients, print their table, and write reports.

    Each client holds one digit of each pair and predicts the pair, so that no single model fits all
    clients. The runs stay in the folder, where a second call finds them.

    Args:
        folder: Folder of the runs and of the reports.
    """
    study = Study(
        data=partial(concept_drift, "digits", clients=20),
        model=network,
        methods={
            "Local": partial(local, epochs=PASSES),
            "FedAvg": partial(fedavg, epochs=PASSES),
            "pFedVEM": pfedvem,
        },
        rounds=ROUNDS,
        evaluate_every=5,
    )
    found = study.run(folder, keep="result")
    print(found)
    found.report(folder / "report.html")
    found.result("pFedVEM", 0).report(folder / "pfedvem.html")
    print(f"\nReports: {folder / 'report.html'} of all methods, {folder / 'pfedvem.html'} of one")
