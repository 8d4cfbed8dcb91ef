"""Predictions of several clients, whose labels follow other temperatures and biases."""

import numpy as np
import torch
from torch import Tensor

from bayesfl.evaluation.metrics.clients import Segments
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
    rows = torch.randint(2**62, shape, generator=g)[mask].numpy().astype(np.uint64)
    own = np.array(ids if ids is not None else range(len(counts)))
    return LocalPredictions(*found.rows(), own, seed=3, round=5, rows=rows)


def split(given: LocalPredictions, t: Tensor) -> tuple[Tensor, ...]:
    """What there is of rows [R, ...] as each client's own."""
    return t.split(given.clients.counts.tolist())


def alone(given: LocalPredictions) -> list[tuple[Tensor, Tensor]]:
    """Each client's log probabilities [n, O] and labels [n]."""
    found = given.predictions
    own = zip(split(given, found.probs), split(given, found.labels), strict=True)
    return [(probs.log(), labels) for probs, labels in own]


def part(given: LocalPredictions, j: int) -> LocalPredictions:
    """One client's predictions as its node has them: of its own rows alone."""
    start, n = int(given.clients.starts[j]), int(given.clients.counts[j])
    own = slice(start, start + n)
    return LocalPredictions(
        given.predictions.at(own),
        Segments(torch.tensor([n])),
        given.ids[j : j + 1],
        given.seed,
        given.round,
        rows=given.rows[own],
    )
