"""Values as one tensor of bytes, for messages between ranks: JSON that describes them, followed by
the bytes of their tensors and arrays.

Nothing is pickled. Objects must be data classes of bayesfl, and are sent as their fields.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

OWN = "bayesfl."
"""Prefix of the modules whose data classes can be sent."""


def packed(value: Any) -> Tensor:
    """Return a value as bytes, [n] uint8.

    Args:
        value: Plain values, tensors, NumPy arrays and data classes of bayesfl, in lists, tuples and
            mappings.

    Raises:
        TypeError: A value is none of these.

    Example:
        >>> from bayesfl.base.processes.packing import packed, unpacked
        >>> unpacked(packed({1: (torch.ones(2), "two")}))
        {1: (tensor([1., 1.]), 'two')}
    """
    parts: list[Tensor] = []
    text = json.dumps(_said(value, parts)).encode()
    head = np.frombuffer(np.int64(len(text)).tobytes() + text, np.uint8)
    return torch.cat([torch.from_numpy(head.copy()), *parts])


def unpacked(data: Tensor) -> Any:
    """Return the value that `packed` converted; tensors from a GPU are placed on this process's."""
    start = 8 + int(data[:8].clone().view(torch.int64))
    said = json.loads(data[8:start].numpy().tobytes())
    return _made(said, data, [start])


def flat_bytes(t: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU, in the order of its entries, [n] uint8."""
    t = t.contiguous()
    # A single entry also counts as contiguous with a stride of 0, which `view` does not accept.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def _said(value: Any, parts: list[Tensor]) -> Any:
    """Return the JSON description of a value, and append its bytes to `parts`."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        t = torch.as_tensor(value).detach()
        parts.append(flat_bytes(t.cpu()))
        kind = "tensor" if isinstance(value, Tensor) else "array"
        return {kind: str(t.dtype).removeprefix("torch."), "shape": t.shape, "on": t.device.type}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_said(one, parts) for one in value]}
    if isinstance(value, Mapping):
        return {"mapping": [[_said(key, parts), _said(one, parts)] for key, one in value.items()]}
    kind = type(value)
    if not is_dataclass(kind) or not kind.__module__.startswith(OWN):
        raise TypeError(f"ranks send tensors and plain values to each other, not {value!r}")
    known = {one.name: _said(getattr(value, one.name), parts) for one in fields(kind)}
    return {"class": [kind.__module__, kind.__qualname__], "fields": known}


def _made(said: Any, data: Tensor, at: list[int]) -> Any:
    """Return the value with this JSON description; its bytes start at position `at`, which is
    advanced.
    """
    if not isinstance(said, Mapping):
        return said
    if "tensor" in said or "array" in said:
        kind = getattr(torch, said.get("tensor", said.get("array")))
        at[0] += (size := math.prod(said["shape"]) * kind.itemsize)
        # A copy has the alignment that every dtype needs.
        found = data[at[0] - size : at[0]].clone().view(kind).reshape(said["shape"])
        return found.numpy() if "array" in said else found.to(said["on"])
    if "tuple" in said or "list" in said:
        found = [_made(one, data, at) for one in said.get("tuple", said.get("list"))]
        return tuple(found) if "tuple" in said else found
    if "mapping" in said:
        return {_made(key, data, at): _made(one, data, at) for key, one in said["mapping"]}
    module, name = said["class"]
    if not module.startswith(OWN):
        raise TypeError(f"ranks send data classes of bayesfl to each other, not {module}.{name}")
    kind = attrgetter(name)(import_module(module))
    value = object.__new__(kind)
    for key, one in said["fields"].items():
        object.__setattr__(value, key, _made(one, data, at))
    return value
