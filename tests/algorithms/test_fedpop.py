"""FedPop: chains whose law is known, and the steps of body and prior at the chains' heads."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.models import SplitModel
from bayesfl.optim import SGD
from tests.algorithms.made import COUNTS, DIM
from tests.cases import run

VARIANCE, RATE = 0.5, 0.3


def test_chains_have_the_law_of_langevin_steps_on_the_posterior(regressions: FederatedData):
    """On a Gaussian posterior of precision P: its mean, and the covariance P^-1 (1 - rate P / (2
    n))^-1. The prior is held.
    """
    twins, body = 200, nn.Linear(DIM, DIM, bias=False)
    nn.init.eye_(body.weight)
    made = bf.algorithms.fedpop(
        SplitModel(body, nn.Linear(DIM, 1, bias=False)),
        burn_in=60,
        kept=1,
        chain_optimiser=SGD(RATE),
        body_optimiser=SGD(0.0),
        prior_variance=VARIANCE,
        prior_step=1e-12,
        likelihood=Gaussian(),
    )
    x, y = regressions.train.client(1)
    several = bf.data.from_arrays([x] * twins, [y] * twins, test_share=0.0)
    heads = run(made, several).private["head"]["loc"].flatten(0, 1)
    mu = made.init(1, seed=2, dtype=torch.float64)["head"]["loc"].mean(0)
    precision = x.double().T @ x.double() + torch.eye(DIM).double() / VARIANCE
    mean = torch.linalg.solve(precision, x.double().T @ y.double() + mu / VARIANCE)
    wide = torch.linalg.inv(precision - RATE / (2 * len(x)) * precision @ precision)
    error = (heads.mean(0) - mean) / (wide.diagonal() / len(heads)).sqrt()
    assert float(error.abs().max()) < 4
    # a covariance of n draws has a standard error of at most (2 / n)^(1/2) of the variances
    limit = 4 * (2 / len(heads)) ** 0.5 * float(wide.diagonal().max())
    assert_close(heads.T.cov(), wide, atol=limit, rtol=0)


def test_body_and_prior_move_at_the_heads(few: FederatedData, network: SplitModel):
    """In a round of one kept step: the body by the mean over chains of gradients at their heads,
    mu and v towards the moments of all heads.
    """
    options: dict[str, Any] = {"chains": 3, "burn_in": 2, "kept": 1, "prior_step": 0.3}
    made = bf.algorithms.fedpop(network, body_optimiser=SGD(0.2), prior_variance=0.8, **options)
    start, result = made.init(4, seed=2, dtype=torch.float64), run(made, few)
    heads, bodies = result.private["head"]["loc"], []
    for j in range(4):
        x, y = few.train.client(j)
        body = start["body"]["loc"].clone().requires_grad_()
        losses = []
        for head in heads[j]:
            weights = {
                **made.layout("body").leaves(body),
                **made.layout("head").leaves(head),
            }
            out = torch.func.functional_call(network, weights, (x.double(),))
            losses.append(F.cross_entropy(out, y))
        (slope,) = torch.autograd.grad(torch.stack(losses).mean(), body)
        bodies.append(body.detach() - 0.2 * slope)
    n = torch.tensor(COUNTS).double()
    wanted = (n @ torch.stack(bodies)) / n.sum()
    assert_close(result.server["body"]["loc"], wanted, atol=1e-9, rtol=0)
    old = start["head"]["loc"]
    assert_close(result.server["head"]["loc"], old + 0.3 * (heads.mean(0) - old))
    apart = (heads - old.mean(0)).square().mean()
    assert_close(result.server["variance"], 0.8 + 0.3 * (apart - 0.8))
