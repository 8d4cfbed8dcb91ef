"""The partial likelihood of a proportional hazards model with Efron's ties, by sums for each time.

At a time t with d tied events, R is the sum over the rows at risk of e^eta (1, x, x x'), and E the
same over the tied rows. Efron's likelihood has, for l = 0, ..., d - 1, the denominators

    phi_l = R - l / d E,

so that loss, slope and Hessian need R, E, d, and the events' own sums alone. R and E are sums over
sites.

Source: Efron, "The efficiency of Cox's likelihood function for censored data", JASA 72, 1977; the
weighted form, and score residuals under ties, as in Therneau and Grambsch, "Modeling survival
data", Springer 2000, sections 3.3 and 7.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors


@dataclass(frozen=True)
class Rows:
    """Hold n rows as the partial likelihood reads them.

    Args:
        design: Their columns, [n, p].
        eta: Their linear predictors, [n].
        weights: How often each counts, [n].
        events: Whether each has an event, [n].
        last: Place of the last time at which each is at risk, [n]; -1 if none.
        times: Number T of times.
    """

    design: Tensor
    eta: Tensor
    weights: Tensor
    events: Tensor
    last: Tensor
    times: int


def shapes(times: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what `moments` returns."""
    width = 1 + columns + columns * (columns + 1) // 2
    return {
        "risk": (times, width),
        "tied": (times, width),
        "n_tied": (times,),
        "weight": (times,),
        "linear": (columns + 1,),
    }


def moments(rows: Rows) -> Tensors:
    """Return the sums of some rows for each time.

    Returns:
        `risk` and `tied` [T, 1 + p + p (p + 1) / 2]: sums of e^eta, e^eta x and the upper half of
        e^eta x x' over the rows at risk and over those with an event; `n_tied` and `weight` [T]:
        number and weight of these; `linear` [1 + p]: the sum of (eta, x) over all events.
    """
    x, w = rows.design, rows.weights
    i, j = torch.triu_indices(x.shape[1], x.shape[1])
    relative = (w * rows.eta.exp()).unsqueeze(1)
    terms = torch.cat([relative, relative * x, relative * x[:, i] * x[:, j]], 1)
    there, died = rows.last >= 0, rows.events

    def at_last(values: Tensor, chosen: Tensor) -> Tensor:
        found = torch.zeros(rows.times, *values.shape[1:], dtype=torch.float64)
        return found.index_add_(0, rows.last[chosen], values[chosen])

    own = torch.cat([rows.eta.unsqueeze(1), x], 1)
    return {
        "risk": at_last(terms, there).flip(0).cumsum(0).flip(0),
        "tied": at_last(terms, died),
        "n_tied": at_last(torch.ones_like(w), died),
        "weight": at_last(w, died),
        "linear": w[died] @ own[died],
    }


@dataclass(frozen=True)
class Hazards:
    """Hold what the denominators of all events say, for each of T times.

    Args:
        loss: Negative log partial likelihood, in nats.
        slope: Its gradient, [p].
        hessian: Its Hessian, [p, p].
        at_risk: The hazard's step w / phi_l, summed over l, and the same times the mean of x under
            phi_l, [T, 1 + p].
        of_tied: The same with each l times l / d, of which tied rows are spared.
        mean: The mean of x in the denominators, [T, p].
    """

    loss: Tensor
    slope: Tensor
    hessian: Tensor
    at_risk: Tensor
    of_tied: Tensor
    mean: Tensor


def hazards(sums: Tensors) -> Hazards:
    """Return the partial likelihood and its parts by sums of `moments` over all rows."""
    tied, p = sums["n_tied"].round().long(), len(sums["linear"]) - 1
    # A line for each event: its time, and its number among those tied there.
    place = torch.arange(len(tied)).repeat_interleave(tied)
    number = torch.arange(len(place)) - (tied.cumsum(0) - tied)[place]
    share = (number / tied[place].double()).unsqueeze(1)
    weight = (sums["weight"] / tied.clamp_min(1))[place]
    phi = sums["risk"][place, : p + 1] - share * sums["tied"][place, : p + 1]
    mean = phi[:, 1:] / phi[:, :1]
    step = (weight / phi[:, 0]).unsqueeze(1)
    steps = torch.cat([step, step * mean], 1)

    def by_time(values: Tensor) -> Tensor:
        found = torch.zeros(len(tied), values.shape[1], dtype=torch.float64)
        return found.index_add_(0, place, values)

    at_risk, of_tied = by_time(steps), by_time(share * steps)
    half = at_risk[:, 0] @ sums["risk"][:, p + 1 :] - of_tied[:, 0] @ sums["tied"][:, p + 1 :]
    i, j = torch.triu_indices(p, p)
    hessian = torch.zeros(p, p, dtype=torch.float64)
    hessian[i, j] = hessian[j, i] = half
    return Hazards(
        loss=weight @ phi[:, 0].log() - sums["linear"][0],
        slope=weight @ mean - sums["linear"][1:],
        hessian=hessian - mean.T @ (weight.unsqueeze(1) * mean),
        at_risk=at_risk,
        of_tied=of_tied,
        mean=by_time(mean / tied[place].unsqueeze(1)),
    )


def score_residuals(rows: Rows, at_risk: Tensor, of_tied: Tensor, mean: Tensor) -> Tensor:
    """Return the slope of the log partial likelihood row by row, [n, p], whose outer products make
    robust errors.

    Args:
        rows: The rows.
        at_risk: As of `Hazards`, of all rows of the baseline.
        of_tied: As of `Hazards`.
        mean: As of `Hazards`.

    Source: Lin and Wei, "The robust inference for the Cox proportional hazards model", JASA 84,
    1989; tied events as in Therneau and Grambsch, section 7.2.
    """
    x, died, last = rows.design, rows.events.unsqueeze(1), rows.last
    before = torch.zeros(1, at_risk.shape[1], dtype=torch.float64)
    met = torch.cat([before, at_risk.cumsum(0)])[last + 1] - died * of_tied[last]
    expected = rows.eta.exp().unsqueeze(1) * (met[:, :1] * x - met[:, 1:])
    return rows.weights.unsqueeze(1) * (died * (x - mean[last]) - expected)
