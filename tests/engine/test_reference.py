"""The reference kernel against plain autograd."""

import copy

import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

import bayesfl as bf
from bayesfl.composition.block import Block
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend
from bayesfl.data import FederatedData
from bayesfl.engine import reference
from bayesfl.optim import SGD
from tests.engine.made import chunk


def test_unequal_clients_one_after_another(clients: FederatedData, model: nn.Module):
    """Two full-batch steps of each on its own mean loss, whoever else is in the chunk; what the
    views held stays.
    """
    step = Descend(Energy("w", ("w",), likelihood="mean"), epochs=2, optimiser=SGD(0.1))
    algorithm = bf.Algorithm(model, {"w": Block()}, (step,), parts=("w",))
    data = clients.to("cpu", torch.float64).train
    given, views, plan = chunk(algorithm, data)
    before = tree_map(torch.clone, views)
    algorithm.module(views["n"])  # made here, since no copy can be made inside torch.func
    found, _ = reference.run(algorithm, step, given, views, plan)
    for j in range(7):
        x, y = data.client(j)
        net = copy.deepcopy(model).double()
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
        assert_close(
            found["w"]["loc"][j],
            torch.cat([p.detach().flatten() for p in net.parameters()]),
            atol=1e-12,
            rtol=0,
        )
    assert_close(views, before, atol=0, rtol=0)
