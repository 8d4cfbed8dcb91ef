"""Curves, one line for each method: a measure against the rounds, and the error rate against the
share of answered examples.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bayesfl.evaluation.detection import RiskCoverage, doubt
from bayesfl.evaluation.detection import risk_coverage as risk_coverage_of
from bayesfl.evaluation.history import HEADLINES
from bayesfl.evaluation.metrics import reliability_bins
from bayesfl.evaluation.plots.inputs import predictions
from bayesfl.evaluation.plots.look import Axes, Figure, finish, lines, literal, new_figure, whole
from bayesfl.evaluation.report import in_prose, mean_and_error

# a risk-coverage curve jumps before this share of the examples; its axis need not reach these peaks
_SETTLED = 0.05


@literal
def learning_curves(
    histories: Mapping[str, Any],
    *,
    metric: str | None = None,
    x: str = "round",
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Figure":
    """Draw a measure against the rounds, one line for each method; for several seeds their mean,
    with a band of one standard error on each side.

    Args:
        histories: {method: a history, or a list of histories, one for each seed}. A history has
            arrays of equal length under `x` and `metric`, as a mapping or data frame, or is a
            result with such a `history`. Rounds without evaluation (NaN) are omitted; for several
            seeds, only rounds evaluated in all of them are drawn.
        metric: Column on the y axis; by default the personal accuracy, for regressions the personal
            RMSE.
        x: Column on the x axis.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Figure, that of `ax` if given.

    Raises:
        KeyError: A history has no such column.
        ValueError: Nothing was evaluated.

    Example:
        >>> clients = bf.data.iid("digits", clients=3)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        >>> made = {"FedAvg": bf.algorithms.fedavg(model), "Local": bf.algorithms.local(model)}
        >>> runs = {name: bf.simulate(method, clients, rounds=2) for name, method in made.items()}
        >>> bf.plots.learning_curves(runs, metric="personal_nll").axes[0].get_ylabel()
        'personal NLL'
    """
    runs: dict[str, list[Any]] = {}
    for name, history in histories.items():
        seeds = history if isinstance(history, list | tuple) else [history]
        runs[name] = [getattr(seed, "history", seed) for seed in seeds]
    # Of a History, a data frame or a mapping.
    columns = [list(getattr(r, "columns", r)) for seeds in runs.values() for r in seeds]
    usual = (measure for measure in HEADLINES if all(measure in keys for keys in columns))
    metric = metric or next(usual, HEADLINES[0])
    ax = new_figure((5.6, 3.6)).add_subplot() if ax is None else ax
    for of, look in zip(runs.values(), lines(runs), strict=True):
        seeds = [_curve(run, x, metric) for run in of]
        common = sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []
        stats = np.array([mean_and_error([seed[at] for seed in seeds]) for at in common])
        ax.plot(
            common,
            stats[:, 0],
            marker="o" if len(common) <= 15 else "",
            markersize=3.5,
            linewidth=1.8,
            **look,
        )
        if len(seeds) > 1:
            low, high = stats[:, 0] - stats[:, 1], stats[:, 0] + stats[:, 1]
            ax.fill_between(common, low, high, color=look["color"], alpha=0.18, linewidth=0)
    if x == "round":
        whole(ax)
    return finish(
        ax,
        title,
        grid="both",
        legend=len(histories) > 1,
        xlabel=in_prose(x),
        ylabel=in_prose(metric),
    )


@literal
def risk_coverage(
    entries: Mapping[str, Any], *, ax: "Axes | None" = None, title: str | None = None
) -> "Figure":
    """Draw the error rate among answered examples against the share answered, most confident first.

    There is one line for each method, over all examples of all clients; lower is better, and the
    right end is the error rate. The legend has the area under each curve (AURC). Geifman, Uziel and
    El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019.

    Args:
        entries: {method: a simulation's result, or (probs, labels, mask)}, with 1 minus the largest
            probability as doubt; or a curve from `bf.detection.risk_coverage` for any other score.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Figure, that of `ax` if given.

    Raises:
        ValueError: An entry does not fit or has no examples.

    Example:
        >>> clients = bf.data.iid("digits", clients=3)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        >>> made = {"FedAvg": bf.algorithms.fedavg(model), "Local": bf.algorithms.local(model)}
        >>> runs = {name: bf.simulate(method, clients, rounds=2) for name, method in made.items()}
        >>> bf.plots.risk_coverage(runs).axes[0].get_xlabel()
        'share of the examples answered'
    """
    curves = {name: _risks(entry) for name, entry in entries.items()}
    ax = new_figure((5.0, 3.6)).add_subplot() if ax is None else ax
    named = [f"{name} (AURC {curve.aurc:.4f})" for name, curve in curves.items()]
    for curve, look in zip(curves.values(), lines(named), strict=True):
        ax.plot(curve.coverage, curve.risk, linewidth=1.8, **look)
    settled = [float(c.risk[c.coverage >= _SETTLED].max()) for c in curves.values()]
    return finish(
        ax,
        title,
        grid="both",
        legend=True,
        xlim=(0, 1),
        ylim=(0, 1.1 * max(0.001, *settled)),
        xlabel="share of the examples answered",
        ylabel="error rate among the answers",
    )


def _curve(history: Any, x: str, metric: str) -> dict[float, float]:
    """Return {round: value} for one seed, without rounds that were not evaluated."""
    at, values = (np.asarray(history[key], dtype=np.float64) for key in (x, metric))
    return {float(a): float(v) for a, v in zip(at, values, strict=True) if np.isfinite(v)}


def _risks(entry: Any) -> RiskCoverage:
    """Return the curve of a result or of (probs, labels, mask), or a given curve."""
    if isinstance(entry, RiskCoverage):
        return entry
    probs, labels, mask = (t.cpu() for t in predictions(entry, None, None))
    reliability_bins(probs, labels, mask)  # raises for invalid input
    return risk_coverage_of(doubt(probs), probs.argmax(-1) == labels, mask)
