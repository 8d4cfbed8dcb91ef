"""Reliability diagrams: a classifier's accuracy against its confidence."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor

from bayesfl.data.outline import known_names, place
from bayesfl.evaluation.metrics import ReliabilityBins, ece, reliability_bins
from bayesfl.evaluation.plots.inputs import only, predictions
from bayesfl.evaluation.plots.look import (
    BLUE,
    GREY,
    INK,
    Axes,
    Figure,
    clean,
    literal,
    new_figure,
)

_OVER: dict[str, Any] = {
    "color": "#F6CDB2",
    "edgecolor": "#D55E00",
    "hatch": "////",
    "label": "overconfident",
    "gid": "overconfident",
}
_UNDER: dict[str, Any] = {
    "color": "none",
    "edgecolor": "white",
    "hatch": "....",
    "label": "underconfident",
    "gid": "underconfident",
}
_Panel: TypeAlias = tuple[ReliabilityBins, str]  # one diagram: its bins, and the numbers above it
_CLIENTS = 12  # panels that by="client" draws unless told which
_COLUMNS = 3  # panels in a row, so that they can be read at the width of a page
_LINE = 11.0  # points that a line of numbers above a diagram takes


def _panel(probs: Tensor, labels: Tensor, mask: Tensor, bins: int) -> _Panel:
    """Return the bins of one diagram, and the numbers above it: errors as fractions, as in tables,
    with the clients' mean if several clients are pooled.
    """
    found = reliability_bins(probs, labels, mask, bins)
    if not found.examples:
        return found, "no examples"
    own = ece(probs, labels, mask, bins=bins)[mask.any(-1)]
    examples = f"n = {found.examples:,}".replace(",", "\u2009")
    if len(own) == 1:
        return found, f"ECE {found.ece:.3f}, {examples}"
    mean = f"ECE, clients' mean {float(own.mean()):.3f}"
    return found, f"ECE, pooled {found.ece:.3f}, {examples}\n{mean}"


@literal
def reliability(
    source: Any,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    bins: int = 15,
    by: Literal["pooled", "client"] = "pooled",
    clients: Sequence[int | str] | None = None,
    title: str | None = None,
) -> "Figure":
    """Draw a reliability diagram: accuracy by bins of confidence, and the number of examples in
    each bin.

    Blue bars are the accuracy of each bin. The gap to the bin's mean confidence is marked: above
    the bar, hatched in vermilion, if the model is overconfident; inside the bar, dotted, if it is
    underconfident. Thin lines are intervals of a binomial share (Wilson, level 0.95) for each
    accuracy. The expected calibration error (ECE) is the mean of the gaps, weighted by the counts
    in the histogram beneath, whose scale is logarithmic. If several clients are pooled, the mean of
    their own errors is shown as well; it is larger, because each client has fewer examples. Guo et
    al., "On calibration of modern neural networks", ICML 2017.

    Args:
        source: A simulation's result, whose personal predictions on its test data are used; or
            class probabilities, [J, N, O] or [N, O].
        labels: True classes, [J, N] or [N]; only if `source` is probabilities.
        mask: Which rows are examples, bool and shaped as `labels`; by default all.
        bins: Number of bins of equal width.
        by: `pooled`, one diagram of all examples; `client`, one for each client under its name.
        clients: Clients by name or number; by default all if pooled, otherwise the first 12 with
            examples.
        title: Of the diagram, or of the figure.

    Returns:
        The matplotlib Figure; its `axes` are a diagram and its histogram, for each client in the
        order of `clients`.

    Raises:
        TypeError: A client is neither a name nor a number.
        ValueError: The shapes do not fit, or a client does not exist.

    Example:
        >>> clients = bf.data.iid("digits", clients=3)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        >>> result = bf.simulate(bf.algorithms.fedavg(model), clients, rounds=1)
        >>> bf.plots.reliability(result).axes[0].get_ylabel()
        'accuracy'
    """
    probs, labels, mask = predictions(source, labels, mask)
    names = source.data.client_names if hasattr(source, "predict") else None
    called = known_names(names, len(probs))
    these = None if clients is None else [place(client, called) for client in clients]
    if by == "pooled":
        pooled = _panel(probs, labels, mask if these is None else only(mask, these), bins)
        return _panels([pooled], [title or ""], 1, size=(3.8, 4.6))
    these = mask.any(-1).nonzero().flatten().tolist()[:_CLIENTS] if these is None else these
    panels = [_panel(probs, labels, only(mask, [j]), bins) for j in these]
    lines = -(-len(panels) // _COLUMNS)
    titles = [f"client {called[j]}" if called[j].isdigit() else called[j] for j in these]
    figure = _panels(panels, titles, -(-len(panels) // lines))  # lines of the same length
    if title:
        figure.suptitle(title)
    return figure


@literal
def reliability_compare(
    entries: Mapping[str, Any], *, bins: int = 15, columns: int | None = None
) -> "Figure":
    """Draw reliability diagrams of several methods side by side, on one scale.

    See `reliability` for their interpretation.

    Args:
        entries: {method: a simulation's result, or (probs, labels, mask)} as in `reliability`.
        bins: Number of bins of equal width.
        columns: Diagrams in a row; by default up to 3.

    Returns:
        The matplotlib Figure.

    Raises:
        ValueError: There is no entry, or one does not fit.

    Example:
        >>> clients = bf.data.iid("digits", clients=3)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        >>> made = {"FedAvg": bf.algorithms.fedavg(model), "Local": bf.algorithms.local(model)}
        >>> runs = {name: bf.simulate(method, clients, rounds=2) for name, method in made.items()}
        >>> figure = bf.plots.reliability_compare(runs)
        >>> figure.axes[0].get_title()
        'FedAvg'
    """
    panels = [_panel(*predictions(entry, None, None), bins) for entry in entries.values()]
    return _panels(
        panels, list(entries), min(_COLUMNS, len(panels)) if columns is None else columns
    )


def _panels(
    panels: Sequence[_Panel],
    titles: Sequence[str],
    columns: int,
    *,
    size: tuple[float, float] = (2.4, 3.0),
) -> "Figure":
    """Draw a grid of diagrams whose histograms have a common scale; only the outer ones have
    labels.
    """
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure((max(size[0] * columns, 3.6) + 0.4, size[1] * lines + 0.5))
    grid = figure.add_gridspec(2 * lines, columns, height_ratios=(4, 1) * lines)
    tallest = max(int(bins.count.max()) for bins, _ in panels)
    for spot, (title, panel) in enumerate(zip(titles, panels, strict=True)):
        line, column = divmod(spot, columns)
        ax = figure.add_subplot(grid[2 * line, column])
        beneath = figure.add_subplot(grid[2 * line + 1, column], sharex=ax, label="histogram")
        _diagram(
            ax,
            beneath,
            panel,
            across=spot + columns >= len(panels),
            up=column == 0,
            tallest=tallest,
        )
        above = _LINE * len(panel[1].splitlines())  # points
        ax.set_title(title, fontsize=10 if max(map(len, titles)) < 25 else 8, pad=above + 6)
    figure.legend(
        handles=_key(),
        loc="outside lower center",
        ncols=2 if columns < 3 else 4,
        frameon=False,
        fontsize="small",
        handlelength=1.3,
    )
    return figure


def _diagram(
    ax: "Axes",
    beneath: "Axes",
    panel: _Panel,
    *,
    across: bool,
    up: bool,
    tallest: int,
) -> None:
    """Draw one reliability diagram in `ax` and its histogram in `beneath`, which shares the x axis.

    Args:
        ax: Where the bars go.
        beneath: Where the histogram goes.
        panel: What to draw.
        across: Whether to write along the x axis.
        up: Whether to write along the y axes.
        tallest: Largest count on the histogram's axis.
    """
    from scipy.stats import binomtest

    bins, numbers = panel
    left, width, filled = bins.edges[:-1], np.diff(bins.edges), bins.count > 0
    height = np.where(filled, bins.accuracy, 0.0)
    ax.bar(
        left,
        height,
        width,
        align="edge",
        color=BLUE,
        alpha=0.85,
        edgecolor="white",
        linewidth=0.6,
        label="accuracy",
        gid="accuracy",
    )
    low, high = np.fmin(bins.accuracy, bins.confidence), np.fmax(bins.accuracy, bins.confidence)
    over = filled & (bins.confidence >= bins.accuracy)
    for which, look in ((over, _OVER), (filled & ~over, _UNDER)):
        ax.bar(
            left[which],
            (high - low)[which],
            width[which],
            bottom=low[which],
            align="edge",
            linewidth=0.6,
            **look,
        )
    for middle, count, right in zip(
        (left + width / 2)[filled], bins.count[filled], bins.accuracy[filled], strict=True
    ):
        ends = binomtest(round(right * count), int(count)).proportion_ci(method="wilson")
        ax.plot(
            [middle] * 2,
            [ends.low, ends.high],
            color=INK,
            linewidth=0.9,
            gid="interval",
        )
    ax.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), color=INK, linewidth=1, gid="diagonal")
    ax.set(xlim=(0, 1), ylim=(0, 1))
    clean(ax, grid="y")
    ax.annotate(
        numbers,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 3),
        textcoords="offset points",
        va="bottom",
        fontsize="small",
        linespacing=1.2,
    )
    beneath.bar(
        left,
        bins.count,
        width,
        align="edge",
        color=GREY,
        edgecolor="white",
        linewidth=0.6,
        gid="count",
    )
    _count(beneath, tallest)
    beneath.set_xticks(np.linspace(0, 1, 6))
    clean(beneath)
    ax.tick_params(labelbottom=False, labelleft=up)
    beneath.tick_params(labelbottom=across, labelleft=up)
    if across:
        beneath.set_xlabel("confidence")
    if up:
        ax.set_ylabel("accuracy")
        beneath.set_ylabel("examples\n(log scale)", fontsize="x-small")


def _count(ax: "Axes", tallest: int) -> None:
    """Set a logarithmic axis of a histogram on which a single example is still a bar, with powers
    of ten as ticks.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    decades = len(str(max(tallest, 1)))
    # first: of no examples alone, the scale would have no limits of its own.
    ax.set_ylim(0.5, 1.5 * max(tallest, 10))
    ax.set_yscale("log", nonpositive="clip")
    ax.yaxis.set_major_locator(
        FixedLocator([10**k for k in range(0, max(decades, 2), 1 if decades < 5 else 2)])
    )
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}".replace(",", "\u2009"))
    )


def _key() -> list[Any]:
    """Return the handles of a diagram's legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=BLUE, alpha=0.85, label="accuracy"),
        Patch(
            facecolor=_OVER["color"],
            edgecolor=_OVER["edgecolor"],
            hatch=_OVER["hatch"],
            linewidth=0.6,
            label=_OVER["label"],
        ),
        Patch(
            facecolor=BLUE,
            edgecolor="white",
            hatch=_UNDER["hatch"],
            linewidth=0.6,
            label=_UNDER["label"],
        ),
        Line2D([], [], color=INK, linewidth=0.9, label="interval, level 0.95"),
    ]
