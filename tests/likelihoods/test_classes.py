"""Likelihoods against torch's, their slopes against autograd, and their predictive distributions against slow sums."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian
from tests.cases import numbers


def labels(classes: int, *shape: int) -> Tensor:
    """Labels from 0 to classes - 1."""
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


CASES = {
    "categorical": (Categorical(), numbers(3, 7, 5), labels(5, 3, 7)),
    "categorical of two": (Categorical(), numbers(7, 2), labels(2, 7)),
    "bernoulli": (Bernoulli(), numbers(3, 7, 1), labels(2, 3, 7)),
    "gaussian": (Gaussian(0.7), numbers(3, 7, 1), numbers(3, 7, seed=1)),
    "gaussian, a column of targets": (Gaussian(0.7), numbers(3, 7, 1), numbers(3, 7, 1, seed=1)),
    "gaussian, several outputs": (Gaussian(2.5), numbers(3, 7, 4), numbers(3, 7, 4, seed=1)),
}
cases = pytest.mark.parametrize(("likelihood", "outputs", "y"), CASES.values(), ids=list(CASES))


# Negative log likelihoods


def test_categorical_is_cross_entropy():
    """-log softmax(outputs)[y], one for each example."""
    outputs, y = numbers(3, 7, 5), labels(5, 3, 7)
    expected = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view(3, 7)
    assert_close(Categorical().nll(outputs, y), expected)
    assert_close(Categorical().nll(outputs, y), -distributions.Categorical(logits=outputs).log_prob(y))


def test_bernoulli_is_torchs():
    """-log p(y) with p(1) = sigmoid(outputs), at integer labels and at far logits."""
    outputs, y = numbers(3, 7, 1), labels(2, 3, 7)
    assert_close(Bernoulli().nll(outputs, y), -distributions.Bernoulli(logits=outputs.squeeze(-1)).log_prob(y.double()))
    far = torch.tensor([[1000.0], [-1000.0], [1000.0], [-1000.0]])
    assert_close(Bernoulli().nll(far, torch.tensor([1, 0, 0, 1])), torch.tensor([0.0, 0.0, 1000.0, 1000.0]))


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_gaussian_is_torchs_summed_over_outputs(scale):
    """-log N(y | outputs, scale^2), the constant kept."""
    outputs, y = numbers(3, 7, 4), numbers(3, 7, 4, seed=1)
    assert_close(Gaussian(scale).nll(outputs, y), -distributions.Normal(outputs, scale).log_prob(y).sum(-1))
    one, target = outputs[..., :1], y[..., 0]
    assert_close(Gaussian(scale).nll(one, target), -distributions.Normal(one.squeeze(-1), scale).log_prob(target))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, "1", (1.0, 2.0), None, torch.ones(2), np.ones(2)])
def test_gaussian_needs_a_positive_scale(scale: Any):
    """One number above 0 for all targets; a tensor or an array of one number is that number."""
    with pytest.raises(ValueError, match=r"^scale .*standard deviation.* got "):
        Gaussian(scale)
    for one in (torch.tensor(0.5), np.array(0.5), np.float32(0.5)):
        made: Any = one
        assert Gaussian(made) == Gaussian(0.5)
        assert type(Gaussian(made).scale) is float


def test_weights_as_tensors():
    """And as arrays; a single number weights no class."""
    for weights in (torch.tensor([1.0, 2.0, 3.0]), np.array([1, 2, 3]), [1, 2, 3]):
        given: Any = weights
        assert Categorical(weights=given) == Categorical(weights=(1.0, 2.0, 3.0))
    for wrong in (2.0, torch.tensor(2.0), "12", {0: 1.0}):
        given = wrong
        with pytest.raises(ValueError, match=r"^weights .*one number for each class.* got "):
            Categorical(weights=given)


def test_tasks():
    """Which measures apply."""
    assert [rule.task for rule in (Categorical(), Bernoulli(), Gaussian())] == ["classification", "classification", "regression"]


# Slopes


@cases
def test_slope_is_autograds(likelihood, outputs, y):
    """The derivative of the sum of nll, by hand, is autograd's."""
    live = outputs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(likelihood.nll(live, y).sum(), live)
    losses, slope = likelihood.nll_and_slope(outputs, y)
    assert_close(losses, likelihood.nll(outputs, y))
    assert_close(slope, expected)


