"""Checks of a split that is to be predicted against the federation's data."""

import numpy as np
import torch

from bayesfl.data import ClientData, FederatedData
from bayesfl.data.frames import same_columns
from bayesfl.federation.form import same_form


def check_split(split: ClientData, data: FederatedData) -> None:
    """Check that a split is one of the federation's own, or a part of one.

    Args:
        split: The split, on the device and in the precision of `data`.
        data: The federation's data.

    Raises:
        ValueError: It has no examples, other inputs or other columns, or is of other clients.
    """
    if not split.counts.any():
        raise ValueError("the split has no examples to predict; pass one that has, or make the data with a larger part for it")
    same_columns("split", split.columns, data.columns)
    same_form("split", split, data.train)
    if split.clients != data.clients:
        raise ValueError(f"the split has {split.clients} clients, the result {data.clients}; use result.adapt(...) for new clients")
    if not any(_is_part(split, known) for known in data.splits.values()):
        raise ValueError(
            "the split is of other clients: its labels are not rows of the same clients in result.data. Pass one of result.data's "
            "splits, or a part of one; result.adapt(...) is for clients never seen"
        )


def _is_part(split: ClientData, known: ClientData) -> bool:
    """Say whether every client's examples in `split` are among its own in `known`, by labels and places; inputs may differ."""
    if split.y is not known.y and not (split.y.dtype == known.y.dtype and torch.equal(split.y, known.y)):
        return False

    def owned(of: ClientData) -> torch.Tensor:
        client = torch.from_numpy(np.repeat(np.arange(of.clients), of.counts)).to(of.index.device)
        return client * len(of.y) + of.index

    return bool(torch.isin(owned(split), owned(known)).all())
