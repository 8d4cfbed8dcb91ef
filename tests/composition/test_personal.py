"""A personal model beside a method: any method keeps what it does, and its clients predict with
their own.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl import Block, Descend, Energy, pools, priors, with_personal
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.cases import run

# Full batches draw nothing.
FIT = Descend(Energy("v", ("v",), likelihood="mean"), epochs=2, optimiser=SGD(0.1))
METHODS: dict[str, Any] = {
    "fedavg": {"epochs": 2, "batch_size": 10},
    "fedper": {"epochs": 1, "batch_size": 10},
    "fedprox": {"epochs": 1, "batch_size": 10},
    "irm": {"steps": 2, "batch_size": 10, "anneal": 0},
}


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "irm"])
def test_the_method_goes_on_as_without_it(name: str, clients: FederatedData, model: nn.Module):
    """The server's state to the bit, and what is sent."""
    method = getattr(bf.algorithms, name)(model, **METHODS[name])
    both = with_personal(method, FIT)
    assert both.uplink(both.init(1)) == method.uplink(method.init(1))
    found, alone = (run(one, clients, rounds=2).server["w"] for one in (both, method))
    assert_close(found, alone, atol=0, rtol=0)


def test_it_is_ditto_on_fedavg(clients: FederatedData, model: nn.Module):
    """By hand: two gradient steps a round on the mean loss plus lam / 2 |v - w|^2, w the model
    received.
    """
    lam = 0.7
    plain = replace(
        bf.algorithms.fedavg(model, epochs=1, batch_size=10),
        blocks={"w": Block(pool=pools.Mean(pools.equal))},
    )
    tied = priors.Normal(centre=priors.server_mean("w"), variance=priors.inverse_size(lam))
    found = run(with_personal(plain, FIT, prior=tied), clients, rounds=2)
    received = [
        plain.init(7, dtype=torch.float64)["w"]["loc"],
        run(plain, clients, 1).server["w"]["loc"],
    ]
    for j in (0, 3):
        x, y = clients.train.client(j)
        v = received[0].clone()
        for w in received:
            for _ in range(2):
                v.requires_grad_()
                loss = (
                    plain.losses(plain.layout("w").leaves(v), {"x": x.double(), "y": y}).mean()
                    + lam / 2 * (v - w).square().sum()
                )
                (slope,) = torch.autograd.grad(loss, v)
                v = (v - 0.1 * slope).detach()
        assert_close(found.private["v"]["loc"][j], v, atol=1e-12, rtol=0)


def test_restarting_forgets(clients: FederatedData, model: nn.Module):
    """With `restart` a round's personal model depends on the model received alone; without, it goes
    on from its own.
    """
    plain = bf.algorithms.fedavg(model, **METHODS["fedavg"])
    before = run(plain, clients, 1)
    begin, kept = (
        run(with_personal(plain, FIT, restart=restart), clients, rounds=2).private["v"]["loc"]
        for restart in (True, False)
    )
    x, y = clients.train.client(0)

    def loss(v: torch.Tensor) -> torch.Tensor:
        return plain.losses(plain.layout("w").leaves(v), {"x": x.double(), "y": y}).mean()

    v = before.server["w"]["loc"]
    for _ in range(2):
        v = v.detach().requires_grad_()
        v = (v - 0.1 * torch.autograd.grad(loss(v), v)[0]).detach()
    assert_close(begin[0], v, atol=1e-12, rtol=0)
    assert not torch.allclose(kept[0], v)


@pytest.mark.parametrize("parted", [False, True])
def test_newcomers_start_from_what_they_receive(
    parted: bool, clients: FederatedData, model: nn.Module
):
    """By phases of their own where there are some; FIT without a step would be the model received,
    which is put together where the method has a body and a head that everyone receives.
    """
    old, novel = clients.hold_out(2, seed=0)
    both = ("body", "head")
    parts = bf.Algorithm(
        model,
        {name: Block(f"{name}.*") for name in both},
        (Descend(Energy(both, both, likelihood="mean"), optimiser=SGD(0.1)),),
        parts=both,
    )
    plain = parts if parted else bf.algorithms.fedavg(model, **METHODS["fedavg"])
    still = replace(FIT, optimiser=SGD(0.0))
    result = run(with_personal(plain, FIT, adapt=(still,)), old, rounds=2)
    leaves = result.algorithm.leaves(plain.parts, result.server)
    received = result.algorithm.layout("v").ravel(leaves).expand(2, -1)
    assert_close(result.adapt(novel).private["v"]["loc"], received, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "phases", "options", "words"),
    [
        ("fedavg", (), {}, r"phases .*got none .*\['w'\]"),
        (
            "fedavg",
            (FIT, replace(FIT, energy=Energy("u", ("u",), likelihood="mean"))),
            {},
            "got .'v', 'u'.",
        ),
        ("fedavg", (), {"adapt": (FIT,)}, r"phases .*got \['v'\] .*\['w'\]"),
        ("fedavg_ft", (FIT,), {}, "fine-tunes its model"),
        ("clustered", (FIT,), {}, "fine-tunes its model"),
        ("fedsi", (FIT,), {}, "has a predictor"),
        *(
            (name, (FIT,), {}, r"Algorithm\(SplitModel.* no single model")
            for name in ("fedper", "fedpac", "local")
        ),
    ],
)
def test_what_does_not_fit(
    name: str, phases: tuple[Any, ...], options: Any, words: str, model: nn.Module
):
    """Refused where it is composed, by name."""
    with pytest.raises(ValueError, match=words):
        with_personal(getattr(bf.algorithms, name)(model), *phases, **options)
