"""Nests of tensors and their dotted names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nest of mappings as one, its keys joined by dots; what is not a mapping is a leaf.

    Raises:
        ValueError: A key is not text, or has a dot itself, so that it could not be told from a nest.
    """
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str) or "." in key or not key:
            raise ValueError(f"name {key!r} must be text without dots, which join the names of a nest; choose another")
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def shapes(tree: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each of a nest's tensors, under their dotted names."""
    return {name: (t.dtype, tuple(t.shape)) for name, t in flatten(tree).items()}


def detached(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """A nest's tensors under their dotted names, in the order of names: copies on the CPU, contiguous, that share no memory."""
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in sorted(flatten(tree).items())}


def nest(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors under names joined by dots as the nest that `flatten` took them from.

    Raises:
        ValueError: One name is the beginning of another.
    """
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = out
        for key in path:
            place = place.setdefault(key, {})
            if isinstance(place, Tensor):
                raise ValueError(f"tensor {name!r} stands below another")
        if last in place:
            raise ValueError(f"tensor {name!r} stands above another")
        place[last] = value
    return out
