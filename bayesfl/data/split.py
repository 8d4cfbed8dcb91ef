"""One named part (train, test, ...) of every client's data, as indices into tensors that all
clients share.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.inputs import (
    Inputs,
    Shapes,
    each,
    first,
    in_precision,
    named,
    row_bytes,
    shape_of,
)
from bayesfl.base.numerics import finite
from bayesfl.data.mapped import mapped

Change: TypeAlias = Callable[[Any], Inputs]
"""Function of inputs [B, ...] to inputs [B, ...]."""


def all_finite(change: str, made: Inputs, given: Inputs) -> Inputs:
    """Return the inputs that a transform or an augmentation returned, after a check.

    Raises:
        ValueError: They hold NaN or infinities.
    """
    for what, t in named(made, f"{change}(x)"):
        if t.is_floating_point() and not finite(t):
            raise ValueError(
                f"{what} holds NaN or infinite numbers "
                + (
                    "as x does: its file, or the array, has changed since the data were made; mend "
                    "it, and make them anew"
                    if any(t.is_floating_point() and not finite(t) for _, t in named(given))
                    else "for rows that hold none: guard divisions and logarithms, as by "
                    "x.clamp(1e-6)"
                )
            )
    return made


def _doubles(t: Tensor) -> bool:
    """Return whether a tensor holds float64 in a mapped file: it is read as float32, as arrays in
    memory are once and for all.
    """
    return t.dtype == torch.float64 and mapped(t)


@dataclass(frozen=True, eq=False, repr=False)
class ClientData:
    """One named part (train, test, ...) of every client's data, as indices into shared tensors:
    nothing is copied per client.

    Args:
        x: Inputs [N, ...], a tensor or a tree of them, of any real dtype; shared between splits and
            clients.
        y: Class labels [N] int64, or targets [N] or [N, O], floating point.
        index: Rows of `x` and `y`, client after client, [sum of counts] int64.
        counts: Number of examples of each client, [J] int64.
        environment: Environment from which each row comes, [N] int64, numbered from 0 within each
            client; None for data without environments.
        columns: Names of the inputs' columns, as of a data frame; None for inputs without names.
        transform: Function applied to inputs whenever they are read, row by row, such as
            `lambda x: x / 255`; None for none.
        augment: Function applied to them in steps of training, plain torch code that may draw, such
            as flips; None for none.
        dtype: Precision of floats when they are read; by default that of the first float in `x`,
            float32 where there is none or it is shorter.

    Raises:
        ValueError: The tensors have wrong types or shapes, or do not fit each other.

    Example:
        >>> split = bf.data.iid("digits", clients=2).test
        >>> split
        ClientData(2 clients, 359 examples; inputs (64,))
        >>> x, y = split.client(0)
        >>> x.shape
        torch.Size([180, 64])
    """

    x: Tensor | Any
    y: Tensor
    index: Tensor
    counts: np.ndarray
    environment: Tensor | None = None
    columns: tuple[str, ...] | None = None
    transform: Change | None = field(default=None, kw_only=True)
    augment: Change | None = field(default=None, kw_only=True)
    dtype: torch.dtype = field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType] (made below, where it is None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", np.asarray(self.counts, dtype=np.int64))
        if self.dtype is None:
            floats = [t.dtype for _, t in named(self.x) if t.is_floating_point()]
            dtype = torch.promote_types(floats[0], torch.float32) if floats else torch.float32
            object.__setattr__(self, "dtype", dtype)
        y, index, counts = self.y, self.index, self.counts
        for name, t in named(self.x):
            if t.dim() < 1 or len(t) != len(y):
                raise ValueError(
                    f"{name} and y must have as many rows, got "
                    f"{len(t) if t.dim() else 'a single number'} and {len(y)}"
                )
        if counts.ndim != 1 or (counts < 0).any() or int(counts.sum()) != len(index):
            raise ValueError(
                f"counts must be >= 0 and add up to the {len(index)} entries of index, got a "
                f"sum of {counts.sum()}"
            )

    def __repr__(self) -> str:
        return (
            f"ClientData({self.clients} clients, {self.counts.sum()} examples; "
            f"inputs {self.inputs})"
        )

    @property
    def clients(self) -> int:
        """Return the number of clients J."""
        return len(self.counts)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Return where each client starts in `index`, [J] int64."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def environments(self) -> int:
        """Return the largest number of environments that a client has; 0 for data without
        environments.
        """
        return (
            0
            if self.environment is None or not len(self.index)
            else int(self.environment[self.index].max()) + 1
        )

    def rows(self, j: int) -> Tensor:
        """Return client j's rows in `x` and `y`, [n_j] int64."""
        return self.index.narrow(0, int(self.offsets[j]), int(self.counts[j]))

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs that `take` returns."""
        return self.index.device

    @cached_property
    def inputs(self) -> Shapes:
        """Return the shape of one example as a model receives it."""
        return shape_of(
            self.take(
                self.index[:1]
                if len(self.index)
                else torch.zeros(min(1, len(self.y)), dtype=torch.int64, device=self.device)
            )
        )

    @cached_property
    def _ready(self) -> Tensor | None:
        """Return `x` if its rows are what a model receives: of one tensor of floats, on the device
        and in the precision of the run.
        """
        x = self.x
        return (
            x
            if isinstance(x, Tensor)
            and x.dtype == self.dtype
            and x.device == self.device
            and not _doubles(x)
            and self.transform is None
            else None
        )

    @cached_property
    def row_bytes(self) -> int:
        """Return the bytes of one example's inputs as a model receives them, at least 1."""
        return row_bytes(
            self.take(torch.zeros(min(1, len(self.y)), dtype=torch.int64, device=self.device))
        )

    def take(self, rows: Tensor) -> Inputs:
        """Return the inputs at `rows` [R] of the shared tensors as a model receives them: floats in
        `dtype`, and transformed.

        Raises:
            ValueError: The transform gives another number of rows, or numbers that are not finite.
        """
        if self._ready is not None:
            # The usual case: one call gathers a step's batch.
            return self._ready.index_select(0, rows)
        if self.transform is not None and not len(rows) and len(self.y):
            # A transform is given at least one row.
            return each(lambda t: t[:0], self.take(rows.new_zeros(1)))
        x = in_precision(each(lambda t: self._read(t, rows), self.x), self.dtype)
        return (
            x
            if self.transform is None
            else all_finite("transform", self.changed("transform", self.transform, x), x)
        )

    def _read(self, t: Tensor, rows: Tensor) -> Tensor:
        found = t.index_select(0, rows.to(t.device)).to(self.device)
        return found.float() if _doubles(t) else found

    def changed(self, name: str, change: Change, x: Inputs) -> Inputs:
        """Return what `change` makes of inputs, floats in `dtype`.

        Raises:
            ValueError: The change, called `name`, gives another number of rows.
            TypeError: It gives something else than tensors.
        """
        before = len(first(x))
        with torch.no_grad():  # a frozen network may be part of it
            made = change(x)
        for what, t in named(made, f"{name}(x)"):
            if t.dim() < 1 or len(t) != before:
                raise ValueError(
                    f"{what} has shape {list(t.shape)} for {before} rows; {name} must return one "
                    "row for each it is given"
                )
        return in_precision(made, self.dtype)

    def client(self, j: int, *, raw: bool = False) -> tuple[Tensor | Any, Tensor]:
        """Copy client j's inputs [n_j, ...] and labels or targets [n_j, ...] out of the shared
        tensors.

        Args:
            j: The client.
            raw: Whether inputs are as they were before the transform, as a client's own model takes
                them; else as `take` reads them.
        """
        rows = self.rows(j)
        return replace(self, transform=None).take(rows) if raw else self.take(rows), self.y[rows]

    def alone(self, j: int) -> "ClientData":
        """Return a split where client j has its number and copies of its rows, and all other
        clients have no examples.
        """
        rows, counts = self.rows(j), np.zeros_like(self.counts)
        counts[j] = len(rows)
        return replace(
            self,
            x=each(lambda t: t[rows.to(t.device)], self.x),
            y=self.y[rows],
            index=torch.arange(len(rows), device=self.index.device),
            counts=counts,
            environment=None if self.environment is None else self.environment[rows],
        )

    def select(self, ids: Iterable[int]) -> "ClientData":
        """Return a split of the clients `ids` only, in that order, numbered from 0."""
        chosen = list(ids)
        index = torch.cat([self.rows(j) for j in chosen]) if chosen else self.index[:0]
        return replace(self, index=index, counts=self.counts[chosen])

    def only(self, ids: np.ndarray) -> "ClientData":
        """Return a split where the clients `ids`, ascending, have their examples, and all others
        none.
        """
        counts = np.zeros_like(self.counts)
        counts[ids] = self.counts[ids]
        return replace(self, index=torch.cat([self.rows(j) for j in ids.tolist()]), counts=counts)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "ClientData":
        """Move the split to `device`, with `y` in `dtype` if it is floating-point; `x` is converted
        to it where it is read.

        Inputs in mapped files, see `bayesfl.data.mapped.mapped`, stay there: `take` moves the rows
        that it reads.
        """
        return self.moved(lambda t, dtype: t.to(device=device, dtype=dtype), dtype)

    def moved(
        self, move: Callable[[Tensor, torch.dtype | None], Tensor], dtype: torch.dtype | None
    ) -> "ClientData":
        """Return the split with its tensors moved, targets in `dtype` if they are floats; the split
        itself if nothing changes.
        """
        dtype = self.dtype if dtype is None else dtype
        x, index = each(lambda t: t if mapped(t) else move(t, None), self.x), move(self.index, None)
        y = move(self.y, dtype if self.y.is_floating_point() else None)
        same = all(map(is_, dict(named(x)).values(), dict(named(self.x)).values()))
        if same and y is self.y and index is self.index and dtype == self.dtype:
            return self
        return replace(
            self,
            x=x,
            y=y,
            index=index,
            environment=None if self.environment is None else move(self.environment, None),
            dtype=dtype,
        )

    def padded_labels(self) -> tuple[Tensor, Tensor]:
        """Pad labels or targets to [J, max n] (or [J, max n, O]), and return them with their mask
        [J, max n] bool; padded rows are 0.
        """
        width = int(self.counts.max(initial=0))
        mask = (torch.arange(width) < torch.from_numpy(self.counts)[:, None]).to(self.y.device)
        y = self.y.new_zeros(self.clients, width, *self.y.shape[1:])
        y[mask] = self.y[self.index]
        return y, mask
