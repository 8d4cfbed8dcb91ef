"""The input of the diagrams: the class probabilities of a simulation's result, or those that are
given.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesfl.data.names import check_names
from bayesfl.data.outline import known_names


def predictions(
    source: Any, labels: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Find what to score, [J, N, O], [J, N] and [J, N], of a result or of what was given; label by
    label where an example has several.
    """
    if hasattr(source, "predict") and hasattr(source, "data"):
        found = source.predict(source.data.test).places()
        return found.probs, found.labels, found.mask
    if labels is None and isinstance(source, (tuple, list)) and len(source) == 3:
        source, labels, mask = source
    probs, labels = torch.as_tensor(source), torch.as_tensor(labels)
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    return (probs[None], labels[None], mask[None]) if probs.dim() == 2 else (probs, labels, mask)


def names_of_results(source: Any, given: Sequence[str] | None, clients: int) -> Sequence[str]:
    """Return the clients' names as they are given, else of a result those of its data, else their
    numbers.

    Raises:
        TypeError: Names are given, but no list.
        ValueError: Names are given, but not one for each client.
    """
    check_names(given, clients)
    if given is None and hasattr(source, "data") and hasattr(source, "predict"):
        given = source.data.client_names
    return known_names(given, clients)


def only(mask: Tensor, clients: Sequence[int]) -> Tensor:
    """Return the mask [J, N] with no example of any other client, so that numbers in messages stay
    those among all clients.
    """
    kept = torch.zeros(len(mask), 1, dtype=torch.bool)
    kept[list(clients)] = True
    return mask & kept.to(mask.device)
