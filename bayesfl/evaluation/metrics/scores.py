"""Measures of predicted classes: accuracy, likelihood, Brier score, F1 score and area under the ROC
curve, client by client.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bayesfl.base.numerics import levelled
from bayesfl.evaluation.metrics.clients import Checked, Segments, as_clients, check_shapes


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
    scored = Scored.of(probs, labels, mask)
    return scored.average(scored.hits)


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
    scored = Scored.of(probs, labels, mask)
    return scored.average(scored.losses)


def brier(probs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the Brier score: squared error of the probabilities, summed over classes and averaged
    over examples.

    Brier, "Verification of forecasts expressed in terms of probability", Monthly Weather Review
    1950. With two classes it is twice the score of the second class alone.

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
    scored = Scored.of(probs, labels, mask)
    return scored.average(scored.squares)


def macro_f1(probs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the F1 score averaged over the classes among a client's labels or predictions.

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
    rest, averaged over the classes with both positives and negatives at the client. NaN for a
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
class Scored(Checked):
    """Hold checked predictions of classes, R rows; rows that are not finite are zeros."""

    probs: Tensor  # [R, O]
    labels: Tensor  # [R]

    @classmethod
    def of(cls, probs: Tensor, labels: Tensor, mask: Tensor | None) -> "Scored":
        """Return checked predictions and labels; without a mask, those of one model, [N, O] and
        [N].

        Raises:
            ValueError: The shapes or types do not fit; or see `of_rows`.
        """
        single = mask is None
        probs, labels, mask = (t.detach().cpu() for t in as_clients(probs, labels, mask))
        if probs.dim() != 3 or not probs.shape[-1]:
            raise ValueError(
                "probs must be [J, N, O], one row of class probabilities per example; got shape "
                f"{list(probs.shape)}"
                + "; for several labels of each example use predictions.places()"
                * (probs.dim() == 4)
            )
        check_shapes(probs, mask, labels=labels)
        return cls.of_rows(Segments(mask.sum(1)), probs[mask], labels[mask], single=single)

    @classmethod
    def of_rows(
        cls, clients: Segments, probs: Tensor, labels: Tensor, *, single: bool = False
    ) -> "Scored":
        """Return checked rows, [R, O] and [R].

        Raises:
            ValueError: A label is not an integer, or a label or probability is out of range; the
                message has the remedy.
        """
        integers = not (labels.is_floating_point() or labels.dtype == torch.bool)
        kind, labels, outputs = labels.dtype, labels.long(), probs.shape[-1]
        lowest, highest = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
        if not integers or lowest < 0 or highest >= outputs:
            raise ValueError(
                f"labels must be integers in [0, {outputs}), the classes that probs has columns "
                f"for; got {lowest} to {highest} in {kind}. Number the classes from 0, use "
                "labels.long(), or mask the rows that are padding."
            )
        finite = (probs < math.inf).all(-1)  # -inf is a log probability, and refused below
        exact = probs.dtype if probs.is_floating_point() else torch.float64
        probs = probs.to(exact).masked_fill(~finite[:, None], 0)
        least, most = (float(probs.min()), float(probs.max())) if probs.numel() else (0.0, 1.0)
        total = _summed(probs, 1)[finite]
        # Each probability of a row in half precision is rounded, which shows in their sum.
        apart = (total - 1).abs() > max(1e-3, 2 * torch.finfo(exact).eps)
        if least < -1e-6 or most > 1 + 1e-2 or bool(apart.any()):
            raise ValueError(
                "probs of each example must be probabilities in [0, 1] whose sum is 1, got "
                f"{least:.4g} to {most:.4g} and sums from {float(total.min()):.4g} to "
                f"{float(total.max()):.4g}; for logits use softmax(-1), for log probabilities "
                "exp(), for scores probs / probs.sum(-1, keepdim=True)"
            )
        return cls(clients, ~finite, single, probs, labels)

    def pooled(self) -> "Scored":
        """Return all examples of all clients as those of one client."""
        return replace(self, clients=Segments(self.clients.counts.sum()[None]))

    @cached_property
    def top(self) -> tuple[Tensor, Tensor]:
        """Return confidence in float64 and predicted class, [R] each; the first of tied classes."""
        best = self.probs.max(-1)
        return best.values.double(), best.indices

    @cached_property
    def hits(self) -> Tensor:
        """Return where the predicted class is the true one, [R] bool."""
        return self.top[1] == self.labels

    @cached_property
    def true(self) -> Tensor:
        """Return the probability of the true class, [R] in float64."""
        return self.probs.gather(-1, self.labels[:, None])[:, 0].double()

    @cached_property
    def losses(self) -> Tensor:
        """Return the negative log probability of the true class, [R], in nats."""
        return -self.true.clamp(torch.finfo(torch.float64).tiny, 1).log()

    @cached_property
    def squares(self) -> Tensor:
        """Return the squared error of the probabilities, summed over classes, [R]."""
        return _summed(self.probs, 2) - self.true.square() + (1 - self.true).square()

    def macro_f1(self) -> Tensor:
        """Compute the F1 score averaged over classes, [J]."""
        outputs, predicted, count = self.probs.shape[-1], self.top[1], self.clients.count
        right = count(predicted, outputs, self.hits)
        total = count(predicted, outputs) + count(self.labels, outputs)
        # 0 / 0 marks a class that does not occur.
        return self.of_clients((2 * right / total).nanmean(-1))

    def auroc(self) -> Tensor:
        """Compute the area under the ROC curve averaged over classes, [J]."""
        outputs = self.probs.shape[-1]
        areas = [
            area(self.clients, self.probs[:, k], self.labels == k)
            for k in ((1,) if outputs == 2 else range(outputs))
        ]
        return self.of_clients(torch.stack(areas, -1).nanmean(-1))


def area(clients: Segments, scores: Tensor, positive: Tensor) -> Tensor:
    """Compute the area under the ROC curve of scores [R] for `positive` [R] bool, [J]; NaN for a
    client without positives or negatives.
    """
    order = clients.order(scores)
    scores, positive = levelled(scores[order], among=clients.owner), positive[order]
    new = (scores[1:] != scores[:-1]) | (clients.owner[1:] != clients.owner[:-1])
    tied = torch.cat([new.new_zeros(min(len(scores), 1)), new]).cumsum(0)
    last = tied.bincount().cumsum(0)
    first = torch.cat([last.new_zeros(1), last])[:-1]
    # Number of examples ranked below, ties counting half.
    below = (first + last - 1).double()[tied] / 2 - clients.starts[clients.owner]
    ours = clients.sum(positive)
    ranks = clients.sum(below * positive) - ours * (ours - 1) / 2
    return ranks / (ours * (clients.counts - ours))


def _summed(probs: Tensor, power: int) -> Tensor:
    """Return the sums of probabilities [R, O] to a power, [R] in float64, some rows at a time to
    save memory.
    """
    return torch.cat([some.double().pow(power).sum(-1) for some in probs.split(2**16)])
