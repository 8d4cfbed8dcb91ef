"""The forest plot: a coefficient for each site and for all sites."""

import textwrap
from typing import Any

import numpy as np

from bayesfl.evaluation.plots.look import (
    BLUE,
    GREY,
    INK,
    Axes,
    Figure,
    finish,
    literal,
    new_figure,
)

REACH = 5.0
"""Range of the axis on either side, as a multiple of the median distance from the joint estimate to
the ends of intervals; arrows mark intervals that extend beyond it.
"""


@literal
def forest(
    fit: Any,
    term: str,
    *,
    without: bool = False,
    level: float = 0.95,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Figure":
    """Draw a coefficient for each site with its interval, with areas proportional to rows, and for
    all sites as a diamond; ratios on a logarithmic axis.

    Args:
        fit: A `bf.stats.Fit`, whose sites are refitted separately, or a `Mixed`, whose sites'
            posteriors are drawn.
        term: Name of the coefficient.
        without: Whether to draw the estimates without each site in turn, `fit.leave_one_out`,
            instead of those for each site.
        level: Probability of the intervals.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Figure, that of `ax` if given.

    Raises:
        KeyError: A `Fit` has no such coefficient.
        ValueError: A `Mixed` has no such coefficient with own effects.

    Example:
        >>> import pandas as pd
        >>> frames = {
        ...     "north": pd.DataFrame({"dose": [0.0, 1, 2, 3], "ill": [0, 1, 0, 1]}),
        ...     "south": pd.DataFrame({"dose": [0.0, 2, 3, 4], "ill": [0, 0, 1, 1]}),
        ... }
        >>> sites = bf.stats.tables(frames, outcome="ill", terms=["dose"])
        >>> fit = bf.stats.glm(sites, family="binomial")
        >>> bf.plots.forest(fit, "dose").axes[0].get_xlabel()
        'odds ratio of dose'
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    found = (fit.leave_one_out if without else fit.by_site)(term, level)
    ratio = fit.ratio is not None
    values = found[["estimate", "low", "high"]].to_numpy(float)
    joint, sites = values[-1], values[:-1]
    away = np.abs(sites[:, 1:] - joint[0]).max(1)
    usual = np.quantile(away[~np.isnan(away)], 0.5, method="lower") if (away >= 0).any() else 0.0
    reach = REACH * max(usual, np.ptp(joint[1:]) / 2)
    ends = joint[0] - reach, joint[0] + reach
    inside = np.clip(values, *ends)
    inner = np.nanmin(inside), np.nanmax(inside)
    margin = 0.04 * (inner[1] - inner[0])

    def shown(value: Any) -> Any:
        with np.errstate(over="ignore"):
            return np.exp(value) if ratio else value

    ax = new_figure((5.2, 0.9 + 0.32 * len(found))).add_subplot() if ax is None else ax
    across = ax.get_yaxis_transform()  # x in shares of the axes
    rows = found["rows"].to_numpy(float)
    areas = 20 + 130 * np.nan_to_num(rows[:-1] / np.nanmax(rows), nan=0.2)
    for place, (estimate, low, high) in enumerate(sites):
        if why := found["why"].iloc[place]:
            told = textwrap.shorten(why, 50, placeholder=" …")
            ax.text(
                0.02, place, told, transform=across, color=GREY, fontsize="x-small", va="center"
            )
            continue
        ax.plot(shown(inside[place, 1:]), [place] * 2, color=INK, linewidth=1)
        for end, arrow, beyond in ((ends[0], "<", low < ends[0]), (ends[1], ">", high > ends[1])):
            if beyond:
                ax.plot(shown(end), place, marker=arrow, color=INK, markersize=5)
        if ends[0] <= estimate <= ends[1]:
            ax.scatter(shown(estimate), place, s=areas[place], marker="s", color=BLUE, zorder=3)
    last, half = len(sites), 0.28
    corners = [joint[1], joint[0], joint[2], joint[0]]
    ax.fill(shown(corners), [last, last - half, last, last + half], color=BLUE)
    ax.axvline(shown(joint[0]), color=BLUE, linewidth=0.8, linestyle=":")
    ax.axvline(shown(0.0), color=GREY, linewidth=0.8)
    for place, numbers in enumerate(values):
        if not np.isnan(numbers).any():
            estimate, low, high = (_told(value) for value in shown(numbers))
            told = f"{estimate} [{low}, {high}]"
            ax.text(1.02, place, told, transform=across, fontsize="small", va="center")
    short = "".join(word[0].upper() for word in fit.ratio.split()) if ratio else "estimate"
    above = {"y": -0.95, "transform": across, "fontsize": "small", "va": "center"}
    ax.text(x=1.02, s=f"{short} [{100 * level:g} %]", **above)
    ax.text(x=-0.02, s="site (rows)", ha="right", **above)
    if ratio:
        ax.set_xscale("log")
        span = shown(max(inner[1], 0.0)) / shown(min(inner[0], 0.0))
        if span < 8:  # powers of ten would leave one number on the axis, or none
            ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            ax.xaxis.set_minor_locator(NullLocator())
        else:
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 50 else (1,)))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.xaxis.set_minor_formatter(lambda value, _: "")
    ax.set_xlim(shown(min(inner[0], 0.0) - margin), shown(max(inner[1], 0.0) + margin))
    named = [
        f"{name} ({n:g})" if n == n else str(name)
        for name, n in zip(found.index, rows, strict=True)
    ]
    ax.set_yticks(range(len(found)), named)
    ax.set_ylim(len(found) - 0.4, -0.6)  # the first site on top
    return finish(ax, title, grid="x", xlabel=f"{fit.ratio} of {term}" if ratio else term)


def _told(value: float) -> str:
    """Return a number with three digits, or its order of magnitude if it is very large or small."""
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 else f"{value:.0e}"
