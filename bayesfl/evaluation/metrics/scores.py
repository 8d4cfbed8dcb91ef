"""Measures of predicted classes: accuracy, likelihood, Brier score, F1 score and area under the ROC
curve, client by client.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bayesfl.base.numerics import levelled
from bayesfl.evaluation.metrics.clients import as_clients, check_shapes, pool


def accuracy(probs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the share of examples whose most probable class is the true one.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.

    Returns:
        Shape [J], [] of one model, in [0, 1].

    Example:
        >>> probs, y = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0])
        >>> bf.metrics.accuracy(probs, y).item()
        0.5
        >>> bf.metrics.accuracy(probs[None], y[None], torch.tensor([[True, False]])).tolist()
        [1.0]
    """
    return Scored.of(probs, labels, mask).accuracy()


def nll(probs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the mean negative log probability of the true class, in nats per example.

    A probability below the smallest normal float64 counts as that, 2.2e-308: a certain and wrong
    prediction costs 708.4 nats, not inf.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.

    Returns:
        Shape [J], [] of one model, >= 0.

    Example:
        >>> probs, y = torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([0, 1])
        >>> round(bf.metrics.nll(probs, y).item(), 3)  # (log 2 + log 4) / 2
        1.04
    """
    return Scored.of(probs, labels, mask).nll()


def brier(probs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the Brier score: squared error of the probabilities, summed over classes and averaged
    over examples.

    Brier, "Verification of forecasts expressed in terms of probability", Monthly Weather Review
    1950. With two classes it is twice the score that counts only one of them.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.

    Returns:
        Shape [J], [] of one model, in [0, 2].

    Example:
        >>> bf.metrics.brier(torch.tensor([[0.75, 0.25]]), torch.tensor([0])).item()
        0.125
    """
    return Scored.of(probs, labels, mask).brier()


def macro_f1(probs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the F1 score averaged over the classes that occur among a client's labels or
    predictions.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.

    Returns:
        Shape [J], [] of one model, in [0, 1].

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
        >>> round(bf.metrics.macro_f1(probs, torch.tensor([0, 1, 1])).item(), 3)
        0.667
    """
    return Scored.of(probs, labels, mask).macro_f1()


def auroc(probs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the area under the ROC curve: the probability that a positive example scores above a
    negative one, ties counting half.

    With two classes the score is the probability of class 1. With more it is one class against the
    rest, averaged over the classes of which a client has both positives and negatives. NaN for a
    client without such a class.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.

    Returns:
        Shape [J], [] of one model, in [0, 1] or NaN.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
        >>> bf.metrics.auroc(probs, torch.tensor([0, 0, 1])).item()
        0.5
    """
    return Scored.of(probs, labels, mask).auroc()


@dataclass(frozen=True)
class Scored:
    """Checked predictions of classes, with zeros in every row that is padding or not finite."""

    probs: Tensor  # [J, N, O]
    labels: Tensor  # [J, N]
    mask: Tensor  # [J, N]
    broken: Tensor  # [J], clients with a prediction that is not finite
    single: bool = False  # whether they are of one model, of which a measure is one number

    @classmethod
    def of(cls, probs: Tensor, labels: Tensor, mask: Tensor | None) -> "Scored":
        """Check predictions, labels and mask, and make a `Scored` of them; without a mask those of
        one model, [N, O] and [N].

        Raises:
            ValueError: The shapes or types do not fit, or a label or probability is out of range;
                the message names the remedy.
        """
        single = mask is None
        probs, labels, mask = (t.detach().cpu() for t in as_clients(probs, labels, mask))
        if probs.dim() != 3 or not probs.shape[-1]:
            raise ValueError(
                "probs must be [J, N, O], one row of class probabilities per example; got shape "
                f"{list(probs.shape)}"
                + "; of several labels of each example take predictions.places()"
                * (probs.dim() == 4)
            )
        check_shapes(probs, mask, labels=labels)
        integers = not (labels.is_floating_point() or labels.dtype == torch.bool)
        kind, labels, outputs = labels.dtype, labels.long().masked_fill(~mask, 0), probs.shape[-1]
        lowest, highest = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
        if not integers or lowest < 0 or highest >= outputs:
            raise ValueError(
                f"labels must be integers in [0, {outputs}), the classes that probs has columns "
                f"for; got {lowest} to {highest} in {kind}. Number the classes from 0, use "
                "labels.long(), or mask the rows that are padding."
            )
        finite = (probs < math.inf).all(-1)  # -inf is a log probability, and refused below
        exact = probs.dtype if probs.is_floating_point() else torch.float64
        probs = probs.to(torch.float64).masked_fill(~(mask & finite)[..., None], 0)
        least, most = (float(probs.min()), float(probs.max())) if probs.numel() else (0.0, 1.0)
        total = probs.sum(-1)[mask & finite]
        # Each probability of a row in half precision is rounded, which shows in their sum.
        apart = (total - 1).abs() > max(1e-3, 2 * torch.finfo(exact).eps)
        if least < -1e-6 or most > 1 + 1e-2 or bool(apart.any()):
            raise ValueError(
                "probs of each example must be probabilities in [0, 1] whose sum is 1, got "
                f"{least:.4g} to {most:.4g} and sums from {float(total.min()):.4g} to "
                f"{float(total.max()):.4g}; of logits take softmax(-1), of log probabilities "
                "exp(), of scores probs / probs.sum(-1, keepdim=True)"
            )
        return cls(probs, labels, mask, (mask & ~finite).any(-1), single)

    def pooled(self) -> "Scored":
        """Pool all examples of all clients, as those of one client."""
        return Scored(*pool(self.probs, self.labels, self.mask), broken=self.broken.any()[None])

    @cached_property
    def top(self) -> tuple[Tensor, Tensor]:
        """Return confidence and predicted class, [J, N] each; the first class of those that tie."""
        best = self.probs.max(-1)
        return best.values, best.indices

    @cached_property
    def hits(self) -> Tensor:
        """Return where the predicted class is the true one, [J, N] bool."""
        return self.top[1] == self.labels

    def accuracy(self) -> Tensor:
        """Compute the share of hits, [J]."""
        return self.average(self.hits)

    @cached_property
    def true(self) -> Tensor:
        """Return the probability of the true class, [J, N]."""
        return self.probs.gather(-1, self.labels[..., None])[..., 0]

    def nll(self) -> Tensor:
        """Compute the mean negative log probability of the true class, [J], in nats per example."""
        return self.average(self.losses)

    @cached_property
    def losses(self) -> Tensor:
        """Return the negative log probability of the true class, [J, N], in nats."""
        return -self.true.clamp(torch.finfo(torch.float64).tiny, 1).log()

    def brier(self) -> Tensor:
        """Compute the squared error of the probabilities, summed over classes and averaged over
        examples, [J].
        """
        return self.average(self.squares)

    @cached_property
    def squares(self) -> Tensor:
        """Return the squared error of the probabilities, summed over classes, [J, N]."""
        return self.probs.square().sum(-1) - self.true.square() + (1 - self.true).square()

    def macro_f1(self) -> Tensor:
        """Compute the F1 score averaged over classes, [J]."""
        outputs, predicted = self.probs.shape[-1], self.top[1]
        right = self.count(predicted, outputs, self.hits)
        total = self.count(predicted, outputs) + self.count(self.labels, outputs)
        # 0 / 0 marks a class that does not occur.
        return self.nan_broken((2 * right / total).nanmean(-1))

    def auroc(self) -> Tensor:
        """Compute the area under the ROC curve averaged over classes, [J]."""
        clients, rows, outputs = self.probs.shape
        position = torch.arange(rows, dtype=torch.int32).expand(clients, rows)
        edge = torch.ones(clients, min(rows, 1), dtype=torch.bool)
        areas = []
        for k in (1,) if outputs == 2 else range(outputs):
            score = levelled(self.probs[..., k].masked_fill(~self.mask, math.inf))
            score, order = score.sort(-1)
            change = score[:, 1:] != score[:, :-1]
            first = torch.where(torch.cat([edge, change], -1), position, 0).cummax(-1).values
            last = (
                torch.where(torch.cat([change, edge], -1), position, rows)
                .flip(-1)
                .cummin(-1)
                .values.flip(-1)
            )
            positive = ((self.labels == k) & self.mask).gather(-1, order)
            # Number of examples ranked below, ties counting half.
            below = (first + last).double() / 2 * positive
            ours = positive.sum(-1)
            areas.append(
                (below.sum(-1) - ours * (ours - 1) / 2) / (ours * (self.mask.sum(-1) - ours))
            )
        return self.nan_broken(torch.stack(areas, -1).nanmean(-1))

    def average(self, values: Tensor) -> Tensor:
        """Average values [J, N] over each client's examples: [J]."""
        return self.nan_broken(
            (values * self.mask).sum(-1, dtype=torch.float64) / self.mask.sum(-1)
        )

    def count(self, where: Tensor, size: int, weight: Tensor | None = None) -> Tensor:
        """Sum `weight` [J, N] of each client's examples by the place `where` [J, N] in [0, size):
        [J, size]; None counts examples.
        """
        clients = len(where)
        weights = self.mask.double() if weight is None else self.mask * weight.double()
        index = where + size * torch.arange(clients)[:, None]
        return (
            torch.bincount(index.flatten(), weights.flatten(), minlength=clients * size)
            .double()
            .view(clients, size)
        )

    def nan_broken(self, values: Tensor) -> Tensor:
        """Set values [J] to NaN for clients with a prediction that is not finite; return the one
        number [] of one model.
        """
        values = values.masked_fill(self.broken, math.nan)
        return values[0] if self.single else values
