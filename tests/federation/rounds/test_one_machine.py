"""Clients on one machine: what they keep where a reply is changed, refused or never made."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Batch, Server, Tensors, View
from bayesfl.base.trees import flatten
from bayesfl.composition.phases import Once
from bayesfl.composition.pools import Mean
from bayesfl.data import FederatedData
from bayesfl.federation.rounds.admission import Message
from bayesfl.federation.rounds.faults import FAULTS, Altered, Lost
from bayesfl.federation.rounds.one_machine import OneMachine
from bayesfl.federation.rounds.replies import AggregationRun
from bayesfl.federation.rounds.round import Rules, run_round
from bayesfl.federation.settings import Settings
from tests.cases import SIZES
from tests.federation.made import METHODS, of_client, run, same_bits, state


def outside(round: int, sampling: Any) -> int:
    """A client that is not in the cohort of that round."""
    cohort = Settings(3, 0.5, sampling, "all", 3, None).cohort(7, round)
    return int(np.setdiff1d(np.arange(7), cohort)[0])


def test_a_lost_client_outside_the_cohort(model: nn.Module, clients: FederatedData):
    """Where all train, one that is not gathered may fail too: its state stays, and nobody else's
    changes.
    """
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])
    out = outside(2, "fixed")
    options: dict[str, Any] = {"participation": 0.5, "sampling": "fixed", "train": "all"}
    before = run(algorithm, clients, rounds=2, **options)
    result, plain = (
        run(
            algorithm,
            clients,
            resume=before,
            faults=of_client(out, 2, fault) if fault else None,
            **options,
        )
        for fault in (Lost(), None)
    )
    assert_close(result.server, plain.server, atol=1e-12, rtol=0)
    for name, t in flatten(result.private).items():
        wanted = flatten(plain.private)[name].clone()
        wanted[out] = flatten(before.private)[name][out]
        assert_close(t, wanted, atol=1e-12, rtol=0)


def test_a_reply_that_is_taken_leaves_the_clients_own_state_alone(
    model: nn.Module, clients: FederatedData
):
    """Changed on its way by so little that nobody objects, it moves the server, and not what the
    client keeps.
    """
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])

    def nudged(message: Message) -> Message:
        return replace(
            message,
            tensors={
                name: t + 0.1 if t.is_floating_point() else t for name, t in message.tensors.items()
            },
        )

    plain = run(algorithm, clients, rounds=1, admission=bf.Admission("skip"))
    result = run(
        algorithm, clients, rounds=1, faults=lambda round, attempt, ids: {3: Altered(nudged)}
    )
    assert result.history["rejected"].tolist() == [0]
    assert_close(result.private, plain.private, atol=0, rtol=0)
    assert not torch.allclose(result.server["body"]["loc"], plain.server["body"]["loc"])


@pytest.mark.parametrize("kind", list(FAULTS))
def test_clients_that_send_nothing(kind: str, model: nn.Module, clients: FederatedData):
    """A method without a server's model survives every fault; a client whose reply is refused stays
    where it was.
    """
    algorithm, plan = (
        bf.algorithms.local(model, epochs=1, batch_size=10),
        of_client(2, 0, FAULTS[kind]),
    )
    kept = flatten(run(algorithm, clients, faults=plan, rounds=1, evaluate_every=None).private)
    start = flatten(algorithm.rows(algorithm.init(clients.clients, seed=3, dtype=torch.float64)))
    refused = kind in ("lost", "stale", "protocol", "extra")
    assert all(torch.equal(t[2], start[name]) == refused for name, t in kept.items())
    assert not any(torch.equal(t[1], start[name]) for name, t in kept.items())


@pytest.mark.parametrize("kind", ["stale", "protocol", "extra"])
def test_a_bad_acknowledgement(kind: str, model: nn.Module, clients: FederatedData):
    """A client that trains outside the cohort and whose word is not taken starts again from where
    it was.
    """
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])
    options: dict[str, Any] = {"participation": 0.5, "train": "all", "evaluate_every": None}
    out = outside(1, algorithm.sampling)
    found, lost = (
        run(algorithm, clients, faults=of_client(out, 1, fault), **options)
        for fault in (FAULTS[kind], Lost())
    )
    assert_close(state(found), state(lost), atol=1e-12, rtol=0)
    assert found.history["rejected"].sum() == lost.history["lost"].sum() == 0


class Interrupted(BaseException):
    """Neither an error nor ours."""


@pytest.mark.parametrize("where", ["combine", "solve", "phase"])
@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
def test_whatever_is_raised_leaves_private_rows_as_they_were(clients, model, where, error):
    """An error in any part of a method, or from outside, undoes what its round has written, as a
    divergence does.
    """
    fail: list[str] = []

    def maybe(part: str) -> None:
        if part in fail:
            raise error(part)

    class Pool(Mean):
        def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
            maybe("solve")
            return super().solve(server, name, total)

    def touch(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        if int(view["n"]) == min(SIZES):  # the last chunk
            maybe("phase")
        return view

    def combine(server: Server, ids: Tensor, uplink: dict[str, Tensor]) -> Server:
        maybe("combine")
        return {}

    plain = bf.algorithms.fedper(model, epochs=1)
    blocks = {"body": replace(plain.blocks["body"], pool=Pool()), "head": plain.blocks["head"]}
    made = replace(plain, blocks=blocks, phases=(*plain.phases, Once(touch)), combine=combine)
    options = {
        "engine": bf.Engine("reference", chunk=2, workers=1),
        "evaluate_every": None,
        "progress": False,
    }
    first = bf.simulate(made, clients, rounds=1, **options)
    kept = {name: t.clone() for name, t in state(first).items()}
    fail.append(where)
    with pytest.raises(error, match=where):
        bf.simulate(made, clients, rounds=2, resume=first, **options)
    rules = Rules(
        made.uplink(made.init(1)),
        bf.Admission(),
        AggregationRun(made, first.settings, clients.clients, 1),
    )
    with first.engine.crew(first.device) as crew:
        transport = OneMachine(first.local(clients.splits), first.state, crew, None, None)
        with pytest.raises(error, match=where):
            run_round(rules, first.server, first.round, first.history, transport)
    assert same_bits(state(first), kept)
    fail.clear()
    again, whole = (
        bf.simulate(made, clients, rounds=2, resume=start, **options) for start in (first, None)
    )
    assert same_bits(state(again), state(whole))
