"""Biases of single clients, against a general optimiser."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.testing import assert_close

from bayesfl.evaluation.calibration import Bias, fit
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from tests.evaluation.calibration.made import CLASSES, alone, local, part


def test_it_is_each_clients_own_optimum():
    """Of its likelihood under the prior N(0, v I), fitted alone or beside others; a client without
    rows has none.
    """
    given, step = local(seed=4), Bias(variance=0.7)
    fitted = fit(step, given, CLASSES)
    for j, (z, y) in enumerate(alone(given)):

        def objective(b: np.ndarray, z: torch.Tensor = z, y: torch.Tensor = y) -> float:
            logs = (z + torch.from_numpy(b)).log_softmax(-1).gather(1, y[:, None])
            return float(-logs.sum()) + float((b**2).sum()) / (2 * 0.7)

        wanted = minimize(objective, np.zeros(4), method="BFGS", options={"gtol": 1e-9}).x
        assert_close(fitted.own["bias"][j].numpy(), wanted, atol=1e-6, rtol=1e-6)
        if len(y):
            assert_close(fit(step, part(given, j), CLASSES).own["bias"][0], fitted.own["bias"][j])
    changed = fitted.apply(given).predictions.probs
    z, _ = alone(given)[0]
    assert_close(changed[:30], (z + fitted.own["bias"][0]).softmax(-1))


def test_probabilities_of_nearly_zero_and_one():
    """Newton's steps, which would overshoot, are halved."""
    given = local((400,), heat=0.02)
    given.predictions.probs[:] = (given.predictions.probs.log() * 40).softmax(-1)
    found = fit(Bias(variance=1.0), given, CLASSES).own["bias"]
    z, y = alone(given)[0]
    z = z.clamp_min(np.log(np.finfo(np.float64).tiny))
    slope = (z + found[0]).softmax(-1).sum(0) - torch.bincount(y, minlength=4) + found[0]
    assert float(slope.abs().max()) < 1e-8


def test_steps_that_would_overshoot_are_halved():
    """Where labels are those of a class that has almost no probability, the curvature at 0 tells
    nothing of where the slope ends.
    """
    z = torch.tensor([-30.0, 0.0], dtype=torch.float64).expand(1, 1000, 2)
    mask, labels = torch.ones(1, 1000, dtype=torch.bool), torch.zeros(1, 1000, dtype=torch.int64)
    found = Predictions(mask, torch.zeros(1, 1000), probs=z.softmax(-1), labels=labels)
    given = LocalPredictions(*found.rows(), np.zeros(1))
    (b,) = fit(Bias(variance=1.0), given, Outputs("classification", 2)).own["bias"]
    slope = 1000 * ((z[0, 0] + b).softmax(-1) - torch.tensor([1.0, 0.0])) + b
    assert float(slope.abs().max()) < 1e-6


def drawn(variance: float, clients: int, rows: int) -> LocalPredictions:
    """Clients whose labels follow softmax(z + b_j), b_j ~ N(0, v I), probabilities softmax(z)."""
    g = torch.Generator().manual_seed(1)
    b = variance**0.5 * torch.randn(clients, 1, 3, generator=g, dtype=torch.float64)
    z = torch.randn(clients, rows, 3, generator=g, dtype=torch.float64)
    y = torch.multinomial((z + b).softmax(-1).flatten(0, 1), 1, generator=g).view(clients, rows)
    mask = torch.ones(clients, rows, dtype=torch.bool)
    found = Predictions(mask, torch.zeros(clients, rows), probs=z.softmax(-1), labels=y)
    return LocalPredictions(*found.rows(), np.arange(clients))


@pytest.mark.filterwarnings("ignore:Bias raises")
@pytest.mark.parametrize("variance", [0.0, 0.2, 1.0])
def test_the_priors_variance_is_that_of_the_clients(variance: float):
    """It is a fixed point of MacKay's formula, whose traces are those of plain Hessians, and near
    the truth where rows are many.
    """
    given = drawn(variance, 60, 80)
    found = float(fit(Bias(), given, Outputs("classification", 3)).state["variance"])
    assert variance * 0.7 <= found <= max(variance * 1.4, 0.005)
    own = fit(Bias(variance=found), given, Outputs("classification", 3)).own["bias"]
    squares, determined = 0.0, 0.0
    for (z, y), b in zip(alone(given), own, strict=True):

        def nll(b: torch.Tensor, z: torch.Tensor = z, y: torch.Tensor = y) -> torch.Tensor:
            return -(z + b).log_softmax(-1).gather(1, y[:, None]).sum()

        h = torch.autograd.functional.hessian(nll, b)
        squares += float(b @ b)
        determined += float((h @ torch.linalg.inv(h + torch.eye(3) / found)).trace())
    if variance:
        assert squares / determined == pytest.approx(found, rel=0.05)


def test_a_client_whose_rows_speak_against_a_bias_keeps_none():
    """Of the last client every second row has another label than the rest."""
    given = drawn(2.0, 6, 40)
    labels = given.predictions.labels
    assert labels is not None
    labels[-40::2], labels[-39::2] = 0, 1
    with pytest.warns(UserWarning, match="at 1 of 6 clients, which keep 0"):
        own = fit(Bias(), given, Outputs("classification", 3)).own["bias"]
    assert (own == 0).all(1).tolist() == [False] * 5 + [True]


def test_biases_near_0_are_no_reason_for_a_warning(recwarn: pytest.WarningsRecorder):
    """Of clients that are alike, rounding and chance give some larger losses on other rows."""
    own = fit(Bias(), drawn(0.0, 400, 18), Outputs("classification", 3)).own["bias"]
    assert float(own.abs().max()) < 0.01
    assert not recwarn.list


def test_a_regression_is_refused():
    with pytest.raises(ValueError, match="Bias works on probabilities of classes"):
        fit(Bias(), local(), Outputs("regression", 1))
