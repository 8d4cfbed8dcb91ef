"""The rows of the training or the test data, found for every client: of one array per client, or of
arrays that all share.
"""

import math
from collections.abc import Hashable, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.inputs import WIDE, Inputs, each, join, named, unnamed
from bayesfl.data.conversion import to_inputs, to_tensor
from bayesfl.data.mapped import mapped
from bayesfl.data.names import natural, places_of

MISSING = ("", "nan", "NaN", "None", "<NA>", "NaT")
"""Texts that `astype(str)` makes of a missing client id."""


class Part(NamedTuple):
    """The training or the test data of all clients.

    Args:
        x: Inputs [N, ...]: client after client, in memory of their own; where a tensor is mapped,
            all in the order of its file.
        ys: Labels or targets of each client, in the order of its rows.
        rows: Rows in `x` of each client.
        given: Rows of each client in the original order.
    """

    x: Inputs
    ys: list[Tensor]
    rows: list[np.ndarray]
    given: list[np.ndarray]

    @property
    def mapped(self) -> bool:
        """Return whether an input lies in a mapped file."""
        return any(mapped(t) for _, t in named(self.x))

    def placed(self, values: Sequence[Tensor]) -> Tensor:
        """Return every client's values in the order of `x`, [N, ...]."""
        joined = torch.cat(list(values))
        out = torch.empty_like(joined)
        out[torch.from_numpy(np.concatenate(self.rows))] = joined
        return out

    def as_type(self, dtype: torch.dtype) -> "Part":
        """Return the data with labels or targets of this type."""
        return self._replace(ys=[y.to(dtype) for y in self.ys])

    def like(self, train: "Part") -> "Part":
        """Return test data, after a check that they have the inputs of the training data.

        Raises:
            ValueError: They have others.
        """
        return self._replace(x=_alike("x", "the test part", self.x, "the training part", train.x))


def per_client(x: Sequence[Any], y: Any, train: Part | None = None) -> Part:
    """Join lists with one entry for each client; an error names the first client that does not fit.

    Args:
        x: Inputs of each client.
        y: Labels or targets of each client.
        train: The training data, where these are test data.

    Raises:
        ValueError: Clients have different inputs, or inputs and labels of different lengths.
        RuntimeError: Their rows have different shapes.
        TypeError: Something is no array.
    """
    part = "" if train is None else "test "
    xs = [to_inputs(value, f"{part}x", f" of client {j}") for j, value in enumerate(x)]
    ys = [to_tensor(value, f"{part}y of client {j}") for j, value in enumerate(y)]
    for j, (xj, yj) in enumerate(zip(xs, ys, strict=True)):
        name, leaf = next(named(xj, f"{part}x"))
        if leaf.dim() < 1 or yj.dim() < 1 or len(leaf) != len(yj):
            raise ValueError(
                f"client {j} has {name} of shape {list(leaf.shape)} and {part}y of shape "
                f"{list(yj.shape)}; they must have as many rows. Are these pooled arrays? Then "
                "pass client_ids, one per row"
            )
    some = next((j for j, yj in enumerate(ys) if len(yj)), 0)
    xs = [
        _alike(f"{part}x", f"client {j}", xj, f"client {some}", xs[some]) for j, xj in enumerate(xs)
    ]
    rows = _one_after_another(ys)
    return Part(join(xs), ys, rows, rows)


