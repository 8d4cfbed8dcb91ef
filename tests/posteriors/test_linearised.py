"""Predictive distributions of linearised models, and the labels and targets that they are held
against.
"""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian
from bayesfl.posteriors import Laplace
from bayesfl.posteriors.linearised import predictive
from bayesfl.posteriors.prior_precision import by_validation, predictive_nll
from tests.cases import numbers
from tests.posteriors.made import linear_model, network


def test_a_constant_added_to_all_logits_changes_nothing():
    """Under contrasts never; class by class with centring alone, since softmax(kappa f)
    reads it.
    """
    model, x = network(), numbers(12, 4)
    fitted = Laplace.fit(model, x, precision=0.3)
    shifted = bf.models.mlp(4, hidden=6, outputs=3, seed=1).double()
    with torch.no_grad():
        shifted.head.bias.add_(5.0)
    other = Laplace.fit(shifted, x, precision=0.3)
    assert_close(other.predict(x)["probs"], fitted.predict(x)["probs"])
    uncentred = predictive(other.curvature.likelihood, *other.linearised(x, centre=False))
    assert_close(uncentred["probs"], fitted.predict(x)["probs"])
    assert_close(other.predict(x, centre=False)["probs"], uncentred["probs"])
    assert_close(
        other.predict(x, link="per_class")["probs"], fitted.predict(x, link="per_class")["probs"]
    )
    apart = [one.predict(x, link="per_class", centre=False)["probs"] for one in (other, fitted)]
    assert (apart[0] - apart[1]).abs().max() > 1e-3


def test_probit_golden_values():
    """Kappa at mean 2 and variance 1, and three classes with and without centring, whose
    Monte-Carlo truth is (.748, .193, .058).
    """
    two, one = torch.tensor([[2.0]], dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)
    assert_close(float(predictive(Bernoulli(), two, one)["probs"][0, 1]), 0.8448456150189875)
    mean = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
    covariance = torch.diag(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))[None]
    probs = predictive(Categorical(), mean, covariance, link="per_class")["probs"][0]
    assert_close(probs, torch.tensor([0.795, 0.146, 0.059], dtype=torch.float64), atol=6e-4, rtol=0)
    project = torch.eye(3, dtype=torch.float64) - 1 / 3
    centred = predictive(
        Categorical(), mean @ project, project @ covariance @ project, link="per_class"
    )["probs"][0]
    assert_close(
        centred, torch.tensor([0.805, 0.140, 0.055], dtype=torch.float64), atol=6e-4, rtol=0
    )
    drawn = predictive(Categorical(), mean, covariance, numbers(200000, 1, 3))["probs"][0]
    assert_close(drawn, torch.tensor([0.748, 0.193, 0.058], dtype=torch.float64), atol=3e-3, rtol=0)


