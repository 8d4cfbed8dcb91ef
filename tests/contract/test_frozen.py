"""Every method on a model that is partly frozen: frozen parameters are constants, in no block, and
never sent.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from tests.cases import CASES, SAMPLE, Case, sampled
from tests.contract.made import DECOUPLED
from tests.federation.made import run, state

FROZEN = ("body.0.weight", "body.0.bias", "head.bias")


def partly_frozen() -> nn.Module:
    model = bf.models.mlp(8, hidden=(16, 6), outputs=3)
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


@pytest.mark.filterwarnings(
    "ignore:most of the selected weights have no curvature"
)  # a dead unit of the small body
@pytest.mark.parametrize(
    "case", sampled([case for case in (*CASES, DECOUPLED) if case.name != "fedsa_lora"]), ids=str
)
def test_what_is_frozen_stays_frozen(case: Case, clients: FederatedData):
    """By every kernel alike, of which the other two take one method of each kind; the user's module
    is untouched, and what is sent is as much as the rest.
    """
    model = partly_frozen()
    before = {name: (t.clone(), t.requires_grad) for name, t in model.named_parameters()}
    algorithm = case(model)
    assert not {name for block in algorithm.blocks for name in algorithm.layout(block).names} & set(
        FROZEN
    )
    found: dict[str, Any] = {}
    kernels: tuple[Any, ...] = ("reference", "vmap")
    for kernel in (*kernels, "live", "layers") if case.name in SAMPLE else kernels:
        result = run(
            algorithm,
            clients,
            rounds=2,
            participation=0.5,
            evaluate_every=None,
            engine=bf.Engine(kernel, chunk=3, workers=1),
        )
        found[kernel] = state(result)
        assert_close(found[kernel], found["reference"], atol=1e-10, rtol=1e-9)
    assert result.predict().probs is not None
    ran = algorithm.module(result.server[next(iter(algorithm.blocks))]["loc"])
    assert all(torch.equal(ran.get_parameter(name).float(), before[name][0]) for name in FROZEN)
    assert all(
        torch.equal(t, before[name][0]) and t.requires_grad == before[name][1]
        for name, t in model.named_parameters()
    )
    free = sum(t.numel() for name, t in model.named_parameters() if name not in FROZEN)
    sent = algorithm.uplink(algorithm.init(1))
    for name in algorithm.blocks:
        sizes = {shape[-1] for key, (shape, _) in sent.items() if key.startswith(f"{name}.")}
        assert len(sizes) <= 1
        assert max(sizes, default=0) <= free, name


def test_frozen_parameters_are_not_copied():
    """They share the storage of the user's model, as a backbone may be large; what is trained does
    not.
    """
    model = partly_frozen()
    algorithm = bf.algorithms.fedavg(model)
    inside = algorithm.module(torch.zeros(1))
    for name, t in model.named_parameters():
        assert (t.data_ptr() == inside.get_parameter(name).data_ptr()) == (name in FROZEN)
    assert not any(p.requires_grad for p in inside.parameters())
