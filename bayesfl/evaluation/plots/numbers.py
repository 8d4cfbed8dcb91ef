"""Diagrams of predicted numbers: measured against nominal coverage."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.evaluation.metrics import coverage, pool
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

LEVELS = np.linspace(0.05, 0.95, 19)
"""Probabilities of the intervals whose coverage is drawn."""


@literal
def interval_reliability(
    source: Any,
    *,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Figure":
    """Draw the coverage of central intervals against the nominal coverage.

    The blue line is for all targets pooled, grey lines are for each client. Below the diagonal
    intervals are too narrow, above it too wide. If predictions are calibrated and examples
    independent, the blue line lies in the band with probability 0.95 at each level. Kuleshov,
    Fenner, Ermon, "Accurate uncertainties for deep learning using calibrated regression", ICML
    2018.

    Args:
        source: A simulation's result, for its personal predictions on test data under the
            distribution of its likelihood; or (mean, variance, targets, mask) of normal
            predictions, as for `bayesfl.metrics.coverage`.
        ax: Where to draw; by default a new figure.
        title: Of the diagram.

    Returns:
        The matplotlib Figure, that of `ax` if given.

    Raises:
        ValueError: The shapes do not fit.

    Example:
        >>> mean, variance = torch.zeros(1, 50, 1), torch.ones(1, 50, 1)
        >>> given = (mean, variance, torch.randn(1, 50), torch.ones(1, 50, dtype=torch.bool))
        >>> bf.plots.interval_reliability(given).axes[0].get_xlabel()
        'probability of the interval'
    """
    mean, variance, targets, mask, kind = _predictions(source)
    targets = targets[..., None] if targets.dim() == mean.dim() - 1 else targets
    pooled_mean, pooled_targets, everyone = pool(mean, targets, mask)
    pooled = (pooled_mean, variance.flatten(0, 1)[None], pooled_targets, everyone)

    def shares(mean: Tensor, variance: Tensor, targets: Tensor, mask: Tensor) -> np.ndarray:
        return torch.stack(
            [coverage(mean, variance, targets, mask, float(p), distribution=kind) for p in LEVELS],
            -1,
        ).numpy()

    ax = new_figure((4.0, 3.9)).add_subplot() if ax is None else ax
    together, count = shares(*pooled)[0], int(mask.sum())
    wide = 1.96 * np.sqrt(LEVELS * (1 - LEVELS) / count)
    ax.fill_between(
        LEVELS,
        LEVELS - wide,
        LEVELS + wide,
        color="0.9",
        linewidth=0,
        label="by chance, level 0.95",
        gid="chance",
    )
    for j, line in enumerate(shares(mean, variance, targets, mask)[mask.any(-1).numpy()]):
        ax.plot(
            LEVELS,
            line,
            color=GREY,
            linewidth=0.6,
            alpha=0.7,
            label=None if j else "each client",
            gid="client",
        )
    ax.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), color=INK, linewidth=1, gid="diagonal")
    ax.plot(
        LEVELS, together, color=BLUE, marker="o", markersize=3, label="all targets", gid="pooled"
    )
    number = f"n = {count:,}".replace(",", "\u2009")
    ax.text(0.97, 0.04, number, transform=ax.transAxes, ha="right", va="bottom", fontsize="small")
    return finish(
        ax,
        title,
        grid="both",
        legend=True,
        xlim=(0, 1),
        ylim=(0, 1),
        ylabel="share of targets inside",
        xlabel="probability of the interval",
    )


def _predictions(source: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """Return means, variances, targets, mask and the distribution, from a result or from the
    arguments.
    """
    if hasattr(source, "predict") and hasattr(source, "data"):
        found = source.predict(source.data.test)
        kind = getattr(found.likelihood, "distribution", "normal")
        return found.mean, found.variance, found.labels, found.mask, kind
    mean, variance, targets, mask = (torch.as_tensor(t) for t in source[:4])
    return mean, variance, targets, mask, source[4] if len(source) > 4 else "normal"