def gaussians(count: int, classes: int, scale: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return means [N, O] and full covariances [N, O, O] of random Gaussians over logits."""
    factor = numbers(count, classes, classes, seed=seed + 1) * scale / classes**0.5
    return 2 * numbers(count, classes, seed=seed), factor @ factor.mT


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
def test_contrasts_keep_the_most_probable_class(scale: float):
    """For any covariance, where the class-wise link takes another one in some cases; more variance,
    less confidence.
    """
    mean, covariance = gaussians(500, 5, scale)
    found = predictive(Categorical(), mean, covariance)
    assert torch.equal(found["probs"].argmax(-1), mean.argmax(-1))
    assert (found["probs"].amax(-1) <= mean.softmax(-1).amax(-1) + 1e-12).all()
    assert_close(found["probs"].sum(-1), torch.ones(500, dtype=torch.float64))
    if scale >= 1:
        other = predictive(Categorical(), mean, covariance, link="per_class")["probs"]
        assert not torch.equal(other.argmax(-1), mean.argmax(-1))


def test_what_would_be_less_than_nothing_is_nothing():
    """Shrinking one contrast alone may lower the entropy; a variance below 0, by rounding, counts
    as 0.
    """
    mean = torch.tensor([[-1.9, 0.63, 0.49]], dtype=torch.float64)
    covariance = torch.tensor(
        [[[27.0, 27.0, 0.0], [27.0, 27.0, 0.0], [0.0, 0.0, 48.0]]], dtype=torch.float64
    )
    found, plain = predictive(Categorical(), mean, covariance), mean.softmax(-1)
    assert torch.special.entr(found["probs"]).sum() < torch.special.entr(plain).sum() - 1e-4
    assert float(found["epistemic"]) == 0
    below = predictive(
        Categorical(), mean, -3 * torch.eye(3, dtype=torch.float64)[None], link="per_class"
    )["probs"]
    assert_close(below, plain)


def test_contrasts_of_two_classes_are_bernoullis_probit():
    """In difference 2 and variance 4 both have .777 for an exact .775; the class-wise link sees a
    quarter of the variance.
    """
    mean, covariance = gaussians(50, 2, 2.0)
    difference = mean[:, 1:] - mean[:, :1]
    variance = covariance[:, :1, :1] + covariance[:, 1:, 1:] - 2 * covariance[:, :1, 1:]
    one = predictive(Bernoulli(), difference, variance)
    other = predictive(Categorical(), mean, covariance)
    assert_close(one, other)
    mean = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    covariance = 2 * torch.eye(2, dtype=torch.float64)[None]
    exact = float((2 + 2 * numbers(2000000)).sigmoid().mean())
    assert_close(exact, 0.775, atol=1e-3, rtol=0)
    assert_close(
        float(predictive(Categorical(), mean, covariance)["probs"][0, 1]), 0.7768, atol=1e-4, rtol=0
    )
    project = torch.eye(2, dtype=torch.float64) - 0.5
    class_wise = predictive(
        Categorical(), mean @ project, project @ covariance @ project, link="per_class"
    )["probs"][0, 1]
    assert_close(float(class_wise), 0.845, atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "expected"),
    [(3, (0.008, 0.024, 0.029)), (5, (0.020, 0.044, 0.042)), (10, (0.044, 0.053, 0.055))],
)
def test_contrasts_lie_nearer_to_the_gaussian(classes: int, expected: tuple[float, float, float]):
    """Mean divergence in nats from the mean softmax of 20,000 draws each; with ten classes the two
    links are nearly alike.
    """
    mean, covariance = gaussians(200, classes, 2.0)
    noise = torch.randn(20000, 1, classes, generator=torch.Generator().manual_seed(0))
    cases = zip(mean.split(1), covariance.split(1), strict=True)
    truth = torch.cat(
        [predictive(Categorical(), one, spread, noise)["probs"] for one, spread in cases]
    )
    project = torch.eye(classes, dtype=torch.float64) - 1 / classes
    found = (
        predictive(Categorical(), mean, covariance),
        predictive(Categorical(), mean @ project, project @ covariance @ project, link="per_class"),
        predictive(Categorical(), mean, covariance, link="per_class"),
    )
    apart = [float((truth * (truth / one["probs"]).log()).sum(-1).mean()) for one in found]
    assert_close(apart, list(expected), atol=2e-3, rtol=0)
    assert apart[0] < min(apart[1:])


def test_contrasts_part_the_uncertainty():
    """The entropy of the probabilities is the entropy at the mean and what the weights add; nothing
    where nothing is uncertain.
    """
    mean, covariance = gaussians(200, 4, 2.0)
    found = predictive(Categorical(), mean, covariance)
    assert_close(found["aleatoric"], torch.special.entr(mean.softmax(-1)).sum(-1))
    more = torch.special.entr(found["probs"]).sum(-1) - found["aleatoric"]
    assert_close(found["epistemic"], more.clamp_min(0))
    assert (more > 0).float().mean() > 0.9
    still = predictive(Categorical(), mean, 0 * covariance)
    assert_close(still["probs"], mean.softmax(-1))
    assert_close(still["epistemic"], torch.zeros(200, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"link .*'contrasts'.*got 'probit'"):
        predictive(Categorical(), mean, covariance, link="probit")  # type: ignore[arg-type]


def test_draws_part_the_uncertainty():
    """Entropy of the mean = epistemic + aleatoric; without variance nothing is epistemic, and
    centred draws are the uncentred ones.
    """
    mean, factor = numbers(5, 3), numbers(5, 3, 3, seed=1)
    covariance = factor @ factor.mT
    found = predictive(Categorical(), mean, covariance, numbers(500, 5, 3, seed=2))
    assert_close(
        found["epistemic"] + found["aleatoric"], torch.special.entr(found["probs"]).sum(-1)
    )
    assert (found["epistemic"] > 0).all()
    still = predictive(Categorical(), mean, 0 * covariance, numbers(4, 5, 3, seed=2))
    assert_close(still["epistemic"], torch.zeros(5, dtype=torch.float64))
    assert_close(still["probs"], predictive(Categorical(), mean, 0 * covariance)["probs"])
    project = torch.eye(3, dtype=torch.float64) - 1 / 3
    many = numbers(40000, 5, 3, seed=3)
    singular = predictive(Categorical(), mean @ project, project @ covariance @ project, many)
    assert_close(
        singular["probs"],
        predictive(Categorical(), mean, covariance, many)["probs"],
        atol=0.02,
        rtol=0,
    )


def test_nll_of_a_regression():
    """Of the Gaussian predictive, noise included."""
    model, x, y, precision = linear_model()
    fitted = Laplace.fit(model, x, precision=precision, likelihood=Gaussian(scale=0.5))
    found = fitted.predict(x)
    expected = torch.distributions.Normal(
        found["mean"][:, 0], found["variance"][:, 0].sqrt()
    ).log_prob(y)
    assert_close(predictive_nll(fitted, x, y), float(-expected.mean()))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(29).long(), r"labels .*30 inputs, got shape \[29\]"),
        (torch.zeros(1).long(), r"labels .*30 inputs, got shape \[1\]"),
        (torch.zeros(30, 3).long(), r"labels .*30 inputs, got shape \[30, 3\]"),
        (torch.arange(30) % 4, r"labels .*0 to 2, got 3 \(7 of 30\)"),
        (torch.arange(30) % 3 - 1, r"labels .*0 to 2, got -1 \(10 of 30\)"),
        (torch.full((30,), 0.5), r"labels .*0 to 2, got 0.5"),
    ],
)
def test_labels_fit_the_inputs_and_the_classes(labels, message):
    """Wherever they come in."""
    model, x = network(), numbers(30, 4)
    fitted = Laplace.fit(model, x, precision=1.0)
    for call in (
        lambda: by_validation(fitted, x, x, labels),
        lambda: predictive_nll(fitted, x, labels),
        lambda: fitted.log_marginal_likelihood(x, labels),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_targets_fit_the_outputs():
    """One for each output of each input; for one output an axis may be left out."""
    model, x, y, precision = linear_model()
    fitted = Laplace.fit(model, x, precision=precision, likelihood=Gaussian(0.5))
    for score in (
        lambda y: predictive_nll(fitted, x, y),
        lambda y: float(fitted.log_marginal_likelihood(x, y)),
    ):
        assert score(y) == score(y[:, None])
        for other in (y[:-1], y[:1], y[None], y.view(10, 2)):
            with pytest.raises(ValueError, match=r"targets .*20 inputs, .*\[20, 1\], got"):
                score(other)
    wide = Laplace.fit(network(), numbers(6, 4), precision=1.0, likelihood=Gaussian())
    assert predictive_nll(wide, numbers(6, 4), numbers(6, 3)) > 0
    for other in (numbers(6), numbers(18), numbers(3, 6)):
        with pytest.raises(ValueError, match=r"of shape \[6, 3\], got"):
            predictive_nll(wide, numbers(6, 4), other)


def test_bernoulli_labels():
    """0 and 1, as whole numbers or not."""
    x, y = numbers(12, 4), torch.arange(12) % 2
    fitted = Laplace.fit(network(1), x, precision=1.0, likelihood=Bernoulli())
    for score in (partial(predictive_nll, fitted), fitted.log_marginal_likelihood):
        assert float(score(x, y)) == float(score(x, y.double()))
    with pytest.raises(ValueError, match=r"labels .*0 to 1, got 2"):
        fitted.log_marginal_likelihood(x, 2 * y)
