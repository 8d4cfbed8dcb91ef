"""Data in batches, and the memory that is available for them.

Data are one batch, or an iterable of batches. One batch is a tensor, or a mapping with the inputs
as 'x', such as clients' data. In an iterable, a batch may also be a tuple or a list that starts
with the inputs, as from a DataLoader. In a batch, inputs are a tensor, for `model(x)`; a tuple or a
list, for `model(*x)`; or a mapping, for `model(**x)`.

A whole data set with several inputs is therefore `{"x": (tokens, mask)}` or
`{"x": {"tokens": tokens, "mask": mask}}`, while `(x_1, x_2)` are two batches, as from
`x.split(100)`.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import lru_cache
from time import monotonic
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from bayesfl.base.inputs import Inputs, count, each

Data: TypeAlias = Tensor | Mapping[str, Any] | Iterable[Any]
"""Inputs [N, ...], a mapping with them as `x`, or an iterable of batches: of these, or of tuples
that start with inputs.
"""


def batches(x: Data, like: Tensor) -> Iterator[Any]:
    """Yield the batches' inputs [B, ...] on the device of `like`; empty ones are left out.

    Raises:
        TypeError: The inputs of a batch contain something other than tensors.
        ValueError: Tensors of one batch have different numbers of rows.
    """
    for batch in [x] if one_batch(x) else every_row(x):
        inputs = of_batch(batch)
        if count(inputs):
            yield each(lambda t: _placed(t, like), inputs)


def labelled(x: Data, y: Tensor | None, like: Tensor) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield the batches' inputs with their labels or targets, on the device of `like`.

    Labels come with their rows: batches are tuples (x, y), as from a DataLoader, or mappings with
    "x" and "y"; `y` [N] belongs to one tensor of inputs, or to one mapping without "y". A shuffling
    DataLoader has another order in every pass; see `every_row`.

    Raises:
        ValueError: `y` is given in addition to batches, or a batch has no labels.
    """
    one = one_batch(x)
    own = y is None
    if not own and (not one or (isinstance(x, Mapping) and "y" in x)):
        raise ValueError(
            f"y is given with x, a {type(x).__name__}, which is read as batches (x, y) with "
            "their own labels: leave it out, or pass x as one tensor, as torch.as_tensor(x)"
        )
    for batch in [x] if one else every_row(x):
        labels = y
        if own:
            labels = batch["y"] if isinstance(batch, Mapping) else _second(batch)
        inputs = of_batch(batch)
        if count(inputs):
            yield each(lambda t: _placed(t, like), inputs), _placed(torch.as_tensor(labels), like)


def _placed(t: Tensor, like: Tensor) -> Tensor:
    """Return a tensor on the device of `like` that supports gradients."""
    return t.to(like.device).clone() if t.is_inference() else t.to(like.device)


def every_row(x: Iterable[Any]) -> Iterable[Any]:
    """Return batches with all rows, including those that a DataLoader with `drop_last=True` omits,
    because a posterior is for the whole data set.

    Raises:
        ValueError: The loader reads other rows in every pass, as with a WeightedRandomSampler.
    """
    if not isinstance(x, DataLoader):
        return x
    kind = "sampler" if x.batch_sampler is None else "batch_sampler"
    order = getattr(x, kind)
    if getattr(order, "drop_last", False) and not isinstance(order, DistributedSampler):
        x, order = copy(x), copy(order)
        order.drop_last = False
        # A DataLoader does not allow setting these by name; its workers stay with the original.
        vars(x).update({"drop_last": False, kind: order, "_iterator": None})
    own = getattr(order, "sampler", order)
    plain = (
        (type(order) is BatchSampler or order is own)
        and type(own) in (SequentialSampler, RandomSampler, SubsetRandomSampler)
        and not getattr(own, "replacement", False)
        and len(own) == len(getattr(own, "data_source", own))
    )
    if not (plain or isinstance(x.dataset, IterableDataset)) and _rows(order) != _rows(order):
        raise ValueError(
            f"the loader's {type(own).__name__} reads other rows in every pass, so it is unknown "
            "for which rows the posterior is: pass a loader without it, as "
            "DataLoader(dataset, batch_size=100, shuffle=True)"
        )
    return x


def _rows(order: Iterable[Any]) -> Counter[str]:
    """Count how often a sampler, or a sampler of batches, reads each row in one pass."""
    return Counter(
        repr(row)
        for rows in order
        for row in (rows if isinstance(rows, Iterable) and getattr(rows, "ndim", 1) else [rows])
    )


def _second(batch: Any) -> Any:
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ValueError("a batch has no labels: let batches be (x, y), as list(zip(xs, ys)) is")
    return batch[1]


def one_batch(x: Data) -> bool:
    """Return whether data are one batch: a tensor, or a mapping with `x`."""
    return isinstance(x, Tensor | Mapping)


def of_batch(batch: Any) -> Inputs:
    """Return a batch's inputs."""
    if isinstance(batch, Mapping):
        batch = batch["x"]
    elif isinstance(batch, tuple | list):
        batch = batch[0]
    return _tensors(batch)


def _tensors(x: Any) -> Inputs:
    """Return inputs as tuples and dicts of tensors; a DataLoader converts tuples to lists."""
    if isinstance(x, Mapping):
        return {key: _tensors(part) for key, part in x.items()}
    return tuple(map(_tensors, x)) if isinstance(x, tuple | list) else x


def available_memory(like: Tensor) -> int:
    """Return the bytes of free memory on the device of `like`."""
    if like.is_cuda:
        return torch.cuda.mem_get_info(like.device)[0]
    return _free(int(monotonic()))


@lru_cache(maxsize=1)
def _free(second: int) -> int:
    """Return the bytes of free memory of the machine, updated once a second."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(
                1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return (
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            if hasattr(os, "sysconf")
            else 2**63
        )


def require(needed: int, limit: int, what: str, remedy: str) -> None:
    """Check that `needed` bytes are within `limit`.

    Raises:
        MemoryError: `needed` exceeds `limit`; raised before memory is allocated.
    """
    if needed > limit:
        raise MemoryError(f"{what} needs {needed:,} bytes and {limit:,} may be used; {remedy}")
