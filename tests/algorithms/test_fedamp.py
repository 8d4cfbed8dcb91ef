"""FedAMP as a plain loop, without its pull, and for newcomers."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.cases import run


def reference(
    model: nn.Module, clients: FederatedData, cohorts: list[list[int]], alpha: float
) -> tuple[list[Tensor], list[Tensor]]:
    """The method as a plain loop, lam = 0.5 and sigma = 0.3, three full-batch steps of rate 0.1:
    the clients' models and their cloud models.
    """
    net = copy.deepcopy(model).double()
    start = parameters_to_vector(net.parameters()).detach()
    own, cloud = [start] * clients.clients, [start] * clients.clients
    for cohort in cohorts:
        for j in cohort:
            x, y = clients.train.client(j)
            for _ in range(3):
                vector_to_parameters(own[j], net.parameters())
                loss = F.cross_entropy(net(x.double()), y)
                slope = parameters_to_vector(torch.autograd.grad(loss, list(net.parameters())))
                own[j] = own[j] - 0.1 * (slope + 0.5 / alpha * (own[j] - cloud[j]))
        for i in cohort:
            mixed, rest = torch.zeros_like(start), 1.0
            for j in cohort:
                if j != i:
                    apart = float((own[i] - own[j]).square().sum())
                    weight = alpha * math.exp(-apart / 0.3) / 0.3
                    mixed, rest = mixed + weight * own[j], rest - weight
            cloud[i] = mixed + rest * own[i]
    return own, cloud


@pytest.mark.parametrize("alpha", [None, 0.05])
def test_rounds_as_a_plain_loop(model: nn.Module, clients: FederatedData, alpha: float | None):
    """Four rounds with clients that stay away."""
    options = {"lam": 0.5, "sigma": 0.3, "epochs": 3, "batch_size": None, "optimiser": SGD(0.1)}
    algorithm = bf.algorithms.fedamp(model, alpha=alpha, **options)
    result = run(algorithm, clients, 4, participation=0.6)
    cohorts = [result.settings.cohort(7, t).tolist() for t in range(4)]
    own, cloud = reference(model, clients, cohorts, 0.3 / 7 if alpha is None else alpha)
    assert_close(result.private["w"]["loc"], torch.stack(own), atol=1e-9, rtol=0)
    assert_close(result.server["cloud"], torch.stack(cloud), atol=1e-9, rtol=0)
    assert_close(result.server["w"]["loc"], torch.stack(cloud).mean(0), atol=1e-9, rtol=0)


def test_without_pull_it_is_local(model: nn.Module, clients: FederatedData):
    """lam = 0: the same steps as alone, to the bit."""
    options = {"epochs": 2, "batch_size": None, "optimiser": SGD(0.05)}
    pulled = run(bf.algorithms.fedamp(model, lam=0.0, **options), clients, 3)
    alone = run(bf.algorithms.local(model, **options), clients, 3)
    assert torch.equal(pulled.private["w"]["loc"], alone.private["w"]["loc"])


def test_a_newcomer_starts_from_the_mean_of_all(model: nn.Module, clients: FederatedData):
    """And is pulled to it."""
    old, new = clients.hold_out(2, seed=0)
    algorithm = bf.algorithms.fedamp(
        model, lam=10.0, alpha=0.02, optimiser=SGD(2e-3), batch_size=None, adapt_epochs=2000
    )
    result = run(algorithm, old, 2)
    near = result.adapt(new).private["w"]["loc"] - result.server["w"]["loc"]
    assert 0 < near.abs().max() < 1e-2


def test_a_step_too_large_is_refused(model: nn.Module, clients: FederatedData):
    """An own weight below 0 would extrapolate."""
    algorithm = bf.algorithms.fedamp(model, alpha=1.0, epochs=1)
    with pytest.raises(ValueError, match=r"alpha=1 gives .* weight -.*at most sigma / 7"):
        run(algorithm, clients)
