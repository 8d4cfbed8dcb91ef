"""What curves contain, without looking at them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bayesfl.evaluation import detection, plots
from bayesfl.evaluation.history import History
from bayesfl.evaluation.report import mean_and_error
from tests.evaluation.plots.made import federation, history

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure


def test_learning_curves():
    """A line without the rounds that were not evaluated; several seeds give their mean and a band
    of one standard error.
    """
    seeds = [history(s) for s in range(3)]
    ax: Any = plots.learning_curves(
        {"one": seeds[0], "three": seeds, "result": SimpleNamespace(history=seeds[1])}
    ).axes[0]
    one, three, result = ax.lines
    assert one.get_xdata().tolist() == [5, 10, 15, 20]
    np.testing.assert_allclose(one.get_ydata(), seeds[0]["personal_accuracy"][4::5])
    np.testing.assert_allclose(result.get_ydata(), seeds[1]["personal_accuracy"][4::5])
    values = np.array([seed["personal_accuracy"][4::5] for seed in seeds])
    np.testing.assert_allclose(three.get_ydata(), values.mean(0))
    (band,) = ax.collections
    mean, error = mean_and_error(values[:, 0])
    edge = [y for x, y in band.get_paths()[0].vertices if x == 5]
    assert (min(edge), max(edge)) == (pytest.approx(mean - error), pytest.approx(mean + error))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "three", "result"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("round", "personal accuracy")
    short: Any = plots.learning_curves({"two rounds": history(0, rounds=2, every=1)}).axes[0]
    assert all(tick == int(tick) for tick in short.get_xticks())
    ax.figure.canvas.draw()


def test_learning_curves_options():
    """Another measure, another abscissa, own axes, and seeds that were evaluated at different
    rounds.
    """
    mine = Figure().add_subplot()
    ax: Any = plots.learning_curves(
        {"a": [history(0, every=5), history(1, every=10)]}, ax=mine, title="t"
    ).axes[0]
    assert ax.lines[0].get_xdata().tolist() == [10, 20]
    assert (ax, ax.get_title(), ax.get_legend()) == (mine, "t", None)
    loss: Any = plots.learning_curves({"a": history(0)}, metric="loss", x="round").axes[0]
    assert len(loss.lines[0].get_xdata()) == 20
    many = plots.learning_curves({str(k): history(k) for k in range(20)}).axes[0]
    assert len({(line.get_color(), line.get_linestyle()) for line in many.lines}) == 20


def test_the_default_measure_is_that_of_the_task():
    """Accuracy, of regressions the error; where the histories share neither, one lacks a column."""
    accuracy = {"round": 2, "train_nll": 1.0, "personal_accuracy": 0.5}
    rmse = {"round": 2, "train_nll": 1.0, "personal_rmse": 3.0}
    assert (
        plots.learning_curves({"a": History([accuracy])}).axes[0].get_ylabel()
        == "personal accuracy"
    )
    regression: Any = plots.learning_curves(
        {"a": History([{"round": 1}, rmse]), "b": [History([rmse])] * 2}
    ).axes[0]
    assert regression.get_ylabel() == "personal RMSE"
    assert regression.lines[0].get_ydata().tolist() == [3.0]
    for other in ([accuracy], [{"round": 1, "train_nll": 2.0}]):
        with pytest.raises(KeyError, match="no column 'personal_accuracy'"):
            plots.learning_curves({"a": History([rmse]), "b": History(other)})


def test_risk_coverage_shows_the_curve():
    """One line a method: of predictions by the largest probability, of a curve as it is; the legend
    has the areas.
    """
    probs, labels, mask = case = federation()
    right = probs.argmax(-1) == labels
    by_entropy = detection.risk_coverage(detection.entropy(probs), right, mask)
    mine = Figure().add_subplot()
    ax = plots.risk_coverage({"doubt": case, "entropy": by_entropy}, ax=mine, title="t").axes[0]
    by_doubt = detection.risk_coverage(detection.doubt(probs), right, mask)
    for line, curve in zip(ax.lines, (by_doubt, by_entropy), strict=True):
        np.testing.assert_allclose(line.get_xdata(), curve.coverage)
        np.testing.assert_allclose(line.get_ydata(), curve.risk)
    words = [text.get_text() for text in ax.get_legend().get_texts()]  # pyright: ignore
    assert words == [f"doubt (AURC {by_doubt.aurc:.4f})", f"entropy (AURC {by_entropy.aurc:.4f})"]
    assert (ax, ax.get_title()) == (mine, "t")
    ax.figure.canvas.draw()
    with pytest.raises(ValueError, match="labels must"):
        plots.risk_coverage({"a": (probs, labels + 1, mask)})


def test_errors_name_the_remedy():
    """At the boundary, before anything is drawn."""
    with pytest.raises(KeyError, match=r"'auroc'.*'personal_accuracy'"):
        plots.learning_curves(
            {"a": History([{"round": 1, "personal_accuracy": 0.5}])}, metric="auroc"
        )
