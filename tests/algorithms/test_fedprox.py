"""FedProx against algebra."""

import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import COUNTS, DIM, linear_only, moments
from tests.cases import run


def test_fedprox_without_pull_is_fedavg(clients: FederatedData, model: nn.Module):
    """mu = 0: the same steps, to the bit."""
    options = {"epochs": 2, "batch_size": 10, "optimiser": SGD(0.05, momentum=0.9)}
    plain = run(bf.algorithms.fedavg(model, **options), clients, rounds=3)
    pulled = run(bf.algorithms.fedprox(model, mu=0.0, **options), clients, rounds=3)
    assert torch.equal(plain.server["w"]["loc"], pulled.server["w"]["loc"])


def test_fedprox_solves_its_proximal_problem(regressions: FederatedData):
    """A converged client is argmin |y - Xv|^2 / (2n) + mu/2 |v - w|^2, so the pull is by a mean
    loss: (A/n + mu)^-1 (b/n + mu w).
    """
    w0, mu = torch.full((1, DIM), 0.7), 0.4
    algorithm = bf.algorithms.fedprox(
        linear_only(w0),
        mu=mu,
        epochs=3000,
        batch_size=None,
        optimiser=SGD(0.2),
        likelihood=Gaussian(),
    )
    result = run(algorithm, regressions, rounds=1)
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()
    solved = torch.linalg.solve(
        a / n[:, None, None] + mu * torch.eye(DIM).double(), b / n[:, None] + mu * w0.double()
    )
    assert_close(
        result.server["w"]["loc"], (n[:, None] * solved).sum(0) / n.sum(), atol=1e-10, rtol=0
    )
