"""Measures of predicted intervals."""

import math

from torch import Tensor

from bayesfl.evaluation.metrics.clients import Checked, Segments
from bayesfl.evaluation.metrics.measured import Measured


def measured_intervals(
    clients: Segments,
    lower: Tensor,
    upper: Tensor,
    targets: Tensor,
    middle: Tensor,
    *,
    level: float,
) -> Measured:
    """Compute every measure of the intervals of rows, [R, O] each.

    `rmse` is that of the intervals' middles, `pinball` the loss of both quantiles, summed over
    targets, `coverage` the share of targets inside, and `width` the mean width. `interval_score` is
    the width plus 2 / (1 - level) times the distance of a target outside; it is proper, and equals
    2 / (1 - level) times the loss. Of intervals without end, all but `rmse` and `coverage` are
    infinite.

    Args:
        clients: The rows' clients.
        lower: Lower ends.
        upper: Upper ends, not below these.
        targets: True values.
        middle: The intervals' middles.
        level: Probability that an interval should contain its target, in (0, 1).

    References:
        Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 102,
        2007, eq. 43.
    """
    # Not NaN; a lower end may be -inf, an upper end inf.
    there = ((lower < math.inf) & (upper > -math.inf)).all(-1)
    low, high, y = (t.double().masked_fill(~there[:, None], 0) for t in (lower, upper, targets))
    outside = (low - y).clamp_min(0) + (y - high).clamp_min(0)
    score = high - low + 2 / (1 - level) * outside
    values = {
        "rmse": (y - middle.double()).square().mean(-1),
        "pinball": (0.5 * (1 - level) * score).sum(-1),
        "coverage": (outside == 0).double().mean(-1),
        "width": (high - low).mean(-1),
        "interval_score": score.mean(-1),
    }
    told = Checked(clients, ~there, False).told
    return Measured.of(clients, {name: told(t) for name, t in values.items()})
