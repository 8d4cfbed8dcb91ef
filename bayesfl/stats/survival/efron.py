"""The partial likelihood of a proportional hazards model with Efron's ties, by sums for each time.

At a time t with d tied events, R is the sum over the rows at risk of $e^eta (1, x, x x')$, and E
the same over the tied rows. Efron's likelihood has, for $l = 0, ..., d - 1$, the denominators

    $phi_l = R - l / d E$,

so loss, slope and Hessian need only R, E, d, and the events' own sums. R and E are sums over sites.
Each stratum has its own times, and the likelihood is a product over strata: one of S T times is a
time of a stratum.

Source: Efron, "The efficiency of Cox's likelihood function for censored data", JASA 72, 1977; the
weighted form, and score residuals under ties, as in Therneau and Grambsch, "Modeling survival
data", Springer 2000, sections 3.3 and 7.2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors


@dataclass(frozen=True)
class Rows:
    """Hold n rows for the partial likelihood.

    Args:
        design: Their columns, [n, p].
        eta: Their linear predictors, [n].
        weights: Their weights, [n].
        events: Whether each has an event, [n].
        first: Place of the first time at which each is at risk, [n]; 0 without entry times.
        last: Place of the last one, [n]; first - 1 if there is none.
        stratum: Place of each one's stratum, [n].
        times: Number T of times of a stratum.
        strata: Number S of strata.
    """

    design: Tensor
    eta: Tensor
    weights: Tensor
    events: Tensor
    first: Tensor
    last: Tensor
    stratum: Tensor
    times: int
    strata: int = 1

    @property
    def place(self) -> Tensor:
        """Return the place of each row's last time among those of all strata, [n]."""
        return self.stratum * self.times + self.last

    @property
    def slot(self) -> Tensor:
        """Return the place of each row's stratum, [n], among times with one before the first of
        each stratum.
        """
        return self.stratum * (self.times + 1)


