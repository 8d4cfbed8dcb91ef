"""Integrals over a site's own parameters, beside closed forms and sums over a fine grid."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Cauchy, MultivariateNormal, Normal, Poisson
from torch.func import grad, hessian, vmap

from bayesfl.stats.density.integral import Differences, Integral, Parts, Unasked
from bayesfl.stats.families import FAMILIES
from bayesfl.stats.hierarchy import Groups, Phi, log_marginals

GROUPS, ROWS = 6, 4


OUTCOMES = 1 + 2 * torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()


@pytest.fixture(autouse=True)
def unasked() -> Iterator[None]:
    """Distributions for many draws at once."""
    with Unasked():
        yield


def vectors(count: int = 3) -> Tensor:
    return 0.3 * torch.randn(count, 3, generator=torch.Generator().manual_seed(1)).double()


def normal(phi: Tensor, z: Tensor) -> Tensor:
    """Rows around effects of groups, which are around a mean."""
    effects = Normal(phi[0], phi[1].exp()).log_prob(z).sum()
    return effects + Normal(z[:, None], phi[2].exp()).log_prob(OUTCOMES).sum()


def normal_marginal(phi: Tensor) -> Tensor:
    spread = torch.eye(ROWS).double() * (2 * phi[2]).exp() + (2 * phi[1]).exp()
    return (
        MultivariateNormal(phi[0].expand(ROWS), spread, validate_args=False)
        .log_prob(OUTCOMES)
        .sum()
    )


def nested(phi: Tensor, z: Tensor) -> Tensor:
    """The same around an effect of the site, which comes third."""
    site, groups = z[2], torch.cat([z[:2], z[3:]])
    above = Normal(phi[0], 1.5).log_prob(site) + Normal(site, phi[1].exp()).log_prob(groups).sum()
    return above + Normal(groups[:, None], phi[2].exp()).log_prob(OUTCOMES).sum()


def nested_marginal(phi: Tensor) -> Tensor:
    n = GROUPS * ROWS
    alike = torch.block_diag(*[torch.ones(ROWS, ROWS).double()] * GROUPS)
    spread = torch.eye(n).double() * (2 * phi[2]).exp() + 1.5**2 + alike * (2 * phi[1]).exp()
    return MultivariateNormal(phi[0].expand(n), spread, validate_args=False).log_prob(
        OUTCOMES.flatten()
    )


def logistic(phi: Tensor, z: Tensor) -> Tensor:
    effects = Normal(phi[0], phi[1].exp()).log_prob(z).sum()
    logits = z[:, None].expand(GROUPS, ROWS)
    return effects + Bernoulli(logits=logits).log_prob((OUTCOMES > 1).double()).sum()


SITE = Parts(torch.tensor([2]), torch.tensor([0, 1, 3, 4, 5, 6])[:, None])
ALONE = Parts(torch.arange(0), torch.arange(GROUPS)[:, None])


@pytest.mark.parametrize(
    ("density", "exact", "parts"),
    [
        (normal, normal_marginal, Parts.whole(GROUPS)),
        (normal, normal_marginal, ALONE),
        (nested, nested_marginal, Parts.whole(1 + GROUPS)),
        (nested, nested_marginal, SITE),
    ],
)
def test_of_normal_ones_there_is_a_closed_form(
    density: Callable[..., Tensor], exact: Callable[[Tensor], Tensor], parts: Parts
):
    """Values, slopes and Hessians, whichever parts."""
    size = len(parts.common) + parts.parts.numel()
    integral = Integral(density, parts, torch.zeros(1, size, dtype=torch.float64))
    phi = vectors()
    wanted = [vmap(of)(phi) for of in (exact, grad(exact), hessian(exact))]
    for found, right in zip(integral.derivatives(phi), wanted, strict=True):
        assert torch.allclose(found[0], right, rtol=1e-8, atol=1e-8)
    assert torch.allclose(integral.log_marginals(phi), wanted[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("count", [1, GROUPS])
def test_quadrature_is_a_fine_grids(count: int):
    """Where Laplace's approximation is off by more than a tenth of a nat."""

    def density(phi: Tensor, z: Tensor) -> Tensor:
        return logistic(phi, torch.cat([z, z.new_zeros(GROUPS - count)]))

    places = torch.arange(count)
    parts = Parts(torch.arange(0), places[:, None])
    integral = Integral(density, parts, torch.zeros(1, count, dtype=torch.float64))
    phi = torch.tensor([[0.2, 0.3], [0.0, 0.7]], dtype=torch.float64)
    grid = torch.linspace(-25, 25, 5001, dtype=torch.float64)
    wanted = []
    for one in phi:
        rest = density(one, torch.zeros(count).double())
        total = rest
        for group in range(count):
            z = torch.zeros(len(grid), count).double()
            z[:, group] = grid
            logs = vmap(density, in_dims=(None, 0))(one, z) - rest
            total = total + logs.logsumexp(0) + math.log(50 / 5000)
        wanted.append(total)
    found = integral.log_marginals(phi)
    assert torch.allclose(found, torch.stack(wanted), atol=1e-4)
    assert bool(((integral.laplace(phi, integral.modes(phi)) - found).abs() > 0.01 * count).all())


