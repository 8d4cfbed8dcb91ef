"""Data in batches, and the memory that is available for them."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Inputs: TypeAlias = Tensor | Iterable[Any]
"""Inputs [N, ...], or batches of them: tensors, mappings with `x`, or tuples that begin with the inputs, as a DataLoader gives."""


def batches(x: Inputs, like: Tensor) -> Iterator[Tensor]:
    """Yield the batches' inputs [B, ...] on the device of `like`; empty ones are left out.

    Raises:
        TypeError: `x` is neither inputs nor batches, or one of the batches has no inputs.
    """
    if not isinstance(x, Iterable):
        raise TypeError(f"x must be a tensor [N, ...] or batches of them, got {type(x).__name__}")
    for batch in [x] if isinstance(x, Tensor) else x:
        if isinstance(batch, Mapping):
            batch = batch.get("x")
        elif isinstance(batch, (tuple, list)):
            batch = batch[0] if batch else None
        if not isinstance(batch, Tensor) or not batch.dim():
            came = "a single number" if isinstance(batch, Tensor) else type(batch).__name__
            raise TypeError(f"a batch must be a tensor [N, ...], a tuple that begins with one, or a mapping with 'x', got {came}")
        if len(batch):
            yield batch.to(like.device)


def twice(x: Inputs) -> Inputs:
    """Return the data, which must be readable more than once.

    Raises:
        TypeError: `x` is an iterator, which can be read only once.
    """
    if isinstance(x, Iterator):
        raise TypeError("the data are read more than once: pass a tensor, a list of batches or a DataLoader, not an iterator")
    return x


def available(like: Tensor) -> int:
    """Return the bytes of free memory on the device of `like`."""
    if like.is_cuda:
        return torch.cuda.mem_get_info(like.device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63


def require(needed: int, limit: int, what: str, remedy: str) -> None:
    """Check that `needed` bytes are within `limit`.

    Raises:
        MemoryError: `needed` exceeds `limit`; raised before any memory is taken.
    """
    if needed > limit:
        raise MemoryError(f"{what} needs {_human(needed)} and {_human(limit)} may be used; {remedy}")


def _human(count: int) -> str:
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit} ({count} bytes)" if unit != "bytes" else f"{count} bytes"
