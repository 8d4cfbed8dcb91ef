"""pFedBayes on linear regressions, against a plain loop that finds its gradients by autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.numerics import inverse_softplus
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD, cosine
from tests.algorithms.made import COUNTS, DIM, linear_only, moments
from tests.cases import run

RATE, ZETA, SCALE = 0.02, 3.0, 0.5


def kl(q: Any, w: Any) -> Tensor:
    """Of two beliefs (loc, rho), by torch's own formula."""
    one, other = (Normal(loc, F.softplus(rho)) for loc, rho in (q, w))
    return kl_divergence(one, other).sum()


def method(**options: Any) -> bf.Algorithm:
    """On full batches by plain steps."""
    given: dict[str, Any] = {"zeta": ZETA, "init_scale": SCALE, "optimiser": SGD(RATE)}
    return bf.algorithms.pfedbayes(
        linear_only(torch.full((1, DIM), 0.4)),
        batch_size=None,
        likelihood=Gaussian(),
        **{**given, **options},
    )


def test_the_federated_belief_follows_the_gradient_of_the_kl(regressions: FederatedData):
    """From the clients' own q after one batch, the step on w is one on zeta KL(q || w) / n, and the
    server goes beta of the way to the plain mean of loc and rho.
    """
    result = run(method(batches=1, inner_steps=3, beta=0.6), regressions)
    algorithm = method()
    belief = algorithm.centre("w", algorithm.init(4, dtype=torch.float64))
    start = [belief[key] for key in ("loc", "rho")]
    ends = []
    for j, n in enumerate(COUNTS):
        q = [result.private["q"][key][j] for key in ("loc", "rho")]
        w = [t.clone().requires_grad_() for t in start]
        slopes = torch.autograd.grad(ZETA * kl(q, w) / n, w)
        ends.append([t.detach() - RATE * g for t, g in zip(w, slopes, strict=True)])
    for place, key in enumerate(("loc", "rho")):
        mean = torch.stack([end[place] for end in ends]).mean(0)
        wanted = start[place] + 0.6 * (mean - start[place])
        assert_close(result.server["w"][key], wanted, atol=1e-9, rtol=0)
        assert float((wanted - start[place]).norm()) > 1e-6


def test_clients_steps_lower_their_bound(regressions: FederatedData):
    """With many draws, steps are those on the exact bound of a Gaussian likelihood, E |y - Xw|^2 =
    |y - X loc|^2 + sum_d (X'X)_dd var_d, under a prior that moves after every batch.
    """
    options = {"batches": 3, "inner_steps": 2, "draws": 4000}
    result = run(method(**options), regressions)
    a, b = moments(regressions)
    for j, n in enumerate(COUNTS):
        q, w = (
            [torch.full((DIM,), 0.4).double(), inverse_softplus(torch.full((DIM,), SCALE).double())]
            for _ in range(2)
        )

        def step(energy: Any, at: list[Tensor]) -> list[Tensor]:
            leaves = [t.detach().requires_grad_() for t in at]
            slopes = torch.autograd.grad(energy(leaves), leaves)
            return [t.detach() - RATE * g for t, g in zip(leaves, slopes, strict=True)]

        def bound(at: list[Tensor], j: int = j, n: int = n, w: Any = w) -> Tensor:
            loc, var = at[0], F.softplus(at[1]).square()
            fit = loc @ a[j] @ loc / 2 - b[j] @ loc + a[j].diagonal() @ var / 2
            return (fit + ZETA * kl(at, w)) / n

        for _ in range(3):
            for _ in range(2):
                q = step(lambda at, w=w: bound(at, w=w), q)
            w = step(lambda at, q=q, n=n: ZETA * kl(q, at) / n, w)
        for key, wanted in zip(("loc", "rho"), q, strict=True):
            assert_close(result.private["q"][key][j], wanted, atol=3e-3, rtol=0)


@pytest.mark.slow
def test_centre_and_variance_of_the_prior_end_where_a_hierarchical_bound_does(
    regressions: FederatedData,
):
    """With zeta 1 and one step on (mu, tau) a round, the end is a stationary point of sum_j (bound
    of client j) / n_j in all q_j, mu and tau: the closest Gaussian to the mixture of the q_j, and
    mean fields' posteriors under it.
    """
    made = method(zeta=1.0, batches=1, inner_steps=5, draws=50, optimiser=SGD(cosine(0.4)))
    result = run(made, regressions, rounds=400)
    (loc, var), (mu, tau2) = (
        (of["loc"], F.softplus(of["rho"]).square())
        for of in (result.private["q"], result.server["w"])
    )
    share = torch.tensor([1 / n for n in COUNTS]).double()
    share = (share / share.sum())[:, None]
    a, b = moments(regressions)
    precision = a.diagonal(dim1=1, dim2=2) + 1 / tau2
    assert_close(mu, (share * loc).sum(0), atol=0.02, rtol=0)
    assert_close(tau2, (share * (var + (loc - mu).square())).sum(0), atol=0, rtol=0.05)
    assert_close(var, 1 / precision, atol=0, rtol=0.05)
    mean = torch.linalg.solve(a + torch.diag(1 / tau2), b + mu / tau2)
    assert_close(loc, mean, atol=0.02, rtol=0)
