"""The input of the diagrams: class probabilities, from a simulation's result or from the caller."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def predictions(
    source: Any, labels: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, labels and mask, [J, N, O], [J, N] and [J, N], from a result or from
    the arguments; one row for each label if an example has several.
    """
    if hasattr(source, "predict") and hasattr(source, "data"):
        found = source.predict(source.data.test).places()
        return found.probs, found.labels, found.mask
    if labels is None and isinstance(source, (tuple, list)) and len(source) == 3:
        source, labels, mask = source
    probs, labels = torch.as_tensor(source), torch.as_tensor(labels)
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    return (probs[None], labels[None], mask[None]) if probs.dim() == 2 else (probs, labels, mask)


def only(mask: Tensor, clients: Sequence[int]) -> Tensor:
    """Return the mask [J, N] without the examples of other clients; all clients stay, so that their
    numbers in messages do not change.
    """
    kept = torch.zeros(len(mask), 1, dtype=torch.bool)
    kept[list(clients)] = True
    return mask & kept.to(mask.device)
