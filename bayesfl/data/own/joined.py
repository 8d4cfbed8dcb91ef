"""Rows of data sets as tensors, one data set's rows after the other's."""

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bayesfl.base.inputs import WIDE
from bayesfl.base.targets import IGNORE

Rows = dict[str, Tensor]
"""Some rows of a data set: the values of each column, [b, ...]."""


def joined(sets: Iterable[Iterable[Rows]], *, target: str, mask: str | None) -> Rows:
    """Return the columns of data sets, [N, ...].

    Args:
        sets: The rows of each.
        target: Name of the column to predict.
        mask: Name of the column to add where lists are filled up; None if lists must not differ in
            length.

    Raises:
        ValueError: Rows do not fit each other.
    """
    columns: dict[str, list[Tensor]] = {}
    for piece in itertools.chain.from_iterable(sets):
        for key in columns or piece:
            columns.setdefault(key, []).append(as_kept(piece[key]))
    columns = {key: _of_one_type(key, parts) for key, parts in columns.items()}
    shapes = {
        key: [tuple(t.shape[1:]) for t in parts for _ in range(len(t))]
        for key, parts in columns.items()
    }
    lists, lengths = ragged(shapes, mask)
    for key in lists:
        each = [row for t in columns[key] for row in t]
        value = IGNORE if key == target else 0
        columns[key] = [pad_sequence(each, batch_first=True, padding_value=value)]
    if mask is not None and mask not in columns and any(key != target for key in lists):
        columns[mask] = [torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]]
    return {key: torch.cat(parts) for key, parts in columns.items()}


def _of_one_type(name: str, parts: list[Tensor]) -> list[Tensor]:
    """Return the parts of a column in one type; empty parts have no type of their own.

    Raises:
        ValueError: They hold numbers of several types.
    """
    kinds = list(dict.fromkeys(t.dtype for t in parts if t.numel()))
    if len(kinds) > 1:
        raise ValueError(
            f"column {name!r} must hold numbers of one type, got {kinds[1]} after {kinds[0]}: "
            "convert them alike"
        )
    return [t.to(kinds[0]) for t in parts] if kinds else parts


def ragged(
    shapes: Mapping[str, list[tuple[int, ...]]], mask: str | None
) -> tuple[list[str], list[int]]:
    """Find the columns that are lists of different lengths.

    Args:
        shapes: The shape of each row, by column.
        mask: Name of the mask of such lists; None if there must be none.

    Returns:
        Their names, and the length of every row.

    Raises:
        ValueError: Rows differ in shape and are no lists, or lists of one row have different
            lengths.
    """
    found = [key for key, own in shapes.items() if len(set(own)) > 1]
    if wrong := [
        key for key in found if mask is None or any(len(shape) != 1 for shape in shapes[key])
    ]:
        raise ValueError(
            f"column {wrong[0]!r} has rows of shapes {sorted(set(shapes[wrong[0]]))[:5]}; make "
            "them alike"
        )
    lengths: list[int] = []
    for own in zip(*(shapes[key] for key in found), strict=True):
        if len(set(own)) > 1:
            raise ValueError(
                f"columns {found} have different lengths in one row, {[n for (n,) in own]}: fill "
                "them up before, each with a mask of its own"
            )
        lengths.append(own[0][0])
    return found, lengths


def as_kept(t: Tensor) -> Tensor:
    """Return numbers in the type of stored data: float64 and bfloat16 as float32, numbers of `WIDE`
    types as int64.
    """
    return (
        t.float()
        if t.dtype in (torch.float64, torch.bfloat16)
        else t.long()
        if t.dtype in WIDE
        else t
    )
