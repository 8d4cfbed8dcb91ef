"""What a reliability diagram contains, without looking at it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.base.files import atomic_path
from bayesfl.data import FederatedData
from bayesfl.evaluation import plots
from bayesfl.evaluation.metrics import ece, reliability_bins
from tests.cases import run
from tests.evaluation.plots.made import bars, beneath, federation

pytest.importorskip("matplotlib")


def test_diagram_shows_the_bins():
    """Bars are accuracies, gaps reach from accuracy to confidence, the histogram counts every
    example once.
    """
    case = federation()
    bins = reliability_bins(*case, bins=10)
    ax = plots.reliability(*case, bins=10, title="here").axes[0]
    np.testing.assert_allclose(
        [bar.get_height() for bar in bars(ax, "accuracy")], np.nan_to_num(bins.accuracy)
    )
    np.testing.assert_allclose([bar.get_x() for bar in bars(ax, "accuracy")], bins.edges[:-1])
    counts = [bar.get_height() for bar in bars(beneath(ax), "count")]
    assert counts == bins.count.tolist()
    assert sum(counts) == case[2].sum()
    over, under = bars(ax, "overconfident"), bars(ax, "underconfident")
    assert len(over) + len(under) == (bins.count > 0).sum()
    above, below = (bins.confidence >= bins.accuracy), (bins.confidence < bins.accuracy)
    np.testing.assert_allclose([bar.get_y() for bar in over], bins.accuracy[above])
    np.testing.assert_allclose(
        [bar.get_y() + bar.get_height() for bar in over], bins.confidence[above]
    )
    np.testing.assert_allclose([bar.get_y() for bar in under], bins.confidence[below])
    (diagonal,) = [line for line in ax.lines if line.get_gid() == "diagonal"]
    np.testing.assert_array_equal(diagonal.get_xydata(), [[0, 0], [1, 1]])
    (words,) = [text.get_text() for text in ax.texts]
    own = ece(*case, bins=10)
    assert words.split("\n") == [
        f"ECE, pooled {bins.ece:.3f}, n = {bins.examples}",
        f"ECE, clients' mean {own[~own.isnan()].mean():.3f}",
    ]
    assert ax.get_title() == "here"
    words = ["accuracy", "overconfident", "underconfident", "interval, level 0.95"]
    assert [text.get_text() for text in ax.figure.legends[0].get_texts()] == words
    ax.figure.canvas.draw()


def test_every_filled_bin_has_its_accuracys_wilson_interval():
    confidence = torch.tensor([0.55] * 19 + [0.75] * 20 + [0.95] * 400)
    right = torch.cat([torch.arange(19) < 3, torch.arange(20) < 15, torch.arange(400) < 396])
    probs, labels = torch.stack([confidence, 1 - confidence], -1), (~right).long()
    ax = plots.reliability(probs, labels, bins=10).axes[0]
    lines = [line for line in ax.lines if line.get_gid() == "interval"]
    z = 1.959963984540054
    for line, middle, k, n in zip(
        lines, (0.55, 0.75, 0.95), (3, 15, 396), (19, 20, 400), strict=True
    ):
        centre = (k + z**2 / 2) / (n + z**2)
        half = z / (n + z**2) * (k * (n - k) / n + z**2 / 4) ** 0.5
        np.testing.assert_allclose(
            line.get_xydata(), [[middle, centre - half], [middle, centre + half]]
        )


def test_numbers_stand_above_the_bars():
    """At one place in every panel, above its axes; over them the title."""
    case = federation()
    panels = plots.reliability(*case, by="client", clients=[0, 2, 3, 4]).axes[::2]
    panels[0].figure.canvas.draw()
    places = [panel.texts[0].get_window_extent() for panel in panels]
    tops = [panel.get_window_extent() for panel in panels]
    assert all(words.y0 > top.y1 for words, top in zip(places, tops, strict=True))
    assert len({round(w.y0 - t.y1, 3) for w, t in zip(places, tops, strict=True)}) == 1
    assert len({round(w.x0 - t.x0, 3) for w, t in zip(places, tops, strict=True)}) == 1
    titles = [panel.title.get_window_extent() for panel in panels]
    assert all(words.y1 < title.y0 for words, title in zip(places, titles, strict=True))


@pytest.mark.parametrize(
    ("most", "ticks"),
    [(1, [1, 10]), (25, [1, 10]), (999, [1, 10, 100]), (3000, [1, 10, 100, 1000])],
)
def test_counts_are_on_a_scale_that_shows_all(most: int, ticks: list[int]):
    """A logarithmic one, on which a single example is a bar as well; powers of ten are
    its ticks.
    """
    confidence = torch.tensor([0.55] + [0.95] * most)
    ax = beneath(
        plots.reliability(
            torch.stack([confidence, 1 - confidence], -1),
            torch.zeros(most + 1, dtype=torch.long),
            bins=10,
        ).axes[0]
    )
    assert ax.get_yscale() == "log"
    assert "log" in ax.get_ylabel()
    assert ax.get_yticks().tolist() == ticks
    assert ax.get_ylim()[0] < 1 <= most < ax.get_ylim()[1]


def test_clients_have_their_names(clients: FederatedData, model: nn.Module):
    """Of a result those of its data; a name that is a number says what it counts."""
    named = replace(clients, client_names=("Basel", "2", "Genève", *map(str, range(3, 7))))
    axes = plots.reliability(
        run(bf.algorithms.fedavg(model, epochs=1), named), by="client", clients=[0, "2", "Genève"]
    ).axes[::2]
    assert [ax.get_title() for ax in axes] == ["Basel", "client 2", "Genève"]


@pytest.mark.parametrize("by", ["pooled", "client"])
def test_clients_are_chosen_by_name_or_number(by: str):
    """As `Result.client` takes them; of probabilities by their numbers."""
    case: Any = federation()
    for chosen in ([2, 4], ["2", "4"], np.array([2, 4]), ["2", 4]):
        drawn = plots.reliability(*case, by=by, clients=chosen).axes[::2]
        counts = [sum(bar.get_height() for bar in bars(beneath(ax), "count")) for ax in drawn]
        assert sum(counts) == case[2][[2, 4]].sum()
    one = plots.reliability(*case, by=by, clients=["3"]).axes[::2]
    assert (
        sum(bar.get_height() for ax in one for bar in bars(beneath(ax), "count"))
        == case[2][3].sum()
    )
    for wrong, words in ("twon", "client 'twon'"), (14, "0 to 13, got 14"):
        with pytest.raises(ValueError, match=words):
            plots.reliability(*case, by=by, clients=[wrong])


def test_errors_name_the_client():
    """By its number among all, whichever are drawn; what the others predict does not matter."""
    probs, labels, mask = federation()
    probs[3, 0] = torch.nan
    for options in (
        {"by": "client"},
        {"by": "client", "clients": [2, 3]},
        {"clients": np.array([2, 3])},
    ):
        with pytest.raises(ValueError, match=r"clients? \[?3\b"):
            plots.reliability(probs, labels, mask, **options)
    plots.reliability(probs, labels, mask, by="client", clients=[2, 4])


@pytest.mark.parametrize("panels", [1, 2, 3, 5])
def test_the_legend_is_within_the_figure(panels: int):
    figure = plots.reliability_compare({str(k): federation() for k in range(panels)})
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_by_client():
    """One diagram a client: those asked for, or the first 12 that have examples."""
    case = federation()
    axes = plots.reliability(*case, by="client", title="all").axes[::2]
    assert [ax.get_title() for ax in axes] == [f"client {j}" for j in (0, *range(2, 13))]
    for j, ax in zip((0, *range(2, 13)), axes, strict=True):
        assert sum(bar.get_height() for bar in bars(beneath(ax), "count")) == case[2][j].sum()
    assert axes[0].figure.get_suptitle() == "all"
    few = plots.reliability(*case, by="client", clients=[5, 3, 1]).axes[::2]
    assert [ax.get_title() for ax in few] == ["client 5", "client 3", "client 1"]
    assert few[2].texts[0].get_text() == "no examples"
    few[0].figure.canvas.draw()


def test_compare(tmp_path: Path):
    """One diagram a method with its histogram, all histograms on one scale; the figure can be saved
    atomically.
    """
    probs, labels, mask = federation()
    figure = plots.reliability_compare(
        {
            "a": (probs, labels, mask),
            "b": (probs[:3], labels[:3], mask[:3]),
            "c": (probs, labels, mask),
        },
        columns=2,
    )
    panels = [ax for ax in figure.axes if ax.get_label() != "histogram"]
    assert [ax.get_title() for ax in panels] == ["a", "b", "c"]
    assert len({beneath(ax).get_ylim() for ax in panels}) == 1
    with atomic_path(tmp_path / "compare.png") as temporary:
        figure.savefig(temporary)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