def test_groups_with_an_effect_in_common_by_quadrature():
    """Binary rows: where Laplace's approximation is off by a fifth of a nat."""

    def density(phi: Tensor, z: Tensor) -> Tensor:
        site, groups = z[0], z[1:]
        above = Normal(phi[0], 1.5).log_prob(site)
        rows = Bernoulli(logits=groups[:, None].expand(GROUPS, ROWS)).log_prob(
            (OUTCOMES > 1).double()
        )
        return above + Normal(site, phi[1].exp()).log_prob(groups).sum() + rows.sum()

    phi = torch.tensor([[0.2, 0.3], [0.0, 0.9]], dtype=torch.float64)
    grid = torch.linspace(-12, 12, 401, dtype=torch.float64)
    ones = (OUTCOMES > 1).double().sum(1)
    wanted = []
    for centre, scale in phi:
        one = ones[:, None] * grid - ROWS * torch.nn.functional.softplus(grid)
        given = Normal(grid[:, None], scale.exp()).log_prob(grid) + one[:, None]
        inner = given.logsumexp(-1).sum(0) + GROUPS * math.log(24 / 400)
        outer = inner + Normal(centre, 1.5).log_prob(grid)
        wanted.append(outer.logsumexp(0) + math.log(24 / 400))
    begin = torch.zeros(1, 1 + GROUPS, dtype=torch.float64)
    parts = Parts(torch.tensor([0]), torch.arange(1, 1 + GROUPS)[:, None])
    integral = Integral(density, parts, begin)
    exact = torch.stack(wanted)
    assert torch.allclose(integral.log_marginals(phi)[0], exact, atol=2e-3)
    assert bool(((integral.laplace(phi, integral.modes(phi))[0] - exact).abs() > 0.05).all())


def test_three_effects_by_quadrature():
    """One part of three parameters, beside a fine grid."""
    x = torch.stack([torch.ones(7), torch.linspace(-1, 1, 7), torch.linspace(-1, 1, 7) ** 2], 1)
    y = torch.tensor([1.0, 1, 0, 1, 1, 1, 1]).double()

    def density(phi: Tensor, z: Tensor) -> Tensor:
        rows = Bernoulli(logits=x.double() @ (phi[0] + phi[1].exp() * z)).log_prob(y)
        return Normal(0, 1).log_prob(z).sum() + rows.sum()

    phi = torch.tensor([[0.2, 0.7]], dtype=torch.float64)
    grid = torch.linspace(-5, 5, 41, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid, grid)
    exact = vmap(density, (None, 0))(phi[0], points).logsumexp(0) + 3 * math.log(10 / 40)
    integral = Integral(density, Parts.whole(3), torch.zeros(1, 3, dtype=torch.float64))
    assert float(integral.log_marginals(phi)) == pytest.approx(float(exact), abs=0.005)
    assert abs(float(integral.laplace(phi, integral.modes(phi)) - exact)) > 0.02


def test_an_effect_with_long_tails():
    """A narrow Cauchy distribution beside normal rows, which Gauss and Hermite miss by .7 nats."""

    def density(phi: Tensor, z: Tensor) -> Tensor:
        return Cauchy(0.0, phi[0].exp()).log_prob(z[0]) + Normal(z[0], 1.0).log_prob(phi[1])

    phi = torch.tensor([[-2.3, 3.0], [0.0, 1.0], [1.0, -2.0]], dtype=torch.float64)
    grid = torch.linspace(-30, 30, 60001, dtype=torch.float64)[:, None]
    exact = vmap(lambda one: vmap(lambda z: density(one, z))(grid).logsumexp(0))(phi)
    integral = Integral(density, Parts.whole(1), torch.zeros(1, 1, dtype=torch.float64))
    found = integral.log_marginals(phi)[0]
    assert torch.allclose(found, exact + math.log(60 / 60000), atol=1e-5)
    assert (integral.laplace(phi, integral.modes(phi))[0] - found).abs().max() > 0.5


