"""Measures of intervals that a network predicts by two quantiles."""

import math
from typing import Annotated

from torch import Tensor

from bayesfl.base.options import PROBABILITY, declared
from bayesfl.evaluation.metrics.clients import Checked, Segments, rows_of_numbers
from bayesfl.evaluation.metrics.measured import Measured


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
    given = {"lower": lower, "upper": upper} | ({} if middle is None else {"middle": middle})
    clients, (low, high, *centre, y) = rows_of_numbers(targets, mask, **given)
    return measured_intervals(clients, low, high, y, *centre, level=level).summary()


def measured_intervals(
    clients: Segments,
    lower: Tensor,
    upper: Tensor,
    targets: Tensor,
    middle: Tensor | None = None,
    *,
    level: float = 0.9,
) -> Measured:
    """Compute every measure of the intervals of rows, [R, O] each.

    Raises:
        ValueError: A lower end is above the upper one.
    """
    # Not NaN; a lower end may be -inf, an upper one inf.
    there = ((lower < math.inf) & (upper > -math.inf)).all(-1)
    low, high, y = (t.double().masked_fill(~there[:, None], 0) for t in (lower, upper, targets))
    if bool((low > high).any()):
        raise ValueError("a lower end is above its upper one; sort the two")
    outside = (low - y).clamp_min(0) + (y - high).clamp_min(0)
    score = high - low + 2 / (1 - level) * outside
    centre = (low + high) / 2 if middle is None else middle.double()
    values = {
        "rmse": (y - centre).square().mean(-1),
        "pinball": (0.5 * (1 - level) * score).sum(-1),
        "coverage": (outside == 0).double().mean(-1),
        "width": (high - low).mean(-1),
        "interval_score": score.mean(-1),
    }
    told = Checked(clients, ~there, False).told
    return Measured.of(clients, {name: told(t) for name, t in values.items()})
