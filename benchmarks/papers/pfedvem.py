"""pFedVEM's Table 1, CIFAR-100 by superclasses, reduced: 50 of the 200 clients, 60 rounds.

Zhu, Ma, Blaschko, "Tackling personalized federated learning with label concept drift via
hierarchical Bayesian modeling", FL-NeurIPS 2022. Under every method the clients that train are
those that are gathered, and each goes over its data fifteen times in a round; the paper's code goes
over them 25 times, and so does `--full`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD
from bayesfl.study.grid import Make
from bayesfl.study.table import Row
from benchmarks.papers import Part, Size, measured

PLACE = "Table 1, CIFAR-100, 200 clients of 250 images; accuracy (%) and standard error, five seeds"
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "Local": {"accuracy": 22.8, "error": 0.3},
    "FedAvg": {"accuracy": 45.8, "error": 0.1},
    "pFedMe": {"accuracy": 42.2, "error": 0.4},
    "FedPer": {"accuracy": 38.9, "error": 0.4},
    "pFedHN": {"accuracy": 45.7, "error": 0.3},
    "pFedMAP": {"accuracy": 47.3, "error": 0.4},
    "pFedVEM, mean": {"accuracy": 51.5, "error": 0.5},
}
RATES = (0.003, 0.01, 0.03)  # local training of heads from N(0, 1) diverges at 0.03
BATCH = 50
BODY = 5  # passes over the data for the body, where a head has passes of its own


def methods(passes: int) -> dict[str, Make]:
    """Return the methods, {title: (model, rate) -> algorithm}, of so many passes in a round."""
    heavy = partial(SGD, momentum=0.9)
    own: dict[str, Any] = {"head_epochs": passes - BODY, "body_epochs": BODY, "batch_size": BATCH}

    def whole(make: Callable[..., bf.Algorithm], epochs: int = passes) -> Make:
        return lambda model, rate: make(
            model, epochs=epochs, batch_size=BATCH, optimiser=heavy(rate)
        )

    def tied(make: Callable[..., bf.Algorithm]) -> Make:  # the head's rate is the paper's
        return lambda model, rate: make(model, body_optimiser=heavy(rate), **own)

    return {
        "Local": whole(bf.algorithms.local),
        "FedAvg": whole(bf.algorithms.fedavg),
        "FedPer": whole(bf.algorithms.fedper),
        "pFedMAP": tied(bf.algorithms.pfedmap),
        "pFedVEM": tied(bf.algorithms.pfedvem),
        "pFedVEM, fixed variances": tied(bf.algorithms.pfedvem_held),
        "FedPAC": lambda model, rate: bf.algorithms.fedpac(
            model, head_optimiser=heavy(rate), body_optimiser=heavy(rate), **own
        ),
        # Two models, which share the passes.
        "Ditto": whole(bf.algorithms.ditto, passes // 2),
        # As many steps as the others take on 200 images.
        "pFedMe": lambda model, rate: bf.algorithms.pfedme(
            model, batches=4 * passes // 5, batch_size=BATCH, personal_optimiser=SGD(rate)
        ),
        "pFedHN": lambda model, rate: bf.algorithms.pfedhn(
            model, steps=4 * passes, batch_size=BATCH, optimiser=heavy(rate, weight_decay=5e-5)
        ),
    }


def federation(seed: int, clients: int, every: int) -> FederatedData:
    """Return the first of the paper's 200 clients; of the test images, one in `every`."""
    found = bf.data.concept_drift("cifar100", clients=200, validation=0.1, seed=seed)
    found = found.select(range(clients))
    test = found.test
    rows = [mine[mine % every == 0] for mine in map(test.rows, range(clients))]
    thin = replace(test, index=torch.cat(rows), counts=np.array([len(mine) for mine in rows]))
    return replace(found, splits={**found.splits, "test": thin})


def network(clients: FederatedData, seed: int) -> nn.Module:
    """Return the paper's network, under a head drawn from N(0, 1); one hidden layer for digits."""
    if len(clients.inputs) == 3 and clients.inputs[0] == 3:
        return bf.models.cifar100_cnn(
            clients.inputs, outputs=clients.classes, head_scale=1.0, seed=seed
        )
    return bf.models.mlp(
        clients.inputs, hidden=32, outputs=clients.classes, head_scale=1.0, seed=seed
    )


def confident(run: Row, result: Result) -> dict[str, Any]:
    """Return the rows of a run, and for pFedVEM each client's confidence beside its number of
    training images and its accuracy.
    """
    found = measured(run, result)
    if "rho2" in result.private:
        accuracy = result.table(draws=0)["accuracy"]
        found["clients"] = {
            "rows": result.data.train.counts.tolist(),
            "precision": (1 / result.private["rho2"]).tolist(),
            "accuracy": [float(value) for value in accuracy],
        }
    return found


def parts(size: Size) -> dict[str, Part]:
    """Return the one federation of the table."""
    small = partial(bf.data.concept_drift, "digits", clients=6, validation=0.2)
    full, quick = size == "full", size == "quick"
    part = Part(
        data=partial(federation, clients=200 if full else 50, every=1 if full else 4),
        model=network,
        methods=methods(25 if full else 15),
        rounds=100 if full else 60,
        seconds=14400 if full else 900,
        seeds=range(5) if full else range(3),
        grid={"*": {"rate": RATES}, "pFedHN": {"rate": (0.001, 0.003, 0.01)}},
        settings={"participation": 0.1, "sampling": "bernoulli", "train": "cohort"},
        measure=confident,
    )
    if quick:
        part = replace(
            part,
            data=small,
            methods=methods(10),
            rounds=2,
            seconds=1,
            seeds=(0,),
            grid={"*": {"rate": RATES[:2]}},
            settings={**part.settings, "participation": 0.5},
        )
    return {"digits" if quick else "CIFAR-100": part}
