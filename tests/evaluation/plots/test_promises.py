"""What diagrams of coverage contain, without looking at them."""

import dataclasses

import numpy as np
import pytest

from bayesfl.evaluation import plots
from bayesfl.evaluation.audit import Audit

pytest.importorskip("matplotlib")

from tests.evaluation.plots.made import bars

UNITS = ("Basel", "Bern", "Chur", "Genf")
FOUND = Audit(
    "client",
    UNITS,
    np.array([50, 0, 200, 40]),
    0.9,
    0.05,
    held=np.array([46, 0, 150, 40]),
    size=np.array([1.2, np.nan, 1.6, 0.9]),
    right=np.array([40, 0, 140, 39]),
)


def test_coverage_shows_units_and_their_intervals():
    """A point, a bar and a size for each unit with rows; who is below the level looks
    different.
    """
    figure = plots.coverage({"a": FOUND, "b": FOUND}, title="t")
    upper = [ax for ax in figure.axes if ax.get_label() == "coverage"]
    lower = [ax for ax in figure.axes if ax.get_label() == "size"]
    assert [ax.get_title() for ax in upper] == ["a", "b"]
    assert len({ax.get_ylim() for ax in upper}) == len({ax.get_ylim() for ax in lower}) == 1
    kept, below = (
        next(line for line in upper[0].lines if line.get_gid() == gid)
        for gid in ("a client", "a client below the level")
    )
    assert list(below.get_xdata()) == [2]
    assert dict(zip(kept.get_xdata(), kept.get_ydata(), strict=True)) == pytest.approx(
        {0: 0.92, 3: 1.0}
    )
    low, high = FOUND.intervals(FOUND.held)[[0, 2, 3]].T
    np.testing.assert_allclose([bar.get_y() for bar in bars(upper[0], "interval")], low)
    np.testing.assert_allclose(
        [bar.get_y() + bar.get_height() for bar in bars(upper[0], "interval")], high
    )
    np.testing.assert_allclose(
        [bar.get_height() for bar in bars(lower[0], "size")], [1.2, 1.6, 0.9]
    )
    lines = {str(line.get_label()): list(line.get_ydata()) for line in upper[0].lines}
    assert lines["nominal: 0.9"] == [0.9, 0.9]
    assert lines["worst by chance"] == pytest.approx([FOUND.worst_by_chance] * 2)
    assert [text.get_text() for text in lower[1].get_xticklabels()] == list(UNITS)
    assert figure.get_suptitle() == "t"
    figure.canvas.draw()
    (alone,) = [ax for ax in plots.coverage(FOUND).axes if ax.get_label() == "coverage"]
    assert f"worst by chance: {FOUND.worst_by_chance:.2f}" in alone.get_legend_handles_labels()[1]


@pytest.mark.parametrize("units", [2, 4])
def test_the_legend_lies_within_the_picture(units: int):
    """Few units make a narrow figure, whose legend takes more lines, the diamond of who is below
    the level included.
    """
    few = dataclasses.replace(
        FOUND,
        units=UNITS[-units:],
        **{n: getattr(FOUND, n)[-units:] for n in ("rows", "held", "size", "right")},
    )
    figure = plots.coverage(few)
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert 0 <= box.y0 < box.y1 <= figure.bbox.height
    assert "a client below the level" in [text.get_text() for text in legend.get_texts()]


def test_widths_without_end_are_hatched():
    """Of a client that gets everything there is no bar of infinite height, but one to the top that
    looks different.
    """
    numbers = dataclasses.replace(FOUND, right=None, size=np.array([2.0, np.nan, np.inf, 3.0]))
    figure = plots.coverage(numbers)
    (lower,) = [ax for ax in figure.axes if ax.get_label() == "size"]
    assert [bar.get_height() for bar in bars(lower, "size")] == [2.0, 0.0, 3.0]
    (endless,) = bars(lower, "endless")
    assert endless.get_x() + endless.get_width() / 2 == 2
    assert endless.get_height() == lower.get_ylim()[1]
    assert "width without end" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert plots.coverage(dataclasses.replace(numbers, size=np.full(4, np.inf))).axes
    assert lower.get_ylabel() == "width"
    figure.canvas.draw()
