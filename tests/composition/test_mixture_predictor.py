"""Predictions by several copies of a block: against the formula, and against one model alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.predictors import LinearisedBelief, LinearisedLaplace, Mixture
from bayesfl.likelihoods import Gaussian
from tests.cases import EM, numbers, run


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return bf.models.mlp(4, hidden=5, outputs=3)


@pytest.mark.parametrize("pi", [[1.0], [1.0, 0.0], [0.0, 1.0]], ids=str)
def test_a_mixture_of_one_is_that_one(small: nn.Module, pi: list[float]):
    """To the bit: a single component, or the only one of weight; the other may be anything."""
    single = bf.algorithms.fedavg(small)
    theta = numbers(len(pi), single.layout("w").size, seed=7) * 0.7
    weights, only = torch.tensor(pi, dtype=torch.float64), pi.index(1.0)
    theta[weights == 0] = torch.nan
    n, x = torch.tensor(20.0, dtype=torch.float64), numbers(6, 4, seed=9)
    method = bf.algorithms.fedem(small, components=len(pi))
    view = {"components": {"loc": theta}, "pi": weights, "n": n}
    found = Mixture("components", "pi")(method, {}, view, {})(x)
    outputs = single.outputs(single.leaves(("w",), {"w": {"loc": theta[only]}}), x)
    alone = single.likelihood.predictive(outputs.unsqueeze(0))
    assert torch.equal(found["probs"], alone["probs"])
    assert found["epistemic"].isnan().all()


def test_regression_has_the_moments_of_the_mixture(tmp_path: Path):
    """Mean pi m; variance s^2 + pi m^2 - (pi m)^2, here and read from a client's file."""
    xs = [numbers(n, 3, seed=n).float() for n in (20, 12)]
    ys = [torch.stack([x[:, 0] * sign, x[:, 1]], -1) for x, sign in zip(xs, (1, -1), strict=True)]
    data = bf.data.from_arrays(xs, ys, test=(xs, ys), outputs=2, task="regression")
    method = bf.algorithms.fedem(
        bf.models.mlp(3, hidden=4, outputs=2),
        components=2,
        epochs=2,
        batch_size=10,
        optimiser=EM(0.01),
        likelihood=Gaussian(1.0),
    )
    result = run(method, data, 5)
    pi, theta = result.private["pi"][0], result.server["components"]["loc"]
    leaves = method.layout("components").leaves
    each = torch.stack([method.outputs(leaves(w), xs[0].double()) for w in theta], -1)
    mean = each @ pi
    expected = [mean, 1 + each.square() @ pi - mean.square()]
    result.client(0).save(tmp_path)
    alone = bf.load_client(tmp_path, method).predict(xs[0])
    for found in (result.predict().client(0), alone):
        assert_close([found.mean, found.variance], expected, atol=1e-9, rtol=0)
        assert not bool(found.epistemic.isfinite().any())
    assert float(pi.max()) < 0.99


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda model: replace(bf.algorithms.fedavg(model), predictor=Mixture("w", "pi")),
            r"block 'w' .*have copies",
        ),
        (
            lambda model: replace(bf.algorithms.fedem(model), predictor=LinearisedBelief()),
            r"LinearisedBelief .*3 copies; .*Mixture\('components', 'pi'\)",
        ),
        (
            lambda model: replace(
                bf.algorithms.fedem(model), predictor=LinearisedLaplace("components")
            ),
            r"'components' has 3 copies; .*Mixture\('components', 'pi'\)",
        ),
    ],
)
def test_what_does_not_fit_the_method(make: Any, words: str, small: nn.Module):
    """No copies, or several for a predictor of one network: at composition, not after hours of
    training.
    """
    with pytest.raises(ValueError, match=words):
        make(small)