def shapes(times: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `moments` and `squares`."""
    first, half = (times, 1 + columns), (times, columns * (columns + 1) // 2)
    return {
        "risk": first,
        "tied": first,
        "n_tied": (times,),
        "weight": (times,),
        "linear": (1 + columns,),
        "risk_square": half,
        "tied_square": half,
    }


def moments(rows: Rows) -> Tensors:
    """Return the sums of some rows for each time.

    Returns:
        `risk` and `tied` [S T, 1 + p]: sums of $e^eta$ and $e^eta x$ over the rows at risk and over
        those with an event; `n_tied` and `weight` [S T]: number and weight of these; `linear`
        [1 + p]: the sum of (eta, x) over all events.
    """
    x, w, died = rows.design, rows.weights, rows.events
    relative = (w * rows.eta.exp()).unsqueeze(1)
    terms = torch.cat([relative, relative * x], 1)
    own = torch.cat([rows.eta.unsqueeze(1), x], 1)

    def at_events(values: Tensor) -> Tensor:
        return added(values[died], rows.place[died], rows.strata * rows.times)

    return {
        "risk": over_risk_sets(rows, lambda chosen, *slot: added(terms[chosen], *slot)),
        "tied": at_events(terms),
        "n_tied": at_events(torch.ones_like(w)),
        "weight": at_events(w),
        "linear": w[died] @ own[died],
    }


def squares(rows: Rows) -> Tensors:
    """Return the upper halves of the sums of e^eta x x', `risk_square` over the rows at risk and
    `tied_square` over those with an event, [S T, p (p + 1) / 2].
    """
    root = (rows.weights * rows.eta.exp()).sqrt().unsqueeze(1) * rows.design
    i, j = torch.triu_indices(root.shape[1], root.shape[1])

    def by_slot(chosen: Tensor, slot: Tensor, size: int) -> Tensor:
        ordered, order = slot.sort(stable=True)
        parts = root[chosen][order].split(torch.bincount(ordered, minlength=size).tolist())
        return torch.stack([part.T @ part for part in parts])[:, i, j]

    return {
        "risk_square": over_risk_sets(rows, by_slot),
        "tied_square": by_slot(rows.events, rows.place[rows.events], rows.strata * rows.times),
    }


def paired(sums: Tensors, times: int, skip: int) -> Tensors:
    """Return sums of `moments` and `squares` with neighbouring `times` of a baseline joined in
    pairs, from the first on or, with `skip` 1, from the second on. The rows at risk at the first
    time of a pair are at risk at both. If more rows enter than leave, these are the rows with an
    event at the first time or at risk at the second.
    """

    def pairs(name: str) -> tuple[Tensor, Tensor]:
        found = sums[name].unflatten(0, (-1, times))
        around = (0, 0) * (found.dim() - 2) + (skip, (times + skip) % 2)
        whole = torch.nn.functional.pad(found, around).unflatten(1, (-1, 2))
        return whole[:, :, 0].flatten(0, 1), whole[:, :, 1].flatten(0, 1)

    joined = {name: torch.add(*pairs(name)) for name in ("tied", "n_tied", "weight", "tied_square")}
    (risk, later), died = pairs("risk"), pairs("tied")[0]
    entered = (later + died)[:, :1] > risk[:, :1] * (1 + 1e-9)
    for kind in ("", "_square"):
        first, second = pairs("risk" + kind)
        other = second + pairs("tied" + kind)[0]
        joined["risk" + kind] = torch.where(entered, other, first)
    return {**sums, **joined}


def added(values: Tensor, place: Tensor, size: int) -> Tensor:
    """Return the sums of values [n, ...] by place [n], [size, ...]."""
    return torch.zeros(size, *values.shape[1:], dtype=torch.float64).index_add_(0, place, values)


def over_risk_sets(rows: Rows, by_slot: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
    """Return sums over the rows at risk at each time, [S T, ...].

    A row is at risk from its first time to its last: among those that leave from a time on, but
    not among those that enter after it.

    Args:
        rows: The rows.
        by_slot: Function (mask of rows [n], the slot of each, number of slots) -> sums by slot.
    """
    size = rows.strata * (rows.times + 1)
    late = rows.first > 0
    leaving = by_slot(torch.ones_like(late), rows.slot + rows.last + 1, size)
    change = leaving - by_slot(late, (rows.slot + rows.first)[late], size)
    by_stratum = change.unflatten(0, (rows.strata, rows.times + 1))
    return by_stratum.flip(1).cumsum(1).flip(1)[:, 1:].flatten(0, 1)


def hazards(sums: Tensors) -> Tensors:
    """Return the partial likelihood from sums of `moments` over all rows, and terms of its
    denominators for each of S T times.

    Returns:
        `loss`: negative log partial likelihood, in nats; `slope`: its gradient, [p]; `at_risk`: the
        hazard's step $w / phi_l$, summed over l, and the same times the mean of x under $phi_l$,
        [S T, 1 + p]; `of_tied`: the same with each l times $l / d$, the part that tied rows do not
        meet; `variance`: that of the hazard's step, $w / phi_l^2$ summed over l, [S T]; `mean`:
        that of x in the denominators, [S T, p]; `weight`: that of events, [S T]; `outer`: the sum
        of w times the outer products of the means under $phi_l$, [p, p]. The Hessian is the sum of
        $e^eta x x'$ weighted by the hazards' steps, minus `outer`.
    """
    tied = sums["n_tied"].round().long()  # [S T]
    # A line for each event: its time, and its number among those tied there.
    place = torch.arange(len(tied)).repeat_interleave(tied)
    number = torch.arange(len(place)) - (tied.cumsum(0) - tied)[place]
    share = (number / tied[place].double()).unsqueeze(1)
    weight = (sums["weight"] / tied.clamp_min(1))[place]
    phi = sums["risk"][place] - share * sums["tied"][place]
    mean = phi[:, 1:] / phi[:, :1]
    step = (weight / phi[:, 0]).unsqueeze(1)
    steps = torch.cat([step, step * mean], 1)

    def by_time(values: Tensor) -> Tensor:
        return added(values, place, len(tied))

    return {
        "loss": weight @ phi[:, 0].log() - sums["linear"][0],
        "slope": weight @ mean - sums["linear"][1:],
        "at_risk": by_time(steps),
        "of_tied": by_time(share * steps),
        "variance": by_time(step / phi[:, :1])[:, 0],
        "weight": sums["weight"],
        "mean": by_time(mean / tied[place].unsqueeze(1)),
        "outer": mean.T @ (weight.unsqueeze(1) * mean),
    }


def hessian(found: Tensors, sums: Tensors) -> Tensor:
    """Return the Hessian of `hazards`' loss, [p, p], from sums of `squares` over all rows."""
    at_risk, of_tied = found["at_risk"][:, 0], found["of_tied"][:, 0]
    half = at_risk @ sums["risk_square"] - of_tied @ sums["tied_square"]
    square = torch.zeros_like(found["outer"])
    i, j = torch.triu_indices(*square.shape)
    square[i, j] = square[j, i] = half
    return square - found["outer"]


def hessian_of(found: Tensors, rows: Rows) -> Tensor:
    """Return the same from the rows themselves, if they are in one place."""
    relative = rows.weights * rows.eta.exp() * hazard_met(rows, found)[:, 0]
    return rows.design.T @ (relative.unsqueeze(1) * rows.design) - found["outer"]


def hazard_met(rows: Rows, baseline: Tensors) -> Tensor:
    """Return the sums of the steps of `hazards` while each row was at risk, [n, 1 + p]."""
    by_stratum = baseline["at_risk"].unflatten(0, (rows.strata, rows.times)).cumsum(1)
    until = torch.nn.functional.pad(by_stratum, (0, 0, 1, 0)).flatten(0, 1)
    met = until[rows.slot + rows.last + 1] - until[rows.slot + rows.first]
    return met - rows.events.unsqueeze(1) * baseline["of_tied"][rows.place]


def score_residuals(rows: Rows, baseline: Tensors) -> Tensor:
    """Return the slope of the log partial likelihood by row, [n, p]; its outer products give robust
    errors.

    Args:
        rows: The rows.
        baseline: The result of `hazards` for all rows of the baseline.

    Source: Lin and Wei, "The robust inference for the Cox proportional hazards model", JASA 84,
    1989; tied events as in Therneau and Grambsch, section 7.2.
    """
    x, met = rows.design, hazard_met(rows, baseline)
    expected = rows.eta.exp().unsqueeze(1) * (met[:, :1] * x - met[:, 1:])
    observed = rows.events.unsqueeze(1) * (x - baseline["mean"][rows.place])
    return rows.weights.unsqueeze(1) * (observed - expected)
