"""Draws against the exact posterior of conjugate regression; what must stay as it was."""

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bayesfl.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    MultiLabel,
    Poisson,
    Quantiles,
)
from bayesfl.posteriors import nuts
from bayesfl.posteriors.sampling.nuts import Samples
from bayesfl.posteriors.sampling.target import Target
from tests.cases import draws_elsewhere

pytest.importorskip("pyro")

SCALE, D = 0.5, 4
PRECISION = torch.tensor([4.0, 1.0, 0.5, 2.0], dtype=torch.float64)
CENTRE = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)


class Squares:
    """A likelihood of somebody else's, for outputs [N]."""

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (outputs - y).square()


class Cliff(Gaussian):
    """A density with a cliff."""

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        return super().nll(outputs, y) + 1e6 * outputs.squeeze(-1).clamp_min(0.5).square()


def data() -> tuple[Tensor, Tensor]:
    """Twelve examples of three features, two of them correlated."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=rng, dtype=torch.float64)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    return x, x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.3 + SCALE * torch.randn(
        12, generator=rng, dtype=torch.float64
    )


def linear() -> nn.Linear:
    """Three inputs, one output, all weights 0, where chains start from: nothing here hangs on a
    shared generator.
    """
    model = nn.Linear(3, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def exact() -> tuple[Tensor, Tensor]:
    """Mean [D] and covariance [D, D] of the conjugate posterior, the bias last."""
    x, y = data()
    design = torch.cat([x, torch.ones(12, 1).double()], -1)
    covariance = (design.T @ design / SCALE**2 + PRECISION.diag()).inverse()
    return covariance @ (design.T @ y / SCALE**2 + PRECISION * CENTRE), covariance


@pytest.fixture(scope="module")
def regression() -> Samples:
    """Two chains of 350 draws for y = w x + b, float32 model, a prior of its own for every
    weight.
    """
    return nuts(
        linear(),
        *data(),
        likelihood=Gaussian(SCALE),
        precision=PRECISION,
        centre=CENTRE,
        draws=350,
        warmup=150,
        chains=2,
        full_mass=True,
    )


@pytest.mark.slow
def test_draws_are_the_conjugate_posterior(regression):
    """Mean and covariance within Monte Carlo error of the effective number of draws."""
    mean, covariance = exact()
    found = regression.diagnostics()
    ess = found["ess"]
    assert regression.draws.shape == (2, 350, D)
    assert ess.min() > 300
    error = covariance.diagonal().sqrt() / ess.sqrt()
    assert ((regression.moments()[0] - mean).abs() < 4 * error).all()
    scale = covariance.diagonal().sqrt()
    assert_close(
        regression.draws.flatten(0, 1).T.cov() / scale[:, None] / scale,
        covariance / scale[:, None] / scale,
        rtol=0,
        atol=4 * (2 / 300) ** 0.5,
    )
    assert_close(regression.moments()[1], regression.draws.flatten(0, 1).T.cov().diagonal())
    assert (found["r_hat"] - 1).abs().max() < 0.02
    assert not regression.diverging.any()


@pytest.mark.slow
def test_predictions_are_the_conjugate_ones(regression):
    """Mean and variance of the predictive, the noise counted once."""
    x = data()[0][:5]
    mean, covariance = exact()
    design = torch.cat([x, torch.ones(5, 1).double()], -1)
    variance = ((design @ covariance) * design).sum(-1)
    found = regression.predict(x.float())
    assert regression.outputs(x).shape == (700, 5, 1)
    assert_close(
        found["mean"][:, 0], design @ mean, rtol=0, atol=4 * float((variance / 300).sqrt().max())
    )
    assert_close(found["variance"][:, 0] - SCALE**2, variance, rtol=0.3, atol=0)
    assert_close(found["epistemic"], found["variance"][:, 0] - SCALE**2)


def test_the_target_is_the_negative_log_joint():
    """Up to a constant: its gradient is (w - mean) / covariance, everywhere."""
    mean, covariance = exact()
    prior: Any = {"precision": PRECISION, "centre": CENTRE, "pattern": "*"}
    target = Target.of(linear().double(), *data(), Gaussian(SCALE), **prior)
    w = torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ((x, y),) = target.once()
    slope = target.slope(w, x, y) * len(x)
    assert_close(slope, torch.linalg.solve(covariance, w - mean))


@pytest.mark.slow
def test_arviz_gets_every_parameter(regression):
    """One variable a parameter, in its shape, and which transitions diverged."""
    groups = regression.to_arviz()
    assert dict(groups["posterior"].sizes)["chain"] == 2
    assert groups["posterior"]["weight"].shape == (2, 350, 1, 3)
    np.testing.assert_array_equal(groups["posterior"]["bias"][..., 0], regression.draws[..., 3])
    assert groups["sample_stats"]["diverging"].shape == (2, 350)


def test_seeds_decide_and_nothing_else_changes():
    """Equal seeds give equal bits whatever the shared generators say, and these, like the module,
    stay as they were.
    """
    model = linear().train()
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    options = {"precision": 1.0, "draws": 8, "warmup": 8, "chains": 2}
    first = nuts(model, *data(), likelihood=Gaussian(SCALE), **options)
    assert torch.get_rng_state().equal(states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert random.getstate() == states[2]
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training
    assert all(
        p.grad is None and p.requires_grad and p.dtype == torch.float32 for p in model.parameters()
    )
    torch.manual_seed(99)
    with draws_elsewhere():
        again = nuts(model, *data(), likelihood=Gaussian(SCALE), **options)
    x, y = data()
    split = nuts(model, [(x[:5], y[:5]), (x[5:], y[5:])], likelihood=Gaussian(SCALE), **options)
    assert split.draws.equal(first.draws)
    other = nuts(model, *data(), likelihood=Gaussian(SCALE), **options, seed=1)
    assert again.draws.equal(first.draws)
    assert not other.draws.equal(first.draws)
    assert not first.draws[0].equal(first.draws[1])


def test_a_part_of_a_model_is_sampled():
    """The rest stays at the module's weights; batch norm uses its running statistics and dropout
    nothing.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Dropout(0.5), nn.Linear(2, 3)
    )
    x, _ = data()
    y = torch.arange(12) % 3
    found = nuts(
        model,
        x,
        y,
        likelihood=Categorical(),
        precision=1.0,
        pattern="4.*",
        draws=5,
        warmup=5,
        chains=1,
    )
    assert found.layout.names == ("4.weight", "4.bias")
    assert found.draws.shape == (1, 5, 9)
    assert model[1].num_batches_tracked == 0
    features = copy.deepcopy(model[:3]).double().eval()(x)
    w, b = found.draws[0, :, :6].view(5, 3, 2), found.draws[0, :, 6:]
    assert_close(found.outputs(x), torch.einsum("nd,sod->sno", features, w) + b[:, None])
    assert found.predict(x)["probs"].shape == (12, 3)


