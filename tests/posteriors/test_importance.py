"""Proposals around a mode: their densities, and weights that are the target's."""

import numpy as np
import pytest
import torch
from scipy import stats

from bayesfl.posteriors.importance import Proposal, resampled, weights_of

pytest.importorskip("arviz")


def proposal(groups: float) -> Proposal:
    """Of two coefficients and log tau, of the first one's effects."""
    covariance = torch.tensor([[0.5, 0.1, 0.2], [0.1, 0.3, 0.0], [0.2, 0.0, 0.4]]).double()
    beside = covariance[:2, :2] - torch.tensor([[0.1, 0.0], [0.0, 0.0]]).double()

    def given(psi: torch.Tensor) -> torch.Tensor:
        more = torch.cat([(2 * psi).exp() / groups, 0 * psi], 1)
        return beside + more.diag_embed()

    return Proposal(torch.tensor([1.0, -1.0, 0.3]).double(), covariance, 2, given)


@pytest.mark.parametrize("groups", [3.0, 1e9])
def test_draws_weigh_any_target(groups: float):
    """The mean weight of a normalised target is 1, and its moments are the weighted ones."""
    phi, log_density = proposal(groups).draw(40_000, np.random.default_rng(0))
    target = torch.distributions.MultivariateNormal(
        torch.tensor([0.8, -0.9, 0.2]).double(),
        torch.tensor([[0.4, 0.1, 0.1], [0.1, 0.3, 0.05], [0.1, 0.05, 0.3]]).double(),
    )
    ratio = target.log_prob(phi) - log_density
    assert float(ratio.exp().mean()) == pytest.approx(1, abs=0.02)
    weights, k_hat = weights_of(ratio)
    mass = torch.from_numpy(weights)
    assert k_hat < 0.5
    np.testing.assert_allclose(mass @ phi, target.mean, rtol=0, atol=0.02)
    away = phi - target.mean
    found = away.T @ (mass[:, None] * away)
    np.testing.assert_allclose(found, target.covariance_matrix, rtol=0, atol=0.03)
    places = resampled(weights, 20_000, np.random.default_rng(1))
    np.testing.assert_allclose(phi[places].mean(0), target.mean, rtol=0, atol=0.02)


def test_coefficients_of_effects_spread_where_tau_is_large():
    """By tau^2 / n beside what there is without, and others do not."""
    wide = proposal(3.0)
    phi, _ = wide.draw(40_000, np.random.default_rng(0))
    far = phi[phi[:, 2] > 1.3]  # where the mode's own regression ends
    variance = 0.5 - 0.1 + (2 * far[:, 2]).exp() / 3
    scale = 1.2**2 * 5 / 3  # the variance of Student's t over that of the Gaussian
    away = (far[:, 0] - 1.0 - 0.5) / variance.sqrt()
    assert float(away.square().mean()) == pytest.approx(scale, rel=0.1)
    assert float((far[:, 1] + 1).square().mean()) == pytest.approx(scale * 0.3, rel=0.1)


def test_fewer_draws_than_points_of_a_halton_sequence():
    """Every second or fifteenth point of one would have a part of the numbers alone."""
    for count in (8000, 60_000):
        points = stats.qmc.Halton(2, rng=0).random(count)
        places = resampled(np.full(count, 1 / count), 4000, np.random.default_rng(0))
        assert np.allclose(points[places].mean(0), 0.5, atol=0.02)
        assert np.allclose(points[places].std(0), 12**-0.5, atol=0.02)
