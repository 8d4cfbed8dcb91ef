"""Curves of survival, with intervals and a table of numbers at risk."""

from typing import Any

import numpy as np

from bayesfl.evaluation.plots.look import INK, Axes, Figure, finish, lines, literal, new_figure


@literal
def kaplan_meier(
    found: Any,
    *,
    level: float = 0.95,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Figure":
    """Draw survival curves with bands for their intervals, and below them the numbers of rows at
    risk at the first time at or after a tick.

    A curve ends at the last time with rows at risk. Small ticks mark times, or ends of bins, after
    which rows leave without an event.

    Args:
        found: Curves, of `bf.stats.kaplan_meier`.
        level: Probability of the intervals.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Figure, that of `ax` if given.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"t": [2, 3, 5, 8], "d": [1, 1, 0, 1]})
        >>> sites = bf.stats.tables({"north": frame}, also=["t", "d"])
        >>> curves = bf.stats.kaplan_meier(sites, time="t", event="d", exact_times=True)
        >>> bf.plots.kaplan_meier(curves).axes[0].get_ylabel()
        'survival'
    """
    ax = new_figure((5.6, 3.6 + 0.22 * len(found.groups))).add_subplot() if ax is None else ax
    times, survival = found.times.numpy(), found.survival.numpy()
    low, high = (t.numpy() for t in found.interval(level))
    looks = list(lines(found.groups))
    for place, look in enumerate(looks):
        colour, at_risk = look["color"], found.at_risk[place].numpy()
        there, gone = at_risk > 0, -np.diff(at_risk, append=0) - found.events[place].numpy()
        x = np.concatenate([[0.0], times[there]])
        y = np.concatenate([[1.0], survival[place, there]])
        ax.step(x, y, where="post", linewidth=1.5, **look)
        left = gone > 1e-9 * at_risk[0]  # but by rounding of weights
        ax.plot(times[left], survival[place, left], "|", color=colour, markersize=5, gid="censored")
        below, above = (np.concatenate([[1.0], end[place, there]]) for end in (low, high))
        ax.fill_between(x, below, above, step="post", color=colour, alpha=0.15, linewidth=0)
    ax.set(xlim=(0, None), ylim=(0, 1.02))
    _numbers(ax, found, [look["color"] for look in looks])
    several = len(found.groups) > 1
    return finish(ax, title, grid="y", legend=several, xlabel="time", ylabel="survival")


def _numbers(ax: "Axes", found: Any, colours: list[str]) -> None:
    """Write below the axes the number of rows at risk in each group at the ticks."""
    times, counts = found.times.numpy(), found.at_risk.numpy()
    ticks = [t for t in ax.get_xticks() if 0 <= t <= ax.get_xlim()[1]]
    heads = [("at risk", -33 if len(found.groups) > 1 else -46, INK)]
    for place, (group, colour) in enumerate(zip(found.groups, colours, strict=True)):
        below = -46 - 13 * place  # points
        heads += [(group, below, colour)] * (len(found.groups) > 1)
        for tick in ticks:
            at = int(np.searchsorted(times, tick * (1 - 1e-9)))
            number = counts[place, at] if at < len(times) else 0
            ax.annotate(
                f"{number:g}",
                xy=(tick, 0),
                xycoords=("data", "axes fraction"),
                xytext=(0, below),
                textcoords="offset points",
                ha="center",
                fontsize="small",
                color=colour,
            )
    for head, below, colour in heads:
        ax.annotate(
            head,
            xy=(0, 0),
            xycoords="axes fraction",
            xytext=(-28, below),
            textcoords="offset points",
            ha="right",
            fontsize="small",
            color=colour,
        )
