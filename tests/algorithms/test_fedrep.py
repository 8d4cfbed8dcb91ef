"""FedRep by hand."""

import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.cases import SIZES, run


def test_fedrep_fits_the_head_first(clients: FederatedData, model: nn.Module):
    """One full-batch step of each: the head's under the old body, then the body's under the new
    head.
    """
    fedrep = bf.algorithms.fedrep(
        model, head_epochs=1, body_epochs=1, batch_size=None, optimiser=SGD(0.3)
    )
    result = run(fedrep, clients, rounds=1)
    bodies = []
    for j in range(len(SIZES)):
        x, y = clients.train.client(j)
        net = bf.models.mlp(8, hidden=16, outputs=3).double()
        net.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
        for part in (net.head, net.body):
            slopes = torch.autograd.grad(
                nn.functional.cross_entropy(net(x.double()), y), list(part.parameters())
            )
            with torch.no_grad():
                for p, slope in zip(part.parameters(), slopes, strict=True):
                    p -= 0.3 * slope
        head, body = (
            torch.cat([p.detach().flatten() for p in part.parameters()])
            for part in (net.head, net.body)
        )
        assert_close(result.private["head"]["loc"][j], head, atol=1e-12, rtol=0)
        bodies.append(body)
    weights = torch.tensor(SIZES).double()
    assert_close(
        result.server["body"]["loc"],
        weights @ torch.stack(bodies) / weights.sum(),
        atol=1e-12,
        rtol=0,
    )
