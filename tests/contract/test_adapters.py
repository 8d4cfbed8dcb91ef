"""Adapters on a frozen network: shared, private and with a Gaussian belief, by hand and by peft, by
every kernel that can run them.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl import Algorithm, Block, Descend, Energy
from bayesfl.composition.priors import Normal, server_mean
from bayesfl.data import FederatedData
from bayesfl.data.recipes.torchvision import torchvision
from bayesfl.optim import SGD
from bayesfl.posteriors import MeanField
from tests.federation.made import run, state

TIES: dict[str, Any] = {
    "shared": {},
    "private": {"keep": True, "pool": None},
    "mean-field": {
        "posterior": MeanField(init_scale=0.1),
        "prior": Normal(
            centre=server_mean("lora"),
            variance=lambda given, view: torch.full_like(view["n"], 0.1)[..., None],
        ),
        "keep": True,
    },
}


class Adapted(nn.Module):
    """W x + B A x, of which W is frozen."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.lora_A.T @ self.lora_B.T


def by_hand() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(8, 12), nn.ReLU(), Adapted(12, 6), nn.ReLU())
    model.add_module("classifier", nn.Linear(6, 3))
    return model


def injected(model: nn.Module, **options: Any) -> nn.Module:
    """The model with peft's adapters, whose import takes seconds: here, where tests need it."""
    torchvision()  # peft imports it
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=2, **options), model)


def by_peft() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU())
    model.add_module("classifier", nn.Linear(6, 3))
    return injected(model, target_modules=["0", "2"], modules_to_save=["classifier"])


def lora(model: nn.Module, tie: str) -> Algorithm:
    parts = ("lora", "head")
    step = Descend(
        Energy(parts, parts, likelihood="mean"),
        epochs=2,
        batch_size=10,
        optimiser=SGD(0.1),
        draws=2,
    )
    blocks = {"lora": Block("*lora_*", **TIES[tie]), "head": Block("*classifier*")}
    return Algorithm(model, blocks, (step,), parts=parts, adapt=(step,), draws=4)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("made", [by_hand, by_peft])
def test_adapters_train_alike_by_every_kernel(made: Any, tie: str, clients: FederatedData):
    """The network beside them keeps its bits, is not sent, and neither is the user's module
    changed.
    """
    model = made()
    before = {name: t.clone() for name, t in model.named_parameters()}
    method = lora(model, tie)
    names = {block: method.layout(block).names for block in method.blocks}
    for block, pattern, number in (("lora", "lora_", 4), ("head", "classifier", 2)):
        assert [pattern in name for name in names[block]] == [True] * number
    assert ("lora.loc" in method.uplink(method.init(1))) == (tie != "private")
    found = {}
    for kernel in ("reference", "live", "vmap", "auto"):
        result = run(
            method,
            clients,
            engine=bf.Engine(kernel, chunk=3),
            evaluate_every=None,
            participation=0.6,
        )
        found[kernel] = state(result) | {"probs": result.predict().probs}
        assert_close(found[kernel], found["reference"], rtol=0, atol=1e-12)
    kept = (
        found["auto"]["private.lora.loc"]
        if tie != "shared"
        else found["auto"]["server.lora.loc"].unsqueeze(0)
    )
    start = method.layout("lora").ravel(dict(model.named_parameters()))
    assert (kept - start).abs().amax(-1).max() > 0.01
    assert all(torch.equal(t, before[name]) for name, t in model.named_parameters())
    inside = method.module(torch.zeros((), dtype=torch.float64))
    free = {*names["lora"], *names["head"]}
    assert all(
        torch.equal(t.float(), before[name])
        for name, t in inside.named_parameters()
        if name not in free
    )


def test_adapters_without_a_head_that_is_named_are_no_silent_success():
    """peft freezes what it does not adapt: the head's block is then empty, and the message says
    that it is frozen.
    """
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU())
    model.add_module("classifier", nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"'\*classifier\*'.*requires_grad=False"):
        lora(injected(model, target_modules=["0"]), "shared")
