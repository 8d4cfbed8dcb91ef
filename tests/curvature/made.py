"""What several files of tests of curvature share beside the brute force."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bayesfl.curvature import Curvature
from bayesfl.curvature.jacobians import Rows

EXACT = {"atol": 1e-10, "rtol": 1e-10}


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            # A view of a tensor expanded over an axis takes no memory of its own.
            if isinstance(t, torch.Tensor):
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // 8)
        return out


def chosen(size: int, count: int = 25) -> torch.Tensor:
    """Some indices, in no order."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(2))[:count]


def gram(
    curvature: Curvature,
    x: torch.Tensor,
    other: torch.Tensor | None = None,
    *,
    weight: float | torch.Tensor = 1.0,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """J diag(weight) J' between outputs at `x` and at `other`, by rows that are joined."""

    def rows_of(x: torch.Tensor) -> Rows:
        parts = [curvature.linearise(batch, torch.eye)[1] for batch in curvature.batches(x)]
        parts = parts if indices is None else [rows.restrict(indices) for rows in parts]
        return parts[0].join(parts[1:])

    mine, every = rows_of(x), curvature.vector(weight)
    theirs = mine if other is None else rows_of(other)
    return mine.gram(theirs, every if indices is None else every[indices])
