"""Marginal likelihoods of groups, their derivatives and their effects, against closed forms and
quadrature.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from bayesfl.stats.families import Binomial, Family, NegativeBinomial, Normal, Poisson
from bayesfl.stats.hierarchy import (
    Groups,
    Phi,
    derivatives,
    drawn,
    information,
    log_marginals,
    modes,
)

close = np.testing.assert_allclose
FAMILIES: dict[str, Family] = {
    "binomial": Binomial(),
    "poisson": Poisson(),
    "normal": Normal(),
    "negative": NegativeBinomial(),
}


def made(family: str, effects: int) -> tuple[Family, Groups, Tensor]:
    """Rows of four groups of unequal size, weights among them, and parameters."""
    rng = torch.Generator().manual_seed(3)
    n = 45
    x = torch.randn(n, 3, generator=rng, dtype=torch.float64)
    x[:, 0] = 1
    y = {
        "binomial": (torch.rand(n, generator=rng) < 0.4).double(),
        "normal": torch.randn(n, generator=rng, dtype=torch.float64),
    }.get(family, torch.poisson(torch.full((n,), 1.5), generator=rng).double())
    weights = torch.randint(1, 3, (n,), generator=rng).double()
    group = torch.randint(0, 4, (n,), generator=rng)
    offset = 0.1 * torch.randn(n, generator=rng, dtype=torch.float64)
    rule = FAMILIES[family]
    root = (0.7, 0.4, 0.9)[: 1 if effects == 1 else 3]
    phi = torch.tensor([0.1, -0.2, 0.3, *root, *[0.2] * len(rule.own)])
    groups = Groups.of(x, x[:, :effects], y, weights, offset, group)
    assert int((groups.weights > 0).sum()) == n
    return rule, groups, phi.double()


def parts_of(phi: Tensor) -> Phi:
    """Three coefficients, the entries of the root of one or two effects, row by row, and others."""
    r = 2 if phi.shape[-1] > 5 else 1
    lower = torch.tril_indices(r, r)
    places = torch.eye(r * r, dtype=phi.dtype)[lower[0] * r + lower[1]]
    root = (phi[..., 3 : 3 + len(places)] @ places).unflatten(-1, (r, r))
    return Phi(phi[..., :3], root, phi[..., 3 + len(places) :].movedim(-1, 0)[..., None, None])


@pytest.mark.parametrize("effects", [1, 2])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_integral(family: str, effects: int):
    """By forty nodes for each effect around the mode; of several effects the approximation is
    Laplace's, f and half the log determinant, and exact where it is normal.
    """
    rule, groups, phi = made(family, effects)
    parts = parts_of(phi)
    found = log_marginals(rule, groups, parts)
    roots, masses = np.polynomial.hermite.hermgauss(40)
    nodes = torch.tensor(list(itertools.product(roots, repeat=effects)))
    logs = torch.tensor(list(itertools.product(np.log(masses), repeat=effects))).sum(-1)
    u, hessian = modes(rule, groups, parts)
    for g in range(4):

        def f(at: Tensor, g: int = g) -> Tensor:
            eta = groups.x[g] @ parts.beta + groups.offset[g] + at @ parts.root.T @ groups.z[g].T
            loss = rule.pieces(eta, groups.y[g], parts.own.reshape(-1, 1, 1)).loss
            return (loss * groups.weights[g]).sum(-1) + at.square().sum(-1) / 2

        lower = torch.linalg.cholesky(torch.linalg.inv(hessian[g]))
        terms = -f(u[g] + np.sqrt(2) * nodes @ lower.T) + nodes.square().sum(-1) + logs
        volume = torch.linalg.slogdet(lower).logabsdet
        exact = terms.logsumexp(0) + volume - effects / 2 * np.log(np.pi)
        laplace = -f(u[g][None])[0] + volume
        if effects == 1 or family == "normal":
            close(found[g], exact, rtol=0, atol=1e-7)
        if effects == 2:
            close(found[g], laplace, rtol=0, atol=1e-10)


@pytest.mark.parametrize("effects", [1, 2])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_derivatives(family: str, effects: int):
    """By differences, of the value and of the slope."""
    rule, groups, phi = made(family, effects)
    _, slope, hessian = derivatives(rule, groups, parts_of, phi)
    for i, unit in enumerate(torch.eye(len(phi), dtype=torch.float64)):
        two = [log_marginals(rule, groups, parts_of(phi + h * unit)).sum() for h in (1e-5, -1e-5)]
        close(slope[i], (two[0] - two[1]) / 2e-5, rtol=0, atol=1e-6)
        ends = [derivatives(rule, groups, parts_of, phi + h * unit)[1] for h in (1e-4, -1e-4)]
        close(hessian[i], (ends[0] - ends[1]) / 2e-4, rtol=0, atol=1e-5)


def test_normal_outcomes_are_a_normal_vector():
    """Marginally with covariance Z L L' Z' + sigma^2; the effects are normal given all else."""
    rule, groups, phi = made("normal", 2)
    groups = Groups(groups.x, groups.z, groups.y, (groups.weights > 0).double(), groups.offset)
    parts = parts_of(phi)
    sigma = float(phi[-1].exp())
    found, (u, hessian) = log_marginals(rule, groups, parts), modes(rule, groups, parts)
    for g in range(4):
        inside = groups.weights[g] > 0
        z = groups.z[g][inside] @ parts.root
        residual = (groups.y[g] - groups.x[g] @ parts.beta - groups.offset[g])[inside]
        wide = z @ z.T + sigma**2 * torch.eye(len(z), dtype=torch.float64)
        law = torch.distributions.MultivariateNormal(torch.zeros(len(z)).double(), wide)
        close(found[g], law.log_prob(residual), rtol=0, atol=1e-9)
        precision = torch.eye(2, dtype=torch.float64) + z.T @ z / sigma**2
        close(hessian[g], precision, rtol=0, atol=1e-9)
        close(u[g], torch.linalg.solve(precision, z.T @ residual / sigma**2), rtol=0, atol=1e-9)


def test_draws_are_computed_together():
    rule, groups, phi = made("binomial", 2)
    rng = torch.Generator().manual_seed(0)
    many = phi + 0.5 * torch.randn(6, len(phi), generator=rng, dtype=torch.float64)
    together = log_marginals(rule, groups, parts_of(many))
    alone = torch.stack([log_marginals(rule, groups, parts_of(one)) for one in many])
    close(together, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_effects_that_groups_have_in_common(family: str):
    """Beside one group of all rows, with a column of the design for each group's own effect."""
    rule, groups, phi = made(family, 2)
    inside = groups.weights > 0
    x, y, weights, offset = (t[inside] for t in (groups.x, groups.y, groups.weights, groups.offset))
    group = torch.arange(4)[:, None].expand(inside.shape)[inside]
    apart = torch.nn.functional.one_hot(group).double()
    z = torch.cat([x[:, :2], x[:, :1]], 1)
    nested = Groups.of(x, z, y, weights, offset, group, common=2)
    dense = Groups.of(x, torch.cat([x[:, :2], apart], 1), y, weights, offset, 0 * group)

    def parts(at: Tensor, copies: int = 1) -> Phi:
        root = torch.block_diag(parts_of(at[:-1]).root, at[-1] * torch.eye(copies).double())
        return Phi(at[:3], root, parts_of(at[:-1]).own)

    at = torch.cat([phi, torch.tensor([0.5]).double()])
    found = derivatives(rule, nested, parts, at)
    wanted = derivatives(rule, dense, lambda at: parts(at, 4), at)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, rtol=0, atol=1e-9)
    u, hessian = modes(rule, nested, parts(at))
    v, precision = modes(rule, dense, parts(at, 4))
    close(torch.cat([u[0, :2], u[:, 2]]), v[0], rtol=0, atol=1e-9)
    noise = torch.randn(40_000, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    draws = drawn(nested, u, hessian.expand(len(noise), 4, 3, 3), noise) - u
    draws = torch.cat([draws[:, 0, :2], draws[:, :, 2]], 1)
    close(draws.T @ draws / len(draws), torch.linalg.inv(precision[0]), rtol=0, atol=0.02)
    if family == "normal":
        root = parts(at, 4).root
        wide = dense.z[0] @ root @ root.T @ dense.z[0].T
        wide = wide + float((2 * phi[-1]).exp()) * (1 / weights).diag()
        close(information(nested, parts(at)), x.T @ torch.linalg.solve(wide, x), rtol=1e-9)
