"""The common style of all diagrams: colours, literal text, figures that are not registered with
pyplot, axes.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from bayesfl.base.options import P, suggests

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# Names of types, so that matplotlib is imported only when something is drawn.
Axes: TypeAlias = "matplotlib.axes.Axes"
Figure: TypeAlias = "matplotlib.figure.Figure"

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""The colours of all diagrams, by Okabe and Ito: blue, vermilion, green, purple, orange, sky blue,
black, yellow.
"""
BLUE, GREY, INK = "#0072B2", "#8A8F94", "#333333"
_DASHES = ("-", "--", ":", "-.")


def literal(draw: Callable[P, "Figure"]) -> Callable[P, "Figure"]:
    """Make a diagram draw every text literally; for all public diagrams.

    Names come from users' data, and matplotlib interprets `$...$` in a text as mathematics: it
    raises an error, or draws another text. Only matplotlib's own numbers along an axis stay
    mathematics, for powers of ten.
    """

    @suggests
    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> "Figure":
        from matplotlib import axis, text, ticker

        figure = draw(*args, **kwargs)
        of: Any = kwargs.get("ax") or figure
        numbers = {
            one
            for line in of.findobj(axis.Axis)
            if isinstance(line.get_major_formatter(), ticker.LogFormatter | ticker.ScalarFormatter)
            for one in line.findobj(text.Text)
            if one is not line.label
        }
        for one in set(of.findobj(text.Text)) - numbers:
            # Of texts without a dollar the caller may still make mathematics.
            one.set(usetex=False, parse_math="$" not in one.get_text())
        return figure

    return drawn


def lines(names: Iterable[object]) -> Iterator[dict[str, Any]]:
    """Yield the label, colour and dash pattern of one line after another; they repeat after the
    last.
    """
    for name, (dash, colour) in zip(names, cycle(product(_DASHES, OKABE_ITO[:7])), strict=False):
        # Legends leave out labels that are empty or begin with an underscore.
        hidden = str(name)[:1] in ("", "_")
        yield {"label": f"{' ' * hidden}{name}", "color": colour, "linestyle": dash}


def new_figure(size: tuple[float, float]) -> "Figure":
    """Make a figure, width and height in inches, that is not registered with pyplot; a notebook
    shows it at the end of a cell.
    """
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", bbox_inches="tight")
            return buffer.getvalue()

    return Shown(figsize=size, dpi=150, layout="constrained")


def key(ax: "Axes") -> None:
    """Place the legend above the axes, where it hides nothing, and the title above the legend."""
    from matplotlib.transforms import ScaledTranslation

    shown = ax.get_legend_handles_labels()[0]
    if not shown:
        return
    figure = ax.figure
    longest = max(len(str(handle.get_label())) for handle in shown)
    width = ax.bbox.width / figure.dpi  # inches
    lines = -(-len(shown) // max(1, int(width / (0.5 + 0.068 * longest))))
    above = ScaledTranslation(0, 3 / 72, figure.dpi_scale_trans)
    ax.legend(
        handles=shown,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        bbox_transform=ax.transAxes + above,
        ncols=-(-len(shown) // lines),  # lines of the same length
        frameon=False,
        fontsize="small",
        handlelength=1.8,
        columnspacing=1.4,
        borderpad=0,
        borderaxespad=0,
    )
    ax.set_title(ax.get_title(), pad=8 + 13 * lines)


def clean(ax: "Axes", *, grid: Literal["both", "x", "y"] | None = None) -> None:
    """Remove the upper and the right side of the frame, put axes behind the data, and draw a grid
    if given.
    """
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("0.5")
    ax.tick_params(color="0.5", labelsize="small")
    ax.set_axisbelow(True)
    if grid is not None:
        ax.grid(True, axis=grid, color="0.9", linewidth=0.8)


def finish(
    ax: "Axes",
    title: str | None,
    *,
    grid: Literal["both", "x", "y"] | None = None,
    legend: bool = False,
    **labels: Any,
) -> Any:
    """Set title and labels of axes, apply the common style, draw the legend above them, and return
    their figure.
    """
    ax.set(title=title or "", **labels)
    clean(ax, grid=grid)
    if legend:
        key(ax)
    return ax.figure.figure  # the root, also of a subfigure


def whole(ax: "Axes") -> None:
    """Put whole numbers along the x axis."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(
        MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )


def some(count: int) -> list[int]:
    """Return the positions of labels on an axis with this number of entries, at most 20."""
    return list(range(0, count, max(1, -(-count // 20))))