def test_five_effects_by_draws():
    """Binary rows of wide effects, beside a million draws of their prior."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, generator=rng).double()
    y = torch.bernoulli(torch.sigmoid(x.sum(1)), generator=rng)

    def density(phi: Tensor, z: Tensor) -> Tensor:
        rows = Bernoulli(logits=x @ z).log_prob(y)
        return Normal(0.0, phi[0].exp()).log_prob(z).sum() + rows.sum()

    phi = torch.tensor([[0.0], [0.7]], dtype=torch.float64)
    draws = torch.randn(2**20, 5, generator=rng).double()
    exact = torch.stack(
        [
            (Bernoulli(logits=draws * one.exp() @ x.T).log_prob(y).sum(1)).logsumexp(0)
            for one in phi[:, 0]
        ]
    ) - math.log(2**20)
    integral = Integral(density, Parts.whole(5), torch.zeros(1, 5, dtype=torch.float64))
    assert torch.allclose(integral.log_marginals(phi)[0], exact, atol=0.03)
    assert (integral.laplace(phi, integral.modes(phi))[0] - exact).abs().max() > 0.15


def test_two_effects_by_quadrature():
    """Normal outcomes with an intercept and a slope of each group: exact."""
    x = torch.linspace(-1, 1, ROWS).double()

    def density(phi: Tensor, z: Tensor) -> Tensor:
        effects = Normal(phi[:2], 0.7).log_prob(z.reshape(GROUPS, 2)).sum()
        means = z.reshape(GROUPS, 2) @ torch.stack([torch.ones_like(x), x])
        return effects + Normal(means, phi[2].exp()).log_prob(OUTCOMES).sum()

    places = torch.arange(2 * GROUPS).reshape(GROUPS, 2)
    begin = torch.zeros(1, 2 * GROUPS, dtype=torch.float64)
    integral = Integral(density, Parts(torch.arange(0), places), begin)
    phi = vectors()
    assert torch.allclose(
        integral.log_marginals(phi), integral.laplace(phi, integral.modes(phi)), atol=1e-8
    )


def test_parts_are_found_and_refused():
    """Groups that depend on each other through a sum are one part."""
    phi, z = vectors()[0], torch.zeros(GROUPS, dtype=torch.float64)
    found = Parts.of(normal, phi, z, torch.arange(GROUPS))
    assert found.parts.shape == (GROUPS, 1)

    def coupled(phi: Tensor, z: Tensor) -> Tensor:
        return normal(phi, z) - z.sum().square()

    assert Parts.of(coupled, phi, z, torch.arange(GROUPS)).parts.shape == (1, GROUPS)

    def in_a_row(phi: Tensor, z: Tensor) -> Tensor:
        """Groups depend on each other by a correlation, which is 0 at 0."""
        return Normal(phi[0].tanh() * z[:-1], 1.0).log_prob(z[1:]).sum() + normal(phi, z)

    zeros = torch.zeros_like(phi)
    assert Parts.of(in_a_row, zeros, z, torch.arange(GROUPS)).parts.shape == (1, GROUPS)
    groups = torch.tensor([0, 1, -1, 2, 3, 4, 5])
    found = Parts.of(nested, phi, torch.zeros(1 + GROUPS).double(), groups)
    assert torch.equal(found.common, SITE.common)
    assert torch.equal(found.parts, SITE.parts)


def test_differences_are_close():
    """A function without derivatives."""
    begin = torch.zeros(1, GROUPS, dtype=torch.float64)
    rough = Differences(vmap(normal), Parts.whole(GROUPS), begin)
    phi = vectors(2)
    values, slopes, hessians = (t[0] for t in rough.derivatives(phi))
    assert torch.allclose(values, vmap(normal_marginal)(phi), atol=1e-5)
    assert torch.allclose(slopes, vmap(grad(normal_marginal))(phi), atol=0.05)
    assert torch.allclose(hessians, vmap(hessian(normal_marginal))(phi), atol=0.5, rtol=0.02)


@pytest.mark.parametrize("family", ["binomial", "poisson"])
@pytest.mark.parametrize("effects", [1, 2])
def test_it_is_the_integral_of_mixed_models(family: str, effects: int):
    """Groups with an intercept, or with a slope too: their own functions, written for speed."""
    x = torch.linspace(-1, 1, GROUPS * ROWS).double().reshape(GROUPS, ROWS)
    y = (OUTCOMES > 1).double() + (0 if family == "binomial" else 1)
    columns = torch.stack([torch.ones_like(x), x], -1)
    group = torch.arange(GROUPS).repeat_interleave(ROWS)
    flat = columns.flatten(0, 1)
    zeros, ones = torch.zeros(len(flat)).double(), torch.ones(len(flat)).double()
    groups = Groups.of(flat, flat[:, :effects], y.flatten(), ones, zeros, group)

    def density(phi: Tensor, z: Tensor) -> Tensor:
        u = z.reshape(GROUPS, effects)
        eta = columns @ phi[:2] + (columns[..., :effects] * (u * phi[2:].exp())[:, None]).sum(-1)
        rows = Bernoulli(logits=eta) if family == "binomial" else Poisson(eta.exp())
        return Normal(0, 1).log_prob(u).sum() + rows.log_prob(y).sum()

    places = torch.arange(GROUPS * effects).reshape(GROUPS, effects)
    begin = torch.zeros(1, GROUPS * effects, dtype=torch.float64)
    integral = Integral(density, Parts(torch.arange(0), places), begin)
    phi = 0.3 * torch.randn(2, 2 + effects, generator=torch.Generator().manual_seed(2)).double()
    wanted = []
    for one in phi:
        own = torch.zeros(0, 1, 1).double()
        at = Phi(one[:2], one[2:].exp().diag(), own)
        wanted.append(log_marginals(FAMILIES[family], groups, at).sum())
    if effects == 1:
        found = integral.log_marginals(phi)
    else:
        found = integral.laplace(phi, integral.modes(phi))
    assert torch.allclose(found, torch.stack(wanted), atol=1e-6)
