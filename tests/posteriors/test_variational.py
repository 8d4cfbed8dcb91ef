"""Variational Gaussians against the closed forms of a linear model, and torch's distributions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayesfl as bf
from bayesfl.base.archive import OtherFileError
from bayesfl.likelihoods import Gaussian, Poisson
from bayesfl.optim import SGD, Adam, cosine
from bayesfl.posteriors import FullGaussian, Laplace, MeanField
from bayesfl.posteriors.sampling.target import Target
from bayesfl.posteriors.variational import Family, Variational
from tests.cases import numbers
from tests.posteriors.made import linear_model, network

FAMILIES = [MeanField, FullGaussian]
FAST = Adam(cosine(0.05))


def hessian(x: Tensor, precision: float) -> Tensor:
    """The linear model's posterior precision."""
    return x.T @ x / 0.25 + precision * torch.eye(3, dtype=torch.float64)


def evidence(x: Tensor, y: Tensor, precision: float) -> Tensor:
    """The linear model's log marginal likelihood."""
    covariance = x @ x.T / precision + 0.25 * torch.eye(len(x), dtype=torch.float64)
    zero = torch.zeros(len(x), dtype=torch.float64)
    return distributions.MultivariateNormal(zero, covariance).log_prob(y)


def fitted(family: type[Family], steps: int = 400, **options) -> Variational:
    """A fit to the linear model, from zero."""
    model, x, y, precision = linear_model()
    nn.init.zeros_(model.weight)
    return family.fit(
        model,
        x,
        y,
        precision=precision,
        likelihood=Gaussian(0.5),
        steps=steps,
        **{"optimiser": FAST, **options},
    )


def belief(family: Family, size: int = 5) -> dict[str, Tensor]:
    """A belief of all scales and correlations, two clients of it."""
    start = family.init(numbers(2, size, seed=1))
    return {name: t + numbers(*t.shape, seed=i) for i, (name, t) in enumerate(start.items())}


def theirs(q: dict[str, Tensor]) -> distributions.MultivariateNormal:
    """The same Gaussian as torch has it."""
    scale = F.softplus(q["rho"])
    lower = q["lower"].tril(-1) / scale.shape[-1] ** 0.5 if "lower" in q else 0.0
    root = (torch.eye(scale.shape[-1], dtype=scale.dtype) + lower) * scale.unsqueeze(-2)
    return distributions.MultivariateNormal(q["loc"], scale_tril=root)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_torchs_gaussian(family):
    """Density, entropy, moments and draws, for every leading axis."""
    q = belief(family())
    other, w, noise = theirs(q), numbers(2, 5, seed=7), numbers(2, 5, seed=8)
    assert_close(family().log_density(q, w), other.log_prob(w))
    assert_close(family().entropy(q), other.entropy())
    assert_close(family().moments(q), (other.mean, other.variance))
    root = other.scale_tril
    assert_close(family().sample(q, noise), q["loc"] + (root @ noise[..., None])[..., 0])
    assert_close(family().sample(q), q["loc"])
    if family is FullGaussian:
        assert_close(FullGaussian().cholesky(q), root)


def test_a_full_gaussian_is_the_conjugate_posterior():
    """Mean and covariance of a linear model to rounding; the bound is the evidence, and every
    estimate of it exact.
    """
    _, x, y, precision = linear_model()
    found = fitted(FullGaussian, 600, optimiser=Adam(cosine(0.1)))
    covariance = hessian(x, precision).inverse()
    assert_close(found.moments()[0], covariance @ (x.T @ y / 0.25), rtol=0, atol=1e-6)
    root = FullGaussian().cholesky(found.belief)
    assert_close(root @ root.T, covariance, rtol=1e-4, atol=1e-6)
    assert_close(found.elbo(x, y, draws=2), evidence(x, y, precision), rtol=0, atol=1e-4)
    assert_close(found.history[-1], evidence(x, y, precision), rtol=0, atol=1e-4)


