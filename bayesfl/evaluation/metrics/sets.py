"""What sets of classes and intervals hold."""

from torch import Tensor


def held_classes(sets: Tensor, labels: Tensor) -> Tensor:
    """Say of each example whether its set [..., O] holds its label [...]; labels of rows that pad must lie in [0, O)."""
    return sets.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


def held_numbers(lower: Tensor, upper: Tensor, targets: Tensor) -> Tensor:
    """Say of each example whether all its targets lie within their intervals, ends [..., O] and targets [..., O] or [...]; [...] bool."""
    y = targets.reshape(lower.shape).double()
    return ((lower.double() <= y) & (y <= upper.double())).all(-1)
