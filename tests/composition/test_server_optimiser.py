"""An optimiser on the server: its limits, momentum, schedules, and what it is not for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.changes import with_server_optimiser
from bayesfl.data import FederatedData
from bayesfl.optim import SGD, Adam
from tests.cases import close, run, weights, with_batch_norm


@pytest.mark.parametrize("name", ["fedavg", "pfedvem", "group_dro", "fedem"])
def test_a_step_of_length_one_is_the_method_itself(
    clients: FederatedData, model: nn.Module, name: str
):
    """SGD(1.0) takes what pools, and `combine`, made; what the server keeps for it is not sent."""
    options = {"group_dro": {"environments": 2}}.get(name, {})
    algorithm = getattr(bf.algorithms, name)(model, **options)
    stepped = with_server_optimiser(algorithm, SGD(1.0))
    a, b = (run(one, clients, rounds=2, participation=0.6) for one in (algorithm, stepped))
    assert_close({name: b.server[name] for name in a.server}, a.server, atol=1e-9, rtol=0)
    assert b.history["bytes_down"].tolist() == a.history["bytes_down"].tolist()
    assert stepped.uplink(b.server) == algorithm.uplink(a.server)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (bf.algorithms.d_fedem, r"\['components'\]"),
        (bf.algorithms.fedpac, r"\['head'\]"),
        (bf.algorithms.clustered, r"\['w'\]"),
    ],
)
def test_no_optimiser_steps_what_nobody_is_sent(
    clients: FederatedData, model: nn.Module, make: Any, words: str
):
    """Models of their own for clients or clusters; and one on the server is enough."""
    with pytest.raises(ValueError, match=f"optimiser .*{words}"):
        run(with_server_optimiser(make(model), SGD(0.5)), clients, rounds=1)


def test_momentum_on_the_server(clients: FederatedData):
    """v <- 0.5 v + (w - mean), w <- w - 0.8 v, from what FedAvg makes of each round."""
    average = bf.algorithms.fedavg(
        nn.Linear(8, 3), epochs=2, batch_size=None, optimiser=SGD(0.1, momentum=0.9)
    )
    momentum = with_server_optimiser(average, SGD(0.8, momentum=0.5))
    w, v = weights(average), torch.zeros(27, dtype=torch.float64)
    for _ in range(3):
        start = replace(
            average, blocks={"w": replace(average.blocks["w"], start=lambda rng, size, w=w: w)}
        )
        v = 0.5 * v + w - run(start, clients).server["w"]["loc"]
        w = w - 0.8 * v
    close(run(momentum, clients, rounds=3).server["w"]["loc"], w, 1e-6)


def test_a_schedule_on_the_server(clients: FederatedData):
    """The rate of a round is the schedule's, at the number that the server counts."""
    average = bf.algorithms.fedavg(
        nn.Linear(8, 3), epochs=1, batch_size=None, optimiser=SGD(0.1, momentum=0.9)
    )
    stepped = with_server_optimiser(
        average, SGD(lambda round, rounds: [0.5, 0.0, 2.0][round] if rounds == 3 else 9.0)
    )
    w = weights(average)
    for rate in (0.5, 0.0, 2.0):
        start = replace(
            average, blocks={"w": replace(average.blocks["w"], start=lambda rng, size, w=w: w)}
        )
        w = w + rate * (run(start, clients).server["w"]["loc"] - w)
    close(run(stepped, clients, rounds=3).server["w"]["loc"], w, 1e-6)


def test_draws_of_a_round_are_there(clients: FederatedData):
    """A server's step of rate 1 is the method itself, also where every round draws a number."""
    plain = bf.algorithms.fedavg(nn.Linear(8, 3), epochs=1, batch_size=None)
    drawn = replace(plain, drawn={"shift": lambda rng: rng.normal()})
    moved = replace(
        drawn,
        combine=lambda server, ids, uplink: {"w": {"loc": server["w"]["loc"] + server["shift"]}},
    )
    a, b = (run(one, clients, rounds=2) for one in (moved, with_server_optimiser(moved, SGD(1.0))))
    close(b.server["w"]["loc"], a.server["w"]["loc"], 1e-6)
    assert (
        a.server["w"]["loc"] - run(plain, clients, rounds=2).server["w"]["loc"]
    ).abs().max() > 0.01


def test_statistics_of_norms_are_not_stepped(clients: FederatedData):
    """They are the pooled mean, which Adam would take below 0; the weights are stepped."""
    average = bf.algorithms.fedavg(with_batch_norm(), epochs=1, batch_size=10)
    stepped = with_server_optimiser(average, Adam(2.0))
    a, b = (run(one, clients) for one in (average, stepped))
    assert_close(b.server["w_buffers"], a.server["w_buffers"], atol=0, rtol=0)
    assert (b.server["w"]["loc"] - a.server["w"]["loc"]).abs().max() > 1
    variances = b.algorithm.layout("w_buffers").leaves(
        run(stepped, clients, rounds=3).server["w_buffers"]["loc"]
    )
    assert variances["body.1.running_var"].min() > 0
    assert "w_buffers" not in b.server["server_optimiser"]["before"]
