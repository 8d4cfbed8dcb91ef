"""Measures of conformal sets and intervals: how many hold the truth, and how large they are."""

import torch
from torch import Tensor

from bayesfl.evaluation.metrics.clients import check_rows


def set_coverage(sets: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return the share of each client's examples whose set holds the true class, [J] in float64; NaN for a client without examples.

    Args:
        sets: Which classes are in the set of an example, [J, N, O] bool.
        labels: True classes, [J, N].
        mask: Which rows are examples, [J, N] bool.

    Raises:
        ValueError: The shapes do not fit.
    """
    sets, labels, mask = _checked(sets, labels, mask)
    return (held_classes(sets, labels) & mask).sum(-1).double() / mask.sum(-1)


def set_size(sets: Tensor, mask: Tensor) -> Tensor:
    """Return the mean number of classes in the sets of each client, [J] in float64; NaN for a client without examples.

    Args:
        sets: Which classes are in the set of an example, [J, N, O] bool.
        mask: Which rows are examples, [J, N] bool.

    Raises:
        ValueError: The shapes do not fit.
    """
    sets, _, mask = _checked(sets, mask, mask)
    return (sets.sum(-1) * mask).sum(-1).double() / mask.sum(-1)


def held_classes(sets: Tensor, labels: Tensor) -> Tensor:
    """Say of each example whether its set [..., O] holds its label [...]; labels of rows that pad must lie in [0, O)."""
    return sets.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


def held_numbers(lower: Tensor, upper: Tensor, targets: Tensor) -> Tensor:
    """Say of each example whether all its targets lie within their intervals, ends [..., O] and targets [..., O] or [...]; [...] bool."""
    y = targets.reshape(lower.shape).double()
    return ((lower.double() <= y) & (y <= upper.double())).all(-1)


def _checked(sets: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sets, labels, mask = (torch.as_tensor(t).detach().cpu() for t in (sets, labels, mask))
    if sets.dim() != 3 or sets.dtype != torch.bool:
        raise ValueError(f"sets must be bool, [J, N, O]; got {sets.dtype} of shape {list(sets.shape)}")
    check_rows(sets, mask, labels=labels)
    if bool(((labels < 0) | (labels >= sets.shape[-1]))[mask].any()):
        raise ValueError(f"labels must be classes in [0, {sets.shape[-1]})")
    return sets, labels.long().masked_fill(~mask, 0), mask
