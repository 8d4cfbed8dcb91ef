"""Measures of regressions against scipy and by hand."""

import math

import numpy as np
import pytest
import torch

from bayesfl.evaluation import metrics
from tests.evaluation.metrics.made import regression


def test_regression_agrees_with_scipy():
    """Density and interval of the normal distribution, client by client."""
    norm = pytest.importorskip("scipy.stats").norm
    mean, variance, targets, mask = regression()
    for j, rows in enumerate(mask):
        m, s, t = mean[j][rows].numpy(), variance[j][rows].sqrt().numpy(), targets[j][rows].numpy()
        assert metrics.rmse(mean, targets, mask)[j].item() == pytest.approx(np.sqrt(((t - m) ** 2).mean()))
        assert metrics.gaussian_nll(mean, variance, targets, mask)[j].item() == pytest.approx(-norm.logpdf(t, m, s).sum(-1).mean())
        for level in (0.5, 0.9, 0.95):
            low, high = norm.interval(level, m, s)
            assert metrics.coverage(mean, variance, targets, mask, level)[j].item() == pytest.approx(((low <= t) & (t <= high)).mean())


def test_regression_by_hand():
    """One client, errors 3 and 4 of standard deviation 1."""
    mean, targets, mask = torch.zeros(1, 2, 1), torch.tensor([[3.0, -4.0]]), torch.ones(1, 2).bool()
    assert metrics.rmse(mean, targets, mask).item() == pytest.approx(math.sqrt(12.5))
    assert metrics.gaussian_nll(mean, mean + 1, targets, mask).item() == pytest.approx(6.25 + 0.5 * math.log(2 * math.pi))
    assert metrics.coverage(mean, mean + 1, targets, mask, 0.999).item() == 0.5


def test_regression_summary():
    """Means over clients and pooled ones; targets may leave out the one output."""
    mean, variance, targets, mask = regression(outputs=1)
    summary = metrics.regression_summary(mean, variance, targets[..., 0], mask)
    keys = ["rmse", "nll", "coverage_50", "coverage_90"]
    assert list(summary) == [*keys, *(f"pooled_{key}" for key in keys)]
    assert summary["rmse"] == pytest.approx(metrics.rmse(mean, targets, mask).mean().item())
    assert summary["pooled_rmse"] == pytest.approx(((targets - mean)[mask] ** 2).mean().sqrt().item())
    m, v, t, k = (value[mask][None] for value in (mean, variance, targets, mask))
    assert summary["pooled_coverage_90"] == pytest.approx(metrics.coverage(m, v, t, k).item())
    nobody = metrics.regression_summary(mean, variance, targets, torch.zeros_like(mask))
    assert all(math.isnan(value) for value in nobody.values())
    mean[0, 0] = math.inf
    assert math.isnan(metrics.regression_summary(mean, variance, targets, mask)["rmse"])
    assert metrics.rmse(mean, targets, mask).isnan().tolist() == [True, False, False, False]


def test_regression_errors():
    """Shapes, variances and targets are checked at the boundary."""
    mean, variance, targets, mask = regression()
    with pytest.raises(ValueError, match=r"targets .*\[4, 50, 2\]; got \[4, 50\]"):
        metrics.rmse(mean, targets[..., 0], mask)
    with pytest.raises(ValueError, match=r"variance .*\[4, 50, 2\]; got \[4, 50, 1\]"):
        metrics.gaussian_nll(mean, variance[..., :1], targets, mask)
    with pytest.raises(ValueError, match="variance must be > 0"):
        metrics.gaussian_nll(mean, 0 * variance, targets, mask)
    with pytest.raises(ValueError, match="targets must be finite"):
        metrics.rmse(mean, targets, torch.ones_like(mask))
    with pytest.raises(ValueError, match="mask must be"):
        metrics.rmse(mean, targets, mask[..., None])
    with pytest.raises(ValueError, match="mean must be"):
        metrics.rmse(mean[0], targets, mask)
    with pytest.raises(ValueError, match="level"):
        metrics.coverage(*regression(), 90)
