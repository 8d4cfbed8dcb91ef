"""Summaries and tables: means over clients and pooled ones; who is left out and who is seen."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.evaluation import metrics
from bayesfl.evaluation.metrics.scores import Scored
from bayesfl.evaluation.metrics.summaries import measured_classes
from tests.evaluation.metrics.made import CLASSIFICATION, federation


def test_a_client_without_examples_is_nan_and_left_out():
    """Its own value is NaN; the summary is that of the others."""
    probs, labels, mask = federation()
    empty = mask.clone()
    empty[2] = False
    others = [0, 1, 3, 4]
    for name, measure in CLASSIFICATION.items():
        values = measure(probs, labels, empty)
        assert values.isnan().tolist() == [False, False, True, False, False], name
    kept = metrics.classification_summary(probs[others], labels[others], mask[others])
    assert metrics.classification_summary(probs, labels, empty) == pytest.approx(kept)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 3)])
def test_nobody_at_all(shape):
    """No client, no row, or no example: NaN throughout, and no error."""
    none = torch.rand(shape), torch.zeros(shape[:2]).long(), torch.zeros(shape[:2]).bool()
    assert all(math.isnan(value) for value in metrics.classification_summary(*none).values())
    assert metrics.reliability_bins(*none).examples == 0


def test_a_diverged_client_is_seen():
    """One prediction that is not finite: NaN for its client and for every mean, the other clients
    keep theirs.
    """
    probs, labels, mask = federation()
    broken = probs.clone()
    broken[1, 0, 2] = math.inf
    for name, measure in CLASSIFICATION.items():
        before, after = measure(probs, labels, mask), measure(broken, labels, mask)
        assert after.isnan().tolist() == [False, True, False, False, False], name
        assert_close(after[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
    assert all(
        math.isnan(value) for value in metrics.classification_summary(broken, labels, mask).values()
    )
    with pytest.raises(ValueError, match=r"clients \[1\].*diverged"):
        metrics.reliability_bins(broken, labels, mask)


def test_summary_is_made_of_the_measures():
    """Means over clients, the decile, and pooled measures."""
    case = federation(clients=12)
    summary = metrics.classification_summary(*case, bins=10)
    for name, measure in CLASSIFICATION.items():
        options = {"bins": 10} if name in ("ece", "mce") else {}
        assert summary[name] == pytest.approx(measure(*case, **options).mean().item())
        if name not in ("macro_f1", "auroc"):
            assert summary[f"pooled_{name}"] == pytest.approx(
                float(measure(*metrics.pool(*case), **options))
            )
    assert summary["accuracy_decile"] == metrics.accuracy(*case).sort().values[1]
    pooled = {"pooled_accuracy", "pooled_nll", "pooled_ece", "pooled_mce", "pooled_brier"}
    assert set(summary) == {*CLASSIFICATION, "accuracy_decile", *pooled}
    assert all(type(value) is float for value in summary.values())


def test_table_has_a_row_per_client():
    """Columns of equal length with the clients' own values."""
    case = federation()
    table = measured_classes(Scored.of(*case)).table()
    assert table["client"].tolist() == [0, 1, 2, 3, 4]
    assert table["examples"].tolist() == case[2].sum(-1).tolist()
    for name, measure in CLASSIFICATION.items():
        np.testing.assert_allclose(table[name], measure(*case).numpy())


def test_a_table_names_its_clients():
    """By the names given, in the order of the clients; one for each."""
    case = federation(clients=2)
    measured = measured_classes(Scored.of(*case))
    table = measured.table(("Basel", "Genève"))
    assert table["client"].tolist() == ["Basel", "Genève"]
    with pytest.raises(ValueError, match=r"names .*2 clients, got 1"):
        measured.table(("Basel",))