@pytest.mark.slow
def test_what_diverges_is_said(caplog):
    """A likelihood with a cliff and hardly any adaptation."""
    with caplog.at_level(logging.WARNING, "bayesfl"):
        found = nuts(
            linear(), *data(), likelihood=Cliff(), precision=1.0, draws=6, warmup=0, chains=1
        )
    assert found.diverging.any()
    assert f"{int(found.diverging.sum())} of 6 transitions diverged" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"centre": float("nan")}, r"density .*not finite"),
        ({"precision": torch.full((4,), torch.nan)}, r"density .*not finite"),
        ({"pattern": "head.*"}, "matches no parameter"),
        ({"draws": 0}, r"^draws .*1.* got 0"),
        ({"chains": 1.5}, r"chains .*got 1\.5"),
        ({"warmup": -1}, r"warmup .*0.* got -1"),
        ({"seed": -1}, r"seed .*0.* got -1"),
        ({"target_accept": 1.0}, "target_accept"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(ValueError, match=message):
        nuts(linear(), *data(), likelihood=Gaussian(SCALE), **{"precision": 1.0, **options})


def test_input_errors():
    """Data that do not fit or are not finite."""
    x, y = data()
    labels, flat = (y > 0).long(), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    three = nn.Linear(3, 3)
    for model, likelihood, inputs, bad, words in (
        (linear(), Gaussian(), x, y[1:], r"targets .*12 inputs.* got \[11\]"),
        (linear(), Bernoulli(), torch.nan * x, labels, r"NaN in x: leave these rows out"),
        (linear(), Gaussian(), x[:0], y[:0], "there are no data"),
        (linear(), Bernoulli(), x, 2 * labels, r"labels .*0 to 1, got 2"),
        (linear(), Bernoulli(), x, labels - 5, r"labels .*0 to 1, got -"),
        (three, Bernoulli(), x, labels, r"Bernoulli\(\) .*model has 3"),
        (linear(), Categorical(), x, labels, r"Categorical\(\) .*model has 1"),
        (three, Categorical(), x, labels + 2, r"labels .*0 to 2, got 3"),
        (
            three,
            Categorical(),
            x,
            labels[:, None].expand(-1, 3),
            r"labels .*12 inputs, got shape \[12, 3\]",
        ),
        (three, Gaussian(), x, y, r"targets .*12 inputs, .*got \[12\] and \[12, 3\]"),
        (flat, Bernoulli(), x, labels, r"outputs \[N, O\], got shape \[12\]"),
    ):
        with pytest.raises(ValueError, match=words):
            nuts(model, inputs, bad, likelihood=likelihood, precision=1.0)
    # Its own business.
    assert nuts(
        flat, x, y, likelihood=Squares(), precision=1.0, draws=2, warmup=2, chains=1
    ).draws.shape == (
        1,
        2,
        4,
    )
    with pytest.raises(TypeError, match=r"full_mass .*bool.* got str"):
        nuts(linear(), x, y, likelihood=Gaussian(), precision=1.0, full_mass="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(("draws", "chains"), [(1, 2), (3, 1), (4, 1)])
def test_few_draws_and_one_chain(draws, chains):
    """Sampled, and what they can't tell is NaN."""
    found = nuts(
        linear(),
        *data(),
        likelihood=Gaussian(SCALE),
        precision=1.0,
        draws=draws,
        warmup=5,
        chains=chains,
    )
    assert found.diverging.shape == (chains, draws)
    told = found.diagnostics()
    assert told["r_hat"].isnan().all()
    assert all(told[key].isnan().all() == (draws < 4) for key in ("ess", "ess_tail"))


def test_divergences_are_those_that_pyro_counts(monkeypatch):
    """At the same draws."""
    from pyro.infer import mcmc

    theirs, run = [], mcmc.MCMC.run
    monkeypatch.setattr(
        mcmc.MCMC,
        "run",
        lambda self: (run(self), theirs.append(self.diagnostics()["divergences"]["chain 0"]))[0],
    )
    found = nuts(linear(), *data(), likelihood=Cliff(), precision=1.0, draws=10, warmup=3, chains=2)
    assert theirs == [chain.nonzero().flatten().tolist() for chain in found.diverging]
    assert theirs[0]


@pytest.mark.parametrize("names", [False, True])
def test_two_inputs_are_one_that_is_joined(names: bool):
    """The same draws and predictions; whole numbers stay what they are."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = linear()

        def forward(self, a: Tensor, code: Tensor) -> Tensor:
            assert code.dtype == torch.int64
            return self.one(torch.cat([a, code], -1))

    x, y = data()
    x[:, 2] = x[:, 2].round()
    inputs = {"code": x[:, 2:].long(), "a": x[:, :2]} if names else (x[:, :2], x[:, 2:].long())
    options = {"precision": 1.0, "draws": 5, "warmup": 5, "chains": 1}
    want = nuts(linear(), x, y, likelihood=Gaussian(SCALE), **options)
    found = nuts(Two(), {"x": inputs}, y, likelihood=Gaussian(SCALE), **options)
    assert_close(found.draws, want.draws, rtol=1e-12, atol=1e-12)
    assert_close(
        found.predict({"x": inputs})["mean"], want.predict(x)["mean"], rtol=1e-12, atol=1e-12
    )


def test_targets_of_other_likelihoods_are_checked():
    """A learned scale has two outputs for a target; counts, labels and shapes are looked at; a loss
    is not a density.
    """
    x, two = torch.randn(12, 4), torch.nn.Linear(4, 2)
    options = {"precision": 1.0, "warmup": 5, "draws": 5, "chains": 1}
    y = torch.randn(12)
    assert isinstance(nuts(two, x, y, likelihood=Gaussian("learned"), **options), Samples)
    for likelihood, wrong, words in (
        (Gaussian("learned"), torch.randn(12, 2), r"outputs for them \['N', 4\]"),
        (Poisson(), torch.rand(12, 2) + 0.5, "Poisson is of counts"),
        (Poisson(), torch.ones(12), r"outputs for them \['N', 1\]"),
        (MultiLabel(), torch.full((12, 2), 7), r"labels must be whole .* 0 to 1, or -100"),
        (MultiLabel(), torch.full((12, 2), 0.5), r"labels must be whole .* 0 to 1, or -100"),
        (Quantiles(), y, "not a density"),
    ):
        with pytest.raises(ValueError, match=words):
            nuts(two, x, wrong, likelihood=likelihood, **options)
