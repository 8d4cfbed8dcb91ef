"""SWAG beside a plain loop of torch's SGD and the formulas of its Gaussian."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD

N, PRIOR, RATE = 24, 0.5, 0.05


@pytest.mark.parametrize("rank", [1, 5, 50])
def test_mean_and_covariance_of_the_iterates(rank: int):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 2, generator=rng).double(), torch.randn(N, generator=rng).double()
    model = nn.Linear(2, 1).double()
    batches = [(x[k : k + 8], y[k : k + 8]) for k in range(0, N, 8)]
    drawn = bf.posteriors.swag(
        model,
        batches,
        precision=PRIOR,
        likelihood=Gaussian(),
        draws=200_000,
        warmup=6,
        averages=12,
        thin=2,
        rank=rank,
        optimiser=SGD(RATE, momentum=0.5),
    )
    steps = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    means, iterates = [], []
    for step in range(30):
        xs, ys = batches[step % 3]
        steps.zero_grad()
        w = parameters_to_vector(model.parameters())
        nll = 3 * (model(xs)[:, 0] - ys).square().sum() / 2  # three such batches are all rows
        ((nll + PRIOR * w.square().sum() / 2) / N).backward()
        steps.step()
        if step >= 6 and step % 2:
            iterates.append(parameters_to_vector(model.parameters()).detach())
            means.append(torch.stack(iterates).mean(0))
    away = torch.stack([w - m for w, m in zip(iterates, means, strict=True)])[-rank:]
    wanted = torch.stack(iterates).var(0, correction=0).diag() / 2
    if rank > 1:
        wanted = wanted + away.T @ away / (2 * (len(away) - 1))
    mean, _ = drawn.moments()
    assert_close(mean, means[-1], atol=4 * float(wanted.diagonal().max().sqrt()) / 450, rtol=0)
    assert_close(
        drawn.draws.flatten(0, 1).T.cov(), wanted, atol=0.015 * float(wanted.max()), rtol=0.02
    )


def test_a_rate_that_is_too_large_is_refused():
    x, y = 1e3 * torch.randn(30, 2), torch.arange(30) % 3
    with pytest.raises(ValueError, match="not finite"):
        bf.posteriors.swag(nn.Linear(2, 3), x, y, precision=1.0, batch_size=9, optimiser=SGD(1e9))


@pytest.mark.parametrize("size", [None, 30])
def test_sgd_without_noise_is_refused(size: int | None):
    x, y = torch.randn(30, 2), torch.arange(30) % 3
    with pytest.raises(ValueError, match="reads all 30 rows"):
        bf.posteriors.swag(nn.Linear(2, 3), x, y, precision=1.0, batch_size=size)
    with pytest.raises(ValueError, match="reads all 30 rows"):
        bf.posteriors.swag(nn.Linear(2, 3), [(x, y)], precision=1.0)


def test_batches_that_repeat_at_each_iterate_are_refused():
    """SGD runs in a cycle of one pass, and every iterate is at one place of it."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=rng)
    y = (x[:, 0] + torch.randn(200, generator=rng) > 0).long()
    batches = [(x[k : k + 40], y[k : k + 40]) for k in range(0, 200, 40)]
    options: dict[str, Any] = {"precision": 20.0, "warmup": 600, "optimiser": SGD(0.5)}
    with pytest.raises(ValueError, match="hardly differ"):
        bf.posteriors.swag(nn.Linear(2, 2), batches, **options)
    spread = bf.posteriors.swag(nn.Linear(2, 2), batches, thin=7, **options).moments()[1]
    assert spread.max() > 1e-6
