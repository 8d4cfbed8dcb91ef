"""What all likelihoods share: slopes that are derivatives, targets that broadcast over draws,
outputs that are only read.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.targets import Targets
from bayesfl.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    MultiLabel,
    Poisson,
    Quantiles,
    Tokens,
)
from tests.cases import numbers


def labels(classes: int, *shape: int, unknown: bool = False) -> Tensor:
    """Labels from 0 to classes - 1; a third of them -100 if some are `unknown`."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(classes, shape, generator=generator)
    return (
        torch.where(torch.rand(shape, generator=generator) < 1 / 3, -100, found)
        if unknown
        else found
    )


def counts(*shape: int) -> Tensor:
    return labels(5, *shape).double()


# The likelihood, outputs, targets, and the number of axes that one example's outputs have.
CASES: dict[str, tuple[Any, Tensor, Tensor, int]] = {
    "categorical": (Categorical(), numbers(3, 7, 5), labels(5, 3, 7), 1),
    "categorical of two": (Categorical(), numbers(7, 2), labels(2, 7), 1),
    "bernoulli": (Bernoulli(), numbers(3, 7, 1), labels(2, 3, 7), 1),
    "gaussian": (Gaussian(0.7), numbers(3, 7, 1), numbers(3, 7, seed=1), 1),
    "gaussian, a column of targets": (Gaussian(0.7), numbers(3, 7, 1), numbers(3, 7, 1, seed=1), 1),
    "gaussian, several outputs": (Gaussian(2.5), numbers(3, 7, 4), numbers(3, 7, 4, seed=1), 1),
    "gaussian, learned": (Gaussian("learned"), numbers(3, 7, 2), numbers(3, 7, seed=1), 1),
    "gaussian, learned, several": (
        Gaussian("learned", floor=0.3),
        numbers(3, 7, 6),
        numbers(3, 7, 3, seed=1),
        1,
    ),
    "poisson": (Poisson(), numbers(3, 7, 1), counts(3, 7), 1),
    "poisson, several": (Poisson(), numbers(3, 7, 2), counts(3, 7, 2), 1),
    "quantiles": (Quantiles(0.8), numbers(3, 40, 2), numbers(3, 40, seed=1), 1),
    "quantiles, several": (Quantiles(), numbers(3, 7, 6), numbers(3, 7, 3, seed=1), 1),
    "tokens": (Tokens(), numbers(3, 7, 4, 5), labels(5, 3, 7, 4), 2),
    "tokens, some unknown": (Tokens(), numbers(7, 4, 5), labels(5, 7, 4, unknown=True), 2),
    "several labels": (MultiLabel(), numbers(3, 7, 4), labels(2, 3, 7, 4), 1),
    "several labels, some unknown": (MultiLabel(), numbers(7, 4), labels(2, 7, 4, unknown=True), 1),
}
cases = pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "axes"), CASES.values(), ids=list(CASES)
)


@cases
def test_slope_is_autograds(likelihood, outputs, y, axes):
    """The derivative of the sum of nll, by hand, is autograd's."""
    live = outputs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(likelihood.nll(live, y).sum(), live)
    losses, slope = likelihood.nll_and_slope(outputs, y)
    assert losses.shape == outputs.shape[:-axes]
    assert_close(losses, likelihood.nll(outputs, y), atol=1e-12, rtol=0)
    assert_close(slope, expected, atol=1e-12, rtol=0)
    assert expected.abs().max() > 0.1


@cases
def test_targets_broadcast_over_draws(likelihood, outputs, y, axes):
    """One set of labels serves an axis of draws in front of the examples."""
    draws = -axes - 2
    several = outputs.unsqueeze(draws) + numbers(4, *(1,) * (axes + 1), seed=2)  # [..., S, B, O]
    shared = y.unsqueeze(several.dim() + draws)
    losses, slope = likelihood.nll_and_slope(several, shared)
    assert_close(likelihood.nll(several, shared), losses)
    assert losses.shape == several.shape[:-axes]
    assert slope.shape == several.shape
    for s in range(4):
        one, along = likelihood.nll_and_slope(several.select(draws, s), y)
        assert_close(losses.select(-2, s), one)
        assert_close(slope.select(draws, s), along)


@cases
def test_outputs_are_only_read(likelihood, outputs, y, axes):
    """The slope is computed in place, but not in the outputs' place; what comes back may be
    overwritten.
    """
    before, known = outputs.clone(), y.clone()
    losses, slope = likelihood.nll_and_slope(outputs, y)
    kept = losses.clone()
    slope.mul_(2.0)
    assert_close(outputs, before, rtol=0, atol=0)
    assert_close(y, known, rtol=0, atol=0)
    assert_close(losses, kept, rtol=0, atol=0)


