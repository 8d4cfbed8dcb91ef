"""The proposal along scales: its densities have mass one, and follow a funnel."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import Normal

from bayesfl.stats.density.modes import Modes, climb
from bayesfl.stats.density.proposal import Along, Besides, Marginal, nodes_along


def target(phi: Tensor, order: int) -> list[Tensor]:
    """A funnel: x given the logarithm s of a scale has the standard deviation exp(s), and s is
    normal; y depends on both.
    """

    def value(one: Tensor) -> Tensor:
        s, x, y = one
        logs = Normal(0.3, 0.8).log_prob(s) + Normal(s, s.exp()).log_prob(x)
        return logs + Normal(x + 2 * s, 0.5).log_prob(y) + 3

    slope, second = torch.func.grad(value), torch.func.jacrev(torch.func.grad(value))
    return [torch.stack([of(one) for one in phi]) for of in (value, slope, second)[: order + 1]]


def made() -> Along:
    begin = torch.zeros(1, 3, dtype=torch.float64)
    best = climb(target, begin, begin > 0, torch.tensor([True, False, False]))
    return Along.of(best, nodes_along(target, best, [0], ["s", "x", "y"]))


def test_a_marginal_is_the_density_of_its_nodes():
    """Nodes of a normal density: quantiles, probabilities, and a mass of one."""
    at = np.linspace(-4, 4, 41)
    one = Marginal.of(at, stats.norm.logpdf(at))
    ranks = np.linspace(0.01, 0.99, 30)
    found = np.interp(ranks, one.mass, one.grid)
    assert np.allclose(found, stats.norm.ppf(ranks), atol=0.01)
    below, logs = one.below(found)
    assert np.allclose(below, ranks)
    assert np.allclose(logs, stats.norm.logpdf(found), atol=0.02)
    grid = np.linspace(one.grid[0] + 1e-9, one.grid[-1], 200_001)
    assert np.trapezoid(np.exp(one.below(grid)[1]), grid) == pytest.approx(1, abs=1e-3)
    assert one.below(np.array([1e6]))[1] == -np.inf


def test_weights_of_a_funnel_are_even():
    """The integral is known, exp(3), and most draws count."""
    phi, logs = made().draw(2000, np.random.default_rng(0))
    ratio = target(phi, 0)[0] - logs
    assert float(ratio.logsumexp(0)) - math.log(2000) == pytest.approx(3, abs=0.02)
    weights = ratio.softmax(0)
    assert float(1 / weights.square().sum()) > 1200
    assert float(weights @ phi[:, 0]) == pytest.approx(0.3, abs=0.05)


def test_its_density_has_mass_one():
    """Draws of another distribution weigh it; so do those of a proposal with another beside."""
    along = made()
    centre, covariance = torch.tensor([2.0, 3.0, 6.0]).double(), torch.eye(3).double()
    for proposal in (along, Besides(along, centre, covariance)):
        wide = Besides(along, centre, 9 * covariance)
        phi, logs = wide.draw(20_000, np.random.default_rng(1))
        mass = (proposal.log_density(phi) - logs).exp().mean()
        assert float(mass) == pytest.approx(1, abs=0.02)


def test_scales_depend_on_each_other():
    """Two scales with a correlation, and no other parameter: a normal density."""
    precision = torch.tensor([[2.0, -1.2], [-1.2, 1.0]]).double()

    def normal(phi: Tensor, order: int) -> list[Tensor]:
        second = -precision.expand(len(phi), 2, 2)
        return [
            -0.5 * torch.einsum("ni,ij,nj->n", phi, precision, phi),
            -phi @ precision,
            second,
        ][: order + 1]

    zero = torch.zeros(1, 2, dtype=torch.float64)
    best = Modes(zero, zero[:, 0], precision[None], zero > 0)
    along = Along.of(best, nodes_along(normal, best, [0, 1], ["a", "b"]))
    phi, logs = along.draw(4000, np.random.default_rng(0))
    ratio = normal(phi, 0)[0] - logs
    exact = math.log(2 * math.pi) - float(torch.logdet(precision)) / 2
    assert float(ratio.logsumexp(0)) - math.log(4000) == pytest.approx(exact, abs=0.02)
    weights = ratio.softmax(0)
    assert float(1 / weights.square().sum()) > 3000
    found = (phi.T * weights) @ phi
    assert torch.allclose(found, torch.linalg.inv(precision), rtol=0.05)
