"""Heads of clients' own: a client's posterior by autograd, the hierarchy where all is normal."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import conduct, together
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.posteriors import FullGaussian, heads
from bayesfl.posteriors.heads import Head, Hierarchy, LocalHeads, Rows, Scaled
from bayesfl.posteriors.linearised import predictive

SIZES = (6, 2)
ONE = torch.eye(2).double()


def made(outputs: int, n: int, seed: int, *, classes: bool) -> Rows:
    """Rows of three features and a column of ones."""
    rng = np.random.default_rng(seed)
    features = np.column_stack([rng.normal(size=(n, 3)), np.ones(n)])
    y = rng.integers(0, outputs, n) if classes else rng.normal(size=(n, outputs))
    return Rows(torch.from_numpy(features), torch.from_numpy(y))


def normal_clients(count: int) -> list[Rows]:
    """Clients with normal targets, whose heads are normal around a centre."""
    rng = np.random.default_rng(2)
    centre = rng.normal(size=8)
    found = []
    for j in range(count):
        rows = made(2, 12, 10 + j, classes=False)
        w = centre + rng.normal(size=8) * np.repeat([0.5, 1.0], SIZES)
        matrix = np.column_stack([w[:6].reshape(2, 3), w[6:]])
        y = rows.features.numpy() @ matrix.T + 0.5 * rng.normal(size=(12, 2))
        found.append(Rows(rows.features, torch.from_numpy(y)))
    return found


def stacked(clients: list[Rows]) -> tuple[Tensor, Tensor]:
    """Their designs [J, 24, 8] and targets [J, 24], as of one regression."""
    x = [
        torch.cat([torch.kron(ONE, c.features[:, :3]), torch.kron(ONE, c.features[:, 3:])], 1)
        for c in clients
    ]
    return torch.stack(x), torch.stack([c.y.T.reshape(24) for c in clients])


def each(values: Tensor) -> Tensor:
    return values.repeat_interleave(torch.tensor(SIZES))


def evidence(x: Tensor, y: Tensor, log_tau: Tensor, width: Tensor) -> Tensor:
    """The log density of all targets, centre and heads integrated out."""
    noise = 0.25 * torch.eye(24).double()
    covariance = torch.block_diag(*(x * each(log_tau.exp()) ** 2 @ x.mT + noise))
    flat = x.flatten(0, 1)
    covariance = covariance + flat * each(width) ** 2 @ flat.T
    zeros = torch.zeros(len(flat)).double()
    return torch.distributions.MultivariateNormal(zeros, covariance).log_prob(y.flatten())


def at_the_mode(survey: Hierarchy, local: LocalHeads) -> Tensors:
    """The survey's state before it begins the grid."""
    ask, state = together(survey, local), survey.start(None)
    while True:
        after, _ = survey.solve(state, ask(state, survey.shapes(state)))
        if "grid" in after:
            return after
        state = after


@pytest.mark.parametrize("bias", [True, False])
def test_a_clients_posterior_is_the_mode_with_its_hessian(bias: bool):
    """Beside autograd through the layer as torch has it."""
    rows = made(3, 30, 0, classes=True)
    if not bias:
        rows = Rows(rows.features[:, :-1], rows.y)
    head = Head(3, bias, Categorical())
    d = 12 if bias else 9
    rng = np.random.default_rng(1)
    centre, tau = torch.from_numpy(rng.normal(size=d)), torch.from_numpy(rng.uniform(0.3, 2, d))

    def energy(w: torch.Tensor) -> torch.Tensor:
        weight = w[:9].reshape(3, 3)
        outputs = rows.features[:, :3] @ weight.T + (w[9:] if bias else 0)
        prior = ((w - centre) / tau).square().sum() / 2
        return torch.nn.functional.cross_entropy(outputs, rows.y, reduction="sum") + prior

    mode, covariance, log_marginal = head.given(rows, centre, tau)
    slope = torch.func.grad(energy)(mode)
    np.testing.assert_allclose(slope, torch.zeros(d), atol=1e-4)
    hessian = torch.func.hessian(energy)(mode)
    np.testing.assert_allclose(covariance @ hessian, np.eye(d), rtol=0, atol=1e-9)
    wanted = -energy(mode) - hessian.logdet() / 2 - tau.log().sum()
    np.testing.assert_allclose(log_marginal, wanted, rtol=0, atol=1e-9)
    root = FullGaussian().cholesky(FullGaussian().of_moments(mode, covariance))
    np.testing.assert_allclose(root @ root.T, covariance, rtol=0, atol=1e-9)
    jacobian = torch.func.jacrev(lambda w: rows.features @ head.matrix(w).T)(mode)
    wanted = jacobian @ covariance @ jacobian.mT
    np.testing.assert_allclose(head.spread(rows, covariance), wanted, rtol=0, atol=1e-9)


