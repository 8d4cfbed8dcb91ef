"""Ditto at the limits of its strength, and its fixed point."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import COUNTS, DIM, linear_only, moments
from tests.cases import run


def test_ditto_without_pull_is_local(clients: FederatedData, model: nn.Module):
    """lambda = 0: the personal models are those of clients that train alone, to the bit where steps
    draw nothing.
    """
    options = {"epochs": 2, "batch_size": None, "optimiser": SGD(0.05)}
    ditto = run(bf.algorithms.ditto(model, lam=0.0, **options), clients, rounds=3)
    alone = run(bf.algorithms.local(model, **options), clients, rounds=3)
    assert torch.equal(ditto.private["v"]["loc"], alone.private["w"]["loc"])


def test_ditto_with_a_strong_pull_is_the_broadcast_model(clients: FederatedData, model: nn.Module):
    """lambda to infinity, with steps of 1 / lambda: personal models are the global one that the
    round began with.
    """
    ditto = bf.algorithms.ditto(model, lam=1e6, epochs=3, batch_size=None, optimiser=SGD(1e-6))
    one, two = (run(ditto, clients, rounds) for rounds in (1, 2))
    own = two.private["v"]["loc"]
    assert_close(own, one.server["w"]["loc"].expand_as(own), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_ditto_fixed_point(regressions: FederatedData):
    """At convergence v_j = (A_j / n_j + lambda)^-1 (b_j / n_j + lambda w), with w the global model
    of the round.
    """
    lam = 0.5
    options: dict[str, Any] = {
        "epochs": 2000,
        "batch_size": None,
        "optimiser": SGD(0.2),
        "likelihood": Gaussian(),
    }
    algorithm = bf.algorithms.ditto(linear_only(torch.zeros(1, DIM)), lam=lam, **options)
    one, two = run(algorithm, regressions, rounds=1), run(algorithm, regressions, rounds=2)
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()
    w = one.server["w"]["loc"]
    solved = torch.linalg.solve(
        a / n[:, None, None] + lam * torch.eye(DIM).double(), b / n[:, None] + lam * w
    )
    assert_close(two.private["v"]["loc"], solved, atol=1e-9, rtol=0)
    # The global model is the uniform mean of the clients' own optima.
    assert_close(w, torch.linalg.solve(a, b).mean(0), atol=1e-9, rtol=0)
