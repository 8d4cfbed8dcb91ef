"""Networks as modules: of clients that predict by one of several, and of servers that hold one."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.clients.modules import module_at, server_module
from tests.cases import run


def test_the_servers_network_is_that_of_its_means(model: nn.Module, clients: FederatedData):
    """In evaluation mode, not shared with the run."""
    result = run(bf.algorithms.fedavg(model, epochs=1), clients)
    found = server_module(result.algorithm, result.server, 7, torch.ones((), dtype=torch.float64))
    assert not found.training
    assert_close(torch.cat([p.flatten() for p in found.parameters()]), result.server["w"]["loc"])
    with torch.no_grad():
        next(found.parameters()).zero_()
    assert result.server["w"]["loc"][0] != 0


def test_servers_without_a_network_for_all(model: nn.Module, clients: FederatedData):
    """Private parts and mixtures."""
    for name in ("fedper", "ifca"):
        result = run(getattr(bf.algorithms, name)(model, epochs=1), clients)
        with pytest.raises(ValueError, match=r"no complete network.*result\.client\(name\)"):
            server_module(result.algorithm, result.server, 7, torch.ones((), dtype=torch.float64))


def test_a_copy_that_alone_has_weight(model: nn.Module):
    """Of several copies the chosen one; with two, there is no single network."""
    method = bf.algorithms.ifca(model, clusters=3)
    models = method.init(1, dtype=torch.float64)["models"]["loc"]
    view = {"models": {"loc": models}, "n": torch.ones((), dtype=torch.float64)}
    found = module_at(method, ("models",), view | {"cluster": torch.tensor([0.0, 1.0, 0.0])})
    assert_close(torch.cat([p.flatten() for p in found.parameters()]), models[1])
    with pytest.raises(ValueError, match=r"2 of 3 copies"):
        module_at(method, ("models",), view | {"cluster": torch.tensor([0.5, 0.5, 0.0])})


def test_a_server_beside_personal_networks_with_norms(clients: FederatedData):
    """Its network has the statistics that go with its weights."""
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    result = run(bf.algorithms.ditto(model, epochs=1), clients, rounds=1, evaluate_every=1)
    made = result.model()
    assert torch.equal(made.get_buffer("1.running_mean"), result.server["w_buffers"]["loc"][:6])
    assert math.isfinite(result.history["global_accuracy"][-1])
