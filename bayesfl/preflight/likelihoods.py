"""Check of a likelihood: its slope is its derivative."""

import torch
from torch import Tensor

from bayesfl.base.protocols import Likelihood

TOLERANCE = 1e-3
"""Largest difference that is rounding, relative to 1 and the largest number."""


def check_slope(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> None:
    """Check on some examples that `nll_and_slope` equals `nll` and its derivative. It does not if a
    subclass overrides only one of the two.

    Raises:
        ValueError: The two differ.
    """
    y = y.to(outputs) if y.is_floating_point() else y
    shapes = [
        list(t.shape) for t in (likelihood.nll(outputs, y), *likelihood.nll_and_slope(outputs, y))
    ]
    if shapes != [[len(outputs)], [len(outputs)], list(outputs.shape)]:
        raise ValueError(
            f"likelihood {type(likelihood).__name__}: nll returns shape {shapes[0]}, nll_and_slope "
            f"{shapes[1]} and {shapes[2]}, for outputs {list(outputs.shape)}; losses must be one "
            "for each example, as with reduction='none', and slopes must have the outputs' shape"
        )
    with torch.enable_grad():
        at = outputs.detach().requires_grad_()
        nll = likelihood.nll(at, y)
        if not nll.requires_grad:
            return
        (wanted,) = torch.autograd.grad(nll.sum(), at)
    losses, slope = likelihood.nll_and_slope(outputs.detach(), y)
    nll = nll.detach()
    off = max(
        float((slope - wanted).abs().max() / (1 + wanted.abs().max())),
        float(((losses - nll).abs() / (1 + nll.abs())).max()),
    )
    if off > TOLERANCE:
        raise ValueError(
            f"likelihood {type(likelihood).__name__}: nll_and_slope is not nll and its derivative "
            f"at the model's outputs (they differ by up to {off:.3g}); override both in a "
            "subclass, or mend the slope"
        )
