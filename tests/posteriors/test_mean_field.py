"""The mean-field Gaussian against closed forms: moments, entropy, divergence, and the optimum on a
Gaussian target.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Posterior
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend
from bayesfl.composition.priors import Normal
from bayesfl.data import ClientData
from bayesfl.engine.plan import PhasePlan
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from bayesfl.posteriors import MeanField
from tests.cases import numbers
from tests.engine.made import chunk


def belief(*shape: int) -> dict[str, Tensor]:
    """Means and scales of all sizes."""
    rng = torch.Generator().manual_seed(0)
    loc = torch.randn(*shape, generator=rng, dtype=torch.float64)
    return {"loc": loc, "rho": 3 * torch.randn(*shape, generator=rng, dtype=torch.float64)}


# The belief itself


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 0.1, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_starts_with_the_scale_asked_for(scale, dtype):
    """Its standard deviation is `init_scale` everywhere, in the precision of `loc`, which it
    aliases.
    """
    loc = torch.randn(2, 3, dtype=dtype)
    q = MeanField(init_scale=scale).init(loc)
    assert q["loc"] is loc
    assert q["rho"].dtype == dtype
    mean, variance = MeanField().moments(q)
    assert_close(mean, loc, rtol=0, atol=0)
    assert_close(
        variance.double().sqrt(),
        torch.full((2, 3), scale, dtype=torch.float64),
        rtol=1e-5 if dtype == torch.float32 else 1e-9,
        atol=0,
    )
    q["rho"][0, 0] = 0.0
    assert q["rho"].count_nonzero() >= 5, "every weight has a scale of its own"


def test_draws_are_linear_in_the_noise():
    """One draw is loc + scale * noise, so +1 and -1 lie one standard deviation to either side;
    without noise it is the mean.
    """
    q = belief(2, 5)
    scale = q["rho"].exp().log1p()
    q_of = MeanField().sample
    assert_close(q_of(q), q["loc"], rtol=0, atol=0)
    assert_close(q_of(q, torch.zeros(2, 5).double()), q["loc"])
    assert_close(q_of(q, torch.ones(2, 5).double()), q["loc"] + scale)
    assert_close(q_of(q, -2 * torch.ones(2, 5).double()), q["loc"] - 2 * scale)
    assert_close(MeanField().moments(q), (q["loc"], scale.square()))


def test_draws_are_reparameterised():
    """Derivatives of a draw by its belief: 1 by the mean, sigmoid(rho) * noise by rho."""
    q = {key: value.requires_grad_() for key, value in belief(5).items()}
    noise = torch.linspace(-2, 2, 5).double()
    by_loc, by_rho = torch.autograd.grad(MeanField().sample(q, noise).sum(), [q["loc"], q["rho"]])
    assert_close(by_loc, torch.ones(5).double())
    assert_close(by_rho, q["rho"].detach().sigmoid() * noise)


def test_entropy_is_torchs():
    """The sum over weights of 1/2 log(2 pi e sigma^2), for every leading axis."""
    q = belief(2, 3, 5)
    expected = distributions.Normal(q["loc"], F.softplus(q["rho"])).entropy().sum(-1)
    assert_close(MeanField().entropy(q), expected)


def test_entropy_of_a_collapsed_belief_is_finite():
    """Where float32's scale underflows, the entropy is still that of log sigma = rho, and so is its
    slope.
    """
    rho = torch.full((4,), -200.0, requires_grad=True)
    entropy = MeanField().entropy({"loc": torch.zeros(4), "rho": rho})
    assert_close(entropy.item(), 4 * (-200 + 0.5 * math.log(2 * math.pi * math.e)))
    assert_close(torch.autograd.grad(entropy, rho)[0], torch.ones(4))


def test_divergence_is_torchs():
    """Energy minus entropy is torch's closed form, for beliefs and priors of all scales."""
    q, p = belief(4, 5), {key: value.flip(0) + 0.3 for key, value in belief(4, 5).items()}
    scale = F.softplus(p["rho"])
    prior = Normal(centre=lambda given, view: p["loc"], variance=lambda given, view: scale.square())
    normal = distributions.Normal(q["loc"], F.softplus(q["rho"]))
    expected = distributions.kl_divergence(normal, distributions.Normal(p["loc"], scale)).sum(-1)
    assert_close(
        prior.energy(*MeanField().moments(q), {}, {}) - MeanField().entropy(q),
        expected,
        rtol=1e-9,
        atol=1e-9,
    )


def test_noise_size_and_protocol():
    """One standard normal for each weight."""
    assert MeanField().noise_size(17) == 17
    assert isinstance(MeanField(), Posterior)


@pytest.mark.parametrize("scale", [0.0, -0.1, math.inf, math.nan])
def test_refuses_scales_that_are_none(scale):
    """A standard deviation must be positive and finite."""
    with pytest.raises(ValueError, match=rf"^init_scale must be > 0 and finite, got {scale}"):
        MeanField(init_scale=scale)


# Its optimum on a Gaussian target: noise whose mean is 0 and whose covariance is I integrates a
# quadratic energy exactly

FEATURES, NOISE, PRIOR = 3, 0.8, 1.5  # standard deviations of the noise and of the prior
CENTRE = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64)


