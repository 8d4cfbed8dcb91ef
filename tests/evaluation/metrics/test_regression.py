"""Measures of regressions against scipy and by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from bayesfl.evaluation import metrics
from bayesfl.evaluation.metrics.regression import Fitted, measured_numbers
from tests.evaluation.metrics.made import regression


def test_regression_agrees_with_scipy():
    """Density and interval of the normal distribution, client by client."""
    norm = pytest.importorskip("scipy.stats").norm
    mean, variance, targets, mask = regression()
    for j, rows in enumerate(mask):
        m, s, t = mean[j][rows].numpy(), variance[j][rows].sqrt().numpy(), targets[j][rows].numpy()
        assert metrics.rmse(mean, targets, mask)[j].item() == pytest.approx(
            np.sqrt(((t - m) ** 2).mean())
        )
        assert metrics.gaussian_nll(mean, variance, targets, mask)[j].item() == pytest.approx(
            -norm.logpdf(t, m, s).sum(-1).mean()
        )
        for level in (0.5, 0.9, 0.95):
            low, high = norm.interval(level, m, s)
            assert metrics.coverage(mean, variance, targets, mask, level)[
                j
            ].item() == pytest.approx(((low <= t) & (t <= high)).mean())


def summarised(*given: Any) -> dict[str, float]:
    """The measures of predictions, as those of a result are summarised."""
    return measured_numbers(Fitted.of(*given)).summary()


def test_regression_summary():
    """Means over clients and pooled ones; targets may leave out the one output."""
    mean, variance, targets, mask = regression(outputs=1)
    summary = summarised(mean, variance, targets[..., 0], mask)
    keys = ["rmse", "nll", "crps", "coverage_50", "coverage_90"]
    assert list(summary) == [*keys, *(f"pooled_{key}" for key in keys)]
    assert summary["rmse"] == pytest.approx(metrics.rmse(mean, targets, mask).mean().item())
    assert summary["pooled_rmse"] == pytest.approx(
        ((targets - mean)[mask] ** 2).mean().sqrt().item()
    )
    m, v, t, k = (value[mask][None] for value in (mean, variance, targets, mask))
    assert summary["pooled_coverage_90"] == pytest.approx(metrics.coverage(m, v, t, k).item())
    nobody = summarised(mean, variance, targets, torch.zeros_like(mask))
    assert all(math.isnan(value) for value in nobody.values())
    mean[0, 0] = math.inf
    assert math.isnan(summarised(mean, variance, targets, mask)["rmse"])
    assert metrics.rmse(mean, targets, mask).isnan().tolist() == [True, False, False, False]


def test_regression_errors():
    """Shapes, variances and targets are checked at the boundary."""
    mean, variance, targets, mask = regression()
    for measure, given, words in (
        (metrics.rmse, (mean, targets[..., 0], mask), r"mean, .*\[4, 50\]"),
        (metrics.rmse, (mean[0], targets, mask), r"mean, .*got \[\[50, 2\]"),
        (metrics.gaussian_nll, (mean, variance[..., :1], targets, mask), r"mean, .*\[4, 50, 1\]"),
        (metrics.rmse, (mean, targets, torch.ones_like(mask)), "targets must be finite"),
        (metrics.rmse, (mean, targets, mask[..., None]), "mask must be"),
        (metrics.coverage, (mean, variance, targets, mask, 90), r"level .*got 90"),
    ):
        with pytest.raises(ValueError, match=words):
            measure(*given)


def test_scores_and_tables_by_client():
    """The score is the mean over targets; the table has the measures of the summary, and the width
    of intervals.
    """
    stats = pytest.importorskip("scipy.stats")
    mean, variance, targets, mask = regression()
    table = measured_numbers(Fitted.of(mean, variance, targets, mask)).table()
    for j, rows in enumerate(mask):
        m, s, t = mean[j][rows].numpy(), variance[j][rows].sqrt().numpy(), targets[j][rows].numpy()
        z = (t - m) / s
        wanted = (
            s * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
        ).mean()
        assert (
            metrics.crps(mean, variance, targets, mask)[j].item()
            == pytest.approx(wanted)
            == table["crps"][j]
        )
        assert table["width_90"][j] == pytest.approx(2 * 1.6448536269514722 * s.mean())
        assert table["examples"][j] == rows.sum()
    summary = summarised(mean, variance, targets, mask)
    assert all(
        summary[name] == pytest.approx(np.nanmean(table[name]))
        for name in ("rmse", "nll", "crps", "coverage_90")
    )


def test_counts_far_from_their_rate_are_outside():
    """Where P(Y < y) and P(Y <= y) both round to 1, or to 0."""
    for rate, count in ((5000.0, 2000), (5.0, 200)):
        mean = torch.full((1, 2, 1), rate, dtype=torch.float64)
        y, mask = torch.full_like(mean, count), torch.ones(1, 2).bool()
        for level in (0.5, 0.999):
            assert metrics.coverage(mean, mean, y, mask, level, distribution="counts") == 0


def test_coverage_of_counts_is_nominal():
    """Though counts lie apart, at every level; that of a rate twice as high is not."""
    y = torch.poisson(
        torch.full((1, 20_000, 1), 2.5, dtype=torch.float64),
        generator=torch.Generator().manual_seed(0),
    )
    mask, mean = torch.ones(1, 20_000).bool(), torch.full_like(y, 2.5)
    for level in (0.1, 0.3, 0.5, 0.9):
        found = metrics.coverage(mean, mean, y, mask, level, distribution="counts")
        assert found.item() == pytest.approx(level, abs=0.01)
    high = metrics.coverage(2 * mean, 2 * mean, y, mask, 0.9, distribution="counts")
    assert high.item() < 0.7
    summary = summarised(mean, mean, y, mask, "counts")
    assert summary["nll"] == pytest.approx(
        float(-torch.distributions.Poisson(mean).log_prob(y).mean())
    )


def test_what_is_no_count_or_distribution():
    mean, variance, targets, mask = regression()
    with pytest.raises(ValueError, match="whole numbers >= 0"):
        metrics.crps(mean.abs() + 1, variance, targets, mask, distribution="counts")
