"""Made-up predictions with which measures are tested."""

import math

import torch
from torch import Tensor

from bayesfl.evaluation import metrics

CLASSIFICATION = {
    "accuracy": metrics.accuracy,
    "nll": metrics.nll,
    "brier": metrics.brier,
    "ece": metrics.ece,
    "mce": metrics.mce,
    "macro_f1": metrics.macro_f1,
    "auroc": metrics.auroc,
}


def federation(
    clients: int = 5, rows: int = 60, outputs: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random predictions that know something, of clients of different sizes; padded rows are NaN
    with label -1.
    """
    rng = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(clients, rows, outputs, generator=rng, dtype=torch.float64)
    probs = logits.softmax(-1)
    labels = torch.multinomial((0.7 * logits).softmax(-1).flatten(0, 1), 1, generator=rng).view(
        clients, rows
    )
    mask = torch.arange(rows) < torch.linspace(rows // 3, rows, clients).long()[:, None]
    return probs.masked_fill(~mask[..., None], math.nan), labels.masked_fill(~mask, -1), mask


def each(probs: Tensor, labels: Tensor, mask: Tensor):
    """Predictions and labels of each client, without padding."""
    return [(p[m], y[m]) for p, y, m in zip(probs, labels, mask, strict=True)]


def one(rows: list[list[float]], labels: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A federation of one client without padding."""
    return (
        torch.tensor([rows]),
        torch.tensor([labels]),
        torch.ones(1, len(labels), dtype=torch.bool),
    )


def regression(outputs: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gaussian predictions and targets of 4 clients; padded rows are NaN."""
    rng = torch.Generator().manual_seed(3)
    mean, noise = torch.randn(2, 4, 50, outputs, generator=rng, dtype=torch.float64)
    variance = 0.1 + torch.rand(4, 50, outputs, generator=rng, dtype=torch.float64)
    mask = torch.arange(50) < torch.tensor([50, 30, 20, 41])[:, None]
    targets = mean + 1.2 * variance.sqrt() * noise
    pad = ~mask[..., None]
    return (
        mean.masked_fill(pad, math.nan),
        variance.masked_fill(pad, -1),
        targets.masked_fill(pad, math.nan),
        mask,
    )
