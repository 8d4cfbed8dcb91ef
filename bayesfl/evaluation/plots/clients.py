"""Diagrams client by client: the weights by which models are mixed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from bayesfl.data.names import check_names
from bayesfl.evaluation.plots.look import BLUE, new_figure, some

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def collaboration(
    weights: Tensor | np.ndarray,
    *,
    groups: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Axes":
    """Draw the mixing weights: a darker cell means a larger share of the column's client in the
    row's model.

    Args:
        weights: Of J clients, [J, J] >= 0, as FedPAC's `result.server["head"]["weights"]` of the
            last cohort, whose places among all clients are in `result.server["head"]["cohort"]`.
        groups: Where it is known which clients are alike, the group of each, [J]: clients stand in
            the order of their groups, with lines between these, so that weights within groups are
            blocks on the diagonal.
        names: Names of all clients, as `clients.client_names`; None for their numbers.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Axes. `axes.figure` is the figure.

    Raises:
        ValueError: The weights are not square, not finite or negative, or `groups` or `names` has
            another length.
    """
    from matplotlib.colors import LinearSegmentedColormap

    shown = np.asarray(
        weights.detach().cpu() if isinstance(weights, Tensor) else weights, dtype=float
    )
    weighs = np.isfinite(shown).all() and (shown >= 0).all()
    if shown.shape != (len(shown), len(shown)) or not weighs:
        raise ValueError(
            "weights must be finite and >= 0, a row and a column for each client, got shape "
            f"{list(shown.shape)} and {shown.min():.3g} to {shown.max():.3g}"
        )
    if groups is not None and len(groups) != len(shown):
        raise ValueError(
            f"groups must name one group for each of {len(shown)} clients, got {len(groups)}"
        )
    check_names(names, len(shown))
    order = (
        np.arange(len(shown)) if groups is None else np.argsort(np.asarray(groups), kind="stable")
    )
    ax = new_figure((4.6, 4.0)).add_subplot() if ax is None else ax
    image = ax.imshow(
        shown[np.ix_(order, order)],
        cmap=LinearSegmentedColormap.from_list("", ["white", BLUE]),
        vmin=0,
        vmax=shown.max() or 1,
    )
    if groups is not None:
        kinds = np.asarray(groups)[order]
        for place in np.flatnonzero(kinds[1:] != kinds[:-1]) + 0.5:
            ax.axhline(place, color="0.5", linewidth=0.8)
            ax.axvline(place, color="0.5", linewidth=0.8)
    places = some(len(shown))
    told = [str(order[place]) if names is None else names[int(order[place])] for place in places]
    ax.set_xticks(places, told, rotation=0 if names is None else 90)
    ax.set_yticks(places, told)
    ax.tick_params(color="0.5", labelsize="x-small")
    ax.set(xlabel="whose model", ylabel="client", title=title or "")
    ax.figure.colorbar(image, ax=ax, label="weight", shrink=0.85)
    return ax
