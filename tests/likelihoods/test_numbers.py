"""Likelihoods of numbers: against torch's and scipy's, their moments against draws, and what they
refuse.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import distributions
from torch.testing import assert_close

from bayesfl.likelihoods import Gaussian, Poisson, Quantiles
from tests.cases import numbers


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_gaussian_is_torchs_summed_over_outputs(scale):
    """-log N(y | outputs, scale^2), the constant kept."""
    outputs, y = numbers(3, 7, 4), numbers(3, 7, 4, seed=1)
    assert_close(
        Gaussian(scale).nll(outputs, y), -distributions.Normal(outputs, scale).log_prob(y).sum(-1)
    )
    one, target = outputs[..., :1], y[..., 0]
    assert_close(
        Gaussian(scale).nll(one, target),
        -distributions.Normal(one.squeeze(-1), scale).log_prob(target),
    )


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, "1", torch.ones(2)])
def test_gaussian_needs_a_positive_scale(scale: Any):
    """One number above 0 for all targets."""
    with pytest.raises(ValueError, match=r"^scale .* got "):
        Gaussian(scale)
    assert type(Gaussian(np.float32(0.5)).scale) is float  # pyright: ignore[reportArgumentType]


def test_gaussian_predictive_is_noise_and_spread():
    """The law of total variance: scale^2 plus the population variance of the means over draws; the
    latter is epistemic.
    """
    outputs = numbers(2, 6, 4, 3)
    seen = Gaussian(0.5).predictive(outputs)
    mean = outputs.sum(1) / 6
    spread = ((outputs - mean.unsqueeze(1)) ** 2).sum(1) / 6
    assert_close(seen["mean"], mean)
    assert_close(seen["variance"], 0.25 + spread)
    assert_close(seen["epistemic"], spread.sum(-1))
    alone = Gaussian(0.5).predictive(outputs[:, :1])
    assert_close(alone["variance"], torch.full_like(mean, 0.25))
    assert_close(alone["epistemic"], torch.zeros(2, 4).double())


def test_a_learned_scale_is_torchs_with_a_floor():
    """-log N(y | m, (floor + softplus(r))^2), for outputs [m, r]; the floor is all that is left of
    the deviation far below 0.
    """
    outputs, y = numbers(3, 7, 6), numbers(3, 7, 3, seed=1)
    mean, scale = outputs[..., :3], 0.2 + torch.nn.functional.softplus(outputs[..., 3:])
    assert_close(
        Gaussian("learned", floor=0.2).nll(outputs, y),
        -distributions.Normal(mean, scale).log_prob(y).sum(-1),
    )
    sure = torch.tensor([[1.5, -200.0]]).double()
    seen = Gaussian("learned").predictive(sure[None])
    assert_close(seen["variance"], torch.tensor([[0.2**2]], dtype=torch.float64))


def test_a_learned_scale_predicts_noise_and_spread():
    """The mean variance over draws plus the variance of the means, against 200,000 samples of the
    mixture.
    """
    outputs = numbers(5, 2, 2)  # [S, N, 2 O]
    seen = Gaussian("learned", floor=0.1).predictive(outputs)
    rng = np.random.default_rng(0)
    scale = 0.1 + np.logaddexp(0, outputs[..., 1].numpy())
    which = rng.integers(5, size=200_000)
    for n in range(2):
        drawn = rng.normal(outputs[which, n, 0].numpy(), scale[which, n])
        assert abs(drawn.mean() - float(seen["mean"][n, 0])) < 0.02
        assert abs(drawn.var() / float(seen["variance"][n, 0]) - 1) < 0.02
        assert_close(seen["epistemic"][n], outputs[:, n, 0].var(correction=0))


@pytest.mark.parametrize(
    "options",
    [{"scale": 1.0, "floor": 0.1}, {"scale": "learned", "floor": 0.0}, {"scale": "learnt"}],
)
def test_what_is_no_learned_scale(options: Any):
    with pytest.raises(ValueError, match=r"^(floor|scale) .*"):
        Gaussian(**options)


def test_poisson_is_torchs_summed_over_counts():
    outputs, y = numbers(3, 7, 2), torch.arange(42).view(3, 7, 2).double() % 6
    assert_close(
        Poisson().nll(outputs, y), -distributions.Poisson(outputs.exp()).log_prob(y).sum(-1)
    )
    assert_close(
        Poisson().nll(outputs[..., :1], y[..., 0]),
        -distributions.Poisson(outputs[..., 0].exp()).log_prob(y[..., 0]),
    )


def test_poisson_predicts_noise_and_spread():
    """The mean rate plus the variance of the rates, against samples of the mixture."""
    outputs = numbers(5, 2, 1)
    seen = Poisson().predictive(outputs)
    rng = np.random.default_rng(0)
    for n in range(2):
        rates = outputs[:, n, 0].exp().numpy()
        drawn = rng.poisson(rates[rng.integers(5, size=200_000)])
        assert abs(drawn.mean() / float(seen["mean"][n, 0]) - 1) < 0.02
        assert abs(drawn.var() / float(seen["variance"][n, 0]) - 1) < 0.03
        assert_close(float(seen["epistemic"][n]), rates.var())


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_the_ends_that_lose_least_are_the_quantiles(level: float):
    """The pinball loss is least at the empirical quantiles, found by a grid."""
    y = torch.from_numpy(stats.gamma(2.0).rvs(4001, random_state=0))
    grid = torch.linspace(0.0, 8.0, 801).double()
    gap = torch.expm1(20 - grid).log()  # so that the upper end stays at 20
    low = (
        Quantiles(level).nll(torch.stack([grid, gap], -1)[:, None].expand(801, 4001, 2), y).mean(1)
    )
    assert abs(float(grid[low.argmin()]) - float(y.quantile((1 - level) / 2))) < 0.011
    upper = torch.expm1(grid[1:]).log()  # of which softplus is the grid
    high = (
        Quantiles(level)
        .nll(torch.stack([torch.zeros(800).double(), upper], -1)[:, None].expand(800, 4001, 2), y)
        .mean(1)
    )
    assert abs(float(grid[1:][high.argmin()]) - float(y.quantile((1 + level) / 2))) < 0.011


def test_an_interval_by_draws():
    """Ends are averaged over draws, which cannot cross; what they disagree on is epistemic."""
    outputs = numbers(5, 3, 4)
    seen = Quantiles().predictive(outputs)
    lower = outputs[..., :2]
    upper = outputs[..., :2] + torch.nn.functional.softplus(outputs[..., 2:])
    assert (seen["upper"] > seen["lower"]).all()
    assert_close(seen["lower"], lower.mean(0))
    assert_close(seen["upper"], upper.mean(0))
    assert_close(seen["epistemic"], ((lower + upper) / 2).var(0, correction=0).sum(-1))
    assert_close(seen["mean"], (seen["lower"] + seen["upper"]) / 2)


@pytest.mark.parametrize("level", [0, 1, 90, "0.9"])
def test_what_is_no_level(level: Any):
    with pytest.raises(ValueError, match=r"^level "):
        Quantiles(level)
