"""Every method of the library on four federations, with one number of steps and one grid.

Each client takes 20 gradient steps in batches of 20 in every round, whatever the method. Learning
rates are the method's own defaults times one factor, which validation data choose among five;
every other option has its default. QLSD takes one gradient of all rows, and its step is chosen. A
client is one environment. Nothing here was published: the table is the evidence of
docs/choosing.md.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

import bayesfl as bf
from bayesfl.algorithms import PAPERS
from bayesfl.data import FederatedData
from benchmarks.papers import Part, Size

PLACE = "Nothing was published."
PUBLISHED: Mapping[str, Any] = {}
FACTORS = (1.0, 3.0, 10.0, 30.0, 100.0)
BATCH = 20


def rated(make: Callable[..., bf.Algorithm], model: nn.Module, factor: float) -> bf.Algorithm:
    """Return a method whose default learning rates on clients are multiplied by `factor`."""
    options: dict[str, Any] = {
        name: replace(one.default, rate=factor * one.default.rate)
        for name, one in inspect.signature(make).parameters.items()
        if hasattr(one.default, "rate") and not name.startswith("server")
    }
    if "batch_size" in inspect.signature(make).parameters:
        options["batch_size"] = BATCH
    return make(model, **options)


def federation(make: Callable[..., FederatedData], seed: int) -> FederatedData:
    """Return clients of which each is one environment, for methods that compare environments."""
    return make(seed=seed).as_environments()


def network(clients: FederatedData, seed: int, hidden: int) -> nn.Module:
    """Return one hidden layer."""
    return bf.models.mlp(clients.inputs, hidden=hidden, outputs=clients.classes, seed=seed)


def parts(size: Size) -> dict[str, Part]:
    """Return the federations."""
    held: dict[str, Any] = {"validation": 0.2}
    clients = 40 if size == "full" else 10
    rows: dict[str, Any] = {} if size == "full" else {"max_size": 100}
    data: dict[str, tuple[Callable[..., FederatedData], int]] = {
        "digits, concept drift": (
            partial(bf.data.concept_drift, "digits", clients=10, **held),
            32,
        ),
        "digits, Dirichlet": (
            partial(bf.data.dirichlet, "digits", clients=10, alpha=0.3, **held),
            32,
        ),
        "heart disease": (partial(bf.data.heart_disease, **held), 16),
        "MNIST, Dirichlet": (
            partial(bf.data.dirichlet, "mnist", clients=clients, alpha=0.3, **rows, **held),
            100,
        ),
    }
    if size == "quick":
        data = {name: data[name] for name in ("digits, concept drift",)}
    factors = FACTORS[2:3] if size == "quick" else FACTORS
    rounds = {"quick": 2, "reduced": 20, "full": 100}[size]
    return {
        name: Part(
            data=partial(federation, make),
            model=partial(network, hidden=hidden),
            methods={
                **{title: partial(rated, made) for made, title, _ in PAPERS.values()},
                "QLSD": bf.algorithms.qlsd,
            },
            rounds=rounds,
            seconds=15 if name.startswith("MNIST") else 4,
            seeds=(0,) if size == "quick" else (0, 1, 2),
            grid={"*": {"factor": factors}, "QLSD": {"step": [1e-4 * one for one in factors]}},
            by="validation_nll",
            settings={"steps": 20, "sampling": "fixed", "train": "cohort"},
            own={"QLSD": {"steps": None}},
        )
        for name, (make, hidden) in data.items()
    }
