"""Clients and their rows: sums by client, checks of padded input, pooling of all examples, and
summaries over clients.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Describe the rows of J clients, one client's after another's, without padding.

    Args:
        counts: Number of each client's rows, [J] int64.

    Example:
        >>> from bayesfl.evaluation.metrics.clients import Segments
        >>> clients = Segments(torch.tensor([2, 0, 1]))
        >>> clients.owner.tolist()
        [0, 0, 2]
        >>> clients.sum(torch.tensor([1.0, 2.0, 5.0])).tolist()
        [3.0, 0.0, 5.0]
        >>> clients.mean(torch.tensor([1.0, 2.0, 5.0])).tolist()
        [1.5, nan, 5.0]
    """

    counts: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def owner(self) -> Tensor:
        """Return the index of each row's client, [R] int64."""
        return torch.repeat_interleave(self.counts)

    @cached_property
    def starts(self) -> Tensor:
        """Return the index of each client's first row, [J] int64."""
        return self.counts.cumsum(0) - self.counts

    def sum(self, values: Tensor) -> Tensor:
        """Sum values [R, ...] over each client's rows: [J, ...] in float64."""
        out = torch.zeros(len(self), *values.shape[1:], dtype=torch.float64)
        return out.index_add_(0, self.owner, values.double())

    def mean(self, values: Tensor, among: Tensor | None = None) -> Tensor:
        """Average values [R] over each client's rows: [J] in float64, NaN for a client without
        rows.

        Args:
            values: The values.
            among: Which rows count, [R] bool; None for all.
        """
        if among is None:
            return self.sum(values) / self.counts
        return self.sum(values.double().masked_fill(~among, 0)) / self.sum(among)

    def count(self, place: Tensor, size: int, weight: Tensor | None = None) -> Tensor:
        """Sum `weight` [R] of each client's rows by `place` [R] in [0, size): [J, size] in float64;
        without weights, count the rows.
        """
        index = self.owner * size + place
        weights = None if weight is None else weight.double()
        return torch.bincount(index, weights, len(self) * size).double().view(-1, size)

    def kept(self, inside: Tensor) -> "Segments":
        """Return the clients of the rows that are `inside`, [R] bool."""
        return Segments(self.sum(inside).long())

    def order(self, values: Tensor) -> Tensor:
        """Return the indices that sort rows by values [R], ascending, within each client."""
        order = values.argsort(stable=True)
        return order[self.owner[order].argsort(stable=True)]

    def padded(self, values: Tensor, fill: float) -> Tensor:
        """Return values [R, ...] with an axis of clients, [J, N, ...], padded to the largest
        client.
        """
        width = int(self.counts.max()) if len(self) else 0
        inside = torch.arange(width) < self.counts[:, None]
        out = values.new_full((*inside.shape, *values.shape[1:]), fill)
        out[inside] = values
        return out


@dataclass(frozen=True)
class Checked:
    """Hold checked predictions of rows; measures are NaN where a prediction is not finite.

    Args:
        clients: The rows' clients.
        bad: Which rows have a prediction that is not finite, [R] bool.
        single: Whether they are arrays of one model, for which a measure is one number.
    """

    clients: Segments
    bad: Tensor
    single: bool

    def told(self, values: Tensor) -> Tensor:
        """Return values of examples, [R] in float64; NaN for `bad` ones."""
        return values.double().masked_fill(self.bad, math.nan)

    def average(self, values: Tensor) -> Tensor:
        """Average values [R] over each client's examples: [J], [] for one model."""
        return self.of_clients(self.clients.mean(self.told(values)))

    def of_clients(self, values: Tensor) -> Tensor:
        """Return values [J, ...], NaN for clients with a bad prediction; without the first axis for
        one model.
        """
        values[self.clients.sum(self.bad) > 0] = math.nan
        return values[0] if self.single else values


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


def bottom_decile(values: Tensor | np.ndarray) -> float:
    """Return the lowest decile over clients: of J values in ascending order, the one at position
    floor(J / 10), counted from 0.

    This is the definition of Marfoq et al., "Federated multi-task learning under a mixture of
    distributions", NeurIPS 2021. It is for measures whose larger values are better.

    Args:
        values: One value for each client, [J]; NaN is ignored.

    Returns:
        The value; NaN if all values are NaN or there are none.

    Raises:
        ValueError: `values` is not of shape [J].

    Example:
        >>> bf.metrics.bottom_decile(torch.arange(20.0))
        2.0
    """
    values = torch.as_tensor(values).detach().to("cpu", torch.float64)
    ordered = values[~values.isnan()].sort().values
    return float(ordered[len(ordered) // 10]) if len(ordered) else math.nan


def as_clients(predictions: Any, truths: Any, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictions, labels or targets, and mask as tensors; without a mask, the arrays of one
    model, [N] or [N, O], become those of one client.
    """
    predictions, truths = torch.as_tensor(predictions), torch.as_tensor(truths)
    if mask is not None:
        return predictions, truths, torch.as_tensor(mask)
    predictions = predictions.unsqueeze(-1) if predictions.dim() == 1 else predictions
    return predictions[None], truths[None], torch.ones(1, len(predictions), dtype=torch.bool)


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
