"""What a forest plot contains, without looking at it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import bayesfl as bf

pytest.importorskip("matplotlib")


def fit(ratio: str | None, **sites: Any) -> Any:
    """What has estimates by site: (estimate, low, high, rows), or the reason why not."""
    rows = {
        name: dict.fromkeys(["estimate", "low", "high"], np.nan) | {"rows": 10.0, "why": row}
        if isinstance(row, str)
        else dict(zip(["estimate", "low", "high", "rows"], row, strict=True)) | {"why": ""}
        for name, row in sites.items()
    }
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return SimpleNamespace(ratio=ratio, by_site=lambda term, level=0.95: frame)


PLAIN: dict[str, Any] = {
    "a": (1.0, 0.5, 1.5, 100),
    "b": (0.2, -0.2, 0.6, 50),
    "c": "all of its 10 rows have an event",
    "all sites": (0.7, 0.4, 1.0, 160),
}


def test_estimates_intervals_and_reasons():
    ax = bf.plots.forest(fit(None, **PLAIN), "age", title="t").axes[0]
    points = [tuple(np.asarray(dot.get_offsets())[0]) for dot in ax.collections]
    assert points == [(1.0, 0), (0.2, 1)]
    sizes = [dot.get_sizes()[0] for dot in ax.collections]
    assert sizes[0] - 20 == pytest.approx(2 * (sizes[1] - 20))
    bars = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 1]
    assert [list(line.get_xdata()) for line in bars] == [[0.5, 1.5], [-0.2, 0.6]]
    (diamond,) = ax.patches
    corners = diamond.get_xy()
    assert (corners[:, 0].min(), corners[1, 0], corners[:, 0].max()) == (0.4, 0.7, 1.0)
    texts = [text.get_text() for text in ax.texts]
    assert texts == [
        "all of its 10 rows have an event",
        "1.00 [0.50, 1.50]",
        "0.20 [-0.20, 0.60]",
        "0.70 [0.40, 1.00]",
        "estimate [95 %]",
        "site (rows)",
    ]
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names == ["a (100)", "b (50)", "c (10)", "all sites (160)"]
    assert (ax.get_xlabel(), ax.get_title(), ax.get_xscale()) == ("age", "t", "linear")
    ax.figure.canvas.draw()


def test_ratios_are_drawn_on_a_logarithmic_axis():
    ax = bf.plots.forest(fit("odds ratio", **PLAIN), "sex").axes[0]
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "odds ratio of sex")
    assert np.asarray(ax.collections[0].get_offsets())[0, 0] == pytest.approx(np.e)
    assert ax.texts[1].get_text() == "2.72 [1.65, 4.48]"
    assert [text.get_text() for text in ax.texts[-2:]] == ["OR [95 %]", "site (rows)"]
    ax.figure.canvas.draw()


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.5, 1.0, 2.0])
def test_ratios_have_numbers_on_their_axis(scale: float):
    """Three or more, also where all ratios lie close to one."""
    near = {
        name: (*(scale * v for v in row[:3]), row[3]) for name, row in PLAIN.items() if name != "c"
    }
    ax = bf.plots.forest(fit("odds ratio", **near), "age").axes[0]
    ax.figure.canvas.draw()
    low, high = ax.get_xlim()
    written = [float(label.get_text()) for label in ax.get_xticklabels() if label.get_text()]
    assert len([value for value in written if low <= value <= high]) >= 3


def test_what_lies_far_away_is_an_arrow():
    """So that one site's interval does not hide all others."""
    wild = {"a": PLAIN["a"], "b": PLAIN["b"], "w": (109.0, -1e4, 1e4, 46), "x": (50.0, 49, 51, 9)}
    ax = bf.plots.forest(
        fit("odds ratio", **wild, **{"all sites": PLAIN["all sites"]}), "sex"
    ).axes[0]
    arrows = [(line.get_marker(), line.get_ydata()[0]) for line in ax.lines]
    assert [one for one in arrows if one[0] in "<>"] == [("<", 2), (">", 2), (">", 3)]
    assert len(ax.collections) == 2
    low, high = ax.get_xlim()
    assert np.log(high / low) < 20
    assert ax.texts[2].get_text() == "2e+47 [0e+00, inf]"
    ax.figure.canvas.draw()


def test_a_term_that_is_no_coefficient_is_refused():
    rows = pd.DataFrame({"dose": [0.0, 1, 2, 3] * 9, "ill": [0, 0, 1] * 12})
    sites = bf.stats.tables({"a": rows, "b": rows}, outcome="ill", terms=["dose"])
    made = bf.stats.glm(sites, family="binomial")
    with pytest.raises(KeyError, match="sex"):
        bf.plots.forest(made, term="sex")


def test_sites_stand_in_natural_order():
    rows = pd.DataFrame({"dose": [0.0, 1, 2, 3] * 9, "ill": [0, 0, 1] * 12})
    given = dict.fromkeys(["H10", "H2", "H1"], rows)
    sites = bf.stats.tables(given, outcome="ill", terms=["dose"])
    ax = bf.plots.forest(bf.stats.glm(sites, family="binomial"), "dose").axes[0]
    names = [text.get_text().split()[0] for text in ax.get_yticklabels()]
    assert names == ["H1", "H2", "H10", "all"]
