"""Methods, runs and plans of faults that several files of tests here share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.base.trees import flatten
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend, Once
from bayesfl.composition.pools import Stack
from bayesfl.data import FederatedData
from bayesfl.federation.private.privacy import ClientPrivacy
from bayesfl.federation.rounds.faults import Fault
from bayesfl.federation.run.result import Result
from bayesfl.federation.settings import Settings

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"epochs": 1, "batch_size": 10},
    "ditto": {"epochs": 1, "batch_size": 10},
    "pfedvem": {"head_epochs": 2, "body_epochs": 1, "batch_size": 10, "init_scale": 0.3},
    "d_fedem": {"components": 2, "epochs": 1, "batch_size": 10},
}
SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))


def state(result: Result) -> dict[str, Tensor]:
    """All tensors of a result."""
    return flatten({"server": result.server, "private": result.private})


def reads_replies(algorithm: Algorithm) -> bool:
    """Whether a method's `combine` reads what single clients send."""
    try:
        algorithm.combine(
            algorithm.init(7), torch.arange(7), {"round": 1, "rounds": 2, "clients": 7}
        )
    except KeyError:
        return True
    return False


TIMES = ("seconds", "seconds_steps", "seconds_batches", "seconds_noise")


def rows_of(result: Result) -> list[dict[str, Any]]:
    """The rows of its history, but for times."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in result.history]


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states are the same to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def same(one: Result, other: Result) -> bool:
    """Whether two results have the same bits and, but for times, the same history, in which a NaN
    is a NaN.
    """
    return same_bits(state(one), state(other)) and str(rows_of(one)) == str(rows_of(other))


def run(algorithm: bf.Algorithm, clients: FederatedData, **options: Any) -> Result:
    """Three rounds in float64, in chunks of three clients."""
    options = {
        "rounds": 3,
        "dtype": torch.float64,
        "seed": 3,
        "progress": False,
        "engine": bf.Engine(chunk=3),
        **options,
    }
    return bf.simulate(algorithm, clients, **options)


def without(client: int, round: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no cohort of that round has the client: by other means than a fault."""
    cohort = Settings.cohort

    def fewer(self: Settings, clients: int, at: int, *known: Any) -> np.ndarray:
        ids = cohort(self, clients, at, *known)
        return ids[ids != client] if at == round else ids

    monkeypatch.setattr(Settings, "cohort", fewer)


def power_of_choice(round: int, rng: np.random.Generator, known: Mapping[str, Any]) -> Any:
    """Of four candidates those two whose loss was largest, or is unknown."""
    drawn = rng.choice(len(known["n"]), 4, replace=False, p=known["n"] / known["n"].sum())
    return drawn[np.argsort(-np.nan_to_num(known["loss"][drawn], nan=np.inf), kind="stable")[:2]]


def reporting(algorithm: bf.Algorithm) -> bf.Algorithm:
    """A method whose clients also report the loss of the model that they received."""

    def measure(algorithm: Algorithm, given: Server, view: View, batch: Batch) -> View:
        return {"loss": (batch["weight"] @ batch["losses"]) / batch["weight"].sum()}

    phases = (Once(measure, data=True, losses=("w",)), *algorithm.phases)
    return replace(algorithm, phases=phases, reports={"loss": 0.0})


def of_client(client: int, round: int, fault: Fault) -> Any:
    """A plan in which one client fails once."""

    def plan(at: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {client: fault} if at == round and client in ids else {}

    return plan


def one_head_each(model: nn.Module) -> bf.Algorithm:
    """A shared body, and a head for each client that the server holds and addresses to it, mixed by
    halves with the mean.
    """

    def start(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        return view | {"head": {"loc": view["head_init"]}}

    def combine(server: Server, ids: Tensor, uplink: dict[str, Tensor]) -> Server:
        heads = uplink["head"]["loc"]
        return {
            "heads": server["heads"].index_copy(0, ids, 0.5 * (heads + heads.mean(0))),
            "done": server["done"] + 1,
        }

    both = ("body", "head")
    step = Descend(Energy(both, both, likelihood="mean"), batch_size=10)
    return bf.Algorithm(
        model,
        {"body": bf.Block("body.*"), "head": bf.Block("head.*", pool=Stack())},
        (
            Once(start),
            step,
            Once(
                lambda algorithm, given, view, data: (
                    view | {"moved": (view["head"]["loc"] - view["head_init"]).norm()}
                )
            ),
        ),
        parts=both,
        server=lambda blocks, clients: {
            "heads": blocks["head"]["loc"].expand(clients, -1),
            "done": torch.tensor(0),
        },
        address=lambda server, ids: {"head_init": server["heads"][ids]},
        reports={"moved": 0.0},
        combine=combine,
        finetune=(Once(start),),
    )


def algorithm(**options):
    """A small pFedVEM, that of the fixture `saved`."""
    return bf.algorithms.pfedvem(
        bf.models.mlp(8, hidden=8, outputs=3), head_epochs=2, body_epochs=1, **options
    )


def privately(
    algorithm: Algorithm, clients: FederatedData, rule: ClientPrivacy | None, **options: Any
) -> Result:
    """`run` under differential privacy, measuring nothing on the way."""
    return run(algorithm, clients, **{"evaluate_every": None, "aggregation": rule, **options})


def fedavg(model: nn.Module) -> Algorithm:
    """One pass in batches."""
    return bf.algorithms.fedavg(model, epochs=1, batch_size=10)