def regression() -> tuple[Tensor, Tensor]:
    """Correlated inputs [12, 3] and targets [12]."""
    rng = torch.Generator().manual_seed(0)
    mixing = torch.tensor([[1.0, 0.6, 0.0], [0.0, 0.8, 0.5], [0.0, 0.0, 0.9]]).double()
    x = torch.randn(12, FEATURES, generator=rng, dtype=torch.float64) @ mixing
    return x, x @ torch.tensor([1.0, -2.0, 0.5]).double() + NOISE * torch.randn(
        12, generator=rng, dtype=torch.float64
    )


def sigma_points() -> Tensor:
    """2 D draws at +- sqrt(D) along each axis [2 D, D]: mean 0, covariance I."""
    axes = math.sqrt(FEATURES) * torch.eye(FEATURES, dtype=torch.float64)
    return torch.cat([axes, -axes])


def target(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and precision L = X'X / s^2 + I / rho^2."""
    precision = x.T @ x / NOISE**2 + torch.eye(FEATURES).double() / PRIOR**2
    return torch.linalg.solve(precision, x.T @ y / NOISE**2 + CENTRE / PRIOR**2), precision


def linear(steps: int) -> bf.Algorithm:
    """One client's Bayesian linear regression, by gradient steps on its summed energy."""
    prior = Normal(
        centre=lambda given, view: CENTRE,
        variance=lambda given, view: torch.tensor([PRIOR**2]).double(),
    )
    return bf.Algorithm(
        nn.Linear(FEATURES, 1, bias=False),
        {"w": bf.Block(posterior=MeanField(init_scale=0.3), prior=prior, pool=None, keep=True)},
        (
            Descend(
                Energy("w", ("w",), likelihood="sum"),
                steps=steps,
                optimiser=SGD(0.012, 0.8),
                draws=2 * FEATURES,
            ),
        ),
        parts=("w",),
        likelihood=Gaussian(NOISE),
    )


@pytest.mark.parametrize("kernel", ["reference", "live", "layers", "vmap"])
def test_optimum_on_a_gaussian_target(kernel, monkeypatch):
    """The mean is the posterior's, the variance 1 / L_dd and not (L^-1)_dd, with every kernel."""
    x, y = regression()
    mean, precision = target(x, y)
    assert ((1 / precision.diagonal()) < 0.9 * precision.inverse().diagonal()).all()

    def exact(
        plan: PhasePlan, shapes: dict[str, tuple[int, int]], active: int
    ) -> dict[str, Tensor]:
        assert shapes == {"w": (2 * FEATURES, FEATURES)}
        return {"w": sigma_points().expand(active, -1, -1)}

    monkeypatch.setattr(PhasePlan, "noise", exact)
    algorithm = linear(300)
    (phase,) = algorithm.phases
    given, views, plan = chunk(algorithm, ClientData(x, y, torch.arange(12), np.array([12])))
    views, info = bf.Engine(kernel).run(algorithm, phase, given, views, plan)
    found, variance = MeanField().moments(views["w"])
    assert_close(found[0], mean, rtol=0, atol=1e-8)
    assert_close(variance[0], 1 / precision.diagonal(), rtol=1e-8, atol=0)
    assert info["nll"].shape == (1,)


def test_energy_at_the_optimum_is_evidence_and_divergence():
    """Energy = -log p(D) + KL(q || posterior), both in closed form: no constant is lost in
    likelihood, prior or entropy.
    """
    x, y = regression()
    mean, precision = target(x, y)
    algorithm = linear(1)
    q = {"loc": mean, "rho": torch.special.expm1(precision.diagonal().rsqrt()).log()}
    batch = {"x": x, "y": y, "weight": torch.ones(12).double()}
    energy = algorithm.phases[0].energy
    value, _ = energy(
        algorithm, {"w": q}, {}, {"n": torch.tensor(12.0).double()}, batch, {"w": sigma_points()}
    )
    covariance = NOISE**2 * torch.eye(12).double() + PRIOR**2 * x @ x.T
    evidence = distributions.MultivariateNormal(x @ CENTRE, covariance).log_prob(y)
    divergence = distributions.kl_divergence(
        distributions.MultivariateNormal(mean, torch.diag(1 / precision.diagonal())),
        distributions.MultivariateNormal(mean, precision_matrix=precision),
    )
    assert divergence > 0.1
    assert_close(value, divergence - evidence, rtol=1e-10, atol=0)


@pytest.mark.parametrize("rate", [0.0, 0.3, 2.0])
def test_the_rate_of_the_scales(rate: float):
    """Draws, moments and entropy are the same to the bit; gradients at rho are that much longer,
    others as ever.
    """
    noise, found = numbers(4, seed=3), []
    for posterior in (MeanField(), MeanField(scale_rate=rate)):
        q = {"loc": numbers(4, seed=1).requires_grad_(), "rho": numbers(4, seed=2).requires_grad_()}
        values = (posterior.sample(q, noise), *posterior.moments(q), posterior.entropy(q))
        slopes = torch.autograd.grad(sum(value.sum() for value in values), [q["loc"], q["rho"]])
        found.append((values, slopes))
    (plain, slope), (slowed, slow) = found
    assert all(torch.equal(one, other) for one, other in zip(plain, slowed, strict=True))
    assert_close(slow[0], slope[0])
    assert_close(slow[1], rate * slope[1])
    with pytest.raises(ValueError, match=r"scale_rate .*got -0\.1"):
        MeanField(scale_rate=-0.1)
