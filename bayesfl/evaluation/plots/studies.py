"""Diagrams of a study's table: methods with the errors of their means, and two methods client by
client.
"""

from typing import Any

import numpy as np

from bayesfl.evaluation.history import HEADLINES
from bayesfl.evaluation.plots.look import BLUE, GREY, INK, Axes, Figure, finish, literal, new_figure
from bayesfl.evaluation.report import better, in_prose


@literal
def study(
    table: Any, *, metric: str | None = None, ax: "Axes | None" = None, title: str | None = None
) -> "Figure":
    """Draw a measure of every method of a study: a dot for each seed, the mean, and a bar of one
    standard error to each side.

    Args:
        table: The table of a study, or of `bf.table`; for a method with several options, those that
            `Table.chosen` selects.
        metric: A column of the history; None for the personal accuracy, of regressions the personal
            RMSE.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Figure, that of `ax` if given.

    Raises:
        ValueError: No run has such a measure; or see `Table.chosen`.

    Example:
        >>> clients = bf.data.iid("digits", clients=3)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        >>> made = {"FedAvg": bf.algorithms.fedavg(model), "Local": bf.algorithms.local(model)}
        >>> runs = {name: bf.simulate(method, clients, rounds=2) for name, method in made.items()}
        >>> bf.plots.study(bf.table(runs)).axes[0].get_xlabel()
        'personal accuracy'
    """
    summary = table.summary(None if metric is None else [metric])
    there = list(dict.fromkeys(name for values in summary.runs.values() for name in values))
    shown = next((name for name in HEADLINES if name in there), there[0])
    found = {name: values[shown] for name, values in summary.runs.items() if values.get(shown)}
    ax = new_figure((5.6, (0.9 + 0.34 * len(found)))).add_subplot() if ax is None else ax
    for place, (name, values) in enumerate(found.items()):
        mean, error, _ = summary[name][shown]
        ax.plot(values, [place] * len(values), "o", color=GREY, markersize=3.5, alpha=0.7)
        ax.errorbar(
            mean, place, xerr=np.nan_to_num(error), fmt="D", color=BLUE, markersize=5, capsize=3
        )
    ax.set_yticks(range(len(found)), list(found))
    ax.set_ylim(len(found) - 0.5, -0.5)  # the first method on top
    return finish(ax, title, grid="x", xlabel=in_prose(shown))


@literal
def paired(
    table: Any,
    one: str,
    other: str,
    *,
    metric: str | None = None,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Figure":
    """Compare two methods by client: a dot for each client and seed, at its test measures after the
    last round with the two methods.

    A dot's area grows with the client's number of test examples.

    Args:
        table: As of `study`.
        one: The method on the x axis.
        other: The method on the y axis.
        metric: A measure by client, as `nll`; None for the accuracy, of regressions the RMSE.
        ax: Where to draw; by default a new figure.
        title: Title of the axes; by default the number of clients for which the other method is
            better.

    Returns:
        The matplotlib Figure, that of `ax` if given.

    Raises:
        KeyError: The clients have no such measure.
        ValueError: The methods have no seed on the same data, there are no test data, or the table
            has the best rounds; or see `Table.chosen`.

    Example:
        >>> clients = bf.data.iid("digits", clients=3)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        >>> made = {"FedAvg": bf.algorithms.fedavg(model), "Local": bf.algorithms.local(model)}
        >>> runs = {name: bf.simulate(method, clients, rounds=2) for name, method in made.items()}
        >>> bf.plots.paired(bf.table(runs), "FedAvg", "Local", metric="nll").axes[0].get_xlabel()
        'NLL, FedAvg'
    """
    if table.at == "best":
        raise ValueError(
            "clients' measures exist for the last round only, and this table has each run's best "
            "round; use table.chosen(at='last')"
        )
    columns = [[row.clients() for row in pair] for pair in table.pairs(one, other)]
    usual = [name.removeprefix("personal_") for name in HEADLINES]
    shown = (metric or next(name for name in usual if name in columns[0][0])).removeprefix(
        "personal_"
    )

    def of_all(place: int, measure: str) -> np.ndarray:
        return np.concatenate([np.array(pair[place][measure], np.float64) for pair in columns])

    x, y, n = of_all(0, shown), of_all(1, shown), of_all(0, "test_rows")
    known = np.isfinite(x) & np.isfinite(y)  # clients without test data have no measure
    x, y, n = x[known], y[known], n[known]
    ax = new_figure((4.2, 4.2)).add_subplot() if ax is None else ax
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    wins = {"higher": y > x, "lower": y < x}.get(better(shown) or "")
    counted = "" if wins is None else f"{other} better: {int(wins.sum())} of {len(x)}"
    ax.plot(ends, ends, color=INK, linewidth=1, linestyle="--")
    ax.scatter(x, y, s=10 + 50 * n / n.max(), color=BLUE, alpha=0.55, edgecolors="white")
    ax.set_aspect("equal", adjustable="datalim")
    return finish(
        ax,
        counted if title is None else title,
        grid="both",
        xlabel=f"{in_prose(shown)}, {one}",
        ylabel=f"{in_prose(shown)}, {other}",
    )
