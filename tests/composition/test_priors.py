"""Priors against torch's densities, and empirical Bayes against the derivative of its bound."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions
from torch.testing import assert_close

from bayesfl.base.protocols import Prior
from bayesfl.composition.energy import Energy
from bayesfl.composition.priors import (
    Flat,
    Normal,
    closest_variance,
    inverse_size,
    is_normal,
    own_mean,
    server_mean,
)
from tests.cases import numbers


def normal(centre: Tensor, variance: Tensor) -> Normal:
    """A prior of fixed parameters."""
    return Normal(centre=lambda given, view: centre, variance=lambda given, view: variance)


def kl_isotropic(mu: Tensor, sigma2: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """KL(N(mu, diag sigma2) || N(w, v I)) by its textbook form."""
    return 0.5 * ((v / sigma2).log() + (sigma2 + (mu - w) ** 2) / v - 1).sum(-1)


# Normal and Flat


@pytest.mark.parametrize("shared", [False, True], ids=["variance of each weight", "one variance"])
def test_energy_is_the_expected_negative_log_density(shared):
    """E_q[-log p] by Gauss-Hermite quadrature of torch's density, constants kept; one variance
    counts once for each weight.
    """
    loc, var, centre = numbers(4, 6), numbers(4, 6, seed=1).exp(), numbers(6, seed=2)
    variance = numbers(4, 1, seed=3).exp() if shared else numbers(4, 6, seed=3).exp()
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    draws = loc + var.sqrt() * torch.from_numpy(nodes)[:, None, None]
    density = distributions.Normal(centre, variance.sqrt()).log_prob(draws).sum(-1)
    expected = -(torch.from_numpy(weights / weights.sum())[:, None] * density).sum(0)
    assert_close(normal(centre, variance).energy(loc, var, {}, {}), expected)


def test_energy_of_a_point_is_the_density():
    """With variance 0 nothing is averaged."""
    loc, centre, variance = numbers(6), numbers(6, seed=1), numbers(6, seed=2).exp()
    expected = -distributions.Normal(centre, variance.sqrt()).log_prob(loc).sum()
    assert_close(normal(centre, variance).energy(loc, torch.zeros(6).double(), {}, {}), expected)


def test_pull_is_distance_over_variance():
    """The derivative by the mean is (loc - centre) / variance, by the belief's variance 1 / (2
    variance).
    """
    loc = numbers(6).requires_grad_()
    var = numbers(6).exp().requires_grad_()
    centre = numbers(6, seed=1)
    variance = numbers(6, seed=2).exp()
    by_loc, by_var = torch.autograd.grad(
        normal(centre, variance).energy(loc, var, {}, {}), [loc, var]
    )
    assert_close(by_loc, (loc.detach() - centre) / variance)
    assert_close(by_var, 0.5 / variance)


def test_flat_has_no_energy():
    """0 for every leading axis, whatever the belief."""
    assert_close(
        Flat().energy(numbers(2, 3, 5), numbers(2, 3, 5).exp(), {}, {}), torch.zeros(2, 3).double()
    )


def test_centres_are_read_where_they_say():
    """From what the server sent, or from the client's own view."""
    given, view = {"w": {"loc": numbers(3)}}, {"w": {"loc": numbers(2, 3, seed=1)}}
    assert server_mean("w")(given, view) is given["w"]["loc"]
    assert own_mean("w")(given, view) is view["w"]["loc"]


def test_what_is_normal():
    """A Normal's pull may be added by algebra; that of a subclass with another energy may not, nor
    that of a prior with like names.
    """

    class Wider(Normal):
        pass

    class Huber(Normal):
        def energy(self, loc: Tensor, var: Tensor, given: Any, view: Any) -> Tensor:
            return F.huber_loss(loc, self.centre(given, view).expand_as(loc), reduction="none").sum(
                -1
            )

    parameters = normal(numbers(3), numbers(3).exp())
    assert is_normal(parameters)
    assert is_normal(Wider(centre=parameters.centre, variance=parameters.variance))
    assert not is_normal(Huber(centre=parameters.centre, variance=parameters.variance))
    assert not is_normal(Flat())
    assert isinstance(Flat(), Prior)


# Scales