@cases
def test_far_outputs_stay_finite(likelihood, outputs, y, axes):
    """Losses of outputs of a thousand are as large, and not infinite; a rate of exp(1000) is."""
    far = 1000 * outputs.sign() if not isinstance(likelihood, Poisson) else -1000 * outputs.abs()
    losses, slope = likelihood.nll_and_slope(far, y)
    assert losses.isfinite().all()
    assert slope.isfinite().all()


CLASSES = Targets("classification", 5, labels(5, 9))
TWO = Targets("classification", 2, labels(2, 9))
NUMBERS = numbers(9)
ONE, THREE = Targets("regression", 1, NUMBERS), Targets("regression", 3, numbers(9, 3))
TEXTS = Targets("classification", 5, labels(5, 9, 4))
SEVERAL = Targets("classification", 2, labels(2, 9, 4))
COUNTS = Targets("regression", 1, counts(9))


@pytest.mark.parametrize(
    ("likelihood", "found", "width"),
    [
        (Categorical(), CLASSES, (5,)),
        (Bernoulli(), TWO, (1,)),
        (Gaussian(), THREE, (3,)),
        (Gaussian("learned"), THREE, (6,)),
        (Poisson(), COUNTS, (1,)),
        (Quantiles(), ONE, (2,)),
        (Tokens(), TEXTS, (4, 5)),
        (MultiLabel(), SEVERAL, (4,)),
    ],
    ids=str,
)
def test_the_width_of_a_network(likelihood: Any, found: Targets, width: tuple[int, ...]):
    """By the targets' task, number and shape; and what comes out of the network makes a loss for
    each example.
    """
    assert likelihood.width(found) == width
    assert likelihood.nll(numbers(9, *width), found.y).shape == (9,)


@pytest.mark.parametrize(
    ("likelihood", "found", "words"),
    [
        (
            Categorical(),
            ONE,
            r"Categorical is for classification, the data are for regression.*Gaussian",
        ),
        (
            Gaussian(),
            CLASSES,
            r"Gaussian is for regression, the data are for classification.*Categorical",
        ),
        (Poisson(), CLASSES, r"Poisson is for regression"),
        (Quantiles(), CLASSES, r"Quantiles is for regression"),
        (Tokens(), ONE, r"Tokens is for classification"),
        (
            Categorical(),
            TEXTS,
            r"Categorical is for one label an example, the data have labels "
            r"\[4\].*Tokens\(\).*MultiLabel\(\)",
        ),
        (Bernoulli(), SEVERAL, r"Bernoulli is for one label"),
        (Tokens(), CLASSES, r"Tokens is for several labels .*Categorical\(\)"),
        (MultiLabel(), TWO, r"MultiLabel is for several labels"),
        (MultiLabel(), TEXTS, r"MultiLabel .* 0 or 1, the data have 5 classes.*Tokens\(\)"),
        (
            Bernoulli(),
            CLASSES,
            r"Bernoulli is for two classes, the data have 5; use Categorical\(\)",
        ),
        (
            Bernoulli(),
            Targets("classification", 1, labels(1, 9)),
            r"Bernoulli is for two classes, the data have 1; .*outputs=2",
        ),
        (
            Poisson(),
            ONE,
            r"Poisson is of counts, whole numbers >= 0, the targets hold -?\d\.\d+; "
            r".*standardising",
        ),
        (Poisson(), Targets("regression", 1, -counts(9)), r"targets hold -\d"),
    ],
    ids=str,
)
def test_targets_of_another_kind_are_refused(likelihood: Any, found: Targets, words: str):
    with pytest.raises(ValueError, match=words):
        likelihood.width(found)


@pytest.mark.parametrize(
    "likelihood",
    [Tokens(), MultiLabel(), Quantiles(), Gaussian("learned")],
    ids=str,
)
def test_what_has_no_curvature_here_is_refused_by_name(likelihood: Any):
    """Where a method is composed, where a Laplace approximation is fitted, and where a linearised
    network predicts.
    """
    model, covariance = bf.models.mlp(4, hidden=3, outputs=2), torch.eye(2).expand(3, 2, 2)
    for call in (
        lambda: bf.algorithms.fedsi(model, likelihood=likelihood),
        lambda: bf.curvature.Curvature(model, likelihood).diagonal(numbers(3, 4).float()),
        lambda: bf.posteriors.linearised.predictive(likelihood, numbers(3, 2), covariance.double()),
    ):
        with pytest.raises(TypeError, match=rf"curvature of {type(likelihood).__name__}"):
            call()
