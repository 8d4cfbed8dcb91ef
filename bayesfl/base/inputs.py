"""Inputs of a network as trees of tensors, one row for each example: a tensor, a tuple of several, or a mapping of them by name."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

Inputs: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Inputs [N, ...]: a tensor, with which a model is called as `model(x)`; a tuple, `model(*x)`; or a mapping, `model(**x)`."""

Shapes: TypeAlias = tuple[Any, ...] | Mapping[str, Any]
"""Shape of one example: of a tensor, such as (3, 32, 32); a tuple or a mapping of shapes for a tuple or a mapping of tensors."""


def call(module: nn.Module, x: Inputs) -> Any:
    """Call a module with inputs: `module(x)`, `module(*x)` or `module(**x)`."""
    args, named = _arguments(x)
    return module(*args, **named)


def call_at(module: nn.Module, leaves: dict[str, Tensor], x: Inputs) -> Any:
    """Call a module with inputs at the parameters `leaves`, as `torch.func.functional_call` does."""
    return functional_call(module, leaves, *_arguments(x))


def _arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def each(function: Callable[[Tensor], Any], x: Any) -> Any:
    """Return the same tree of what `function` makes of every tensor."""
    return function(x) if isinstance(x, Tensor) else tree_map(function, x)


def first(x: Inputs) -> Tensor:
    """Return the first tensor of the tree."""
    return x if isinstance(x, Tensor) else tree_leaves(x)[0]


def count(x: Inputs) -> int:
    """Return the number of examples N, by the first tensor."""
    return len(first(x))


def named(x: Inputs, name: str = "x") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with the expression that finds it, as `x`, `x[0]` or `x['mask']`."""
    if isinstance(x, Tensor):
        yield name, x
        return
    for key, part in x.items() if isinstance(x, Mapping) else enumerate(x):
        yield from named(part, f"{name}[{key!r}]")


def in_precision(x: Inputs, dtype: torch.dtype) -> Inputs:
    """Return the inputs with floats in `dtype`; whole numbers and bools stay what they are."""
    return each(lambda t: t.to(dtype=dtype) if t.is_floating_point() else t, x)


def shape_of(x: Inputs) -> Shapes:
    """Return the shape of one example, without the axis of rows."""
    if isinstance(x, Tensor):
        return tuple(x.shape[1:])
    return {key: shape_of(t) for key, t in x.items()} if isinstance(x, Mapping) else tuple(shape_of(t) for t in x)


def row_bytes(x: Inputs) -> int:
    """Return the bytes that one row takes, at least 1."""
    return max(1, sum(t[:1].nbytes for t in ([x] if isinstance(x, Tensor) else tree_leaves(x))))


def pieces(x: Inputs, size: int) -> Iterator[Inputs]:
    """Yield the rows in pieces of at most `size` bytes, of one row at least."""
    rows = max(1, size // row_bytes(x))
    for start in range(0, count(x), rows):
        yield each(lambda t, start=start: t[start : start + rows], x)
