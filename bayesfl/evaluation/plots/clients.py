"""Diagrams client by client: the coverage of conformal sets, and the weights by which models are mixed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from bayesfl.data.names import check_names
from bayesfl.evaluation.calibration import Coverage
from bayesfl.evaluation.plots.look import BLUE, GREY, INK, clean, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COVERAGE = ((0, "coverage"), (1, "size"))  # lines of the diagram of conformal sets


def coverage(
    entries: "Coverage | Mapping[str, Coverage]", *, level: float = 0.9, names: Sequence[str] | None = None, title: str | None = None
) -> "Figure":
    """Draw the coverage of conformal sets client by client, and how many classes the sets hold.

    A point is the share of a client's labels inside their set; the line is what was asked for, 1 - alpha. The bar is the range that
    sampling error alone would give with probability `level`, in calibration and test together, for a client like those that the threshold
    was made for. Points outside the bar, in vermilion, are of clients that are served worse or better than promised. Beneath stand the mean
    numbers of classes in a set.

    Args:
        entries: What `Conformal.evaluate` gives; {name: that} for several side by side.
        level: Probability of the bars, in (0, 1).
        names: Names of all clients, as `clients.client_names`, under the bars; None for their numbers.
        title: Of the figure.

    Returns:
        A matplotlib Figure, to be saved by `.savefig`.

    Raises:
        ValueError: There is no entry, one has no test examples, or `names` has another length.
    """
    named = {"": entries} if isinstance(entries, Coverage) else dict(entries)
    if not named:
        raise ValueError("entries is empty: give the coverage of conformal sets, or {name: coverage}")
    empty = [name for name, found in named.items() if not bool(found.tested.any())]
    if empty:
        raise ValueError(f"{empty} have no test examples; check mask")
    for found in named.values():
        check_names(names, len(found.share))
    most = max(len(found.share) for found in named.values())
    figure = new_figure((max(3.2, 1.2 + 0.16 * most) * len(named) + 0.4, 3.9))
    grid = figure.add_gridspec(2, len(named), height_ratios=(3, 1))
    uppers, lowers = ([figure.add_subplot(grid[line, column], label=kind) for column in range(len(named))] for line, kind in _COVERAGE)
    for (name, found), upper, lower in zip(named.items(), uppers, lowers, strict=True):
        _covered(upper, lower, found, level, names)
        upper.set_title(name, fontsize="medium")
    bottom = min(ax.get_ylim()[0] for ax in uppers)
    widest = max(float(found.size[found.tested > 0].max()) for found in named.values())
    for ax, beneath in zip(uppers, lowers, strict=True):
        ax.set_ylim(bottom, 1.02)
        beneath.set_ylim(0, 1.08 * max(widest, 1.0))
        ax.tick_params(labelleft=ax is uppers[0])
        beneath.tick_params(labelleft=beneath is lowers[0])
    uppers[0].set_ylabel("share of labels inside their set")
    lowers[0].set_ylabel("set size", fontsize="small")
    handles, labels = uppers[0].get_legend_handles_labels()
    columns = len(handles) if figure.get_figwidth() > 6.5 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small", handlelength=1.3)
    if title:
        figure.suptitle(title)
    return figure


def collaboration(
    weights: Tensor | np.ndarray,
    *,
    groups: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Axes":
    """Draw the mixing weights: a darker cell means a larger share of the column's client in the row's model.

    Args:
        weights: Of J clients, [J, J] >= 0, as FedPAC's `result.server["head"]["weights"]`; a row of 0 is a client that never took part.
        groups: Where it is known which clients are alike, the group of each, [J]: clients stand in the order of their groups, with lines
            between these, so that weights within groups are blocks on the diagonal.
        names: Names of all clients, as `clients.client_names`; None for their numbers.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Axes. `axes.figure` is the figure.

    Raises:
        ValueError: The weights are not square, not finite or negative, or `groups` or `names` has another length.
    """
    from matplotlib.colors import LinearSegmentedColormap

    shown = np.asarray(weights.detach().cpu() if isinstance(weights, Tensor) else weights, dtype=float)
    if shown.ndim != 2 or shown.shape[0] != shown.shape[1] or not len(shown):
        raise ValueError(f"weights must be square, a row and a column for each client, got shape {list(shown.shape)}")
    if not (np.isfinite(shown).all() and (shown >= 0).all()):
        raise ValueError(f"weights must be finite and >= 0, got {shown.min():.3g} to {shown.max():.3g}")
    if groups is not None and len(groups) != len(shown):
        raise ValueError(f"groups must name one group for each of {len(shown)} clients, got {len(groups)}")
    check_names(names, len(shown))
    order = np.arange(len(shown)) if groups is None else np.argsort(np.asarray(groups), kind="stable")
    ax = new_figure((4.6, 4.0)).add_subplot() if ax is None else ax
    image = ax.imshow(
        shown[np.ix_(order, order)], cmap=LinearSegmentedColormap.from_list("", ["white", BLUE]), vmin=0, vmax=shown.max() or 1
    )
    if groups is not None:
        kinds = np.asarray(groups)[order]
        for place in np.flatnonzero(kinds[1:] != kinds[:-1]) + 0.5:
            ax.axhline(place, color="0.5", linewidth=0.8)
            ax.axvline(place, color="0.5", linewidth=0.8)
    places = _some(len(shown))
    told = [str(order[place]) if names is None else names[int(order[place])] for place in places]
    ax.set_xticks(places, told, rotation=0 if names is None else 90)
    ax.set_yticks(places, told)
    ax.tick_params(color="0.5", labelsize="x-small")
    ax.set(xlabel="whose model", ylabel="client", title=title or "")
    ax.figure.colorbar(image, ax=ax, label="weight", shrink=0.85)
    return ax


def _some(clients: int) -> list[int]:
    """Return the clients that are named on an axis: all, or of many at regular steps, 20 at most."""
    return list(range(0, clients, max(1, -(-clients // 20))))


def _covered(ax: "Axes", beneath: "Axes", found: Coverage, level: float, names: Sequence[str] | None) -> None:
    """Draw coverage by client in `ax`, and mean set sizes in `beneath`, with the clients' names if there are any."""
    from matplotlib.ticker import MaxNLocator

    some = (found.tested > 0).numpy()
    client, share = np.arange(len(some))[some], found.share.numpy()[some]
    low, high = (t.numpy()[some] for t in found.chance(level))
    ax.bar(client, high - low, 0.6, bottom=low, color="#D9DDE1", linewidth=0, label=f"range by chance, probability {level:g}", gid="chance")
    inside = (low <= share) & (share <= high)
    for which, colour, marker, label in ((inside, BLUE, "o", "a client"), (~inside, "#D55E00", "D", "a client beyond chance")):
        ax.plot(client[which], share[which], marker, color=colour, markersize=4.5, label=label, gid=label)
    ax.axhline(1 - found.alpha, linestyle=(0, (4, 3)), color=INK, linewidth=1, label=f"asked for: {1 - found.alpha:g}")
    lowest = min(float(share.min()), float(low.min()))
    ax.set(xlim=(-0.7, len(some) - 0.3), ylim=(max(0.0, lowest - 0.05), 1.02))
    ax.tick_params(labelbottom=False)
    beneath.bar(client, found.size.numpy()[some], 0.6, color=GREY, edgecolor="white", linewidth=0.6, gid="size")
    beneath.set(xlim=ax.get_xlim(), xlabel="client")
    if names is None:
        beneath.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    else:
        places = _some(len(names))
        beneath.set_xticks(places, [names[place] for place in places], rotation=90, fontsize="small")
    beneath.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    for axes in (ax, beneath):
        clean(axes, grid="y")
