"""The proximal step of `Descend`: against its closed form, its minimum, and where a gradient step leaves the numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.blocks import Block, Energy
from bayesfl.data import FederatedData
from bayesfl.optim import SGD, Adam
from bayesfl.phases import Descend
from bayesfl.posteriors import MeanField
from bayesfl.priors import Normal, own_mean, server_mean


def pulled(
    model: nn.Module, variance: float, *, optimiser: Any = SGD(0.1), prox: bool = True, likelihood: Any = "mean", **steps
) -> bf.Algorithm:
    """One private block under N(server's mean, variance)."""
    prior = Normal(centre=server_mean("w"), variance=lambda given, view: torch.full_like(view["n"], variance)[..., None])
    phase = Descend("w", Energy("w", ("w",), likelihood=likelihood), optimiser=optimiser, prox=prox, **steps)
    return bf.Algorithm(model, {"w": Block(prior=prior)}, (phase,), parts=("w",))


def run(algorithm: bf.Algorithm, clients: FederatedData, kernel: Any = "auto", **options: Any):
    options = {"rounds": 1, "dtype": torch.float64, "evaluate_every": None, "progress": False, "seed": 2, **options}
    return bf.simulate(algorithm, clients, engine=bf.Engine(kernel), **options)


@pytest.mark.parametrize("likelihood", ["sum", "mean"])
@pytest.mark.parametrize("kernel", ["reference", "layers", "live", "vmap"])
def test_two_steps_by_hand(model: nn.Module, clients: FederatedData, likelihood: str, kernel: str):
    """Each step: SGD on the likelihood alone, then (w + lr k centre) / (1 + lr k), k = 1 / variance, of a mean 1 / (n variance)."""
    variance, lr, one = 0.3, 0.05, clients.select([2])
    x, y = (t.double() if t.is_floating_point() else t for t in one.train.client(0))
    copy = bf.models.mlp(8, hidden=16, outputs=3).double()
    copy.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    centres = [p.detach().clone() for p in copy.parameters()]
    k = 1 / variance if likelihood == "sum" else 1 / (len(x) * variance)
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(copy(x), y, reduction=likelihood)
        for p, g, c in zip(copy.parameters(), torch.autograd.grad(loss, list(copy.parameters())), centres, strict=True):
            p.data = (p.data - lr * g + lr * k * c) / (1 + lr * k)
    result = run(pulled(model, variance, optimiser=SGD(lr), likelihood=likelihood, epochs=2), one, kernel)
    assert_close(result.server["w"]["loc"], torch.cat([p.detach().flatten() for p in copy.parameters()]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", ["reference", "layers"])
@pytest.mark.parametrize("optimiser", [SGD(0.1), SGD(0.03, momentum=0.9), Adam(0.01)], ids=str)
def test_the_minimum_is_that_of_the_energy(clients: FederatedData, optimiser: Any, kernel: str):
    """Whatever the optimiser, the gradient of likelihood and prior together vanishes where it ends: of a linear model, convex."""
    one, variance = clients.select([0]), 0.5
    x, y = (t.double() if t.is_floating_point() else t for t in one.train.client(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
    result = run(pulled(model, variance, optimiser=optimiser, steps=1500), one, kernel)
    w = result.server["w"]["loc"].clone().requires_grad_()
    centre = torch.cat([model.weight.flatten(), model.bias]).detach().double()
    energy = torch.nn.functional.cross_entropy(x @ w[:24].view(3, 8).T + w[24:], y) + (w - centre).square().sum() / (2 * variance * len(x))
    energy.backward()
    assert w.grad is not None
    assert float((w - centre).detach().abs().max()) > 0.1
    assert_close(w.grad, torch.zeros_like(w), atol=1e-4, rtol=0)


def test_stiff_priors_are_stable(model: nn.Module, clients: FederatedData):
    """lr k of a few hundred: the proximal step stays finite and near the centre, the gradient step leaves the numbers."""
    options = {"optimiser": SGD(0.1), "epochs": 300, "likelihood": "sum"}
    start = pulled(model, 1e-4).init(7, dtype=torch.float64)["w"]["loc"]
    end = run(pulled(model, 1e-4, **options), clients).server["w"]["loc"]
    assert 0 < float((end - start).abs().max()) < 0.01
    with pytest.raises(bf.DivergenceError):
        run(pulled(model, 1e-4, prox=False, **options), clients)


def test_a_wide_prior_changes_nothing(model: nn.Module, clients: FederatedData):
    """As the variance grows, the steps become those under a flat prior; Adam's too."""
    wide = pulled(model, 1e12, optimiser=Adam(0.01), epochs=3, batch_size=10)
    flat = replace(wide, blocks={"w": Block()}, phases=(replace(wide.phases[0], prox=False),))
    assert_close(run(wide, clients).server["w"]["loc"], run(flat, clients).server["w"]["loc"], atol=1e-10, rtol=0)


def test_prox_needs_a_gaussian_prior_of_points(model: nn.Module):
    """Refused as the algorithm is built, with the remedy."""
    prior = Normal(centre=own_mean("w"), variance=lambda given, view: torch.ones(1))
    step = Descend("w", Energy("w", ("w",), likelihood="sum"), prox=True)
    with pytest.raises(ValueError, match="use prox=False"):
        bf.Algorithm(model, {"w": Block(posterior=MeanField(), prior=prior)}, (step,), parts=("w",))
