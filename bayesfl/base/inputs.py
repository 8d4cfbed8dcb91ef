"""Inputs of a network as trees of tensors with one row for each example: a tensor, a tuple of
tensors, or a mapping of tensors by name.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

Inputs: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Inputs [N, ...]: a tensor, with which a model is called as `model(x)`; a tuple, `model(*x)`; or a
mapping, `model(**x)`.
"""

# `Any`, so that a caller with one tensor needs no cast for a type checker.
Shapes: TypeAlias = tuple[int, ...] | Any
"""Shape of one example: of a tensor, such as (3, 32, 32); a tuple or a mapping of shapes for a
tuple or a mapping of tensors.
"""

WIDE = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that torch stores but hardly computes with; they are read as int64."""


def call(module: nn.Module, x: Inputs) -> Any:
    """Call a module with inputs: `module(x)`, `module(*x)` or `module(**x)`."""
    if isinstance(x, Mapping):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


def each(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply `function` to every tensor of a tree; mappings become dicts."""
    if isinstance(x, Mapping):
        return {key: each(function, part) for key, part in x.items()}
    return tuple(each(function, part) for part in x) if isinstance(x, tuple) else function(x)


def join(trees: Sequence[Inputs]) -> Inputs:
    """Concatenate the rows of several trees of the same structure, in new tensors."""
    leaves = [dict(named(tree)) for tree in trees]
    made: Any = unnamed({name: torch.cat([one[name] for one in leaves]) for name in leaves[0]})
    return made


def first(x: Inputs) -> Tensor:
    """Return the first tensor of the tree."""
    return x if isinstance(x, Tensor) else next(t for _, t in named(x))


def count(x: Inputs) -> int:
    """Return the number of examples N, taken from the first tensor."""
    return len(first(x))


def named(x: Inputs, name: str = "x") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with the expression that selects it, such as `x`, `x[0]` or `x['mask']`.

    Raises:
        TypeError: The tree contains something other than tensors, tuples and mappings.
        ValueError: A tuple or a mapping is empty, or a name is not a text.
    """
    if isinstance(x, Tensor):
        yield name, x
        return
    if not isinstance(x, Mapping | tuple):
        raise TypeError(
            f"{name} must be a tensor, a tuple of tensors or a mapping of them by name, got "
            f"{type(x).__name__}"
        )
    if not x or (isinstance(x, Mapping) and not all(isinstance(key, str) for key in x)):
        raise ValueError(
            f"{name} must hold at least one input, and a mapping must name each by text, as the "
            f"model's forward does, got {structure(x)}"
        )
    for key, part in x.items() if isinstance(x, Mapping) else enumerate(x):
        yield from named(part, f"{name}[{key!r}]")


def in_precision(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Convert floats to `dtype`; integers and bools keep their dtype, except those in `WIDE`."""
    return each(
        lambda t: (
            t.to(dtype=dtype) if t.is_floating_point() else t.long() if t.dtype in WIDE else t
        ),
        x,
    )


def shape_of(x: Inputs) -> Shapes:
    """Return the shape of one example, without the axis of rows."""
    return each(lambda t: tuple(t.shape[1:]), x)


def form(x: Inputs, axes: int = 1) -> tuple[Any, ...]:
    """Return the properties that examples must share: every tensor's name, its shape after the
    first `axes` axes, and its dtype, with all float precisions alike.
    """
    return tuple(
        [(name, tuple(t.shape[axes:]), t.is_floating_point() or t.dtype) for name, t in named(x)]
    )


def row_bytes(x: Inputs) -> int:
    """Return the size of one row in bytes, at least 1."""
    return max(1, sum(t[:1].nbytes for _, t in named(x)))


def pieces(x: Inputs, size: int) -> Iterator[Any]:
    """Yield the rows in pieces of at most `size` bytes and at least one row."""
    return in_rows(x, max(1, size // row_bytes(x)))


def at(x: Inputs, rows: slice | Tensor) -> Inputs:
    """Select rows by a slice or by indices, in that order."""
    return each(lambda t: t[rows], x)


def in_rows(x: Inputs, size: int) -> Iterator[Inputs]:
    """Yield the rows in pieces of at most `size` rows."""
    for start in range(0, count(x), size):
        yield at(x, slice(start, start + size))


def as_tuples(value: Any) -> Any:
    """Convert JSON lists back to tuples, as shapes have them."""
    if isinstance(value, Mapping):
        return {key: as_tuples(part) for key, part in value.items()}
    return tuple(as_tuples(part) for part in value) if isinstance(value, list) else value


def structure(x: object) -> str:
    """Describe the structure of inputs for error messages: one tensor, a tuple of several, or a
    mapping with its names.
    """
    if isinstance(x, Tensor):
        return "one tensor"
    if isinstance(x, Mapping):
        return f"a mapping of {list(x)[:20]}"
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else type(x).__name__


def unnamed(tensors: Mapping[str, Tensor], name: str = "x") -> Inputs | None:
    """Return the inputs from tensors named as `named` does, ignoring other names; None if there are
    none.
    """
    found = []
    for key, t in tensors.items():
        if key == name or key.startswith(f"{name}["):
            path, node = [], ast.parse(key, mode="eval").body
            while isinstance(node, ast.Subscript):
                path.insert(0, ast.literal_eval(node.slice))
                node = node.value
            found.append((path, t))
    return _nested(found) if found else None


def _nested(parts: Sequence[tuple[list[str | int], Tensor]]) -> Inputs:
    if not parts[0][0]:
        return parts[0][1]
    groups: dict[str | int, list[tuple[list[str | int], Tensor]]] = {}
    for (key, *rest), t in parts:
        groups.setdefault(key, []).append((rest, t))
    places = sorted(key for key in groups if isinstance(key, int))
    return (
        tuple(_nested(groups[key]) for key in places)
        if places
        else {str(key): _nested(own) for key, own in groups.items()}
    )


def words(x: Inputs) -> np.ndarray:
    """Return the numbers of every row as 32-bit words, [n, m] uint32, identical in every precision:
    floats as float32, others as int64.
    """
    parts = []
    for _, t in named(x):
        flat = t.detach().cpu().reshape(len(t), -1)
        # Adding 0 turns -0 into 0.
        plain = (
            (flat.float() + 0.0).numpy() if t.is_floating_point() else flat.to(torch.int64).numpy()
        )
        parts.append(np.ascontiguousarray(plain).view(np.uint32))
    return np.concatenate(parts, 1)
