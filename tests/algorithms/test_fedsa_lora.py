"""FedSA-LoRA against a plain loop; FFA-LoRA, shared and private adapters by other methods."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.cases import federation, run
from tests.contract.test_adapters import by_hand

FULL: Any = {"batch_size": None, "optimiser": SGD(0.1)}


def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Two layers W x + b + B A x, each with an activation, and a classifier."""
    for layer in "02":
        of = f"{layer}.layer."
        low = x @ p[f"{layer}.lora_A"].T @ p[f"{layer}.lora_B"].T
        x = (x @ p[f"{of}weight"].T + p[f"{of}bias"] + low).relu()
    return F.cross_entropy(x @ p["classifier.weight"].T + p["classifier.bias"], y)


def trained(p: dict[str, Tensor], own: list[str], x: Tensor, y: Tensor, *, steps: int) -> Any:
    """The parameters after steps of gradient descent on those named."""
    for _ in range(steps):
        live = {name: p[name].clone().requires_grad_() for name in own}
        slopes = torch.autograd.grad(loss(p | live, x, y), list(live.values()))
        p = p | {name: p[name] - 0.1 * g for name, g in zip(own, slopes, strict=True)}
    return p


def by_loop(clients: FederatedData, frozen: str, shared: tuple[str, ...]) -> Any:
    """Two rounds of three steps; parameters whose names contain `shared` are averaged."""
    start = {name: t.detach().double() for name, t in by_hand().named_parameters()}
    own = [n for n in start if ".layer." not in n and frozen not in n]
    gone = [n for n in own if any(part in n for part in shared)]
    data = [clients.train.client(j) for j in range(clients.clients)]
    share = torch.tensor([len(y) for _, y in data]).double()
    share /= share.sum()
    locals = [start] * len(data)
    for _ in range(2):
        locals = [
            trained(p, own, x.double(), y, steps=3) for p, (x, y) in zip(locals, data, strict=True)
        ]
        mean = {n: sum(s * p[n] for s, p in zip(share, locals, strict=True)) for n in gone}
        locals = [p | mean for p in locals]
    return locals


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    return federation(sizes=(9, 14, 6))


def test_a_is_averaged_and_the_rest_stays(clients: FederatedData):
    model = by_hand()
    method = bf.algorithms.fedsa_lora(model, steps=3, **FULL)
    assert method.layout("A").names == ("0.lora_A", "2.lora_A")
    result = run(method, clients, rounds=2)
    wanted = by_loop(clients, "none", ("lora_A",))
    assert_close(
        method.layout("A").leaves(result.server["A"]["loc"])["2.lora_A"], wanted[0]["2.lora_A"]
    )
    for j, one in enumerate(wanted):
        kept = method.layout("B").leaves(result.private["B"]["loc"][j])
        for name, t in kept.items():
            assert_close(t, one[name], rtol=0, atol=1e-12)
    assert (wanted[0]["0.lora_B"] - wanted[1]["0.lora_B"]).abs().max() > 1e-3


def test_ffa_lora_is_fedavg_with_a_frozen_a(clients: FederatedData):
    model = by_hand()
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and "lora_A" not in name)
    method = bf.algorithms.fedavg(model, epochs=3, **FULL)
    result = run(method, clients, rounds=2)
    wanted = by_loop(clients, "lora_A", ("lora_B", "classifier"))[0]
    for name, t in method.layout("w").leaves(result.server["w"]["loc"]).items():
        assert "lora_A" not in name
        assert_close(t, wanted[name], rtol=0, atol=1e-12)


def test_one_that_joins_takes_a_and_trains_the_rest(clients: FederatedData):
    old, new = clients.hold_out(1, seed=0)
    method = bf.algorithms.fedsa_lora(by_hand(), steps=3, adapt_epochs=4, **FULL)
    result = run(method, old, rounds=1)
    joined = result.adapt(new)
    start = {name: t.detach().double() for name, t in by_hand().named_parameters()}
    start |= method.layout("A").leaves(result.server["A"]["loc"])
    x, y = new.train.client(0)
    names = list(method.layout("B").names)
    wanted = trained(start, names, x.double(), y, steps=4)
    kept = method.layout("B").leaves(joined.private["B"]["loc"][0])
    for name in names:
        assert_close(kept[name], wanted[name], rtol=0, atol=1e-12)


def test_a_model_without_adapters_is_refused(model: nn.Module):
    with pytest.raises(ValueError, match=r"lora_A"):
        bf.algorithms.fedsa_lora(model)