def test_a_mean_field_is_the_best_without_covariances():
    """Mean of the posterior, and widths where the others are known; the bound falls short of the
    evidence by the divergence.
    """
    _, x, y, precision = linear_model()
    found = fitted(MeanField, 600)
    matrix = hessian(x, precision)
    assert_close(found.moments()[0], torch.linalg.solve(matrix, x.T @ y / 0.25))
    assert_close(found.moments()[1], 1 / matrix.diagonal(), rtol=0.1, atol=0)
    mean, variance = found.moments()
    short = distributions.kl_divergence(
        distributions.MultivariateNormal(mean, variance.diag()),
        distributions.MultivariateNormal(mean, precision_matrix=matrix),
    )
    assert_close(found.elbo(x, y, draws=300), evidence(x, y, precision) - short, rtol=0, atol=0.05)


def correlated(r: float) -> tuple[nn.Module, Tensor, Tensor]:
    """Two slopes whose posterior correlation is -r under a nearly flat prior, at their MAP."""
    root = torch.linalg.cholesky(torch.tensor([[1, r], [r, 1]], dtype=torch.float64))
    x = torch.linalg.qr(numbers(200, 2)).Q * 200**0.5 @ root.T
    model, y = nn.Linear(2, 1, bias=False).double(), x @ torch.tensor([1.0, 2.0]).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y[:, None]).solution.T)
    return model, x, y


