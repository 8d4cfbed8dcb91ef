"""Saved runs: one safetensors file whose metadata holds everything that is not a tensor, and one digest over all of it.

Format 1. The file `state.safetensors` holds the server's and the clients' tensors under dotted names. Its metadata has two
entries: `bayesfl`, JSON with sorted keys, and `digest`, the SHA-256 over that JSON and over name, dtype, shape and bytes of every
tensor in the order of names. It is written under a temporary name, flushed and renamed, so a folder never holds half of one.
No pickle: loading a run executes nothing.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesfl.blocks import Algorithm, flatten
from bayesfl.files import atomic_path

FORMAT = 1
STATE = "state.safetensors"


class CheckpointError(RuntimeError):
    """A saved run that is damaged, of another format, or of something else than it is loaded for."""


def write(path: str | os.PathLike[str], meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Writes a nest of tensors and JSON-able `meta` into the folder `path`, all or nothing."""
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    flat = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in sorted(flatten(tensors).items())}
    text = json.dumps({**meta, "format": FORMAT}, sort_keys=True)
    with atomic_path(folder / STATE) as temporary:
        save_file(flat, str(temporary), metadata={"bayesfl": text, "digest": _digest(text, flat)})


def read(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
    """The meta data and the nest of tensors that `write` put into the folder `path`.

    Raises:
        CheckpointError: There is no run, it is damaged, or its format is not this one.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path) / STATE
    if not file.is_file():
        raise CheckpointError(f"{str(path)!r} holds no saved run: {STATE} is missing")
    try:
        with safe_open(str(file), "pt") as opened:
            header = opened.metadata() or {}
            flat = {name: opened.get_tensor(name) for name in list(opened.keys())}
    except SafetensorError as error:
        raise CheckpointError(f"{str(file)!r} is damaged: {error}") from error
    text = header.get("bayesfl", "")
    if header.get("digest") != _digest(text, flat):
        raise CheckpointError(f"{str(file)!r} is damaged, or not a saved run: its digest does not match")
    meta = json.loads(text)
    if meta["format"] != FORMAT:
        raise CheckpointError(f"{str(file)!r} has format {meta['format']}; this version of bayesfl reads {FORMAT}")
    return meta, _nest({name: t.to(device) for name, t in flat.items()})


def identity(algorithm: Algorithm) -> dict[str, Any]:
    """What makes two algorithms the same as far as a saved state can tell: JSON-able, stable across processes."""
    named = {name: _plain(getattr(algorithm, name)) for name in (f.name for f in fields(algorithm)) if name != "model"}
    shapes = {name: list(p.shape) for name, p in algorithm.model.named_parameters()}
    return json.loads(json.dumps({**named, "parameters": shapes}))


def differences(saved: Any, given: Any, path: str = "") -> list[str]:
    """Where two identities differ, as `path: saved this, given that`."""
    if isinstance(saved, Mapping) and isinstance(given, Mapping):
        keys = sorted(saved.keys() | given.keys())
        return [line for key in keys for line in differences(saved.get(key), given.get(key), f"{path}.{key}" if path else key)]
    if isinstance(saved, list) and isinstance(given, list) and len(saved) == len(given):
        pairs = enumerate(zip(saved, given, strict=True))
        return [line for i, (one, other) in pairs for line in differences(one, other, f"{path}[{i}]")]
    return [] if saved == given else [f"{path}: saved {saved}, given {given}"]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if is_dataclass(value):
        return {"type": type(value).__name__, **{f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.init}}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Callable):
        # A closure's numbers are part of what it computes: a prior's strength, a schedule's rate.
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        inner = [_plain(cell) for cell in cells if not isinstance(cell, Algorithm | nn.Module | Tensor)]
        return [getattr(value, "__qualname__", type(value).__name__), *inner]
    return type(value).__name__


def _digest(text: str, flat: Mapping[str, Tensor]) -> str:
    sums = hashlib.sha256(text.encode())
    for name, t in sorted(flat.items()):
        sums.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        sums.update(t.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sums.hexdigest()


def _nest(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = out
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return out
