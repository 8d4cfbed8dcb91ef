"""Saved runs: one safetensors file whose metadata holds everything that is not a tensor, and one digest over all of it.

Format 2. The file `state.safetensors` holds the server's and the clients' tensors under dotted names. Its metadata has two
entries: `bayesfl`, JSON whose keys keep their order (that of the history's columns), and `digest`, the SHA-256 over that JSON
and over name, dtype, shape and bytes of every tensor in the order of names. It is written under a temporary name, flushed and
renamed, so a folder never holds half of one.
No pickle: loading a run executes nothing.
"""

import functools
import hashlib
import json
import math
import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.blocks import Algorithm, flatten
from bayesfl.files import atomic_path

FORMAT = 2
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
DEPTH = 40  # how far into nested values an identity looks
STATE = "state.safetensors"


class CheckpointError(RuntimeError):
    """A saved run that is damaged, of another format, or of something else than it is loaded for."""


def write(path: str | os.PathLike[str], meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Writes a nest of tensors and JSON-able `meta` into the folder `path`, all or nothing.

    Raises:
        ValueError: A file is where the folder should be.
    """
    from safetensors.torch import save_file

    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"path must name a folder, but {str(path)!r} is a file, or lies under one; pass another") from error
    flat = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in sorted(flatten(tensors).items())}
    text = json.dumps({**meta, "format": FORMAT})
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
    """What makes two algorithms the same as far as a saved state can tell: JSON-able, stable across processes.

    Numbers, names and types of all options, of what functions close over, have as defaults or are partially applied to; the model's
    layers, the shapes of its parameters, and the values of its buffers and of the parameters that no block covers. Not the code of
    functions: two lambdas of one function differ only where they close over something else.
    """
    covered = {name for block in algorithm.blocks for name in algorithm.layout(block).names}
    parameters = dict(algorithm.model.named_parameters())
    constants = {name: p for name, p in parameters.items() if name not in covered} | dict(algorithm.model.named_buffers())
    named: dict[str, Any] = {f.name: _plain(getattr(algorithm, f.name)) for f in fields(algorithm) if f.name != "model"}
    named["layers"] = _layers(algorithm.model)
    named["parameters"] = {name: list(p.shape) for name, p in parameters.items()}
    named["constants"] = {name: _plain(t) for name, t in constants.items()}
    return named


def differences(saved: Any, given: Any, path: str = "") -> list[str]:
    """Where two identities differ, as `path: saved this, given that`."""
    if isinstance(saved, Mapping) and isinstance(given, Mapping):
        keys = sorted(saved.keys() | given.keys())
        return [line for key in keys for line in differences(saved.get(key), given.get(key), f"{path}.{key}" if path else key)]
    if isinstance(saved, list) and isinstance(given, list) and len(saved) == len(given):
        pairs = enumerate(zip(saved, given, strict=True))
        return [line for i, (one, other) in pairs for line in differences(one, other, f"{path}[{i}]")]
    return [] if saved == given else [f"{path}: saved {saved}, given {given}"]


def _plain(value: Any, path: tuple[int, ...] = ()) -> Any:
    """A picture of any value that JSON can hold, without addresses of memory; a value inside itself is cut off."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if id(value) in path or len(path) == DEPTH:
        return "..."

    def inner(part: Any) -> Any:
        return _plain(part, (*path, id(value)))

    name = type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(inner(k)): inner(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [inner(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((inner(v) for v in value), key=json.dumps)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value) if value.dtype.kind in "biuf" else None
    if isinstance(value, Tensor):
        return f"{name}({value.dtype}, {list(value.shape)}, {_sum_of(value)})"
    if isinstance(value, nn.Module):
        return {"layers": _layers(value), **{key: inner(t) for key, t in value.state_dict(keep_vars=True).items()}}
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": name, **{f.name: inner(getattr(value, f.name, None)) for f in fields(value) if f.init}}
    if isinstance(value, functools.partial):
        return {"type": name, "func": inner(value.func), "args": inner(value.args), "keywords": inner(value.keywords)}
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, types.MethodType):
        return {"method": inner(value.__func__), "of": _attributes(value.__self__, inner)}
    if isinstance(value, type) or not callable(value):
        return getattr(value, "__qualname__", name)
    if not hasattr(value, "__qualname__"):
        return _attributes(value, inner)
    # What a closure holds is part of what it computes: a prior's strength, a schedule's rate.
    cells = [_contents(cell) for cell in getattr(value, "__closure__", None) or ()]
    more = [getattr(value, key, None) for key in ("__defaults__", "__kwdefaults__", "__wrapped__")]
    return [value.__qualname__, *(inner(part) for part in (*cells, *more) if part is not None)]


def _attributes(value: Any, inner: Callable[[Any], Any]) -> Any:
    """An object whose method is called: by its type and attributes, where it is of no kind that has a picture of its own."""
    if isinstance(value, type | nn.Module) or is_dataclass(value):
        return inner(value)
    return {"type": type(value).__qualname__, **inner(getattr(value, "__dict__", {}))}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _layers(model: nn.Module) -> dict[str, str]:
    """Every layer's type and what it says of itself, by name."""
    return {name: f"{type(layer).__qualname__}({_options(layer)})" for name, layer in model.named_modules()}


def _options(layer: nn.Module) -> str:
    try:
        return ADDRESS.sub("", layer.extra_repr())
    except Exception:  # anyone's code, and no reason not to save a run
        return ""


def _sum_of(t: Tensor) -> str:
    try:
        return hashlib.sha256(_bytes(t.detach().cpu())).hexdigest()[:16]
    except (RuntimeError, NotImplementedError, TypeError):  # sparse, or without data
        return ""


def _bytes(t: Tensor) -> Any:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _digest(text: str, flat: Mapping[str, Tensor]) -> str:
    sums = hashlib.sha256(text.encode())
    for name, t in sorted(flat.items()):
        sums.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        sums.update(_bytes(t))
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
