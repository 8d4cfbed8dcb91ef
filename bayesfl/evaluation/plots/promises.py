"""Diagrams of guarantees: coverage by client, label or group with exact intervals, and sizes of
sets.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bayesfl.evaluation.audit import Audit
from bayesfl.evaluation.plots.look import (
    BLUE,
    GREY,
    INK,
    OKABE_ITO,
    Axes,
    Figure,
    clean,
    literal,
    new_figure,
    some,
)

RED = OKABE_ITO[1]


@literal
def coverage(entries: "Audit | Mapping[str, Audit]", *, title: str | None = None) -> "Figure":
    """Draw the coverage of sets or intervals unit by unit, with its interval, and their sizes
    beneath.

    A point is the share of a unit's rows whose set contains the truth; a unit is a client, a label
    or a group. The bars are intervals that all cover together with probability 1 - `delta` of the
    audit. Units whose whole bar lies below the guaranteed level are vermilion. The dashed line is
    this level, the dotted one the expected lowest measured coverage if all units have it. An
    infinite size is a hatched bar.

    Args:
        entries: An audit from `Result.audit`; {name: audit} for several side by side.
        title: Of the figure.

    Returns:
        The matplotlib Figure.

    Example:
        >>> clients = bf.data.iid("digits", clients=3, calibration=0.3)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        >>> result = bf.simulate(bf.algorithms.fedavg(model), clients, rounds=1)
        >>> served = result.calibrate(bf.calibration.Conformal())
        >>> figure = bf.plots.coverage(served.audit())
        >>> [ax.get_ylabel() for ax in figure.axes]
        ['coverage', 'set size']
    """
    named: dict[str, Any] = {"": entries} if isinstance(entries, Audit) else dict(entries)
    most = max(len(found.units) for found in named.values())
    width = max(3.2, 1.2 + 0.16 * most) * len(named) + 0.4
    # The legend of a narrow one has a column alone.
    figure = new_figure((width, 3.9 if width > 5.2 else 4.6))
    uppers, lowers = figure.subplots(
        2, len(named), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 1)
    )
    # A part of the axis remains if all sizes are 0 or infinite.
    least = 1e-12 if next(iter(named.values())).right is None else 1.0
    sizes = np.concatenate([found.size for found in named.values()])
    top = 1.08 * sizes[np.isfinite(sizes)].max(initial=least)
    lowest = 1.0
    for (name, found), ax, beneath in zip(named.items(), uppers, lowers, strict=True):
        lowest = min(lowest, _covered(ax, beneath, found, top, alone=len(named) == 1))
        ax.set_title(name, fontsize="medium")
    uppers[0].set(ylim=(max(0.0, lowest - 0.05), 1.02), ylabel="coverage")
    lowers[0].set_ylim(0, top)
    lowers[0].set_ylabel(
        "width" if next(iter(named.values())).right is None else "set size", fontsize="small"
    )
    shown = {
        label: handle
        for ax in figure.axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(shown.values()),
        list(shown),
        loc="outside lower center",
        ncols=max(1, int(figure.get_figwidth() / 2.6)),
        frameon=False,
        fontsize="small",
        handlelength=1.6,
    )
    if title:
        figure.suptitle(title)
    return figure


def _covered(ax: "Axes", beneath: "Axes", found: Any, top: float, *, alone: bool) -> float:
    """Draw an audit's coverage and intervals by unit in `ax`, with units below the guaranteed level
    in another colour, and mean sizes in `beneath`, hatched up to `top` if infinite; return the
    lowest number drawn in `ax`.
    """
    from matplotlib.ticker import MaxNLocator

    places, units = np.flatnonzero(found.rows > 0), len(found.units)
    share, (low, high) = found.coverage[places], found.intervals(found.held)[places].T
    ax.bar(
        places,
        high - low,
        0.6,
        bottom=low,
        color="#D9DDE1",
        linewidth=0,
        label=f"interval, all with probability {1 - found.delta:g}",
        gid="interval",
    )
    below, kind = np.isin(found.units, found.below)[places], f"a {found.by}"
    for which, colour, marker, label in (
        (~below, BLUE, "o", kind),
        (below, RED, "D", f"{kind} below the level"),
    ):
        if which.any():
            look: dict[str, Any] = {"color": colour, "markersize": 4.5, "label": label}
            ax.plot(places[which], share[which], marker, gid=label, **look)
    worst = "worst by chance" + (f": {found.worst_by_chance:.2f}" if alone else "")
    for height, dashes, label in (
        (found.level, (4, 3), f"nominal: {found.level:g}"),
        (found.worst_by_chance, (1, 2), worst),
    ):
        ax.axhline(height, linestyle=(0, dashes), color=INK, linewidth=1, label=label)
    endless = np.isinf(found.size[places])
    beneath.bar(
        places,
        np.where(endless, 0.0, found.size[places]),
        0.6,
        color=GREY,
        edgecolor="white",
        linewidth=0.6,
        gid="size",
    )
    if endless.any():
        beneath.bar(
            places[endless],
            top,
            0.6,
            color="white",
            edgecolor=GREY,
            hatch="////",
            linewidth=0.6,
            label="width without end",
            gid="endless",
        )
    beneath.set(xlim=(-0.7, units - 0.3), xlabel=found.by)
    shown = some(units)
    beneath.set_xticks(shown, [found.units[u] for u in shown], rotation=90, fontsize="small")
    beneath.yaxis.set_major_locator(MaxNLocator(integer=found.right is not None, nbins=3))
    for axes, label in ((ax, "coverage"), (beneath, "size")):
        axes.set_label(label)
        clean(axes, grid="y")
    return min(float(share.min()), float(low.min()))
