"""FedAvg against algebra, and whom averages count for how much."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.algorithms.made import descend, flat, twin
from tests.cases import SIZES, run


def test_fedavg_of_one_full_step_is_a_gradient_step_on_everything(
    clients: FederatedData, model: nn.Module
):
    """With one full-batch step, the size-weighted mean of the clients is a step on the
    pooled data.
    """
    result = run(
        bf.algorithms.fedavg(model, epochs=1, batch_size=None, optimiser=SGD(0.3)),
        clients,
        rounds=1,
    )
    net = twin(model)
    x, y = zip(*[clients.train.client(j) for j in range(len(SIZES))], strict=True)
    descend(net, net, (torch.cat(x), torch.cat(y)), 0.3)
    assert_close(result.server["w"]["loc"], flat(net), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "block", "by_size"),
    [
        ("fedavg", "w", True),
        ("fedprox", "w", True),
        ("fedper", "body", True),
        ("fedrep", "body", True),
        ("lg_fedavg", "head", True),
        ("fedbabu", "body", False),
        ("ditto", "w", False),
        ("pfedme", "w", False),
        ("pfedmap", "head", False),
    ],
)
def test_who_counts_for_how_much(
    clients: FederatedData, model: nn.Module, name: str, block: str, by_size: bool
):
    """The server's block is the mean of what each client makes of it alone, weighted by size, or
    every client counting the same.
    """
    two = {
        "pfedme": ("batches",),
        "fedrep": ("head_epochs", "body_epochs"),
        "pfedmap": ("head_epochs", "body_epochs"),
    }
    made = getattr(bf.algorithms, name)(
        model, batch_size=None, **dict.fromkeys(two.get(name, ("epochs",)), 2)
    )
    options = {"rounds": 1, "sampling": "fixed", "train": "all"}
    together = run(made, clients, **options).server[block]["loc"]
    alone = torch.stack(
        [run(made, clients.select([j]), **options).server[block]["loc"] for j in range(len(SIZES))]
    )
    weights = torch.tensor(SIZES if by_size else [1] * len(SIZES)).double()
    assert_close(together, weights @ alone / weights.sum(), atol=1e-12, rtol=0)
    other = torch.tensor([1] * len(SIZES) if by_size else SIZES).double()
    assert (together - other @ alone / other.sum()).abs().max() > 1e-5