@cases
def test_targets_broadcast_over_draws(likelihood, outputs, y):
    """One set of labels serves an axis of draws in front of the examples."""
    several = outputs.unsqueeze(-3) + numbers(4, 1, 1, seed=2)  # [..., S, B, O]
    shared = y.unsqueeze(outputs.dim() - 2)
    losses, slope = likelihood.nll_and_slope(several, shared)
    assert_close(likelihood.nll(several, shared), losses)
    assert losses.shape == several.shape[:-1]
    assert slope.shape == several.shape
    for s in range(4):
        one, along = likelihood.nll_and_slope(several.select(-3, s), y)
        assert_close(losses.select(-2, s), one)
        assert_close(slope.select(-3, s), along)


@cases
def test_outputs_are_only_read(likelihood, outputs, y):
    """The slope is computed in place, but not in the outputs' place; what comes back may be overwritten."""
    before = outputs.clone()
    losses, slope = likelihood.nll_and_slope(outputs, y)
    kept = losses.clone()
    slope.mul_(2.0)
    assert_close(outputs, before, rtol=0, atol=0)
    assert_close(losses, kept, rtol=0, atol=0)


# Predictive distributions


def entropy(p: list[float]) -> float:
    """Shannon entropy in nats."""
    return -sum(q * math.log(q) for q in p if q > 0)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=["categorical", "bernoulli"])
def test_class_predictive_against_a_slow_reference(likelihood):
    """Probabilities average over draws; the mutual information is the entropy of the mean minus the mean entropy."""
    outputs = 2 * numbers(2, 6, 4, 3 if isinstance(likelihood, Categorical) else 1)  # [C, S, N, O]
    seen = likelihood.predictive(outputs)
    assert seen["probs"].shape[:2] == seen["epistemic"].shape == (2, 4)
    for c in range(2):
        for n in range(4):
            if isinstance(likelihood, Categorical):
                draws = [[math.exp(v) / sum(map(math.exp, row)) for v in row] for row in outputs[c, :, n].tolist()]
            else:
                draws = [[1 / (1 + math.exp(v)), 1 / (1 + math.exp(-v))] for (v,) in outputs[c, :, n].tolist()]
            mean = [sum(column) / 6 for column in zip(*draws, strict=True)]
            information = entropy(mean) - sum(map(entropy, draws)) / 6
            assert_close(seen["probs"][c, n].tolist(), mean)
            assert information > 0.01
            assert_close(seen["epistemic"][c, n].item(), information)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=["categorical", "bernoulli"])
def test_equal_draws_know_all_there_is_to_know(likelihood):
    """Equal draws, or one, have no mutual information, and never a negative one; certain ones no NaN."""
    outputs = numbers(1, 50, 3 if isinstance(likelihood, Categorical) else 1).float()
    for draws in (1, 7):
        seen = likelihood.predictive(outputs.expand(draws, *outputs.shape[1:]))
        assert (seen["epistemic"] >= 0).all()
        assert_close(seen["epistemic"], torch.zeros(50), rtol=0, atol=1e-6)
    assert likelihood.predictive(1e4 * outputs)["epistemic"].isfinite().all()


def test_opposite_certain_draws_are_worth_a_bit():
    """Two draws that are sure of different labels: log 2, all of it epistemic."""
    seen = Bernoulli().predictive(torch.tensor([[[60.0]], [[-60.0]]]).double())
    assert_close(seen["epistemic"].item(), math.log(2))
    assert_close(seen["probs"], torch.tensor([[0.5, 0.5]]).double())


