"""Calibration of classifiers: the difference between confidence and accuracy, and the bins of a
reliability diagram.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.options import Count, declared
from bayesfl.evaluation.metrics.scores import Scored

Norm: TypeAlias = Literal["l1", "l2", "max"]
"""Aggregation of the calibration gaps of bins: weighted mean, root of the weighted mean square,
maximum.
"""


@declared
def ece(
    probs: Tensor, labels: Tensor, mask: Tensor | None = None, bins: Count = 15, norm: Norm = "l1"
) -> Tensor:
    """Compute the expected calibration error: the difference between confidence, the largest
    probability, and accuracy.

    Examples are binned by confidence; bin k holds (k / bins, (k + 1) / bins], and confidence 0 goes
    to the first. Each bin has a gap |accuracy - mean confidence|, weighted by its share of the
    examples. Guo et al., "On calibration of modern neural networks", ICML 2017, equations 3 and 5.
    Small clients have few examples in a bin, which biases the value upwards: compare clients of
    similar size.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.
        bins: Number of bins of equal width.
        norm: `l1`, the weighted mean of the gaps; `l2`, the root of their weighted mean square;
            `max`, the largest.

    Returns:
        Shape [J], [] of one model, in [0, 1].

    Example:
        >>> probs, y = torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1])
        >>> bf.metrics.ece(probs, y).item()
        0.25
    """
    return calibration_error(Scored.of(probs, labels, mask), bins, norm)


@declared
def mce(probs: Tensor, labels: Tensor, mask: Tensor | None = None, bins: Count = 15) -> Tensor:
    """Compute the maximum calibration error: the largest gap of `ece` over bins that hold an
    example.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.
        bins: Number of bins of equal width.

    Returns:
        Shape [J], [] of one model, in [0, 1].

    Example:
        >>> probs, y = torch.tensor([[0.75, 0.25], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> bf.metrics.mce(probs, y).item()
        0.25
    """
    return calibration_error(Scored.of(probs, labels, mask), bins, "max")


@dataclass(frozen=True)
class ReliabilityBins:
    """Hold the bins of a reliability diagram; bin k contains confidences in (edges[k], edges[k +
    1]], the first also 0.

    Args:
        edges: Bounds of the bins, [bins + 1], from 0 to 1.
        confidence: Mean confidence in each bin, [bins]; NaN in an empty one.
        accuracy: Share of right predictions in each bin, [bins]; NaN in an empty one.
        count: Number of examples in each bin, [bins], integers.

    Example:
        >>> probs, y = torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1])
        >>> bins = bf.metrics.reliability_bins(probs, y, bins=2)
        >>> bins.examples, bins.ece
        (2, 0.25)
    """

    edges: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray

    @property
    def examples(self) -> int:
        """Return the number of examples in all bins."""
        return int(self.count.sum())

    @property
    def ece(self) -> float:
        """Return the expected calibration error of these bins; NaN without examples."""
        gaps = np.abs(self.accuracy - self.confidence)[self.count > 0]
        return (
            float(gaps @ self.count[self.count > 0] / self.examples) if self.examples else math.nan
        )


@declared
def reliability_bins(
    probs: Tensor, labels: Tensor, mask: Tensor | None = None, bins: Count = 15
) -> ReliabilityBins:
    """Compute accuracy and mean confidence by bins of confidence, over all examples of all clients.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.
        bins: Number of bins of equal width.

    Raises:
        ValueError: The prediction of an example is not finite.

    Example:
        >>> probs, y = torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1])
        >>> bins = bf.metrics.reliability_bins(probs, y, bins=2)
        >>> bins.confidence.tolist(), bins.accuracy.tolist(), bins.count.tolist()
        ([nan, 0.75], [nan, 0.5], [0, 2])
    """
    scored = Scored.of(probs, labels, mask)
    if scored.bad.any():
        who = scored.clients.owner[scored.bad].unique().tolist()
        raise ValueError(
            f"clients {who} have predictions that are not "
            "finite: the run diverged (lower its learning rate), or `mask` covers padded rows"
        )
    count, hits, confidence = (t[0].numpy() for t in binned(scored.pooled(), bins))
    with np.errstate(invalid="ignore"):
        return ReliabilityBins(
            np.arange(bins + 1) / bins, confidence / count, hits / count, count.astype(np.int64)
        )


def binned(scored: Scored, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of examples, the number of right predictions and the sum of confidences by
    bins of confidence, [J, bins] each.
    """
    confidence = scored.top[0]
    where, count = bin_of(confidence, bins), scored.clients.count
    return count(where, bins), count(where, bins, scored.hits), count(where, bins, confidence)


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Return the bin of each confidence."""
    return torch.bucketize(confidence, torch.arange(1, bins, dtype=torch.float64) / bins)


def calibration_error(scored: Scored, bins: int, norm: Norm = "l1") -> Tensor:
    """Compute the calibration error of each client, [J]."""
    return scored.of_clients(error_in_bins(*binned(scored, bins), norm))


def error_in_bins(count: Tensor, hits: Tensor, confidence: Tensor, norm: Norm = "l1") -> Tensor:
    """Compute the calibration error, [...], from the results of `binned`, [..., bins] each; NaN
    without examples.
    """
    gap = (hits - confidence).abs() / count.clamp_min(1)
    share = count / count.sum(-1, keepdim=True)
    if norm == "max":
        return torch.where(count.any(-1), gap.amax(-1), math.nan)
    return (share * gap).sum(-1) if norm == "l1" else (share * gap.square()).sum(-1).sqrt()
