"""What all diagrams have in common."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from bayesfl.evaluation.plots.look import OKABE_ITO, clean, key, lines, new_figure


@pytest.mark.slow
def test_matplotlib_is_imported_late():
    """Importing `bayesfl.plots` alone must not need it."""
    import subprocess

    code = (
        "import sys; from bayesfl.evaluation import plots, metrics, report; sys.exit('matplotlib' "
        "in sys.modules or 'scipy' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0
    )


def test_lines_look_different():
    """Every colour with every dash before anything comes again; black is the last of the seven that
    lines have.
    """
    many = [(look["color"], look["linestyle"]) for look in lines(range(29))]
    assert len(set(many)) == 28
    assert many[28] == many[0] == (OKABE_ITO[0], "-")


@pytest.mark.parametrize("grid", [None, "both", "x", "y"])
def test_axes_are_quiet(grid):
    ax: Any = new_figure((3, 2)).add_subplot()
    clean(ax, grid=grid)
    assert [side for side, spine in ax.spines.items() if spine.get_visible()] == ["left", "bottom"]
    assert [axis.get_tick_params()["gridOn"] for axis in (ax.xaxis, ax.yaxis)] == [
        grid in ("both", "x"),
        grid in ("both", "y"),
    ]
    assert tuple(ax.figure.get_size_inches()) == (3, 2)


@pytest.mark.parametrize(("names", "columns"), [(["a", "b"], 2), (["a" * 60, "b" * 60], 1)])
def test_the_legend_is_above_the_axes(names: list[str], columns: int):
    """In as many columns as fit, below the title; without a label there is none."""
    ax: Any = new_figure((5.6, 3.6)).add_subplot()
    ax.set_title("t")
    key(ax)
    assert ax.get_legend() is None
    for name in names:
        ax.plot([0, 1], [0, 1], label=name)
    key(ax)
    ax.figure.canvas.draw()
    box = ax.get_legend().get_window_extent()
    assert ax.get_window_extent().y1 < box.y0 < box.y1 < ax.title.get_window_extent().y0
    assert ax.get_legend()._ncols == columns


def test_a_notebook_shows_a_figure():
    """As PNG, without pyplot."""
    figure: Any = new_figure((3, 2))
    assert figure._repr_png_().startswith(b"\x89PNG")