def test_gaussian_predictive_is_noise_and_spread():
    """The law of total variance: scale^2 plus the population variance of the means over draws; the latter is epistemic."""
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


WEIGHTED = [Categorical((1.0, 2.0, 0.5)), Categorical(smoothing=0.2), Categorical((0.0, 3.0, 1.0), smoothing=0.1)]


@pytest.mark.parametrize("likelihood", WEIGHTED, ids=str)
def test_weights_and_smoothing_are_torchs(likelihood: Categorical):
    """Value, and slope against autograd; also for labels that broadcast over draws."""
    outputs, y = numbers(4, 5, 3).requires_grad_(), torch.tensor([0, 1, 2, 2, 1])
    nll, slope = likelihood.nll_and_slope(outputs.detach(), y)
    weight = None if likelihood.weights is None else torch.tensor(likelihood.weights, dtype=torch.float64)
    expected = torch.stack(
        [F.cross_entropy(row, y, weight=weight, label_smoothing=likelihood.smoothing, reduction="none") for row in outputs]
    )
    assert_close(nll, expected.detach(), atol=1e-12, rtol=0)
    assert_close(likelihood.nll(outputs.detach(), y), nll, atol=1e-12, rtol=0)
    (gradient,) = torch.autograd.grad(expected.sum(), outputs)
    assert_close(slope, gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("likelihood", [Categorical(), *WEIGHTED], ids=str)
def test_targets_make_the_loss_and_its_curvature(likelihood: Categorical):
    """nll = -sum t log p, whose Hessian in the outputs is that of the plain loss times the sum of t."""
    outputs, y = numbers(4, 5, 3), torch.tensor([0, 1, 2, 2, 1])
    targets = likelihood.targets(outputs, y)
    assert_close(-(targets * outputs.log_softmax(-1)).sum(-1), likelihood.nll(outputs, y), atol=1e-12, rtol=0)
    for row, label, total in zip(outputs[0], y, targets[0].sum(-1), strict=True):
        found, plain = (
            torch.func.hessian(lambda f, this=this, label=label: this.nll(f[None], label[None])[0])(row)
            for this in (likelihood, Categorical())
        )
        assert_close(found, plain * total, atol=1e-12, rtol=0)


def test_weights_of_one_and_no_smoothing_change_nothing():
    outputs, y = numbers(4, 3), torch.tensor([0, 1, 2, 2])
    for one, other in zip(Categorical((1.0, 1.0, 1.0)).nll_and_slope(outputs, y), Categorical().nll_and_slope(outputs, y), strict=True):
        assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": (1.0, -1.0)}, r"weights .*got \(1\.0, -1\.0\)"),
        ({"weights": (0.0, 0.0)}, r"weights .*got \(0\.0, 0\.0\)"),
        ({"weights": ("a",)}, "weights .*got 'a'"),
        ({"smoothing": 1.0}, r"smoothing .*got 1\.0"),
    ],
)
def test_what_is_no_weight(options: Any, words: str):
    with pytest.raises(ValueError, match=words):
        Categorical(**options)


def test_losses_that_are_no_likelihood_have_no_curvature():
    """Refused where a Laplace approximation is composed, and where it is fitted; weights for another number of classes are refused, too."""
    with pytest.raises(ValueError, match=r"smoothing=0\.2.*Categorical\(\)"):
        bf.algorithms.fedsi(bf.models.mlp(4, hidden=3, outputs=3), likelihood=WEIGHTED[1])
    with pytest.raises(ValueError, match=r"smoothing=0\.2.*Categorical\(\)"):
        bf.curvature.Curvature(bf.models.mlp(4, hidden=3, outputs=3), WEIGHTED[1])
    with pytest.raises(ValueError, match=r"weights .*2 classes.* got 3"):
        WEIGHTED[0].nll(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
