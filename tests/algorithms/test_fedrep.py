"""FedPer and FedRep by hand."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.algorithms.made import descend, flat, twin
from tests.cases import SIZES, run


@pytest.mark.parametrize(
    ("make", "epochs", "in_turn"),
    [
        (bf.algorithms.fedper, {"epochs": 1}, False),
        (bf.algorithms.fedrep, {"head_epochs": 1, "body_epochs": 1}, True),
    ],
    ids=["fedper", "fedrep"],
)
def test_a_round_by_hand(
    clients: FederatedData, model: nn.Module, make: Any, epochs: dict[str, int], in_turn: bool
):
    """FedPer: one full-batch step on body and head at once. FedRep: one of each, the head's under
    the old body, then the body's under the new head. Bodies average by size, heads stay at home.
    """
    method = make(model, **epochs, batch_size=None, optimiser=SGD(0.3))
    result = run(method, clients)
    nets = [twin(model) for _ in SIZES]
    for j, net in enumerate(nets):
        for part in (net.head, net.body) if in_turn else (net,):
            descend(part, net, clients.train.client(j), 0.3)
    heads, bodies = (torch.stack([flat(getattr(n, p)) for n in nets]) for p in ("head", "body"))
    weights = torch.tensor(SIZES).double()
    assert_close(result.private["head"]["loc"], heads, atol=1e-12, rtol=0)
    assert_close(result.server["body"]["loc"], weights @ bodies / weights.sum(), atol=1e-12, rtol=0)
