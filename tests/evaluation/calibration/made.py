"""Predictions of several clients, whose labels follow other temperatures and biases."""

import numpy as np
import torch
from torch import Tensor

from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs

CLASSES = Outputs("classification", 4)


def local(
    counts: tuple[int, ...] = (30, 7, 0, 55),
    classes: int = 4,
    *,
    heat: float = 1.7,
    seed: int = 0,
    ids: tuple[int, ...] | None = None,
) -> LocalPredictions:
    """Clients with so many rows; labels follow softmax(z / heat + b_j), probabilities
    softmax(z).
    """
    g = torch.Generator().manual_seed(seed)
    shape = (len(counts), max(counts))
    z = 2 * torch.randn(*shape, classes, generator=g, dtype=torch.float64)
    bias = 0.7 * torch.randn(len(counts), 1, classes, generator=g, dtype=torch.float64)
    y = torch.multinomial((z / heat + bias).softmax(-1).flatten(0, 1), 1, generator=g).reshape(
        shape
    )
    mask = torch.arange(shape[1]) < torch.tensor(counts)[:, None]
    probs = torch.where(mask[..., None], z.softmax(-1), torch.nan)
    found = Predictions(
        mask=mask, epistemic=torch.zeros(shape), probs=probs, labels=y.masked_fill(~mask, 0)
    )
    rows = torch.randint(2**62, shape, generator=g).numpy().astype(np.uint64)
    return LocalPredictions(
        found, np.array(ids if ids is not None else range(len(counts))), seed=3, round=5, rows=rows
    )


def alone(given: LocalPredictions) -> list[tuple[Tensor, Tensor]]:
    """Each client's log probabilities [n, O] and labels [n]."""
    found, mask = given.predictions, given.predictions.mask
    return [(found.probs[j][mask[j]].log(), found.labels[j][mask[j]]) for j in range(len(mask))]


def part(given: LocalPredictions, j: int) -> LocalPredictions:
    """One client's predictions as its node has them: of its own rows alone."""
    found, inside = given.predictions, given.predictions.mask[j]
    cut = Predictions(
        mask=inside[inside][None],
        epistemic=torch.zeros(1, int(inside.sum())),
        probs=found.probs[j][inside][None],
        labels=found.labels[j][inside][None],
    )
    return LocalPredictions(
        cut,
        given.ids[j : j + 1],
        given.seed,
        given.round,
        rows=given.rows[j : j + 1, inside.numpy()],
    )
