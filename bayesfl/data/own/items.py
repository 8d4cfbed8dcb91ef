"""Items of map-style data sets as rows of columns: pairs (x, y), or rows by the names of their
columns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.inputs import Inputs, named
from bayesfl.base.warning import noted
from bayesfl.data.own.joined import Rows

AGAIN = 8
"""Number of items that are read twice, to detect random draws."""


def items(
    dataset: Any,
    name: str,
    columns: Sequence[str] | None,
    read: Callable[[int], object],
) -> Iterator[Rows]:
    """Yield the items of a data set in pieces of one row or more, by the names of `columns`, or of
    pairs by those of their tensors.

    Args:
        dataset: The data set.
        name: Its name for error messages.
        columns: Names of the columns; None for pairs (x, y).
        read: Called with the number of rows in each piece.

    Raises:
        ValueError: An item is no pair or gives other numbers when it is read again; pairs have
            different shapes. A note on every error names the item.
    """

    def row_of(i: int) -> Rows:
        with noted(f"in item {i} of {name}"):
            item: Any = dataset[i]
            if columns is None:
                return _pair(item)
            return {key: _tensor(item[key])[None] for key in columns}

    for i in range(len(dataset)):
        row = row_of(i)
        if i < AGAIN:
            again = row_of(i)
            if any(
                t.shape != again[key].shape
                or not torch.allclose(t, again[key], 0, 0, equal_nan=True)
                for key, t in row.items()
            ):
                raise ValueError(
                    f"{name} gives other numbers when item {i} is read again, as random transforms "
                    "do, and every item is read once: leave them out, and pass them to "
                    "clients.augmented(...), which draws anew in every step of training"
                )
        read(1)
        yield row


def _pair(item: Any) -> Rows:
    """Return the tensors of an item (x, y)."""
    if not (isinstance(item, tuple | list) and len(item) == 2):
        raise ValueError(
            f"an item must be a pair (x, y), got a {type(item).__name__}: choose the two, as in "
            "[(item[0], item[1]) for item in data], or name columns by inputs= and target="
        )
    return dict(named(_example(item[0]))) | {"y": torch.as_tensor(item[1])[None]}


def _example(x: Any) -> Inputs:
    """Return one example's inputs as a row; a tuple of numbers is a vector, one of anything else
    several inputs.
    """
    if isinstance(x, Mapping) or (
        isinstance(x, tuple)
        and any(np.ndim(part) or isinstance(part, Tensor | Mapping) for part in x)
    ):
        return (
            {key: _example(part) for key, part in x.items()}
            if isinstance(x, Mapping)
            else tuple(map(_example, x))
        )
    return _tensor(x)[None]


def _tensor(value: Any) -> Tensor:
    """Return a tensor of numbers, of an image of PIL, too."""
    return torch.as_tensor(
        np.array(value)
        if hasattr(value, "__array_interface__") and not isinstance(value, Tensor)
        else value
    )


def class_names(dataset: Any, target: str) -> list[str] | None:
    """Return the names of the classes that a data set of Hugging Face's gives for a column of
    labels, or of lists of labels.
    """
    features = getattr(dataset, "features", None)
    feature = features.get(target) if isinstance(features, Mapping) else None
    found = getattr(feature, "names", None) or getattr(
        getattr(feature, "feature", None), "names", None
    )
    return list(found) if found else None
