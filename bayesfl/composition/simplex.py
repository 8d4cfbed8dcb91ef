"""Quadratic programs over the simplex, many at once, solved exactly in float64.

    minimise $a' Q a - 2 b' a$ over $a >= 0$, $sum a = 1$.

Accelerated projected gradient finds the support approximately. On a support F the
equality-constrained minimum is linear algebra; block pivoting exchanges all weights in F that are
negative there and all outside whose multiplier is negative (Kim and Park, "Fast nonnegative matrix
factorization: an active-set-like method and comparisons", SIAM J. Scientific Computing 33(6), 2011,
section 4). It usually ends after a few exchanges. If the number of wrong weights does not fall,
only the last of them changes sides, which also ends (Murty's rule).
"""

import torch
from torch import Tensor

MOST_STEPS = 80  # steps of projected gradient
TOLERANCE = 1e-12  # multipliers above minus this count as >= 0, in units of Q's mean diagonal
SMALLEST = 1e-6  # weights that projected gradient leaves below this start outside the support
EXCHANGES = 20  # most exchanges of block pivoting, for each weight
BYTES = 2**26  # bytes of the matrices that are solved at once


def project(v: Tensor) -> Tensor:
    """Return the points of the simplex nearest to the rows of `v` [..., K], by sorting (Duchi et
    al., ICML 2008, figure 1).
    """
    ordered = v.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    places = torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    last = (ordered - excess / places > 0).sum(-1, keepdim=True)
    return (v - excess.gather(-1, last - 1) / last).clamp_min(0)


def minimise(quadratic: Tensor, linear: Tensor) -> Tensor:
    """Return the minimisers a [C, K] of C programs with one Q.

    Args:
        quadratic: Q [K, K], symmetric and positive definite.
        linear: b [C, K].

    Raises:
        RuntimeError: The active-set method did not end within its limit of steps.
    """
    quadratic, linear = quadratic.double(), linear.double()
    scale = quadratic.diagonal().mean()
    steepest = float(torch.linalg.eigvalsh(quadratic)[-1] / scale)
    quadratic, linear = quadratic / scale, linear / scale
    weights = _descended(quadratic, linear, steepest)
    return _pivoted(quadratic, linear, weights > SMALLEST)


def _descended(quadratic: Tensor, linear: Tensor, steepest: float) -> Tensor:
    """Approximate the minimisers by accelerated projected gradient (Beck and Teboulle, SIAM J.
    Imaging Sciences 2(1), 2009).
    """
    here = point = torch.full_like(linear, 1 / linear.shape[1])
    momentum = 1.0
    for _ in range(MOST_STEPS):
        further = project(point - (point @ quadratic - linear) / steepest)
        after = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        point = further + (momentum - 1) / after * (further - here)
        here, momentum = further, after
    return here


def _on_support(quadratic: Tensor, linear: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """Return each program's minimum over weights that are 0 outside its `support` [C, K] and sum to
    1, and its level nu [C, 1].

    Programs with supports of the same size are solved together, as many at once as fit into a block
    of memory.
    """
    out, level = torch.zeros_like(linear), linear.new_zeros(len(linear), 1)
    sizes = support.sum(-1)
    for size in sizes.unique().tolist():
        for rows in (sizes == size).nonzero().flatten().split(max(1, BYTES // (8 * size**2))):
            places = support[rows].nonzero()[:, 1].view(-1, size)
            blocks = quadratic[places[:, :, None], places[:, None]]
            own = linear[rows].gather(1, places)
            sides = torch.stack([own, torch.ones_like(own)], -1)
            free, ones = torch.linalg.solve(blocks, sides).unbind(-1)
            nu = (1 - free.sum(-1, keepdim=True)) / ones.sum(-1, keepdim=True)
            out[rows] = torch.zeros_like(linear[rows]).scatter(1, places, free + nu * ones)
            level[rows] = nu
    return out, level


def _pivoted(quadratic: Tensor, linear: Tensor, support: Tensor) -> Tensor:
    """Return the minimisers [C, K] by block pivoting; solved programs are removed."""
    done, todo = torch.zeros_like(linear), torch.arange(len(linear), device=linear.device)
    fewest = torch.full_like(todo, linear.shape[1] + 1)
    for _ in range(EXCHANGES * linear.shape[1] + EXCHANGES):
        target, level = _on_support(quadratic, linear[todo], support)
        slope = target @ quadratic - linear[todo] - level
        wrong = torch.where(support, target < 0, slope < -TOLERANCE)
        count = wrong.sum(-1)
        settled = count == 0
        done[todo[settled]] = target[settled]
        # Unless there are fewer wrong weights than ever before, only the last of them changes
        # sides.
        last = (wrong * torch.arange(1, wrong.shape[1] + 1, device=wrong.device)).argmax(
            -1, keepdim=True
        )
        alone = torch.zeros_like(wrong).scatter(1, last, True)
        better = count < fewest
        fewest = torch.minimum(count, fewest)
        changed = support ^ torch.where(better[:, None], wrong, wrong & alone)
        support = torch.where(changed.any(-1, keepdim=True), changed, support)
        support, todo, fewest = support[~settled], todo[~settled], fewest[~settled]
        if not len(todo):
            return done
    raise RuntimeError(
        f"{len(todo)} programs of {linear.shape[1]} weights did not settle; is the quadratic "
        "nearly singular?"
    )
