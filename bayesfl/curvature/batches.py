"""Data in batches, and the memory that is available for them.

Data are one batch, or an iterable of batches. One batch is a tensor, or a mapping with the inputs
as its 'x', as clients' data are. In an iterable, a batch may also be a tuple or a list that begins
with the inputs, as a DataLoader gives. In a batch, inputs are a tensor, with which a model is
called as `model(x)`; a tuple or a list, `model(*x)`; or a mapping, `model(**x)`.

So a whole data set of several inputs is `{"x": (tokens, mask)}` or
`{"x": {"tokens": tokens, "mask": mask}}`, while `(x_1, x_2)` are two batches, as `x.split(100)`
makes them.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bayesfl.base.inputs import Inputs, count, each, named

Data: TypeAlias = Tensor | Mapping[str, Any] | Iterable[Any]
"""Inputs [N, ...], a mapping with them as `x`, or an iterable of batches: of these, or of tuples
that begin with inputs.
"""


def batches(x: Data, like: Tensor) -> Iterator[Inputs]:
    """Yield the batches' inputs [B, ...] on the device of `like`; empty ones are left out.

    Raises:
        TypeError: The inputs of a batch hold something else than tensors.
        ValueError: Tensors of one batch have different numbers of rows.
    """
    for batch in [x] if one_batch(x) else x:
        inputs = of_batch(batch)
        if count(inputs):
            yield each(lambda t: t.to(like.device), inputs)


def labelled(x: Data, y: Tensor | None, like: Tensor) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield the batches' inputs with their labels or targets, on the device of `like`.

    Labels travel with their rows: batches are tuples (x, y), as a DataLoader gives, or mappings
    with "x" and "y"; `y` [N] goes with one tensor of inputs, or with one mapping without "y". A
    DataLoader that shuffles has another order whenever it is read.

    Raises:
        ValueError: `y` is given beside batches, or a batch has no labels.
    """
    one = one_batch(x)
    own = y is None
    if own and (isinstance(x, Tensor) or (isinstance(x, Mapping) and "y" not in x)):
        raise ValueError("labels or targets y are missing: pass them beside the inputs x")
    if not own and (not one or (isinstance(x, Mapping) and "y" in x)):
        raise ValueError(
            "y is given beside batches, whose order may be another one: leave it out, and let "
            "batches be (x, y), which bring their labels"
        )
    for batch in [x] if one else x:
        labels = y
        if own:
            labels = batch["y"] if isinstance(batch, Mapping) else _second(batch)
        inputs = of_batch(batch)
        if count(inputs):
            yield each(lambda t: t.to(like.device), inputs), torch.as_tensor(labels).to(like.device)


def _second(batch: Any) -> Any:
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ValueError("a batch has no labels: let batches be (x, y), as list(zip(xs, ys)) is")
    return batch[1]


def one_batch(x: Data) -> bool:
    """Say whether data are one batch: a tensor, or a mapping with `x`."""
    return isinstance(x, Tensor | Mapping)


def of_batch(batch: Any) -> Inputs:
    """Return a batch's inputs.

    Raises:
        TypeError: The inputs hold something else than tensors.
        ValueError: Their tensors have different numbers of rows.
    """
    if isinstance(batch, Mapping):
        batch = batch["x"]
    elif isinstance(batch, tuple | list):
        batch = batch[0]
    inputs = _tensors(batch)
    (first, rows), *rest = ((name, len(t)) for name, t in named(inputs))
    for name, other in rest:
        if other != rows:
            raise ValueError(
                f"{name} has {other} rows and {first} has {rows}; every tensor of a batch has a "
                "row for each example"
            )
    return inputs


def _tensors(x: Any) -> Inputs:
    """Return inputs as tuples and dicts of tensors; a DataLoader makes lists of tuples."""
    if isinstance(x, Mapping):
        return {key: _tensors(part) for key, part in x.items()}
    return tuple(map(_tensors, x)) if isinstance(x, tuple | list) else x


def available_memory(like: Tensor) -> int:
    """Return the bytes of free memory on the device of `like`."""
    if like.is_cuda:
        return torch.cuda.mem_get_info(like.device)[0]
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
        MemoryError: `needed` exceeds `limit`; raised before any memory is taken.
    """
    if needed > limit:
        raise MemoryError(
            f"{what} needs {_human(needed)} and {_human(limit)} may be used; {remedy}"
        )


def _human(count: int) -> str:
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit} ({count} bytes)" if unit != "bytes" else f"{count} bytes"
