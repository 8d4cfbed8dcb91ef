"""Scalar functions that stay accurate at the ends of their range."""

import torch
import torch.nn.functional as F
from torch import Tensor


def inverse_softplus(scale: Tensor) -> Tensor:
    """Compute the rho with softplus(rho) = `scale`, elementwise, for scales from 1e-12 to 1e4 and beyond.

    log(expm1(s)) overflows for large s; s + log(-expm1(-s)) is the same number and does not.
    """
    return scale + (-torch.expm1(-scale)).log()


def log_softplus(rho: Tensor) -> Tensor:
    """Compute log(softplus(rho)), elementwise; it equals rho to rounding where softplus would underflow.

    softplus(rho) = e^rho (1 - e^rho / 2 + ...), so below rho = -15 the logarithm is rho - e^rho / 2.
    """
    low = rho.clamp(max=-15.0)
    return torch.where(rho < -15.0, low - 0.5 * low.exp(), F.softplus(rho.clamp(min=-15.0)).log())
