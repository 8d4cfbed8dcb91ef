"""A frozen base in half precision under trained parameters of a run's own: its memory, its numbers
against a plain loop, every kernel, and what reads a client's network.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.models.modes import halved
from bayesfl.models.trial import tried
from bayesfl.optim import SGD
from tests.federation.made import run

HALVES = (torch.bfloat16, torch.float16)


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A frozen body with every kind of float that is no trained parameter, and a head."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.BatchNorm1d(12), nn.Tanh())
    body.to(dtype).eval().requires_grad_(False)
    return bf.models.SplitModel(body, nn.Linear(12, 3))


def features(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers in half precision; batch norm's statistics are in that of the inputs."""
    linear, layer_norm, norm, _ = model.body
    half = linear.weight.dtype
    x = layer_norm(linear(x.to(half)).to(x).to(half)).to(x)
    mean, variance = norm.running_mean.to(x), norm.running_var.to(x)
    return torch.tanh((x - mean) / (variance + norm.eps).sqrt() * norm.weight.to(x) + norm.bias)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_frozen_base_keeps_its_precision_and_its_memory(dtype: torch.dtype):
    model: Any = network(dtype)
    method = bf.algorithms.fedavg(model)
    made: Any = method.module(torch.empty(0))
    for of in (0, 1):
        assert made.body[of].weight.data_ptr() == model.body[of].weight.data_ptr()
        assert made.body[of].weight.dtype == dtype
    assert [type(part) for part in halved(model)] == [nn.Linear, nn.LayerNorm]
    assert made.head.weight.dtype == made.body[2].running_var.dtype == torch.float32
    assert model.body[2].running_var.dtype == dtype
    x = torch.randn(4, 8)
    assert_close(made.body(x), features(model, x), rtol=0, atol=1e-6)
    assert made(x).dtype == torch.float32
    twice = made.double()  # as a posterior in double precision does
    assert twice(x.double()).dtype == torch.float64


def test_a_trained_layer_in_half_precision_is_trained_in_the_runs():
    model = network().requires_grad_(True)
    assert halved(model) == []
    inside = bf.algorithms.fedavg(model).module(torch.empty(0))
    assert {t.dtype for t in inside.parameters()} == {torch.float32}


def test_the_head_trains_as_by_a_plain_loop_by_every_kernel(clients: FederatedData):
    model: Any = network()
    method = bf.algorithms.fedavg(model, epochs=2, batch_size=None, optimiser=SGD(0.1))
    found = {
        kernel: run(
            method, clients, rounds=2, engine=bf.Engine(kernel, chunk=3), evaluate_every=None
        )
        for kernel in ("reference", "live", "vmap", "auto")
    }
    head: Any = nn.Linear(12, 3).double()
    head.load_state_dict(model.head.state_dict())
    share = torch.as_tensor(clients.train.counts, dtype=torch.float64)
    for _ in range(2):
        heads = []
        for j in range(clients.clients):
            own: Any = nn.Linear(12, 3).double()
            own.load_state_dict(head.state_dict())
            xs, ys = clients.train.client(j)
            at = features(model, xs.double()).detach()
            for _ in range(2):
                own.zero_grad()
                nn.functional.cross_entropy(own(at), ys).backward()
                with torch.no_grad():
                    for p in own.parameters():
                        p -= 0.1 * p.grad
            heads.append(nn.utils.parameters_to_vector(own.parameters()).detach())
        mean = (share / share.sum()) @ torch.stack(heads)
        nn.utils.vector_to_parameters(mean, head.parameters())
    wanted = nn.utils.parameters_to_vector(head.parameters()).detach()
    began = nn.utils.parameters_to_vector(model.head.parameters())
    assert (wanted - began).abs().max() > 0.05
    for result in found.values():  # sums in half precision round by the number of rows
        assert_close(result.server["w"]["loc"], wanted, rtol=0, atol=2e-4)


def test_laplace_and_a_clients_network_are_of_the_base_in_half_precision(clients: FederatedData):
    model: Any = network()
    method = bf.algorithms.fedavg(model, optimiser=SGD(0.1))
    result = bf.simulate(method, clients, rounds=1, progress=False)
    own: Any = result.client(0).model()
    x = clients.test.client(0)[0]
    assert own.body[0].weight.dtype == torch.bfloat16
    assert_close(own(x).softmax(-1), result.client(0).predict(x).probs)
    rows = torch.cat([clients.train.client(j)[0] for j in range(clients.clients)])
    around = bf.posteriors.Laplace.fit(own.head, own.body(rows), structure="full", precision=1.0)
    last: Any = result.laplace("last_layer", precision=1.0).predict(clients.test)
    there = around.predict(own.body(x))["probs"].float()
    assert_close(last.client(0).probs[: len(x)], there, atol=1e-4, rtol=0)


def test_a_trial_is_made_without_the_rounding_of_half_precision():
    """A row that torch sums in another order beside others would look mixed."""
    torch.manual_seed(0)
    base = nn.Sequential(*[part for _ in range(40) for part in (nn.Linear(64, 64), nn.Tanh())])
    for p in base.parameters():
        nn.init.normal_(p, std=0.25)  # such that rounding grows
    base.bfloat16().requires_grad_(False)
    x = torch.randn(31, 64)
    beside = base(x.bfloat16())
    alone = torch.cat([base(row.bfloat16()) for row in x.split(1)])
    worst = (beside - alone).abs().amax(1).argmax()
    x = torch.cat([x[worst:], x[:worst]])  # the trial takes the first row alone
    assert tried(nn.Sequential(base, nn.Linear(64, 3)), x, torch.empty(0)).closed
    mixes = nn.Sequential(base, nn.Softmax(0), nn.Linear(64, 3))
    with pytest.raises(ValueError, match="mixes the rows"):
        tried(mixes, x, torch.empty(0))
