"""Diagrams by client: the distribution of labels, and a measure against the rounds."""

from typing import Any

import numpy as np

from bayesfl.data.federated import FederatedData
from bayesfl.evaluation.history import History
from bayesfl.evaluation.plots.look import (
    BLUE,
    INK,
    Axes,
    Figure,
    finish,
    literal,
    new_figure,
    some,
    whole,
)
from bayesfl.evaluation.report import in_prose

_CELLS = 300  # cells of a table of labels that have their numbers written in them


@literal
def labels(
    clients: FederatedData,
    *,
    split: str = "train",
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Figure":
    """Draw the distribution of labels: a row for each client, a column for each class, darker for a
    larger share of the client's rows. The cells show numbers of rows if there is space.

    Args:
        clients: Data of classes.
        split: The split to count.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Figure, that of `ax` if given.

    Raises:
        IndexError: The task is a regression.

    >>> clients = bf.data.dirichlet("digits", clients=5, alpha=0.3)
    >>> bf.plots.labels(clients).axes[0].get_xlabel()
    'class'
    """
    from matplotlib.colors import LinearSegmentedColormap

    names, classes = clients.client_names, clients.classes
    of = clients.splits[split]
    y = of.y[of.index].cpu().numpy().reshape(len(of.index), -1)
    owner = np.repeat(np.arange(clients.clients), of.counts)[:, None] + 0 * y
    counts = np.zeros((clients.clients, classes), int)
    np.add.at(counts, (owner[y >= 0], y[y >= 0]), 1)
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    told = [str(name) for name in clients.class_names or range(classes)]
    if ax is None:
        size = max(3.6, 1.6 + 0.42 * min(classes, 20)), max(2.0, 1.0 + 0.26 * min(len(names), 30))
        ax = new_figure(size).add_subplot()
    blues = LinearSegmentedColormap.from_list("", ["white", BLUE])
    image = ax.imshow(shares, cmap=blues, vmin=0, vmax=shares.max(), aspect="auto")
    if counts.size <= _CELLS:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if shares[row, column] > 0.6 * shares.max() else INK
                centre: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "x-small"}
                ax.text(column, row, f"{count}", color=colour, **centre)
    rows, columns = some(len(names)), some(classes)
    ax.set_yticks(rows, [names[j] for j in rows])
    crowded = len(columns) * max(map(len, told)) > max(24, 5 * len(columns))
    ax.set_xticks(columns, [told[c] for c in columns], rotation=90 if crowded else 0)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.figure.colorbar(image, ax=ax, label="share of the client's rows", shrink=0.9)
    return finish(ax, title, xlabel="class")


@literal
def client_curves(
    history: History, column: str, *, ax: "Axes | None" = None, title: str | None = None
) -> "Figure":
    """Draw a measure against the rounds, a thin line for each client and a bold one for their
    mean.

    Args:
        history: The history of a run with `record_clients`.
        column: The column to draw, such as `personal_accuracy`.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Figure, that of `ax` if given.

    Raises:
        KeyError: The run did not record it.

    Example:
        >>> clients = bf.data.iid("digits", clients=3)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        >>> result = bf.simulate(bf.algorithms.fedavg(model), clients, rounds=2,
        ...     record_clients=["nll"])
        >>> bf.plots.client_curves(result.history, "personal_nll").axes[0].get_ylabel()
        'personal NLL'
    """
    values, rounds = history.clients(column), history["round"]
    ax = new_figure((5.6, 3.6)).add_subplot() if ax is None else ax
    for own in values.T:
        there = np.isfinite(own)
        ax.plot(rounds[there], own[there], color=BLUE, alpha=0.35, linewidth=0.8)
    mean = history[column]
    there = np.isfinite(mean)
    ax.plot(rounds[there], mean[there], color=INK, linewidth=2.4, label="mean over clients")
    whole(ax)
    return finish(ax, title, grid="both", legend=True, xlabel="round", ylabel=in_prose(column))