def by_client(
    x: Any, y: Any, ids: Any, order: Sequence[Hashable] | None = None
) -> tuple[Part, Sequence[Hashable]]:
    """Find each client's rows of arrays that all share; clients are in the order of their sorted
    ids, of texts H2 before H10.

    Args:
        x: Inputs of all.
        y: Labels or targets of all.
        ids: The client of each row.
        order: The clients of the training data, where these are test data.

    Returns:
        The rows, and the clients' ids in their order.

    Raises:
        ValueError: Arrays have different lengths, a row has no client, two ids are one name, or a
            client of test data is unknown.
        TypeError: Something is no array.
    """
    part = "" if order is None else "test "
    inputs, ys = to_inputs(x, f"{part}x"), to_tensor(y, f"{part}y")
    name, leaf = next(named(inputs, f"{part}x"))
    owners = (
        ids.tolist()
        if isinstance(ids, np.ndarray | Tensor)
        else [v.item() if isinstance(v, np.generic | Tensor) else v for v in ids]
    )
    if leaf.dim() < 1 or ys.dim() < 1 or not len(leaf) == len(ys) == len(owners):
        several = (
            "; several inputs are a tuple of arrays, not a list"
            if isinstance(x, list) and leaf.dim() and len(leaf) == len(x)
            else ""
        )
        raise ValueError(
            f"{name}, {part}y and {part}client_ids must have as many rows, got shapes "
            f"{list(leaf.shape)}, {list(ys.shape)} and [{len(owners)}]{several}"
        )
    if missing := [row for row, owner in enumerate(owners) if _missing(owner)]:
        raise ValueError(
            f"{part}client_ids names no client for {len(missing)} of {len(owners)} rows, the first "
            f"is row {missing[0]} ({owners[missing[0]]!r}); leave these rows out, or give them the "
            "id of their client"
        )
    places = places_of(owners)
    # Ids of several types cannot be compared: sorted by type first.
    ranked = sorted(
        places,
        key=lambda owner: (
            type(owner).__name__,
            natural(owner) if isinstance(owner, str) else owner,
        ),
    )
    found = ranked if order is None else list(order)
    known = set(found)
    if strangers := [owner for owner in places if owner not in known]:
        raise ValueError(
            f"{part}client_ids name client {strangers[0]!r}, who has no training data: leave its "
            f"rows out; known are {found[:10]}"
        )
    rows = [np.array(places.get(owner, []), dtype=np.int64) for owner in found]
    divided = [ys[torch.from_numpy(r)] for r in rows]
    if any(mapped(t) for _, t in named(inputs)):
        return Part(
            each(lambda t: t if mapped(t) else t.clone(), inputs), divided, rows, rows
        ), found
    after = torch.from_numpy(np.concatenate(rows))
    joined = each(lambda t: t.index_select(0, after), inputs)
    return Part(joined, divided, _one_after_another(rows), rows), found


def _one_after_another(parts: Sequence[Sized]) -> list[np.ndarray]:
    """Return the places of every part's rows where they stand one part after the other."""
    ends = np.cumsum([len(part) for part in parts])
    return np.split(np.arange(ends[-1], dtype=np.int64), ends[:-1])


def _alike(name: str, whose: str, x: Inputs, others: str, like: Inputs) -> Inputs:
    """Return inputs, after a check that they have the tensors of `like` and types like theirs;
    inputs without rows take these types.
    """
    mine, theirs = dict(named(x)), dict(named(like))
    for what, own in mine.items():
        one = theirs[what]
        if _read_as(own) != _read_as(one) and len(own) and len(one):
            raise ValueError(
                f"{name}{what[1:]} must hold numbers of one type: {whose} has {own.dtype}, "
                f"{others} {one.dtype}; convert them alike, as values.astype('float32') does where "
                "both are quantities"
            )
    typed = {what: t.to(theirs[what].dtype) if not len(t) else t for what, t in mine.items()}
    made: Any = unnamed({what: typed[what] for what in theirs})
    return made


def _read_as(t: Tensor) -> str:
    """Return the type in which numbers are read."""
    return (
        "a float" if t.is_floating_point() else "torch.int64" if t.dtype in WIDE else str(t.dtype)
    )


def _missing(owner: Any) -> bool:
    """Return whether a client id is missing: None, NaN, a missing value of pandas, or one of these
    as text.
    """
    return (
        owner is None
        or type(owner).__name__ in ("NAType", "NaTType")
        or (isinstance(owner, float) and math.isnan(owner))
        or (isinstance(owner, str) and owner.strip() in MISSING)
    )


def environments_of(values: Any, train: Part, *, pooled: bool) -> list[Tensor]:
    """Return the environments of every client's training rows, given for all rows or, not `pooled`,
    as a list by client.

    Raises:
        ValueError: They are no whole numbers from 0 up, or not one for each row.
        TypeError: They are no arrays.
    """
    given = [values] if pooled else values
    sizes = [len(yj) for yj in train.ys]
    found = []
    for j, (value, n) in enumerate(zip(given, [sum(sizes)] if pooled else sizes, strict=True)):
        name = "environments" + (f" of client {j}" if not pooled else "")
        tensor = to_tensor(value, name)
        if tensor.shape != (n,) or tensor.is_floating_point() or (tensor < 0).any():
            raise ValueError(
                f"{name} must be whole numbers from 0 up, one for each of {n} rows, got "
                f"{tensor.dtype} of shape {list(tensor.shape)}, {tensor.unique()[:5].tolist()}"
            )
        found.append(tensor)
    return [torch.cat(found)[torch.from_numpy(rows)] for rows in train.given]
