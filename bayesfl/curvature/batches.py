"""Data in batches of a size that memory bears, and what memory there is."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Inputs: TypeAlias = Tensor | Iterable[Any]
"""Inputs [N, ...], or batches of them: tensors, mappings with `x`, or tuples that begin with the inputs, as a DataLoader gives."""


def batches(x: Inputs, like: Tensor) -> Iterator[Tensor]:
    """The batches' inputs [B, ...] on the device of `like`, empty ones left out.

    Raises:
        TypeError: Neither inputs nor batches, or something among the batches that is no inputs.
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
    """The data, if they can be read more than once.

    Raises:
        TypeError: An iterator, which can't.
    """
    if isinstance(x, Iterator):
        raise TypeError("the data are read more than once: pass a tensor, a list of batches or a DataLoader, not an iterator")
    return x


def available(like: Tensor) -> int:
    """Bytes of free memory on the device of `like`."""
    if like.is_cuda:
        return torch.cuda.mem_get_info(like.device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**63


def require(needed: int, limit: int, what: str, remedy: str) -> None:
    """Nothing where `needed` bytes are within `limit`.

    Raises:
        MemoryError: They are not; it says how many before any is taken.
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
