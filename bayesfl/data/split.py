"""One named part (train, test, ...) of every client's data, as indices into tensors that all clients share."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ClientData:
    """One named part (train, test, ...) of every client's data, as indices into shared tensors: nothing is copied per client.

    Args:
        x: Inputs [N, ...], floating point; shared between splits and clients.
        y: Class labels [N] int64, or targets [N] or [N, O], floating point.
        index: Rows of `x` and `y`, client after client, [sum of counts] int64.
        counts: Number of examples of each client, [J] int64.
        environment: Environment from which each row comes, [N] int64, numbered from 0 within each client; None for data without
            environments.
        columns: Names of the inputs' columns, as of a data frame; None for inputs without names.

    Raises:
        ValueError: The tensors have wrong types or shapes, or do not fit each other.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    counts: np.ndarray
    environment: Tensor | None = None
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", np.asarray(self.counts, dtype=np.int64))
        if not self.x.is_floating_point():
            raise ValueError(f"x must hold floating-point numbers, got {self.x.dtype}; convert it with x.float()")
        if not (self.y.is_floating_point() or self.y.dtype == torch.int64):
            raise ValueError(f"y must hold int64 class labels or floating-point targets, got {self.y.dtype}; convert it with y.long()")
        if len(self.x) != len(self.y):
            raise ValueError(f"x and y must have as many rows, got {len(self.x)} and {len(self.y)}")
        if self.y.dim() not in (1, 2) or (self.y.dim() == 2 and not self.y.is_floating_point()):
            raise ValueError(f"y must be class labels [N] or targets [N] or [N, O], got {self.y.dtype} of shape {list(self.y.shape)}")
        if self.index.dtype != torch.int64 or self.index.dim() != 1:
            raise ValueError(f"index must be a vector of int64, got {self.index.dtype} of shape {list(self.index.shape)}")
        if self.counts.ndim != 1 or (self.counts < 0).any() or int(self.counts.sum()) != len(self.index):
            raise ValueError(f"counts must be >= 0 and add up to the {len(self.index)} entries of index, got a sum of {self.counts.sum()}")
        if len(self.index) and not 0 <= int(self.index.min()) <= int(self.index.max()) < len(self.x):
            raise ValueError(f"index must lie within [0, {len(self.x)}), got {int(self.index.min())} to {int(self.index.max())}")
        if self.environment is not None:
            found = self.environment
            if found.dtype != torch.int64 or found.shape != self.y.shape[:1]:
                raise ValueError(f"environment must be int64 of shape [{len(self.y)}], got {found.dtype} of shape {list(found.shape)}")
            if len(found) and found.min() < 0:
                raise ValueError(f"environment must hold whole numbers from 0 up, got {int(found.min())}")

    def __repr__(self) -> str:
        many = f"{self.counts.min()} to {self.counts.max()} examples" if self.clients else "no examples"
        y = f"{str(self.y.dtype).removeprefix('torch.')} y {list(self.y.shape[1:])}"
        environments = f"; up to {self.environments} environments each" * bool(self.environments)
        return f"ClientData({self.clients} clients of {many}; x {list(self.x.shape[1:])}, {y}{environments})"

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
        """Return the largest number of environments that a client has; 0 for data without environments."""
        return 0 if self.environment is None or not len(self.index) else int(self.environment[self.index].max()) + 1

    def rows(self, j: int) -> Tensor:
        """Return client j's rows in `x` and `y`, [n_j] int64."""
        return self.index.narrow(0, int(self.offsets[j]), int(self.counts[j]))

    def client(self, j: int) -> tuple[Tensor, Tensor]:
        """Copy client j's inputs [n_j, ...] and labels or targets [n_j, ...] out of the shared tensors."""
        rows = self.rows(j)
        return self.x[rows], self.y[rows]

    def alone(self, j: int) -> "ClientData":
        """Return a split in which client j has its number and copies of its rows, and all other clients have no examples."""
        rows, counts = self.rows(j), np.zeros_like(self.counts)
        counts[j] = len(rows)
        index = torch.arange(len(rows), device=self.index.device)
        return replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            index=index,
            counts=counts,
            environment=None if self.environment is None else self.environment[rows],
        )

    def select(self, ids: Iterable[int]) -> "ClientData":
        """Return a split of the clients `ids` only, in that order, numbered from 0."""
        chosen = list(ids)
        index = torch.cat([self.rows(j) for j in chosen]) if chosen else self.index[:0]
        return replace(self, index=index, counts=self.counts[chosen])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "ClientData":
        """Move the split to `device`, with floating-point `x` and `y` in `dtype`; return the split itself if nothing changes."""
        x = self.x.to(device=device, dtype=dtype)
        y = self.y.to(device=device, dtype=dtype if self.y.is_floating_point() else None)
        index = self.index.to(device=device)
        if x is self.x and y is self.y and index is self.index:
            return self
        return replace(self, x=x, y=y, index=index, environment=None if self.environment is None else self.environment.to(device=device))

    def padded_labels(self) -> tuple[Tensor, Tensor]:
        """Pad labels or targets to [J, max n] (or [J, max n, O]), and return them with their mask [J, max n] bool; padded rows are 0."""
        width = int(self.counts.max(initial=0))
        mask = torch.arange(width) < torch.from_numpy(self.counts)[:, None]
        mask = mask.to(self.y.device)
        y = self.y.new_zeros(self.clients, width, *self.y.shape[1:])
        y[mask] = self.y[self.index]
        return y, mask
