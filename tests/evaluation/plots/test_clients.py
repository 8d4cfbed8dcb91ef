"""What diagrams of clients contain, without looking at them."""

import numpy as np
import pytest

import bayesfl as bf
from bayesfl.evaluation import plots
from bayesfl.evaluation.history import History

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure


def test_labels_are_counted_by_client():
    """Shares of each client's rows, with the numbers where there is room; labels by place, those
    left out not counted.
    """
    y = np.array([0, 0, 0, 2, 1, 1])
    clients = bf.data.from_arrays(
        np.zeros((6, 2), "float32"),
        y,
        client_ids=["Bern"] * 4 + ["Chur"] * 2,
        class_names=["a", "b", "c"],
        test_share=0,
    )
    mine = Figure().add_subplot()
    ax = plots.labels(clients, ax=mine, title="t").axes[0]
    (image,) = ax.images
    np.testing.assert_allclose(image.get_array(), [[0.75, 0, 0.25], [0, 1, 0]])
    assert [text.get_text() for text in ax.texts] == ["3", "1", "2"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["Bern", "Chur"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b", "c"]
    assert (ax, ax.get_title()) == (mine, "t")
    by_place = bf.data.from_arrays(
        np.zeros((2, 3), "float32"),
        np.array([[0, 1, -100], [1, 1, 1]]),
        client_ids=["Bern", "Chur"],
        test_share=0,
    )
    np.testing.assert_allclose(
        plots.labels(by_place).axes[0].images[0].get_array(), [[0.5, 0.5], [0, 1]]
    )
    named = bf.data.from_arrays(
        np.zeros((6, 2), "float32"), y, client_ids=[0] * 6, class_names=["benign", "malignant", "c"]
    )
    for few in (named, clients):  # upright where they would overlap
        shown = plots.labels(few).axes[0].get_xticklabels()
        assert {text.get_rotation() for text in shown} == {90.0 if few is named else 0.0}
    many = plots.labels(bf.data.iid("digits", clients=40), split="test").axes[0]
    assert not many.texts
    many.figure.canvas.draw()
    with pytest.raises(IndexError):  # the task is a regression
        plots.labels(bf.data.diabetes(clients=3))


def test_client_curves_have_a_line_for_each_client_and_their_mean():
    """Over the rounds at which each has a value; the mean, the history's column, is the last and
    the boldest.
    """
    history = History()
    values = np.array([[0.5, 0.7, np.nan], [0.6, 0.8, 0.1], [0.7, np.nan, 0.3]])
    for round, own in zip((2, 4, 6), values, strict=True):
        history.append({"round": round - 1})
        history.append({"round": round, "personal_nll": float(np.nanmean(own))})
        history.record({"personal_nll": own})
    mine = Figure().add_subplot()
    ax = plots.client_curves(history, "personal_nll", ax=mine, title="t").axes[0]
    *clients, mean = ax.lines
    wanted = [([2, 4, 6], [0.5, 0.6, 0.7]), ([2, 4], [0.7, 0.8]), ([4, 6], [0.1, 0.3])]
    assert [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in clients] == wanted
    assert mean.get_xdata().tolist() == [2, 4, 6]
    np.testing.assert_allclose(mean.get_ydata(), [0.6, 0.5, 0.5])
    assert mean.get_linewidth() > 2 * max(line.get_linewidth() for line in clients)
    assert (ax, ax.get_title(), ax.get_ylabel()) == (mine, "t", "personal NLL")
    plots.client_curves(history, "personal_nll").canvas.draw()
    with pytest.raises(KeyError, match="record_clients"):
        plots.client_curves(history, "personal_accuracy")
