"""IFCA against FedAvg inside the clusters."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.block import Block
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import in_turn
from tests.cases import keeping, run


def test_ifca_is_fedavg_inside_clusters(clusters: tuple[FederatedData, Tensor]):
    """Started near the rules, every client finds its own, a model moves as FedAvg's among its
    clients, and a new client finds its own.
    """
    data, rules = clusters
    model, begin = nn.Linear(3, 1, bias=False), rules + 0.1
    options: dict[str, Any] = {
        "epochs": 2,
        "batch_size": None,
        "optimiser": SGD(1e-4),
        "likelihood": Gaussian(0.1),
    }
    algorithm = bf.algorithms.ifca(model, clusters=2, **options)
    algorithm = replace(
        algorithm, blocks={"models": replace(algorithm.blocks["models"], start=in_turn(begin))}
    )
    result = run(keeping(algorithm), data)
    assert result.private["cluster"].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    for m in (0, 1):
        avg = replace(
            bf.algorithms.fedavg(model, **options),
            blocks={"w": Block(start=lambda rng, size, m=m: begin[m])},
        )
        inside = run(avg, data.select([2 * m, 2 * m + 1])).server["w"]["loc"]
        assert_close(result.server["models"]["loc"][m], inside, atol=1e-9, rtol=0)
    found: Any = result.adapt(data.select([3])).predict().client(0)
    x = data.test.client(3)[0].double()
    assert_close(found.mean[:, 0], x @ result.server["models"]["loc"][1], atol=1e-9, rtol=0)


def test_a_model_that_nobody_chose_stays(clusters: tuple[FederatedData, Tensor]):
    """To the bit, weight decay and all."""
    data, rules = clusters
    begin = torch.stack([rules[0], rules[1], torch.full((3,), 100.0)])
    decaying = SGD(1e-4, momentum=0.9, weight_decay=0.1)
    algorithm = bf.algorithms.ifca(
        nn.Linear(3, 1, bias=False), clusters=3, optimiser=decaying, likelihood=Gaussian(0.1)
    )
    algorithm = replace(
        algorithm, blocks={"models": replace(algorithm.blocks["models"], start=in_turn(begin))}
    )
    result = run(algorithm, data)
    assert torch.equal(result.server["models"]["loc"][2], begin[2].double())
    assert not torch.equal(result.server["models"]["loc"][0], begin[0].double())
