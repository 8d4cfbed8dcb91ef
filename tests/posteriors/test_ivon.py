"""Mean-field inference by natural gradients."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.random import Purpose, generator
from bayesfl.likelihoods import Bernoulli, Gaussian
from bayesfl.posteriors import ivon
from tests.cases import numbers


def linear() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A regression in float64, its rows and its targets."""
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, -0.2, 0.5]]))
    x = numbers(40, 3)
    return model, x, x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + numbers(40, 1, seed=1)


def test_steps_are_the_papers():
    """Beside a plain loop, whose gradients are those of squares."""
    model, x, y = linear()
    n, precision, centre, rate, b1, b2 = 40, 2.0, 0.1, 0.05, 0.9, 0.95
    found = ivon(
        model,
        x,
        y,
        precision=precision,
        centre=centre,
        likelihood=Gaussian(),
        steps=5,
        rate=rate,
        betas=(b1, b2),
        curvature=0.5,
        seed=3,
    )
    m, h, g, decay = torch.tensor([0.3, -0.2, 0.5]).double(), 0.5, 0.0, precision / n
    for t in range(5):
        noise = generator(3, Purpose.NOISE, index=t).standard_normal(3, "float32")
        e, s = torch.from_numpy(noise).double(), 1 / (n * (h + decay)) ** 0.5
        both = [x.T @ (x @ (m + sign * s * e) - y[:, 0]) / n for sign in (1, -1)]
        curved = (both[0] * (s * e) - both[1] * (s * e)) / 2 / s**2
        g = b1 * g + (1 - b1) * (both[0] + both[1]) / 2
        h = b2 * h + (1 - b2) * curved + 0.5 * (1 - b2) ** 2 * (h - curved) ** 2 / (h + decay)
        m = m - rate * (g / (1 - b1 ** (t + 1)) + decay * (m - centre)) / (h + decay)
    mean, variance = found.moments()
    assert_close(mean, m)
    assert_close(variance, 1 / (n * (h + decay)))


@pytest.mark.slow
def test_it_is_the_mean_field_optimum():
    """Of a linear model, by batches: its posterior's mean, and 1 / its precision's diagonal."""
    model, x, y = linear()
    options = {"precision": 2.0, "likelihood": Gaussian(), "steps": 1500, "betas": (0.9, 0.998)}
    found = ivon(model, x, y, batch_size=10, rate=bf.optim.cosine(0.2), **options)
    precision = x.T @ x + 2 * torch.eye(3).double()
    mean, variance = found.moments()
    assert_close(mean, torch.linalg.solve(precision, x.T @ y)[:, 0], atol=0.02, rtol=0)
    assert_close(variance, 1 / precision.diagonal(), atol=0, rtol=0.1)
    assert float(found.history[-100:].mean()) > float(found.history[:100].mean())


def test_what_grows_without_bound_is_named():
    model, x, y = linear()
    with pytest.raises(ValueError, match=r"ELBO is not finite at step \d+: .*rate=0.01"):
        ivon(model, 1e200 * x, y, precision=1.0, likelihood=Gaussian(), steps=5)


@pytest.mark.slow
def test_its_defaults_reach_the_width():
    """Of two classes, whose curvature is far from that of the start."""
    x = numbers(30, 3)
    y = (x @ torch.tensor([[1.0], [-1.0], [0.5]]).double() + numbers(30, 1, seed=1) > 0).double()
    model, prior = nn.Linear(3, 1).double(), {"precision": 1.0, "likelihood": Bernoulli()}
    mean, variance = ivon(model, x, y, **prior).moments()
    near = bf.posteriors.MeanField.fit(model, x, y, **prior).moments()
    assert_close(mean, near[0], atol=0.05, rtol=0)
    assert_close(variance.sqrt(), near[1].sqrt(), atol=0, rtol=0.06)
