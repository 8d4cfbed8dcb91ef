"""Calibration errors and their bins against hand-made numbers and against another package."""

import contextlib
import math
import warnings

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.data.recipes.torchvision import torchvision
from bayesfl.evaluation import metrics
from tests.evaluation.metrics.made import each, federation, one


def test_calibration_by_hand():
    """Two bins: [.3, .5] holds .4 (wrong); (.5, 1] holds .6 (right), .8 (right), .9 (wrong)."""
    case = one([[0.4, 0.3, 0.3], [0.6, 0.2, 0.2], [0.1, 0.8, 0.1], [0.05, 0.05, 0.9]], [1, 0, 1, 0])
    low, high = 0.4, abs(2 / 3 - 2.3 / 3)
    for found, wanted in (
        (metrics.ece(*case, bins=2), (low + 3 * high) / 4),
        (metrics.ece(*case, bins=2, norm="l2"), math.sqrt((low**2 + 3 * high**2) / 4)),
        (metrics.mce(*case, bins=2), low),
        (metrics.ece(*case, bins=1), abs(2 / 4 - 2.7 / 4)),
    ):
        assert_close(found.item(), wanted, atol=1e-6, rtol=0)


def test_bins_are_closed_on_the_right():
    """With four bins, confidence .5 belongs to (.25, .5], .75 to (.5, .75], and 1 to the last."""
    bins = metrics.reliability_bins(
        *one([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0], [0.76, 0.24]], [0, 0, 1, 0]), bins=4
    )
    assert bins.count.tolist() == [0, 1, 1, 2]
    np.testing.assert_allclose(bins.edges, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(bins.accuracy, [math.nan, 1, 1, 0.5])
    np.testing.assert_allclose(bins.confidence, [math.nan, 0.5, 0.75, 0.88], rtol=1e-6)
    assert metrics.reliability_bins(*one([[0.25] * 4], [0]), bins=4).count.tolist() == [1, 0, 0, 0]


@pytest.fixture(scope="module")
def calibration_error():
    """torchmetrics' function, which imports torchvision where that is installed."""
    with contextlib.suppress(ImportError):
        torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torchmetrics.functional.classification")
    return module.multiclass_calibration_error


@pytest.mark.parametrize("bins", [1, 5, 15])
@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_calibration_agrees_with_torchmetrics(calibration_error, norm, bins):
    """On confidences away from the edges of bins, where its bins are closed on the other side."""
    rng = torch.Generator().manual_seed(bins)
    confidence = (
        torch.randint(7, 15, (3, 200), generator=rng)
        + 0.1
        + 0.8 * torch.rand(3, 200, generator=rng)
    ) / 15
    probs = torch.stack([confidence, (1 - confidence) * 0.6, (1 - confidence) * 0.4], -1)
    turn = torch.randint(3, (3, 200), generator=rng)
    probs = probs.gather(-1, (torch.arange(3) + turn[..., None]) % 3)
    labels = torch.randint(3, (3, 200), generator=rng)
    mask = torch.rand(3, 200, generator=rng) < 0.8
    ours = metrics.ece(probs, labels, mask, bins=bins, norm=norm)
    theirs = [
        calibration_error(p, y, num_classes=3, n_bins=bins, norm=norm)
        for p, y in each(probs, labels, mask)
    ]
    assert_close(ours, torch.stack(theirs).double(), atol=2e-6, rtol=0)
    assert_close(
        metrics.mce(probs, labels, mask, bins=bins),
        metrics.ece(probs, labels, mask, bins=bins, norm="max"),
    )


def test_bins_add_up():
    """The diagram's own error is that of the pooled measure, and every example is in a bin."""
    case = federation()
    bins = metrics.reliability_bins(*case, bins=7)
    assert bins.examples == case[2].sum() == bins.count.sum()
    assert bins.ece == pytest.approx(float(metrics.ece(*metrics.pool(*case), bins=7)))


def test_option_errors():
    """Bins and norms are checked."""
    for options, words in ({"bins": 0}, r"^bins .*got 0"), ({"norm": "l3"}, r"^norm .*got 'l3'"):
        with pytest.raises(ValueError, match=words):
            metrics.ece(*federation(), **options)
