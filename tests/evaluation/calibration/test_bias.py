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
    """Of its likelihood under the prior N(0, I); a client without rows has none, and padding counts
    nothing.
    """
    given = local()
    fitted = fit(Bias(), given, CLASSES)
    for j, (z, y) in enumerate(alone(given)):

        def objective(b: np.ndarray, z: torch.Tensor = z, y: torch.Tensor = y) -> float:
            logs = (z + torch.from_numpy(b)).log_softmax(-1).gather(1, y[:, None])
            return float(-logs.sum()) + float((b**2).sum()) / 2

        wanted = minimize(objective, np.zeros(4), method="BFGS", options={"gtol": 1e-9}).x
        assert_close(fitted.own["bias"][j].numpy(), wanted, atol=1e-6, rtol=1e-6)
        if len(y):
            assert_close(fit(Bias(), part(given, j), CLASSES).own["bias"][0], fitted.own["bias"][j])
    assert fitted.state == {}
    changed = fitted.apply(given).predictions.probs
    z, _ = alone(given)[0]
    assert_close(changed[:30], (z + fitted.own["bias"][0]).softmax(-1))


def test_probabilities_of_nearly_zero_and_one():
    """Newton's steps, which would overshoot, are halved."""
    given = local((400,), heat=0.02)
    given.predictions.probs[:] = (given.predictions.probs.log() * 40).softmax(-1)
    found = fit(Bias(), given, CLASSES).own["bias"]
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
    (b,) = fit(Bias(), given, Outputs("classification", 2)).own["bias"]
    slope = 1000 * ((z[0, 0] + b).softmax(-1) - torch.tensor([1.0, 0.0])) + b
    assert float(slope.abs().max()) < 1e-6


def test_a_regression_is_refused():
    with pytest.raises(ValueError, match="Bias works on probabilities of classes"):
        fit(Bias(), local(), Outputs("regression", 1))
