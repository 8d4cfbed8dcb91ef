"""Functions that stay accurate at the ends of their range, and passes over long tensors without
copies.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

TIES = {torch.float32: 2.0**-20, torch.float64: 2.0**-46}
"""Largest relative difference between scores that count as equal, by precision: 8 units in the last
place of float32, whose scores may be dense, and 64 of float64.
"""
NUMBERS_AT_ONCE = 2**16
"""Number of entries that are added in one step."""


T = TypeVar("T")


@contextmanager
def own_modes() -> Iterator[None]:
    """Compute in the run's own precision and with gradients, even if the caller is inside
    `autocast` or `inference_mode`; these would apply to this thread but not to the workers.
    """
    grads = torch.is_grad_enabled()  # leaving inference mode enables it
    # Usually neither mode is active, and this check takes a tenth of the time.
    with (
        torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(),
        torch.set_grad_enabled(grads),
        ExitStack() as stack,
    ):
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def in_own_modes(owner: type[T]) -> type[T]:
    """Make all public methods of a class, except class methods, compute in `own_modes`."""
    for name, method in list(vars(owner).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(owner, name, own_modes()(method))
    return owner


def inverse_softplus(scale: Tensor) -> Tensor:
    """Compute the rho with softplus(rho) = `scale`, elementwise, for scales from 1e-12 to beyond
    1e4.

    log(expm1(s)) overflows for large s; s + log(-expm1(-s)) is equal and does not.
    """
    return scale + (-torch.expm1(-scale)).log()


def log_softplus(rho: Tensor) -> Tensor:
    """Compute log(softplus(rho)), elementwise; where softplus would underflow, the result is rho up
    to rounding.

    softplus(rho) = e^rho (1 - e^rho / 2 + ...), so below rho = -15 the logarithm is rho - e^rho /
    2.
    """
    low = rho.clamp(max=-15.0)
    return torch.where(rho < -15.0, low - 0.5 * low.exp(), F.softplus(rho.clamp(min=-15.0)).log())


def add_row(total: Tensor, row: Tensor, weight: float) -> None:
    """Add weight * row [...] to `total` [...] in float64, in pieces, which avoids a float64 copy of
    a long row.
    """
    if row.numel() <= NUMBERS_AT_ONCE or not row.is_contiguous():
        total.add_(row, alpha=weight)
        return
    for into, piece in zip(
        total.view(-1).split(NUMBERS_AT_ONCE), row.view(-1).split(NUMBERS_AT_ONCE), strict=True
    ):
        into.add_(piece.double(), alpha=weight)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype are equal; NaN counts as equal to NaN."""
    return one.shape == other.shape and bool(
        ((one == other) | ((one != one) & (other != other))).all()
    )


def apart(one: Tensor, other: Tensor, share: float, size: float = 0.0) -> bool:
    """Return whether two tensors differ in shape, or by more than `share` times the largest finite
    number of `other` (or times `size` if larger); NaN counts as equal to NaN.
    """
    if one.shape != other.shape or not one.numel():
        return one.shape != other.shape
    alike = (one == other) | ((one != one) & (other != other))
    largest = max(size, float(other.abs().where(other.isfinite(), 0.0).max()))
    return not bool((one - other).abs().where(~alike, 0.0).max() <= share * largest)


def levelled(scores: Tensor, scale: Tensor | float = 0.0, *, among: Tensor | None = None) -> Tensor:
    """Replace scores [..., n] that differ only by rounding, see `TIES`, by the smallest of them, in
    float64; ranks then do not depend on how matrix products are blocked.

    The tolerance is that of float32 if all scores are float32 numbers. A chain of neighbours that
    is longer than one tolerance, as among dense scores, stays unchanged.

    Args:
        scores: The scores, without NaN.
        scale: Size of the terms whose sum is a score; the tolerance is relative to it if it is
            larger than the score.
        among: Group numbers [n] of the scores [n], which are sorted by group, ascending; only
            scores of the same group are merged. None for one group, in any order.
    """
    if not scores.is_floating_point():
        return scores.double()
    scores = scores.double()
    kind = torch.float32 if same(scores.float().double(), scores) else torch.float64
    ordered, order = scores.sort(-1) if among is None else (scores, torch.arange(len(scores)))
    room = TIES[kind] * ordered.abs().clamp_min(scale)
    near = ordered.diff() <= torch.minimum(room[..., 1:], room[..., :-1])
    near &= among is None or among.diff() == 0
    group = torch.cat([torch.zeros_like(order[..., :1]), ~near], -1).cumsum(-1)
    least, most = (
        torch.zeros_like(ordered)
        .scatter_reduce(-1, group, ordered, end, include_self=False)
        .gather(-1, group)
        for end in ("amin", "amax")
    )
    one = torch.where(most - least <= room, least, ordered)
    return torch.empty_like(one).scatter_(-1, order, one)


def finite(t: Tensor) -> bool:
    """Return whether all entries are finite.

    A sum takes one pass and is finite only if all its terms are. Large finite terms may overflow,
    so each entry is checked if the sum is not finite.
    """
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())
