"""Bayesian logistic regression: the library's mean field against the exact posterior on a grid, and
against its own optimum.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend
from bayesfl.composition.priors import Normal
from bayesfl.data import from_arrays
from bayesfl.federation.run.result import Result
from bayesfl.likelihoods import Bernoulli
from bayesfl.optim import Adam, cosine
from bayesfl.posteriors import MeanField

ROWS, FEATURES, PRIOR = 60, 3, 2.0


def regression() -> tuple[Tensor, Tensor]:
    """Inputs [60, 3] whose columns are orthogonal, and labels [60] of a logistic model of them."""
    rng = torch.Generator().manual_seed(3)
    x = (
        math.sqrt(ROWS)
        * torch.linalg.qr(torch.randn(ROWS, FEATURES, generator=rng, dtype=torch.float64))[0]
    )
    y = (
        torch.rand(ROWS, generator=rng, dtype=torch.float64)
        < (x @ torch.tensor([1.0, -0.5, 0.2]).double()).sigmoid()
    )
    return x.float().double(), y.long()


@pytest.fixture(scope="module")
def fitted() -> Result:
    """One client's mean field after 40 rounds of 25 steps, its rate falling along a cosine."""
    x, y = regression()

    def prior(value: float):
        return lambda given, view: torch.full((1,), value).to(view["n"])

    block = bf.Block(
        posterior=MeanField(init_scale=0.3),
        prior=Normal(centre=prior(0.0), variance=prior(PRIOR**2)),
        pool=None,
        keep=True,
    )
    step = Descend(
        Energy("w", ("w",), likelihood="sum"), steps=25, optimiser=Adam(cosine(0.05)), draws=64
    )
    algorithm = bf.Algorithm(
        nn.Linear(FEATURES, 1, bias=False),
        {"w": block},
        (step,),
        parts=("w",),
        likelihood=Bernoulli(),
    )
    clients = from_arrays([x], [y], test=([x], [y]))
    return bf.simulate(
        algorithm,
        clients,
        rounds=40,
        evaluate_every=None,
        engine=bf.Engine("layers", workers=1),
        dtype=torch.float64,
        progress=False,
    )


@pytest.fixture(scope="module")
def samples() -> Tensor:
    """Independent draws of the exact posterior on a grid of a third of a standard deviation,
    [4000, 3].
    """
    x, y = regression()
    w = torch.cartesian_prod(*[torch.linspace(-3.0, 3.0, 61).double()] * FEATURES)
    logits = w @ x.T
    logs = (y * logits - F.softplus(logits)).sum(1) - w.square().sum(1) / (2 * PRIOR**2)
    rng = torch.Generator().manual_seed(0)
    places = torch.multinomial(logs.softmax(0), 4000, replacement=True, generator=rng)
    return w[places]


def moments(result: Result) -> tuple[Tensor, Tensor]:
    """Mean and variance of the client's belief."""
    mean, variance = MeanField().moments(result.private["w"])
    return mean[0], variance[0]


def expected_slope_and_curvature(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E_q of the gradient and of the Hessian's diagonal of the negative log joint; each logit is
    Gaussian under q.
    """
    x, y = regression()
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    logit = x @ mean + (x.square() @ variance).sqrt() * torch.from_numpy(nodes)[:, None]
    p, weights = logit.sigmoid(), torch.from_numpy(weights / weights.sum())[:, None]
    slope = x.T @ ((weights * p).sum(0) - y) + mean / PRIOR**2
    return slope, x.T.square() @ (weights * p * (1 - p)).sum(0) + 1 / PRIOR**2


@pytest.mark.slow
def test_means_are_the_posteriors(fitted, samples):
    """Within 0.15 posterior standard deviations, in a design without correlations."""
    mean, _ = moments(fitted)
    assert ((mean - samples.mean(0)).abs() / samples.std(0)).max() < 0.15


@pytest.mark.slow
def test_predictions_are_the_posteriors(fitted, samples):
    """Predictive probabilities within 0.03, each an average over draws, and the epistemic part of
    them likewise.
    """
    x, _ = regression()
    p = (x @ samples.T).sigmoid()
    found = fitted.predict(draws=2000)
    assert_close(found.probs[0, :, 1], p.mean(1), rtol=0, atol=0.03)
    information = F.binary_cross_entropy(
        p.mean(1), p.mean(1), reduction="none"
    ) - F.binary_cross_entropy(p, p, reduction="none").mean(1)
    assert information.max() > 0.05
    assert_close(found.epistemic[0], information, rtol=0, atol=0.015)


@pytest.mark.slow
def test_mean_field_is_its_own_optimum(fitted):
    """There the mean has no expected slope, and a variance is 1 / E_q[H_dd], H the Hessian of the
    negative log joint.
    """
    mean, variance = moments(fitted)
    slope, curvature = expected_slope_and_curvature(mean, variance)
    assert (slope * variance.sqrt()).abs().max() < 0.05
    assert_close(variance, 1 / curvature, rtol=0.05, atol=0)