@pytest.mark.parametrize("strength", [0.5, 15.0])
def test_inverse_size_is_a_pull_under_a_mean(strength):
    """KL / n with variance 1 / (strength n) pulls by strength (w_j - w), for clients of any size,
    one or many at once.
    """
    n = torch.tensor([1.0, 20.0, 300.0]).double()
    w = numbers(3, 4).requires_grad_()
    centre = numbers(4, seed=1)
    variance = inverse_size(strength)
    assert_close(variance({}, {"n": n}), (1 / (strength * n)).view(3, 1))
    assert variance({}, {"n": n[0]}).shape == (1,)
    prior = Normal(centre=lambda given, view: centre, variance=variance)
    _, weight = Energy("w", ("w",), likelihood="mean").scales(n)
    (pull,) = torch.autograd.grad(
        (weight * prior.energy(w, torch.zeros_like(w), {}, {"n": n})).sum(), w
    )
    assert_close(pull, strength * (w.detach() - centre))


def test_closest_variance_golden():
    """Means (1, 2), standard deviations (0.5, 1), centre 0: ((0.25 + 1) + (1 + 4)) / 2 = 3.125."""
    moments = torch.tensor([1.0, 2.0]).double(), torch.tensor([0.25, 1.0]).double()
    assert_close(closest_variance(moments, torch.zeros(2).double()).item(), 3.125)


def test_closest_variance_is_the_root_of_the_bound():
    """It minimises KL(q || N(centre, v I)): the derivative is 0 there and the second one positive,
    for each leading axis.
    """
    mu, sigma2, w = numbers(3, 7), numbers(3, 7, seed=1).exp(), numbers(7, seed=2)
    v = closest_variance((mu, sigma2), w)
    assert v.shape == (3,)
    live = v.clone().requires_grad_()
    (slope,) = torch.autograd.grad(
        kl_isotropic(mu, sigma2, w, live[:, None]).sum(), live, create_graph=True
    )
    assert_close(slope.detach(), torch.zeros(3).double(), rtol=0, atol=1e-12)
    assert (torch.autograd.grad(slope.sum(), live)[0] > 0).all()


def test_divergence_at_the_closest_variance():
    """There KL = 1/2 sum_d log(v / sigma_d^2), the energy minus the entropy of the library's own
    parts.
    """
    mu, sigma2, w = numbers(7), numbers(7, seed=1).exp(), numbers(7, seed=2)
    v = closest_variance((mu, sigma2), w)
    entropy = distributions.Normal(mu, sigma2.sqrt()).entropy().sum()
    assert_close(
        normal(w, v[None]).energy(mu, sigma2, {}, {}) - entropy, 0.5 * (v / sigma2).log().sum()
    )


@pytest.mark.parametrize(("shape", "scale"), [(1.0, 0.1), (0.0, 2.0), (3.0, 0.0)])
def test_closest_variance_under_a_hyperprior_is_the_mode(shape, scale):
    """With density v^-(a+1) e^(-b/v) on v, D/2 log v + total/(2 v) + (a+1) log v + b/v is smallest
    there.
    """
    mu, sigma2, w = numbers(3, 7), numbers(3, 7, seed=1).exp(), numbers(7, seed=2)
    total = (sigma2 + (mu - w) ** 2).sum(-1)
    v = closest_variance((mu, sigma2), w, shape=shape, scale=scale).requires_grad_()
    objective = 3.5 * v.log() + total / (2 * v) + (shape + 1) * v.log() + scale / v
    (slope,) = torch.autograd.grad(objective.sum(), v, create_graph=True)
    assert_close(slope.detach(), torch.zeros(3).double(), rtol=0, atol=1e-12)
    assert (torch.autograd.grad(slope.sum(), v)[0] > 0).all()
    plain = closest_variance((mu, sigma2), w)
    assert_close(v.detach(), (2 * scale + 7 * plain) / (7 + 2 * shape + 2))


def test_hyperprior_keeps_a_collapsed_client_from_zero():
    """A belief at the centre without width has v = 0, and b / (D/2 + a + 1) under the
    hyperprior.
    """
    moments = torch.zeros(2).double(), torch.zeros(2).double()
    assert closest_variance(moments, torch.zeros(2).double()).item() == 0.0
    assert_close(
        closest_variance(moments, torch.zeros(2).double(), shape=1.0, scale=0.1).item(), 0.1 / 3
    )
