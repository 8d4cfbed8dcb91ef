"""Pooled examples, the worst-served tenth, and rows that do not fit."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.evaluation import metrics
from tests.evaluation.metrics.made import CLASSIFICATION, federation


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_pooled_is_one_client_with_everything(name):
    """A measure of what `pool` returns is that of the clients' examples, concatenated."""
    probs, labels, mask = federation()
    measure = CLASSIFICATION[name]
    together = (
        probs[mask][None],
        labels[mask][None],
        torch.ones(1, int(mask.sum()), dtype=torch.bool),
    )
    assert_close(measure(*metrics.pool(probs, labels, mask)), measure(*together))


def test_bottom_decile_counts_from_the_worst():
    """Position floor(J / 10) in ascending order, from 0."""
    assert metrics.bottom_decile(torch.arange(100.0).flip(0)) == 10
    assert metrics.bottom_decile(torch.arange(9.0)) == 0
    assert metrics.bottom_decile(np.array([3.0, math.nan, 1.0, 2.0] + [5.0] * 7)) == 2
    assert math.isnan(metrics.bottom_decile(torch.tensor([])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, y, m: (p[0], y, m), r"probs must be \[J, N, O\]"),
        (
            lambda p, y, m: (p * 0.99, y, m),
            r"probs .*sum is 1, .*sums from 0\.99 to 0\.99; .*keepdim=True",
        ),
        (lambda p, y, m: (p, y[:, 1:], m), "labels must be"),
        (lambda p, y, m: (p, y, m[1:]), "mask must be"),
        (lambda p, y, m: (p, y, m.float()), "mask must be bool"),
        (lambda p, y, m: (p, y.double(), m), r"labels .*integers.* in torch.float64"),
        (lambda p, y, m: (p, y + 1, m), r"labels .*\[0, 4\).*got \d to 4"),
        (lambda p, y, m: (p, y - 1, m), "got -1"),
        (lambda p, y, m: (p.log(), y, m), "softmax"),
    ],
)
def test_errors_name_the_remedy(change, message):
    """Every measure checks its input the same way."""
    for measure in [
        *CLASSIFICATION.values(),
        metrics.classification_summary,
        metrics.reliability_bins,
    ]:
        with pytest.raises(ValueError, match=message):
            measure(*change(*federation()))


def test_arrays_of_one_model_need_no_mask():
    """Every measure of them is that of one client, one number; clients need a mask."""
    probs = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    labels = torch.arange(30) % 3
    mask = torch.ones(1, 30, dtype=torch.bool)
    for measure in (
        metrics.accuracy,
        metrics.auroc,
        metrics.brier,
        metrics.ece,
        metrics.macro_f1,
        metrics.mce,
        metrics.nll,
    ):
        one = measure(probs, labels)
        assert one.shape == ()
        assert_close(one, measure(probs[None], labels[None], mask)[0])
        assert_close(measure(probs.numpy(), labels.numpy()), one)
    bins = metrics.reliability_bins(probs, labels, bins=7)
    assert bins.ece == pytest.approx(float(metrics.ece(probs, labels, bins=7)))
    mean, variance, y = probs[:, :1], 0.1 + probs[:, 1:2], probs[:, 2]
    many = (mean[None], variance[None], y[None], mask)
    for measure in (
        metrics.coverage,
        metrics.crps,
        metrics.gaussian_nll,
    ):
        assert_close(measure(mean, variance, y), measure(*many)[0])
        assert_close(measure(mean[:, 0], variance[:, 0], y), measure(*many)[0])
    assert_close(metrics.rmse(mean, y), metrics.rmse(mean[None], y[None], mask)[0])
    with pytest.raises(ValueError, match=r"probs must be \[J, N, O\]"):
        metrics.ece(probs[None], labels[None])