def test_the_hierarchy_is_stationary(monkeypatch: pytest.MonkeyPatch):
    """Of normal targets the marginal likelihood is that of a normal vector: with the prior its
    slope by log tau, and without it by the width of the centre's prior, are 0 at what is found.
    """
    monkeypatch.setattr(heads, "CLOSE", 1e-9)
    monkeypatch.setattr(heads, "MOST", 1000)
    monkeypatch.setattr(heads, "KNOWN", 1.0)
    clients = normal_clients(30)
    survey = Hierarchy(Head(2, True, Gaussian(0.5)), SIZES, torch.zeros(8))
    found = at_the_mode(survey, LocalHeads(clients, clients, np.arange(30)))
    tau, width = found["tau"], found["width"]
    x, y = stacked(clients)
    inside = torch.linalg.inv(x * each(tau) ** 2 @ x.mT + 0.25 * torch.eye(24).double())
    information = (x.mT @ inside @ x).sum(0)
    spread = torch.linalg.inv(information + (each(width) ** -2).diag())
    np.testing.assert_allclose(found["spread"], spread, rtol=1e-6)
    centre = spread @ torch.einsum("jnd,jnm,jm->d", x, inside, y)
    np.testing.assert_allclose(found["centre"], centre, rtol=0, atol=1e-6)
    by_tau, by_width = torch.func.grad(lambda tau, width: evidence(x, y, tau, width.exp()), (0, 1))(
        tau.log(), width.log()
    )
    np.testing.assert_allclose(by_tau + 1, np.zeros(2), atol=1e-6)
    np.testing.assert_allclose(by_width, np.zeros(2), atol=1e-6)
    np.testing.assert_allclose(tau, [0.5, 1.0], rtol=0.3)


def test_the_grid_integrates_over_centre_and_tau(monkeypatch: pytest.MonkeyPatch):
    """Of normal targets a client's posterior is a mixture of normal ones, by the evidence of each
    point; moments of the mixture are exact.
    """
    monkeypatch.setattr(heads, "KNOWN", 0.0)
    clients = normal_clients(6)
    survey = Hierarchy(Head(2, True, Gaussian(0.5)), SIZES, torch.zeros(8))
    local = LocalHeads(clients, clients, np.arange(6))
    width = at_the_mode(survey, local)["width"]
    prior = conduct(survey, together(survey, local), None)
    assert 3 < len(prior["weight"]) <= 9
    mean, covariance = survey.head.posterior(clients[1], prior)
    x, y = stacked(clients)
    logs, means, covariances = [], [], []
    for tau in prior["tau"]:
        each_tau, tau = tau, tau[[0, 6]]
        logs.append(evidence(x, y, tau.log(), width) + tau.log().sum())
        # Centre, and the head of client 1, as one normal vector beside all targets.
        own = torch.block_diag(*[(each_tau**2).diag()] * 6) + torch.kron(
            torch.ones(6, 6).double(), (each(width) ** 2).diag()
        )
        design = torch.block_diag(*x)
        inside = design @ own @ design.T + 0.25 * torch.eye(len(design)).double()
        gain = own @ design.T @ torch.linalg.inv(inside)
        means.append((gain @ y.flatten())[8:16])
        covariances.append((own - gain @ design @ own)[8:16, 8:16])
    weight = torch.stack(logs).softmax(0)
    np.testing.assert_allclose(prior["weight"], weight, rtol=0, atol=1e-6)
    wanted = weight @ torch.stack(means)
    np.testing.assert_allclose(mean, wanted, rtol=0, atol=1e-6)
    around = torch.stack(means) - wanted
    mixed = sum(
        w * (c + torch.outer(a, a)) for w, c, a in zip(weight, covariances, around, strict=True)
    )
    np.testing.assert_allclose(covariance, mixed, rtol=0, atol=1e-6)


def test_validation_rows_are_scored_at_each_multiple_of_tau():
    """With no width all are one; rows of a client without any count nothing, and where no one has
    any all stays as it is.
    """
    rows = [made(3, 20, seed, classes=True) for seed in range(2)]
    head = Head(3, True, Categorical())
    centre = torch.from_numpy(np.random.default_rng(0).normal(size=12))
    prior = {
        "centre": centre[None],
        "tau": torch.full((1, 12), 1e-6).double(),
        "spread": torch.zeros(1, 12, 12).double(),
        "weight": torch.ones(1).double(),
    }
    survey = Scaled(head, prior)
    found = survey.answer({}, LocalHeads([rows[1], None], rows, np.arange(2)))["nll"]
    outputs = rows[1].features @ head.matrix(centre).T
    wanted = torch.nn.functional.cross_entropy(outputs, rows[1].y, reduction="sum")
    np.testing.assert_allclose(found[0], np.full((3, 4), float(wanted)), rtol=1e-5)
    assert not found[1].any()
    unscaled, _ = survey.solve({}, {"nll": found[1]})
    assert {name: float(t) for name, t in unscaled.items()} == {"scale": 1.0, "width": 1.0}
    wide = replace(survey, prior=prior | {"tau": 1 + 0 * prior["tau"]})
    total = wide.answer({}, LocalHeads([rows[1], None], rows, np.arange(2)))["nll"].sum(0)
    mean, covariance = head.posterior(rows[0], wide.prior | {"tau": 2 * wide.prior["tau"]})
    outputs, spread = rows[1].features @ head.matrix(mean).T, head.spread(rows[1], covariance)
    for width, nll in zip((0.0, 0.5, 1.0), total[:, 3], strict=True):
        probs = predictive(Categorical(), outputs, width**2 * spread)["probs"]
        wanted = torch.nn.functional.nll_loss(probs.log(), rows[1].y, reduction="sum")
        np.testing.assert_allclose(nll, wanted, rtol=1e-9)
    chosen, _ = wide.solve({}, {"nll": total})
    at = (total == total.min()).nonzero()[0]
    np.testing.assert_array_equal(
        [chosen["width"], chosen["scale"]], [(0.0, 0.5, 1.0)[at[0]], (0.25, 0.5, 1.0, 2.0)[at[1]]]
    )
