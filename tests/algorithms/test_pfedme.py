"""pFedMe against the Moreau envelope."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import COUNTS, DIM, linear_only, moments
from tests.cases import run


def test_pfedme_follows_the_moreau_envelope(regressions: FederatedData):
    """With the inner problem solved, w moves against the envelope's gradient, lambda (w -
    theta*(w)) [checked by autograd].
    """
    lam, lr, w0 = 2.0, 0.05, torch.full((1, DIM), 0.4)
    options: dict[str, Any] = {
        "batches": 1,
        "inner_steps": 4000,
        "batch_size": None,
        "personal_optimiser": SGD(0.1),
    }
    algorithm = bf.algorithms.pfedme(
        linear_only(w0), lam=lam, lr=lr, likelihood=Gaussian(), **options
    )
    result = run(algorithm, regressions, rounds=1, participation=1.0, sampling="fixed")
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()[:, None]
    hessian = a / n[..., None]
    w = w0.double().expand(len(COUNTS), DIM).clone().requires_grad_()
    theta = torch.linalg.solve(hessian + lam * torch.eye(DIM).double(), b / n + lam * w)
    loss = (
        0.5 * torch.einsum("jd,jde,je->", theta, hessian, theta)
        - (theta * b / n).sum()
        + 0.5 * lam * (theta - w).square().sum()
    )
    (envelope,) = torch.autograd.grad(loss, w)
    assert_close(envelope, lam * (w - theta).detach(), atol=1e-12, rtol=0)
    assert_close(result.private["theta"]["loc"], theta.detach(), atol=1e-9, rtol=0)
    assert_close(result.server["w"]["loc"], (w - lr * envelope).detach().mean(0), atol=1e-9, rtol=0)


def test_pfedme_server_step(clients: FederatedData, model: nn.Module):
    """beta is the server's step: (1 - beta) w + beta mean."""
    options = {"batches": 2, "inner_steps": 2, "batch_size": 10}
    whole, further = (
        run(bf.algorithms.pfedme(model, beta=beta, **options), clients).server["w"]["loc"]
        for beta in (1.0, 2.0)
    )
    start = bf.algorithms.pfedme(model).init(1, dtype=torch.float64)["w"]["loc"]
    assert_close(further - start, 2 * (whole - start), atol=1e-12, rtol=0)


def test_pfedme_restarts_where_told(regressions: FederatedData):
    """Without a warm start each inner problem begins at w: with one step, theta = w - rate
    (gradient at w).
    """
    options: dict[str, Any] = {
        "batches": 2,
        "inner_steps": 1,
        "batch_size": None,
        "personal_optimiser": SGD(0.1),
        "lam": 2.0,
        "lr": 0.1,
        "likelihood": Gaussian(),
    }
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()[:, None]

    def gradient(v: Tensor) -> Tensor:
        return torch.einsum("jde,je->jd", a, v) / n - b / n

    for warm in (True, False):
        result = run(
            bf.algorithms.pfedme(linear_only(torch.ones(1, DIM)), warm_start=warm, **options),
            regressions,
            rounds=1,
        )
        w = torch.ones(len(COUNTS), DIM).double()
        theta = w.clone()
        for _ in range(2):
            start = theta if warm else w
            theta = start - 0.1 * (gradient(start) + 2.0 * (start - w))
            w = w - 0.1 * 2.0 * (w - theta)
        assert_close(result.private["theta"]["loc"], theta, atol=1e-12, rtol=0)
