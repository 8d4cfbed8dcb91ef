"""The mixture: golden values, what EM promises, densities that underflow."""

import math

import pytest
import torch
from torch.testing import assert_close

from bayesfl.posteriors import mixture


def table(rows: int = 12, components: int = 3) -> torch.Tensor:
    """Losses [M, N] of components that differ."""
    return 2 * torch.rand(
        components, rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def test_golden():
    """Three components, one example."""
    pi, losses = (torch.tensor(v, dtype=torch.float64) for v in ([0.5, 0.3, 0.2], [1.0, 2.0, 0.5]))
    q, evidence = mixture.responsibilities(pi, losses[:, None])
    assert_close(
        q[0],
        torch.tensor([0.53185374, 0.11739483, 0.35075143], dtype=torch.float64),
        atol=1e-8,
        rtol=0,
    )
    assert_close(evidence, torch.tensor([-1.06176042], dtype=torch.float64), atol=1e-8, rtol=0)


def test_small_densities():
    """exp(-l) is 0 in every precision; the responsibilities are those of the differences."""
    losses = torch.tensor([[2000.0], [2001.0]])
    q, evidence = mixture.responsibilities(torch.tensor([0.5, 0.5]), losses)
    assert_close(q[0], torch.tensor([0.0, -1.0]).softmax(0), atol=1e-4, rtol=0)
    assert float(evidence) == pytest.approx(-2000 + math.log((1 + math.exp(-1)) / 2), abs=1e-3)


def test_weights_raise_the_likelihood_and_leave_the_start_behind():
    """EM on the weights alone never lowers the likelihood; two starts meet; padding counts
    nothing.
    """
    losses, counts = table(), torch.ones(12, dtype=torch.float64)
    pi, before = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64), -torch.inf
    for _ in range(2000):
        q, evidence = mixture.responsibilities(pi, losses)
        assert float(evidence.sum()) >= before - 1e-12
        before, pi = float(evidence.sum()), mixture.mean_weights(q, counts)
    assert_close(mixture.fit_weights(losses, counts, iterations=2000), pi, atol=1e-6, rtol=0)
    assert_close(pi.sum(), torch.tensor(1.0, dtype=torch.float64))
    padded = torch.cat([losses, torch.full((3, 4), 7.0, dtype=torch.float64)], 1)
    cut = mixture.fit_weights(
        padded, torch.cat([counts, torch.zeros(4, dtype=torch.float64)]), iterations=2000
    )
    assert_close(cut, pi, atol=1e-6, rtol=0)


def test_a_component_may_die_and_come_back():
    """A weight is never exactly 0, so that a component that fits again is found again."""
    dead = torch.tensor([1.0, 0.0], dtype=torch.float64)
    losses = torch.tensor([[60.0], [0.0]], dtype=torch.float64)
    q, _ = mixture.responsibilities(dead, losses)
    assert float(q[0, 1]) > 0.99
    assert float(mixture.mean_weights(dead[None], torch.ones(1, dtype=torch.float64))[1]) > 0


def test_no_iterations_are_refused():
    losses = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"iterations .*1.* got 0"):
        mixture.fit_weights(losses.mT, torch.ones(4), iterations=0)
