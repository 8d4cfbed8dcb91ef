"""LG-FedAvg: own bodies under one head."""

from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from tests.cases import run


def test_lg_fedavg_shares_its_head_alone(clients: FederatedData, model: nn.Module):
    """Every client predicts with its own body under the server's head."""
    result = run(bf.algorithms.lg_fedavg(model, epochs=1, batch_size=10), clients, rounds=3)
    x, _ = clients.test.client(2)
    algorithm = result.algorithm
    view = {"body": {"loc": result.private["body"]["loc"][2]}, "head": result.server["head"]}
    expected = algorithm.outputs(algorithm.leaves(("body", "head"), view), x.double()).softmax(-1)
    assert_close(result.predict().client(2).probs, expected, atol=1e-12, rtol=0)
