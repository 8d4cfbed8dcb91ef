"""Federations of predicted probabilities and labels."""

import math

import torch
from torch import Tensor


def federation(
    clients: int = 5, rows: int = 60, outputs: int = 4, seed: int = 0, sharpness: float = 3.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities that claim too much, of clients of different sizes; padded rows are NaN with
    label -1.
    """
    rng = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(clients, rows, outputs, generator=rng, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=rng).view(
        clients, rows
    )
    mask = torch.arange(rows) < torch.linspace(rows // 3, rows, clients).long()[:, None]
    probs = (sharpness * logits).softmax(-1)
    return probs.masked_fill(~mask[..., None], math.nan), labels.masked_fill(~mask, -1), mask


def certain(rows: int, clients: int = 1, p: float = 0.9) -> tuple[Tensor, Tensor, Tensor]:
    """Two classes, the first always right with probability p."""
    probs = torch.tensor([p, 1 - p], dtype=torch.float64).expand(clients, rows, 2)
    return (
        probs,
        torch.zeros(clients, rows, dtype=torch.long),
        torch.ones(clients, rows, dtype=torch.bool),
    )
