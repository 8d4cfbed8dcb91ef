"""Descriptions of any values as JSON, which are the same in every process: how a saved run knows the functions it was made with."""

import functools
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base import digest

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
LATER = {"later": True}
"""Marks, as `metadata` of a field, an option that came after runs had been saved, in whose descriptions it is not."""
DEPTH = 40  # deepest level of nested values that is described


def described(value: Any, path: tuple[int, ...] = ()) -> Any:
    """Return a JSON-able description of any value, without memory addresses; values inside themselves or nested too deeply are cut off.

    A function is described by its name and by what it closes over, has as defaults or is partially applied to, not by its code,
    which `bayesfl.base.function_code` reads. A module is described by its layers and their numbers.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if id(value) in path or len(path) == DEPTH:
        return "..."

    def inner(part: Any) -> Any:
        return described(part, (*path, id(value)))

    name = type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(inner(k)): inner(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [inner(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((inner(v) for v in value), key=json.dumps)
    if isinstance(value, np.ndarray):
        value = (
            torch.from_numpy(np.ascontiguousarray(value))
            if value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8
            else None
        )
    if isinstance(value, Tensor):
        return f"{name}({value.dtype}, {list(value.shape)}, {_sum_of(value)})"
    if isinstance(value, nn.Module):
        return {"layers": layers(value), **{key: inner(t) for key, t in value.state_dict(keep_vars=True).items()}}
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": name, **{key: inner(option) for key, option in options(value).items()}}
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
    # The values in a closure are part of what a function computes: a prior's strength, a schedule's rate.
    cells = [contents(cell) for cell in getattr(value, "__closure__", None) or ()]
    more = [getattr(value, key, None) for key in ("__defaults__", "__kwdefaults__", "__wrapped__")]
    return [value.__qualname__, *(inner(part) for part in (*cells, *more) if part is not None)]


def options(value: Any) -> dict[str, Any]:
    """Return the options of a data class by name; those marked `LATER` that are None are left out."""
    found = {f.name: (getattr(value, f.name, None), f.metadata) for f in fields(value) if f.init}
    return {name: option for name, (option, marks) in found.items() if option is not None or "later" not in marks}


def _attributes(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Describe an object by its type and attributes, unless it is of a kind that `described` describes."""
    if isinstance(value, type | nn.Module) or is_dataclass(value):
        return inner(value)
    return {"type": type(value).__qualname__, **inner(getattr(value, "__dict__", {}))}


def contents(cell: types.CellType) -> Any:
    """Return what a cell of a closure holds; None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def layers(model: nn.Module) -> dict[str, str]:
    """Return every layer's type and options, by name."""
    return {name: f"{type(layer).__qualname__}({_options(layer)})" for name, layer in model.named_modules()}


def held(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the plain values that every part of a model holds beside its layers' options, by name: numbers, texts, names of functions."""
    found = {}
    for name, part in model.named_modules():
        own = {key: value for key, value in vars(part).items() if not key.startswith("_") and key not in ("training", "name_or_path")}
        found[name] = {key: _plain(value) for key, value in own.items() if value is None or _plain(value) is not None}
    return found


def _plain(value: Any) -> Any:
    """Return a plain value, or a function by its name, as JSON holds it; None for all else."""
    if isinstance(value, bool | int | float | str | np.generic | np.ndarray | torch.dtype | tuple | list | dict) or type(value) is Tensor:
        return described(value)
    return getattr(value, "__qualname__", None) if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type) else None


def _options(layer: nn.Module) -> str:
    try:
        return ADDRESS.sub("", layer.extra_repr())
    except Exception:  # extra_repr is user code; its failure must not stop a run from being saved
        return ""


def _sum_of(t: Tensor) -> str:
    try:
        return digest.of_tensor(t)[:16]
    except (RuntimeError, NotImplementedError, TypeError):  # sparse, or without data
        return ""
