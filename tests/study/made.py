"""A small study that several files of tests share, and one that is killed."""

from functools import partial
from typing import Any

import torch
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from bayesfl.study.table import Table
from tests.federation.made import TIMES
from tests.recovery.killed import die_at

DATA = partial(bf.data.dirichlet, "digits", clients=4, alpha=1.0, max_size=50, validation=0.2)


def network(clients: FederatedData) -> nn.Module:
    return bf.models.mlp(clients.inputs, hidden=8, outputs=clients.outputs)


def study(**changes: Any) -> bf.Study:
    """Three methods over two seeds: two, four and two choices of options."""
    options: dict[str, Any] = {
        "data": DATA,
        "model": network,
        "methods": {
            "FedAvg": partial(bf.algorithms.fedavg, epochs=1),
            "Ditto": partial(bf.algorithms.ditto, epochs=1, lam=0.5),
            "pFedVEM": partial(bf.algorithms.pfedvem, head_epochs=2, body_epochs=1),
        },
        "options": {
            "*": {"optimiser": [SGD(0.01), SGD(0.1)]},
            "Ditto": {"lam": [0.1, 1.0]},
            "pFedVEM": {"body_optimiser": [SGD(0.01), SGD(0.1)]},
        },
        "seeds": range(2),
        "rounds": 2,
    }
    return bf.Study(**{**options, **changes})


def one(**changes: Any) -> bf.Study:
    """FedAvg alone, over two seeds."""
    methods = {"FedAvg": partial(bf.algorithms.fedavg, epochs=1)}
    return study(**{"methods": methods, "options": {}, **changes})


def bits(table: Table) -> list[str]:
    """All numbers of a table but times and memory, to the last digit."""
    return [
        str(
            (
                row.method,
                sorted(row.options.items(), key=str),
                row.seed,
                [{k: v for k, v in line.items() if k not in TIMES} for line in row.record.history],
                row.record.clients,
                row.record.budget,
            )
        )
        for row in table.rows
    ]


def dying(folder: str, moment: str, count: int) -> None:
    """Run the study up to a moment, as `die_at` names it."""
    torch.set_num_threads(1)
    die_at(moment, count)
    study().run(folder, progress=False)
