"""Draws of whatever posterior: in ArviZ by the parameters' names, in files, and from Gaussians."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayesfl.base.layout import Layout
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.posteriors import Laplace, Samples
from tests.cases import numbers
from tests.posteriors.made import linear_model, network


def samples(pattern: str = "*") -> Samples:
    """Two chains of three draws."""
    model = network()
    layout = Layout(model, pattern)
    return Samples(numbers(2, 3, layout.size), layout, model, Categorical())


def test_predictions_average_over_draws():
    """One tensor, batches, several precisions."""
    made, x = samples("head.*"), numbers(5, 4)
    model = made.model
    features = model.body(x).detach()
    want = torch.stack(
        [
            nn.functional.linear(features, w[:18].view(3, 6), w[18:])
            for w in made.draws.flatten(0, 1)
        ]
    )
    assert_close(made.outputs(x), want)
    assert_close(made.outputs([x[:2], x[2:]]), want)
    assert_close(made.outputs(x.float()), want, rtol=1e-6, atol=1e-6)
    assert_close(made.predict(x)["probs"], want.softmax(-1).mean(0))


def test_arviz_has_parameters_by_name():
    """In their shapes; and of NUTS which transitions diverged."""
    pytest.importorskip("arviz")
    made = samples()
    posterior = made.to_arviz()["posterior"]
    assert set(posterior.data_vars) == set(made.layout.names)
    assert posterior["head.weight"].shape == (2, 3, 3, 6)
    np.testing.assert_array_equal(posterior["head.bias"], made.draws[..., -3:])


def test_draws_of_a_laplace_approximation():
    """They have its moments, its model and its likelihood, and equal seeds give equal bits."""
    model, x, y, precision = linear_model()
    fitted = Laplace.fit(model, x, y, precision=precision, likelihood=Gaussian(0.5))
    drawn = fitted.sample(4000, seed=1)
    assert_close(drawn.moments(), fitted.moments(), rtol=0.06, atol=0.01)
    assert fitted.sample(4000, seed=1).draws.equal(drawn.draws)
    assert not fitted.sample(4000).draws.equal(drawn.draws)
    near = fitted.predict(x)
    assert_close(drawn.predict(x)["variance"], near["variance"], rtol=0.1, atol=0)
    assert repr(drawn) == "Samples(1 chain of 4000 draws of 3 weights)"
    assert repr(fitted) == "Laplace(full, 3 of 3 weights, 20 examples, precision 0.7)"
    pytest.importorskip("arviz")
    assert fitted.to_arviz(draws=7)["posterior"]["weight"].shape == (1, 7, 1, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_saved_draws_are_the_same(tmp_path, dtype):
    """To the bit, in the precision that they were made in, for a module in either; refused for
    another network or other parameters.
    """
    made, x = samples("head.*"), numbers(5, 4)
    made.save(tmp_path / "draws")
    again = Samples.load(tmp_path / "draws", network().to(dtype).double(), pattern="head.*")
    assert again.draws.equal(made.draws)
    assert again.diverging is None
    if dtype == torch.float64:
        assert_close(again.predict(x), made.predict(x), rtol=0, atol=0)
    with pytest.raises(ValueError, match="other layers"):
        Samples.load(tmp_path / "draws", network(), pattern="body.*")
    with pytest.raises(ValueError, match=r"likelihood .*Categorical.*got Gaussian"):
        Samples.load(tmp_path / "draws", network(), likelihood=Gaussian(), pattern="head.*")


@pytest.mark.parametrize(
    ("chains", "apart", "said"),
    [
        (2, 0.0, "of 1200"),
        (2, 3.0, "of 1200: run longer, by warmup= and draws= or thin="),
        (1, 0.0, "of 600"),
    ],
)
def test_the_verdict_is_the_worst_weights(chains: int, apart: float, said: str):
    model = nn.Linear(1, 1)
    layout = Layout(model, "*")
    draws = torch.randn(chains, 600, layout.size, generator=torch.Generator().manual_seed(0))
    draws[0, :, 1] += apart  # of the second weight the chains do not agree
    samples = Samples(draws, layout, model, Categorical())
    found, verdict = samples.diagnostics(), samples.verdict()
    worst, least = found["r_hat"].max(), found["ess"].min()
    what = f"worst R-hat {worst:.2f}" if chains > 1 else "no R-hat of one chain"
    assert verdict == f"{what}, least ESS {least:.0f} {said}"
    assert chains == 1 or (float(worst) > 1.01) == bool(apart)
