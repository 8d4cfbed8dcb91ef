"""Clients, a network and questions after training, and numbers by which answers are known."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

import bayesfl as bf
from bayesfl.base.archive import digest_of_tensors
from bayesfl.base.trees import flatten
from bayesfl.data import FederatedData

STEPS = (bf.calibration.Temperature(), bf.calibration.Bias(), bf.calibration.Conformal())
ABSTAINING = (bf.calibration.Abstention(risk=0.6),)


@cache
def clients(count: int = 3) -> FederatedData:
    """Clients with rows for every question."""
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randn(60 + 20 * j, 4, generator=rng) for j in range(count)]
    rules = [torch.tensor([1.0, -1.0, 0.5, 0.0]) + 0.5 * torch.randn(4, generator=rng) for _ in xs]
    ys = [(x @ rule > 0).long() for x, rule in zip(xs, rules, strict=True)]
    return bf.data.from_arrays(xs, ys, validation=0.3, calibration=0.2)


def network() -> torch.nn.Module:
    """The same network each time."""
    torch.manual_seed(0)
    return bf.models.mlp(4, hidden=3, outputs=2)


def digest(tensors: Any) -> str:
    """The first digits of the digest of a nest's tensors."""
    found = {name: t.cpu() for name, t in flatten(tensors).items() if isinstance(t, Tensor)}
    return digest_of_tensors("", found)[:12]


def number(tensors: Any) -> float:
    """A sum over a nest's tensors that knows the places of their entries."""
    found = [t for _, t in sorted(flatten(tensors).items()) if isinstance(t, Tensor)]
    flat = torch.cat(
        [torch.zeros(1).double(), *(t.detach().double().cpu().flatten() for t in found)]
    )
    flat = torch.where(flat.isfinite(), flat, 7.0)
    return float(flat @ torch.arange(len(flat)).double().cos())
