"""Clients and their rows: checks of padded input, pooling of all examples, and summaries over
clients.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def pool(probs: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pool all examples of all clients: [J, N, *] becomes [1, J * N, *], for any measure of
    `bayesfl.metrics`.

    Args:
        probs: Predictions, [J, N, O].
        labels: True classes, [J, N], or targets, [J, N, O].
        mask: Which rows are examples, [J, N] bool.

    Returns:
        The three tensors of one client.

    Example:
        >>> probs = torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]])  # two clients of one example
        >>> labels, mask = torch.tensor([[0], [0]]), torch.ones(2, 1, dtype=torch.bool)
        >>> bf.metrics.accuracy(*bf.metrics.pool(probs, labels, mask)).tolist()
        [0.5]
    """
    return probs.flatten(0, 1)[None], labels.flatten(0, 1)[None], mask.flatten(0, 1)[None]


def pooled(
    measure: Callable[..., Tensor], probs: Tensor, labels: Tensor, mask: Tensor, **options: Any
) -> float:
    """Compute a measure of all clients' examples together, as in `pooled(ece, probs, labels, mask,
    bins=10)`.

    Args:
        measure: A function of `bayesfl.metrics` that takes `probs`, `labels` and `mask`.
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        options: Further arguments of `measure`.

    Example:
        >>> probs = torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]])  # two clients of one example
        >>> labels, mask = torch.tensor([[0], [0]]), torch.ones(2, 1, dtype=torch.bool)
        >>> round(bf.metrics.pooled(bf.metrics.ece, probs, labels, mask, bins=10), 2)
        0.35
    """
    return float(measure(*pool(probs, labels, mask), **options))


def bottom_decile(values: Tensor | np.ndarray) -> float:
    """Return the lowest decile over clients: of J values in ascending order, the one at position
    floor(J / 10), counted from 0.

    Marfoq et al., "Federated multi-task learning under a mixture of distributions", NeurIPS 2021,
    report it so. It suits measures of which more is better.

    Args:
        values: One value for each client, [J]; NaN is left out.

    Returns:
        The value; NaN if all values are NaN or there are none.

    Raises:
        ValueError: `values` is not of shape [J].

    Example:
        >>> bf.metrics.bottom_decile(torch.arange(20.0))
        2.0
    """
    values = torch.as_tensor(values).detach().to("cpu", torch.float64)
    if values.dim() != 1:
        raise ValueError(f"values must be one number a client, [J]; got shape {list(values.shape)}")
    ordered = values[~values.isnan()].sort().values
    return float(ordered[len(ordered) // 10]) if len(ordered) else math.nan


def as_clients(predictions: Any, truths: Any, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictions, labels or targets and mask as tensors; without a mask the arrays of one
    model, [N] or [N, O], as those of one client.

    Raises:
        ValueError: Predictions of clients, [J, N, O], have no mask.
    """
    predictions, truths = torch.as_tensor(predictions), torch.as_tensor(truths)
    if mask is not None:
        return predictions, truths, torch.as_tensor(mask)
    if predictions.dim() > 2:
        raise ValueError(
            "predictions of clients [J, N, O] need a mask [J, N], True where a row is an example; "
            f"those of one model are [N, O], got {list(predictions.shape)}"
        )
    predictions = predictions.unsqueeze(-1) if predictions.dim() == 1 else predictions
    return predictions[None], truths[None], torch.ones(1, len(predictions), dtype=torch.bool)


def check_alike(**numbers: Tensor) -> None:
    """Check that tensors are numbers of the same outputs, [J, N, O] each.

    Raises:
        ValueError: They have other shapes; the targets of one output alone may be [J, N].
    """
    shapes = {name: list(t.shape) for name, t in numbers.items()}
    if any(len(shape) != 3 or shape != next(iter(shapes.values())) for shape in shapes.values()):
        raise ValueError(
            f"{', '.join(shapes)} must be [J, N, O], a row of outputs for each example, targets of "
            f"one output [J, N] too; got {shapes}"
        )


def check_shapes(predictions: Tensor, mask: Tensor, **others: Tensor) -> None:
    """Check that `mask` and `others` have one entry for each row of `predictions` [J, N, O].

    Raises:
        ValueError: `mask` or one of `others` has another shape, or the mask is not bool.
    """
    rows = predictions.shape[:2]
    for name, value in {**others, "mask": mask}.items():
        if value.shape != rows:
            raise ValueError(
                f"{name} must be [J, N] = {list(rows)}, one entry for each row of predictions; got "
                f"shape {list(value.shape)}"
            )
    if mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be bool, True where a row is an example; got {mask.dtype}, use mask.bool()"
        )
