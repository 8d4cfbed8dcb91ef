"""Heads of clients' own: a client's posterior by autograd, the hierarchy where all is normal."""

import numpy as np
import pytest
import torch

from bayesfl.base.surveys import conduct, together
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.posteriors import FullGaussian
from bayesfl.posteriors.heads import Head, Hierarchy, LocalHeads, Rows, Scaled, belief

SIZES = (6, 2)


def made(outputs: int, n: int, seed: int, *, classes: bool) -> Rows:
    """Rows of three features and a column of ones."""
    rng = np.random.default_rng(seed)
    features = np.column_stack([rng.normal(size=(n, 3)), np.ones(n)])
    y = rng.integers(0, outputs, n) if classes else rng.normal(size=(n, outputs))
    return Rows(torch.from_numpy(features), torch.from_numpy(y))


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

    mode, hessian = head.posterior(rows, centre, tau)
    slope = torch.func.grad(energy)(mode)
    np.testing.assert_allclose(slope, torch.zeros(d), atol=1e-4)
    np.testing.assert_allclose(hessian, torch.func.hessian(energy)(mode), rtol=0, atol=1e-9)
    root = FullGaussian().cholesky(belief(mode, hessian))
    np.testing.assert_allclose(root @ root.T, torch.linalg.inv(hessian), rtol=0, atol=1e-9)
    jacobian = torch.func.jacrev(lambda w: rows.features @ head.matrix(w).T)(mode)
    wanted = jacobian @ torch.linalg.inv(hessian) @ jacobian.mT
    np.testing.assert_allclose(head.spread(rows, hessian), wanted, rtol=0, atol=1e-9)


def test_the_hierarchy_is_stationary():
    """Of normal targets the marginal likelihood is that of a normal vector: its slopes by centre
    and log tau, and by the width of the centre's prior, are 0 at what the questions find.
    """
    rng = np.random.default_rng(2)
    centre = rng.normal(size=8)
    clients = []
    for j in range(30):
        rows = made(2, 12, 10 + j, classes=False)
        w = centre + rng.normal(size=8) * np.repeat([0.5, 1.0], SIZES)
        matrix = np.column_stack([w[:6].reshape(2, 3), w[6:]])
        y = rows.features.numpy() @ matrix.T + 0.5 * rng.normal(size=(12, 2))
        clients.append(Rows(rows.features, torch.from_numpy(y)))
    head = Head(2, True, Gaussian(0.5))
    survey = Hierarchy(head, SIZES, torch.zeros(8))
    local = LocalHeads(clients, clients, np.arange(30))
    found = conduct(survey, together(survey, local), None)
    for _ in range(30):  # to the last digits
        answers = survey.answer(found, local)
        found, _ = survey.solve(found, {name: t.sum(0) for name, t in answers.items()})

    one = torch.eye(2).double()
    x = torch.stack(
        [
            torch.cat([torch.kron(one, c.features[:, :3]), torch.kron(one, c.features[:, 3:])], 1)
            for c in clients
        ]
    )
    y = torch.stack([c.y.T.reshape(24) for c in clients])

    def evidence(centre: torch.Tensor, log_tau: torch.Tensor) -> torch.Tensor:
        tau = log_tau.exp().repeat_interleave(torch.tensor(SIZES))
        covariance = x * tau.square() @ x.mT + 0.25 * torch.eye(24).double()
        return torch.distributions.MultivariateNormal(x @ centre, covariance).log_prob(y).sum()

    by_centre, by_tau = torch.func.grad(evidence, (0, 1))(found["centre"], found["tau"].log())
    weak = (found["width"] ** -2).repeat_interleave(torch.tensor(SIZES))
    np.testing.assert_allclose(by_centre - weak * found["centre"], np.zeros(8), atol=1e-6)
    np.testing.assert_allclose(by_tau, np.zeros(2), atol=1e-3)
    np.testing.assert_allclose(found["tau"], [0.5, 1.0], rtol=0.3)
    information = -torch.func.hessian(lambda c: evidence(c, found["tau"].log()))(found["centre"])

    def of_centre(log_width: torch.Tensor) -> torch.Tensor:
        """Laplace's evidence of the centre's prior, which is exact here."""
        prior = (-2 * log_width).exp().repeat_interleave(torch.tensor(SIZES))
        hessian = information + prior.diag()
        mode = torch.linalg.solve(hessian, information @ found["centre"] + by_centre)
        away = mode - found["centre"]
        fit = by_centre @ away - away @ information @ away / 2
        return fit - (prior * mode**2).sum() / 2 + prior.log().sum() / 2 - hessian.logdet() / 2

    slope = torch.func.grad(of_centre)(found["width"].log())
    np.testing.assert_allclose(slope, np.zeros(2), atol=1e-3)


def test_validation_rows_are_scored_by_the_mean_and_by_draws():
    """With no width the two are one; rows of a client without any count nothing."""
    rows = [made(3, 20, seed, classes=True) for seed in range(2)]
    head = Head(3, True, Categorical())
    centre = torch.from_numpy(np.random.default_rng(0).normal(size=12))
    survey = Scaled(head, (9, 3), centre, torch.full((2,), 1e-6).double(), 50, 0)
    local = LocalHeads([rows[1], None], rows, np.arange(2))
    found = survey.answer({}, local)["loss"]
    outputs = rows[1].features @ head.matrix(centre).T
    wanted = torch.nn.functional.cross_entropy(outputs, rows[1].y, reduction="sum")
    np.testing.assert_allclose(found[0], np.full((2, 4), float(wanted)), rtol=1e-5)
    assert not found[1].any()
