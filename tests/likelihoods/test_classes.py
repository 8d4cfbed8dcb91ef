"""Likelihoods of one label: against torch's, and their predictive distributions against
slow sums.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.likelihoods import Bernoulli, Categorical
from tests.cases import numbers


def labels(classes: int, *shape: int) -> Tensor:
    """Labels from 0 to classes - 1."""
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


# Negative log likelihoods


def test_categorical_is_cross_entropy():
    """-log softmax(outputs)[y], one for each example."""
    outputs, y = numbers(3, 7, 5), labels(5, 3, 7)
    expected = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view(3, 7)
    assert_close(Categorical().nll(outputs, y), expected)
    assert_close(
        Categorical().nll(outputs, y), -distributions.Categorical(logits=outputs).log_prob(y)
    )


def test_bernoulli_is_torchs():
    """-log p(y) with p(1) = sigmoid(outputs), at integer labels and at far logits."""
    outputs, y = numbers(3, 7, 1), labels(2, 3, 7)
    assert_close(
        Bernoulli().nll(outputs, y),
        -distributions.Bernoulli(logits=outputs.squeeze(-1)).log_prob(y.double()),
    )
    far = torch.tensor([[1000.0], [-1000.0], [1000.0], [-1000.0]])
    assert_close(
        Bernoulli().nll(far, torch.tensor([1, 0, 0, 1])), torch.tensor([0.0, 0.0, 1000.0, 1000.0])
    )


def test_weights_as_tensors():
    """And as arrays."""
    for weights in (torch.tensor([1.0, 2.0, 3.0]), np.array([1, 2, 3]), [1, 2, 3]):
        given: Any = weights
        assert Categorical(weights=given) == Categorical(weights=(1.0, 2.0, 3.0))


# Predictive distributions


def entropy(p: list[float]) -> float:
    """Shannon entropy in nats."""
    return -sum(q * math.log(q) for q in p if q > 0)


@pytest.mark.parametrize(
    "likelihood", [Categorical(), Bernoulli()], ids=["categorical", "bernoulli"]
)
def test_class_predictive_against_a_slow_reference(likelihood):
    """Probabilities average over draws; the mutual information is the entropy of the mean minus the
    mean entropy.
    """
    outputs = 2 * numbers(2, 6, 4, 3 if isinstance(likelihood, Categorical) else 1)  # [C, S, N, O]
    seen = likelihood.predictive(outputs)
    assert seen["probs"].shape[:2] == seen["epistemic"].shape == (2, 4)
    for c in range(2):
        for n in range(4):
            if isinstance(likelihood, Categorical):
                draws = [
                    [math.exp(v) / sum(map(math.exp, row)) for v in row]
                    for row in outputs[c, :, n].tolist()
                ]
            else:
                draws = [
                    [1 / (1 + math.exp(v)), 1 / (1 + math.exp(-v))]
                    for (v,) in outputs[c, :, n].tolist()
                ]
            mean = [sum(column) / 6 for column in zip(*draws, strict=True)]
            information = entropy(mean) - sum(map(entropy, draws)) / 6
            assert_close(seen["probs"][c, n].tolist(), mean)
            assert information > 0.01
            assert_close(seen["epistemic"][c, n].item(), information)


@pytest.mark.parametrize(
    "likelihood", [Categorical(), Bernoulli()], ids=["categorical", "bernoulli"]
)
def test_equal_draws_know_all_there_is_to_know(likelihood):
    """Equal draws, or one, have no mutual information, and never a negative one; certain ones no
    NaN.
    """
    outputs = numbers(1, 50, 3 if isinstance(likelihood, Categorical) else 1).float()
    for draws in (1, 7):
        seen = likelihood.predictive(outputs.expand(draws, *outputs.shape[1:]))
        assert (seen["epistemic"] >= 0).all()
        assert_close(seen["epistemic"], torch.zeros(50), rtol=0, atol=1e-6)
    assert likelihood.predictive(1e4 * outputs)["epistemic"].isfinite().all()


WEIGHTED = [
    Categorical((1.0, 2.0, 0.5)),
    Categorical((0.0, 3.0, 1.0)),
]


@pytest.mark.parametrize("likelihood", WEIGHTED, ids=str)
def test_weights_are_torchs(likelihood: Categorical):
    """Value, and slope against autograd; also for labels that broadcast over draws."""
    outputs, y = numbers(4, 5, 3).requires_grad_(), torch.tensor([0, 1, 2, 2, 1])
    nll, slope = likelihood.nll_and_slope(outputs.detach(), y)
    weight = torch.tensor(likelihood.weights, dtype=torch.float64)
    expected = torch.stack(
        [F.cross_entropy(row, y, weight=weight, reduction="none") for row in outputs]
    )
    assert_close(nll, expected.detach(), atol=1e-12, rtol=0)
    assert_close(likelihood.nll(outputs.detach(), y), nll, atol=1e-12, rtol=0)
    (gradient,) = torch.autograd.grad(expected.sum(), outputs)
    assert_close(slope, gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("likelihood", [Categorical(), *WEIGHTED], ids=str)
def test_weights_multiply_the_curvature(likelihood: Categorical):
    """The Hessian in the outputs is that of the plain loss, as often as `times` returns."""
    outputs, y = numbers(4, 5, 3), torch.tensor([0, 1, 2, 2, 1])
    for row, label, total in zip(outputs[0], y, likelihood.times(outputs[0], y), strict=True):
        found, plain = (
            torch.func.hessian(lambda f, this=this, label=label: this.nll(f[None], label[None])[0])(
                row
            )
            for this in (likelihood, Categorical())
        )
        assert_close(found, plain * total, atol=1e-12, rtol=0)


def test_weights_of_two_classes_are_torchs():
    """Value, slope and curvature, also for labels that broadcast over draws; refused where there is
    a curvature to be had of a distribution only.
    """
    likelihood, weights = Bernoulli((0.5, 3.0)), torch.tensor([0.5, 3.0], dtype=torch.float64)
    outputs, y = numbers(4, 5, 1).requires_grad_(), torch.tensor([0, 1, 1, 0, 1])
    nll, slope = likelihood.nll_and_slope(outputs.detach(), y)
    expected = F.binary_cross_entropy_with_logits(
        outputs[..., 0], y.double().expand(4, 5), weight=weights[y], reduction="none"
    )
    assert_close(nll, expected.detach(), atol=1e-12, rtol=0)
    (gradient,) = torch.autograd.grad(expected.sum(), outputs)
    assert_close(slope, gradient, atol=1e-12, rtol=0)
    for row, label, times in zip(
        outputs.detach()[0], y, likelihood.times(outputs[0], y), strict=True
    ):
        found, plain = (
            torch.func.hessian(lambda f, this=this, label=label: this.nll(f[None], label[None])[0])(
                row
            )
            for this in (likelihood, Bernoulli())
        )
        assert_close(found, plain * times, atol=1e-12, rtol=0)
    for make in (bf.algorithms.fedsi, bf.curvature.Curvature):
        with pytest.raises(ValueError, match=r"weights=\(0\.5, 3\.0\).*Bernoulli\(\)"):
            make(bf.models.mlp(4, hidden=3, outputs=1), likelihood=likelihood)


def test_balanced_weights_are_sklearns():
    """By training labels of all clients; a class without one has weight 1."""
    from sklearn.utils.class_weight import compute_class_weight

    data = bf.data.dirichlet("digits", clients=5, alpha=0.3, seed=0)
    y = data.train.y[data.train.index].numpy()
    expected = compute_class_weight("balanced", classes=np.arange(10), y=y)
    assert data.balanced_weights == pytest.approx(expected)
    assert Categorical(data.balanced_weights).weights == data.balanced_weights
    x, labels = np.zeros((6, 2), np.float32), np.array([0, 0, 2, 0, 0, 2])
    some = bf.data.from_arrays([x], [labels], outputs=4, test_share=0.5)
    assert some.balanced_weights[1::2] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": (1.0, -1.0)}, r"weights .*got \(1\.0, -1\.0\)"),
        ({"weights": (0.0, 0.0)}, r"weights .*got \(0\.0, 0\.0\)"),
        ({"weights": ("a",)}, "weights .*got 'a'"),
        ({"weights": {0: 2.0, 1: 1.0}}, "weights .*got {0: 2"),
    ],
)
def test_what_is_no_weight(options: Any, words: str):
    with pytest.raises(ValueError, match=words):
        Categorical(**options)


def test_losses_that_are_no_likelihood_have_no_curvature():
    """Refused where a Laplace approximation is composed, and where it is fitted; weights for
    another number of classes are refused, too.
    """
    for make in (bf.algorithms.fedsi, bf.curvature.Curvature):
        with pytest.raises(ValueError, match=r"weights=.*Categorical\(\)"):
            make(bf.models.mlp(4, hidden=3, outputs=3), likelihood=WEIGHTED[1])
    with pytest.raises(ValueError, match=r"weights .*2 classes.* got 3"):
        WEIGHTED[0].nll(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
