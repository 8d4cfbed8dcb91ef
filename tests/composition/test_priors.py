"""Priors against torch's densities, and empirical Bayes against the derivative of its bound."""

import copy
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Prior
from bayesfl.composition.block import Block
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend
from bayesfl.composition.priors import (
    Flat,
    Normal,
    Tilt,
    closest_variance,
    inverse_size,
    is_normal,
    own_mean,
    server_mean,
)
from bayesfl.data import FederatedData
from bayesfl.engine.driver import KernelName
from bayesfl.optim import SGD
from tests.cases import numbers, run


def normal(centre: Tensor, variance: Tensor) -> Normal:
    """A prior of fixed parameters."""
    return Normal(centre=lambda given, view: centre, variance=lambda given, view: variance)


# Normal, Tilt and Flat


@pytest.mark.parametrize("kernel", ["reference", "live", "layers", "vmap"])
@pytest.mark.parametrize("likelihood", ["sum", "mean"])
def test_a_tilt_adds_its_slope_to_the_gradient(
    kernel: KernelName, likelihood: Literal["sum", "mean"], clients: FederatedData
):
    """Two steps by hand on n times the mean loss, or once, plus slope . w, of a mean divided by
    n.
    """
    one, slope = clients.select([2]), numbers(27, seed=1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 3))
    step = Descend(Energy("w", ("w",), likelihood=likelihood), epochs=2, optimiser=SGD(0.01, 0.5))
    block = Block(prior=Tilt(lambda given, view: slope * view["n"].unsqueeze(-1)))
    algorithm = bf.Algorithm(model, {"w": block}, (step,), parts=("w",))
    x, y = one.train.client(0)
    net = copy.deepcopy(model).double()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    n = len(y)
    scale, weight = (n, 1.0) if likelihood == "sum" else (1.0, 1 / n)
    for _ in range(2):
        optimiser.zero_grad()
        flat = torch.nn.utils.parameters_to_vector(net.parameters())
        loss = scale * F.cross_entropy(net(x.double()), y) + weight * n * (slope * flat).sum()
        loss.backward()
        optimiser.step()
    wanted = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    found = run(algorithm, one, kernel=kernel).server["w"]["loc"]
    assert_close(found, wanted, atol=1e-12, rtol=0)


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


def test_pull_is_distance_over_variance():
    """The derivative by the mean is (loc - centre) / variance, by the belief's variance 1 / (2
    variance).
    """
    loc, var = numbers(6).requires_grad_(), numbers(6).exp().requires_grad_()
    centre, variance = numbers(6, seed=1), numbers(6, seed=2).exp()
    by_loc, by_var = torch.autograd.grad(
        normal(centre, variance).energy(loc, var, {}, {}), [loc, var]
    )
    assert_close((by_loc, by_var), ((loc.detach() - centre) / variance, 0.5 / variance))


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
    others = [
        kind(centre=parameters.centre, variance=parameters.variance) for kind in (Wider, Huber)
    ]
    found = [is_normal(prior) for prior in (parameters, *others, Flat())]
    assert found == [True, True, False, False]
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


@pytest.mark.parametrize(
    ("shape", "scale", "power"),
    [(0.0, 0.0, 0.0), (1.0, 0.1, 2.0), (0.0, 2.0, 1.0), (3.0, 0.0, 4.0)],
)
def test_closest_variance_is_the_mode(shape, scale, power):
    """The root of the bound KL(q || N(centre, v I)), D/2 log v + total/(2 v), to which a hyperprior
    of density v^-(a+1) e^(-b/v) adds (a+1) log v + b/v: the slope is 0 there and the second
    derivative positive, for each leading axis.
    """
    mu, sigma2, w = numbers(3, 7), numbers(3, 7, seed=1).exp(), numbers(7, seed=2)
    total = (sigma2 + (mu - w) ** 2).sum(-1)
    v = closest_variance((mu, sigma2), w, shape=shape, scale=scale).requires_grad_()
    objective = 3.5 * v.log() + total / (2 * v) + power * v.log() + scale / v
    (slope,) = torch.autograd.grad(objective.sum(), v, create_graph=True)
    assert_close(slope.detach(), torch.zeros(3).double(), rtol=0, atol=1e-12)
    assert (torch.autograd.grad(slope.sum(), v)[0] > 0).all()
    assert_close(v.detach(), (2 * scale + total) / (7 + 2 * power))


def test_hyperprior_keeps_a_collapsed_client_from_zero():
    """A belief at the centre without width has v = 0, and b / (D/2 + a + 1) under the
    hyperprior.
    """
    none = torch.zeros(2).double()
    assert closest_variance((none, none), none).item() == 0.0
    assert_close(closest_variance((none, none), none, shape=1.0, scale=0.1).item(), 0.1 / 3)
