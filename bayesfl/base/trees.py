"""Nested mappings of tensors, and their dotted names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nest of mappings into one mapping, with keys joined by dots; anything that is not a
    mapping is a leaf.

    Raises:
        ValueError: A key is not text, is empty, or contains a dot, which would make the flat name
            ambiguous.
    """
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if not isinstance(key, str) or "." in key or not key:
            raise ValueError(
                f"name {key!r} must be text without dots, because dots join the names of a nest; "
                "choose another"
            )
        out |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return out


def alike(one: Tensor, other: Tensor, *, free: int = 0) -> bool:
    """Return whether two tensors have the same dtype and shape; the lengths of their first `free`
    axes may differ.
    """
    return (
        one.dtype == other.dtype
        and one.dim() == other.dim()
        and one.shape[free:] == other.shape[free:]
    )


def shapes(tree: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor of a nest, by its dotted name."""
    return {name: (t.dtype, tuple(t.shape)) for name, t in flatten(tree).items()}


def detached(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a nest, sorted by their dotted names, as contiguous copies on the CPU
    that share no memory.
    """
    return {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, t in sorted(flatten(tree).items())
    }


def nest(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Invert `flatten` for tensors.

    Raises:
        ValueError: One name is a prefix of another, such as "a" and "a.b".
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
            raise ValueError(f"tensor {name!r} is a prefix of another tensor's name")
        place[last] = value
    return out
