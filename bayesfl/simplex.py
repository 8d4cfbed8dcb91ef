"""Quadratic programs over the simplex, many at once and exactly, in float64.

    minimise  a' Q a - 2 b' a   over   a >= 0,  sum a = 1.

Accelerated projected gradient finds the support nearly, an active-set method exactly (Nocedal and Wright, "Numerical optimization", 2nd
edition, 2006, algorithm 16.3): on a support F the equality-constrained minimum is linear algebra, a step towards it stops at the first
weight that would turn negative, and a weight outside enters while its multiplier is negative.
"""

import torch
from torch import Tensor

STEPS = 200  # of projected gradient
TOLERANCE = 1e-12  # of multipliers, in units of the mean diagonal
LEAST = 1e-6  # weights that projected gradient leaves below this start outside the support


def project(v: Tensor) -> Tensor:
    """The nearest points of the simplex to the rows of `v` [..., K], by sorting (Duchi et al., ICML 2008, figure 1)."""
    ordered = v.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    places = torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    last = (ordered - excess / places > 0).sum(-1, keepdim=True)
    return (v - excess.gather(-1, last - 1) / last).clamp_min(0)


def minimise(quadratic: Tensor, linear: Tensor) -> Tensor:
    """The minimisers a [C, K] of C programs with one Q.

    Args:
        quadratic: Q [K, K], symmetric and positive definite.
        linear: b [C, K].

    Raises:
        ValueError: Shapes that don't fit, numbers that are not finite, or Q is not positive definite.
        RuntimeError: The active set did not settle.
    """
    quadratic, linear = quadratic.double(), linear.double()
    if linear.dim() != 2 or quadratic.shape != (linear.shape[1], linear.shape[1]):
        raise ValueError(f"quadratic must be [K, K] and linear [C, K], got {list(quadratic.shape)} and {list(linear.shape)}")
    scale = quadratic.diagonal().mean()
    values = torch.linalg.eigvalsh(quadratic) if bool(quadratic.isfinite().all()) else quadratic.new_tensor([torch.nan])
    if not (bool(linear.isfinite().all()) and bool(values[0] > 0)):
        raise ValueError(f"quadratic must be positive definite and all numbers finite; its least eigenvalue is {float(values[0]):.3g}")
    quadratic, linear = quadratic / scale, linear / scale
    weights = _descended(quadratic, linear, float(values[-1] / scale))
    support = weights > LEAST
    weights = torch.where(support, weights, 0.0)
    return _settled(quadratic, linear, weights / weights.sum(-1, keepdim=True), support)


def kkt(quadratic: Tensor, linear: Tensor, weights: Tensor) -> Tensor:
    """How far `weights` [C, K] are from a minimum, [C], in units of Q's mean diagonal: the worst violation of its conditions.

    With g = Q a - b and nu = a' g they are g - nu >= 0, and 0 where a > 0.
    """
    slope = weights @ quadratic - linear
    multipliers = slope - (weights * slope).sum(-1, keepdim=True)
    worst = torch.maximum((-multipliers).amax(-1), (weights * multipliers).abs().amax(-1))
    off = torch.maximum((weights.sum(-1) - 1).abs(), (-weights).amax(-1))
    return torch.maximum(worst / quadratic.diagonal().mean(), off).clamp_min(0)


def _descended(quadratic: Tensor, linear: Tensor, steepest: float) -> Tensor:
    """Nearly the minimisers, by accelerated projected gradient (Beck and Teboulle, SIAM J. Imaging Sciences 2(1), 2009)."""
    here = point = torch.full_like(linear, 1 / linear.shape[1])
    momentum = 1.0
    for _ in range(STEPS):
        further = project(point - (point @ quadratic - linear) / steepest)
        after = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        point = further + (momentum - 1) / after * (further - here)
        here, momentum = further, after
    return here


def _settled(quadratic: Tensor, linear: Tensor, weights: Tensor, support: Tensor) -> Tensor:
    """The minimisers, from feasible `weights` that are 0 outside `support`, both [C, K]; programs that have arrived drop out."""
    count = linear.shape[1]
    identity = torch.eye(count, dtype=quadratic.dtype, device=quadratic.device)
    done, todo = torch.empty_like(weights), torch.arange(len(weights), device=weights.device)
    for _ in range(20 * count + 20):
        inside, wanted = support.to(quadratic), linear[todo]
        blocks = torch.where(support[:, :, None] & support[:, None], quadratic, identity)
        free, ones = torch.linalg.solve(blocks, torch.stack([wanted * inside, inside], -1)).unbind(-1)
        level = (1 - (free * inside).sum(-1, keepdim=True)) / (ones * inside).sum(-1, keepdim=True)
        target = (free + level * ones) * inside
        # As far as the first weight that would turn negative.
        share = torch.where(target < 0, weights / (weights - target).clamp_min(1e-300), torch.inf)
        step = share.amin(-1, keepdim=True).clamp(max=1.0)
        leaves = (share <= step) & (target < 0)
        weights = torch.where(leaves, 0.0, weights + step * (target - weights))
        support = support & ~leaves
        multipliers = (weights @ quadratic - wanted - level).masked_fill(support, torch.inf)
        least, enters = multipliers.min(-1)
        arrived = ~leaves.any(-1)
        grows = arrived & (least < -TOLERANCE)
        settled = arrived & ~grows
        done[todo[settled]] = weights[settled]
        support = support.scatter(1, enters[:, None], support.gather(1, enters[:, None]) | grows[:, None])
        weights, support, todo = weights[~settled], support[~settled], todo[~settled]
        if not len(todo):
            return done
    raise RuntimeError(f"the active set of {len(linear)} programs of {count} weights did not settle; is the quadratic nearly singular?")