@pytest.mark.parametrize(("r", "width"), [(0.57, 0.82), (0.9, 0.44)])
def test_widths_without_covariances_on_correlated_slopes(r, width):
    """(1 - R^2)^(1/2) of the true ones, as the docstrings say, for either approximation."""
    model, x, y = correlated(r)
    options = {"precision": 1e-6, "likelihood": Gaussian(1.0)}
    full = Laplace.fit(model, x, y, **options).moments()[1]
    diagonal = Laplace.fit(model, x, y, structure="diagonal", **options).moments()[1]
    assert_close((diagonal / full).sqrt(), torch.full((2,), (1 - r**2) ** 0.5).double())
    assert ((diagonal / full).sqrt() - width).abs().max() < 0.005
    mean_field = MeanField.fit(model, x, y, steps=500, optimiser=FAST, **options).moments()[1]
    assert_close(mean_field, diagonal, rtol=0.15, atol=0)
    for owner in (MeanField, Laplace):
        assert ".82" in (owner.__doc__ or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_a_loader_and_equal_seeds(family):
    """Batches of tensors and of a loader come near the fit to all at once; equal seeds give equal
    bits, and neither the module nor torch's generator is changed.
    """
    model, x, y, precision = linear_model()
    before, state = model.weight.clone(), torch.get_rng_state()
    options = {"precision": precision, "likelihood": Gaussian(0.5), "optimiser": FAST}
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    split = [family.fit(model, x, y, batch_size=8, steps=200, **options) for _ in range(2)]
    assert all(split[0].belief[key].equal(split[1].belief[key]) for key in split[0].belief)
    assert torch.get_rng_state().equal(state)
    loaded = family.fit(model, loader, steps=200, **options)
    matrix = hessian(x, precision)
    own = 1 / matrix.diagonal() if family is MeanField else matrix.inverse().diagonal()
    for one in (split[0], loaded):
        mean, variance = one.moments()
        assert ((mean - before[0]).abs() < own.sqrt()).all()
        # A batch stands for all rows: 8 of 20 rows alone would be 2.5 times as wide.
        assert ((variance / own).log().abs() < 0.5).all()
        assert one.target.examples == 20
    assert model.weight.equal(before)


def test_a_part_of_a_network_and_classes():
    """The rest stays as it is; predictions average over draws."""
    model, x, y = network().float(), numbers(30, 4).float(), torch.arange(30) % 3
    found = MeanField.fit(model, x, y, precision=1.0, pattern="head.*", steps=20, seed=3)
    assert found.target.layout.names == ("head.weight", "head.bias")
    draws = found.sample(50, seed=1)
    assert draws.draws.shape == (1, 50, 21)
    assert draws.draws.dtype == torch.float32
    probs = torch.stack(
        [F.linear(model.body(x), w[:18].view(3, 6), w[18:]).softmax(-1) for w in draws.draws[0]]
    )
    assert_close(found.predict(x, draws=50, seed=1)["probs"], probs.mean(0).detach())
    assert repr(found) == "MeanField(21 weights, 30 examples)"


def test_counts_have_a_posterior():
    """Any likelihood is taken: rates of counts, near the truth."""
    x = numbers(300, 2)
    rng = torch.Generator().manual_seed(0)
    y = torch.poisson((x @ torch.tensor([0.5, -0.5]).double()).exp(), generator=rng)
    model = nn.Linear(2, 1, bias=False).double()
    found = FullGaussian.fit(
        model, x, y, precision=1.0, likelihood=Poisson(), steps=300, optimiser=FAST
    )
    mean, variance = found.moments()
    assert ((mean - torch.tensor([0.5, -0.5]).double()).abs() < 3 * variance.sqrt()).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_fit_is_the_same(family, tmp_path):
    """Draws to the bit; it is refused as another family, and for another network."""
    found, model = fitted(family, 3), nn.Linear(3, 1, bias=False).double()
    found.save(tmp_path / "one")
    again = family.load(tmp_path / "one", model)
    assert again.sample(4).draws.equal(found.sample(4).draws)
    _, x, y, _ = linear_model()
    assert_close(again.elbo(x, y), found.elbo(x, y), rtol=0, atol=0)
    assert_close(again.history, found.history)
    (other,) = set(FAMILIES) - {family}
    with pytest.raises(ValueError, match=rf"holds a {family.__name__}, not a {other.__name__}"):
        other.load(tmp_path / "one", model)
    with pytest.raises(ValueError, match="other layers"):
        family.load(tmp_path / "one", nn.Linear(3, 2, bias=False).double())
    with pytest.raises(OtherFileError, match="holds a variational, not a laplace"):
        Laplace.load(tmp_path / "one", model)


def test_what_cannot_be_fitted_is_refused():
    """Data that can be read once, another number of examples, batches of batches, divergence."""
    model, x, y, precision = linear_model()
    options = {"precision": precision, "likelihood": Gaussian(0.5)}
    with pytest.raises(ValueError, match="read only once"):
        MeanField.fit(model, iter([(x, y)]), **options)
    with pytest.raises(ValueError, match="to 20 examples, but these are 5"):
        fitted(MeanField, 2).elbo(x[:5], y[:5])
    with pytest.raises(ValueError, match="batch_size splits"):
        MeanField.fit(model, [(x, y)], batch_size=5, **options)
    with pytest.raises(ValueError, match="ELBO is not finite at step"):
        MeanField.fit(model, x, y, optimiser=SGD(1e9), **options)
    with pytest.raises(ValueError, match="targets must be one row for each"):
        MeanField.fit(model, x, y[:, None].expand(-1, 2), **options)


def test_a_full_gaussian_that_is_too_large_is_refused():
    """Before any memory is taken."""
    with pytest.raises(MemoryError, match=r"FullGaussian of 10000000 weights, .*MeanField"):
        FullGaussian().init(torch.zeros(10_000_000))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_a_belief_of_blocks(family):
    """As the protocol asks."""
    assert isinstance(family(), bf.base.protocols.Posterior)
    assert family().noise_size(7) == 7


def test_batches_of_unequal_size_weigh_every_row_alike():
    """Slopes of a pass have the mean of the slope of all rows, and the ELBO is that of all rows."""
    model, x, y, precision = linear_model()
    batches = [(x[:13], y[:13]), (x[13:], y[13:])]
    options = {"precision": precision, "centre": 0.0, "pattern": "*"}
    whole, parted = (
        Target.of(model, *data, Gaussian(0.5), **options) for data in ((x, y), (batches, None))
    )
    w = numbers(3, seed=0)
    mean = torch.stack([parted.slope(w, *batch) for batch in parted.once()]).mean(0)
    assert_close(mean, whole.slope(w, *next(whole.once())))
    found = fitted(FullGaussian)
    assert_close(found.elbo(batches), found.elbo(x, y))
