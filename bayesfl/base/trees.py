"""Nested mappings of tensors, and their dotted names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nest of mappings into one mapping, its keys joined by dots; anything that is not a
    mapping is a leaf.

    Raises:
        ValueError: A key is not text, is empty, or contains a dot, so that it could be confused
            with a nest.
    """
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str) or "." in key or not key:
            raise ValueError(
                f"name {key!r} must be text without dots, which join the names of a nest; choose "
                "another"
            )
        out |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return out


def alike(one: Tensor, other: Tensor, *, free: int = 0) -> bool:
    """Return whether two tensors have one dtype and one shape; their first `free` axes may have
    other lengths.
    """
    return (
        one.dtype == other.dtype
        and one.dim() == other.dim()
        and one.shape[free:] == other.shape[free:]
    )


def shapes(tree: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each of a nest's tensors, under their dotted names."""
    return {name: (t.dtype, tuple(t.shape)) for name, t in flatten(tree).items()}


def detached(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a nest's tensors under their dotted names, sorted by name: contiguous copies on the
    CPU that share no memory.
    """
    return {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, t in sorted(flatten(tree).items())
    }


def nest(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the nest from which `flatten` made these tensors under dotted names.

    Raises:
        ValueError: One name is the beginning of another, such as "a" and "a.b".
    """
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = out
        for key in path:
            place = place.setdefault(key, {})
            if isinstance(place, Tensor):
                break
        if isinstance(place, Tensor) or last in place:
            raise ValueError(f"tensor {name!r} stands above or below another")
        place[last] = value
    return out
