"""Measures of intervals that a network predicts by two quantiles."""

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.options import PROBABILITY, declared
from bayesfl.evaluation.metrics.clients import check_alike, check_shapes
from bayesfl.evaluation.metrics.measured import Measured, average, totals


@declared
def interval_summary(
    lower: Tensor,
    upper: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    level: Annotated[float, PROBABILITY] = 0.9,
    middle: Tensor | None = None,
) -> dict[str, float]:
    """Summarise the intervals that a federation predicts for its targets.

    Args:
        lower: Lower ends, [J, N, O].
        upper: Upper ends, [J, N, O].
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool.
        level: Probability that an interval should hold its target, in (0, 1).
        middle: The intervals' middles, [J, N, O], where these cannot be computed, as those of
            endless intervals; None computes them.

    Returns:
        Means over the clients that have examples. `rmse`: of the intervals' middles. `pinball`: the
        loss of both quantiles, summed over targets. `coverage`: the share of targets inside.
        `width`: the mean width. `interval_score`: the width plus 2 / (1 - level) times what a
        target lies outside, which is proper; it is 2 / (1 - level) times the loss. The same names
        with the prefix `pooled_`: of all clients' examples pooled. An interval may be endless, as
        conformal ones of a client with few rows: then the measures but for `coverage` and `rmse`
        are infinite, and `rmse` is NaN without `middle`.

    References:
        Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 102,
        2007, eq. 43.

    Example:
        >>> low, high = torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[2.0], [3.0]]])
        >>> y, mask = torch.tensor([[1.0, 4.0]]), torch.tensor([[True, True]])
        >>> found = bf.metrics.interval_summary(low, high, y, mask)
        >>> found["coverage"], found["width"]
        (0.5, 2.0)
    """
    return measured_intervals(lower, upper, targets, mask, level=level, middle=middle).summary()


@declared
def interval_table(
    lower: Tensor,
    upper: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    level: Annotated[float, PROBABILITY] = 0.9,
    middle: Tensor | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """Return every measure of `interval_summary` of every client as columns [J], ready for a data
    frame.

    Args:
        lower: Lower ends, [J, N, O].
        upper: Upper ends, [J, N, O].
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool.
        level: Probability that an interval should hold its target, in (0, 1).
        middle: As in `interval_summary`.
        names: Names of the clients, as `clients.client_names`; None for their numbers.

    Returns:
        `client` (names or numbers) and `examples` (integers), `rmse`, `pinball`, `coverage`,
        `width` and `interval_score`.

    Example:
        >>> low, high = torch.tensor([[[0.0]], [[1.0]]]), torch.tensor([[[2.0]], [[3.0]]])
        >>> y, mask = torch.tensor([[1.0], [4.0]]), torch.tensor([[True], [True]])
        >>> found = bf.metrics.interval_table(low, high, y, mask, names=["a", "b"])
        >>> dict(zip(found["client"].tolist(), found["coverage"].tolist()))
        {'a': 1.0, 'b': 0.0}
    """
    found = measured_intervals(lower, upper, targets, mask, level=level, middle=middle)
    return found.table(names)


def measured_intervals(
    lower: Tensor,
    upper: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    level: float = 0.9,
    middle: Tensor | None = None,
) -> Measured:
    """Compute every measure of some clients, as `interval_summary` takes them.

    Raises:
        ValueError: Shapes do not fit, targets are not finite, or a lower end is above the upper
            one.
    """
    lower, upper, targets, mask = (
        torch.as_tensor(t).detach().cpu() for t in (lower, upper, targets, mask)
    )
    targets = targets[..., None] if targets.dim() == 2 and lower.shape[-1] == 1 else targets
    check_alike(lower=lower, upper=upper, targets=targets)
    check_shapes(lower, mask)
    if bool((targets.isfinite().all(-1) < mask).any()):
        raise ValueError(
            "targets must be finite where mask is True; mask the rows that are padding"
        )
    # Not NaN; a lower end may be -inf, an upper one inf.
    there = ((lower < math.inf) & (upper > -math.inf)).all(-1)
    use = (mask & there)[..., None]
    low, high, y = (t.to(torch.float64).masked_fill(~use, 0) for t in (lower, upper, targets))
    if bool((low > high).any()):
        raise ValueError("a lower end is above its upper one; sort the two")
    outside = (low - y).clamp_min(0) + (y - high).clamp_min(0)
    score = high - low + 2 / (1 - level) * outside
    centre = (
        (low + high) / 2
        if middle is None
        else middle.detach().cpu().reshape(low.shape).double().masked_fill(~use, 0)
    )
    examples = {
        "rmse": (y - centre).square().mean(-1),
        "pinball": (0.5 * (1 - level) * score).sum(-1),
        "coverage": (outside == 0).double().mean(-1),
        "width": (high - low).mean(-1),
        "interval_score": score.mean(-1),
    }
    broken = (mask & ~there).any(-1)
    columns = {
        name: average(name, (t * mask).sum(-1), mask.sum(-1)).masked_fill(broken, math.nan)
        for name, t in examples.items()
    }
    without = {name: t.isnan() & mask.any(-1) for name, t in columns.items()}
    sums = {name: totals(t, mask, broken=bool(broken.any())) for name, t in examples.items()}
    return Measured(mask.sum(-1), columns, without, sums)
