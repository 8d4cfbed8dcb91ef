"""Langevin dynamics on a linear model, whose draws have a closed form at any rate."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from bayesfl.likelihoods import Gaussian
from bayesfl.posteriors import Samples, sghmc, sgld
from tests.posteriors.made import linear_model, network

RATE = {sgld: 0.15, sghmc: 0.1}
MOMENTUM = {sgld: 0.0, sghmc: 0.5}


def drawn(sampler, **options) -> Samples:
    """Draws for the linear model, from its MAP on."""
    model, x, y, precision = linear_model()
    plan = {"rate": RATE[sampler], "warmup": 50, "thin": 1, "draws": 2000} | options
    if sampler is sghmc:
        plan["momentum"] = MOMENTUM[sampler]
    return sampler(model, x, y, precision=precision, likelihood=Gaussian(0.5), **plan)


def exact(sampler, temperature: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the draws."""
    _, x, y, precision = linear_model()
    one = torch.eye(3, dtype=torch.float64)
    matrix = x.T @ x / 0.25 + precision * one
    wide = one - RATE[sampler] * matrix / (2 * (1 + MOMENTUM[sampler]) * len(x))
    return torch.linalg.solve(matrix, x.T @ y / 0.25), temperature * (matrix @ wide).inverse()


@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("sampler", [sgld, sghmc])
def test_draws_have_their_closed_form(sampler, temperature):
    """Mean and covariance at a rate at which its own error shows, within Monte Carlo error."""
    found, (mean, covariance) = drawn(sampler, temperature=temperature), exact(sampler, temperature)
    sd = covariance.diagonal().sqrt()
    _, x, _, precision = linear_model()
    true = temperature * (x.T @ x / 0.25 + precision * torch.eye(3).double()).inverse()
    assert (covariance.diagonal() > 1.15 * true.diagonal()).all()
    assert ((found.moments()[0] - mean).abs() < 0.1 * sd).all()
    assert_close(
        found.draws.flatten(0, 1).T.cov() / sd / sd[:, None],
        covariance / sd / sd[:, None],
        rtol=0,
        atol=0.12,
    )


@pytest.mark.parametrize("sampler", [sgld, sghmc])
def test_without_temperature_it_descends(sampler):
    """To the MAP."""
    model, x, y, precision = linear_model()
    wanted = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    found = sampler(
        model,
        x,
        y,
        precision=precision,
        likelihood=Gaussian(0.5),
        temperature=0.0,
        rate=0.1,
        warmup=400,
        draws=1,
    )
    assert_close(found.draws[0], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sampler", [sgld, sghmc])
def test_chains_batches_and_seeds(sampler):
    """Chains differ, equal seeds give equal bits, a loader and batches are read in turn."""
    model, x, y = network().float(), torch.rand(20, 4), torch.arange(20) % 3
    options = {"precision": 1.0, "draws": 3, "warmup": 5, "thin": 2, "chains": 2}
    state = torch.get_rng_state()
    one, two = (sampler(model, x, y, batch_size=6, **options) for _ in range(2))
    assert one.draws.shape == (2, 3, 51)
    assert one.draws.equal(two.draws)
    assert not one.draws[0].equal(one.draws[1])
    other = sampler(model, x, y, batch_size=6, seed=1, **options)
    assert not one.draws.equal(other.draws)
    assert torch.get_rng_state().equal(state)
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    assert sampler(model, loader, **options).predict(x)["probs"].shape == (20, 3)
    with pytest.raises(ValueError, match=r"chain 1 is not finite: .*; use 1e\+08"):
        sampler(model, x, y, rate=1e9, **options)
