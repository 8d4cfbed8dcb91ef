"""Descriptions of any values as JSON, the same in every process: by these a saved run, or another machine, knows them again."""

import ast
import functools
import hashlib
import inspect
import json
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base import digest

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
DEPTH = 40  # deepest level of nested values that is described


def described(value: Any, path: tuple[int, ...] = ()) -> Any:
    """Return a JSON-able description of any value, without memory addresses; values inside themselves or nested too deeply are cut off.

    A function of a user's is described by its module, its name, a digest of the source text of that function alone (of its code, where
    there is none), its defaults, and what it closes over; not by what it reads under global names. Its class counts with its bases, its
    functions and its values. Functions and classes of Python, of installed packages and of bayesfl count by their names. Data classes are
    described by their fields, modules by their layers, other objects by their class and their attributes. An object with a method
    `described_as` says itself what it is.
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

    def entries(of: Mapping[Any, Any]) -> dict[str, Any]:
        return {str(inner(key)): inner(part) for key, part in of.items()}

    if isinstance(value, Mapping):
        return entries(value)
    if isinstance(value, list | tuple):
        return [inner(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((inner(v) for v in value), key=json.dumps)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8:
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        return f"{type(value).__qualname__}({value.dtype}, {list(value.shape)}, {_sum_of(value)})"
    if isinstance(value, torch.dtype | torch.device | np.dtype | PurePath | Enum):
        return str(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, re.Pattern):
        return [value.pattern, value.flags]
    if isinstance(value, type):
        return _of_class(value, inner)
    if (own := getattr(value, "described_as", None)) is not None:
        return inner(own())
    if is_dataclass(value):
        return {"type": inner(type(value)), **{f.name: inner(getattr(value, f.name, None)) for f in fields(value) if f.init}}
    if isinstance(value, nn.Module):
        kinds = [inner(kind) for kind in dict.fromkeys(type(layer) for layer in value.modules())]
        tensors = {key: inner(t) for key, t in value.state_dict(keep_vars=True).items()}
        return {"layers": layers(value), "held": held(value), "types": kinds, "tensors": tensors}
    if isinstance(value, functools.partial):
        return {"partial": inner(value.func), "args": inner(value.args), "keywords": entries(value.keywords)}
    if isinstance(value, types.MethodType):
        return {"method": inner(value.__func__), "of": inner(value.__self__)}
    if isinstance(value, types.FunctionType):
        if (compiled := value.__dict__.get("_torchdynamo_orig_callable")) is not None:  # by torch.compile
            return inner(compiled)
        cells = {name: inner(_contents(cell)) for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)}
        holds = {**cells, **entries(value.__kwdefaults__ or {}), **({"defaults": inner(value.__defaults__)} if value.__defaults__ else {})}
        return _named(value) | ({"holds": holds} if holds else {})
    slots = [name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    attributes = {name: part for name, part in attributes.items() if name == "__wrapped__" or not str(name).startswith("__")}
    found = {"type": inner(type(value)), **({"holds": entries(attributes)} if attributes else {})}
    if name := getattr(value, "__qualname__", None) or getattr(value, "__name__", None):
        found["name"] = name
        if not isinstance(whose := getattr(value, "__self__", None), types.ModuleType | None):
            found["of"] = inner(whose)
    elif not attributes and isinstance(found["type"], str):  # an object of C code, or of an installed package
        found["is"] = ADDRESS.sub("", repr(value))
    return found


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _of_class(kind: type, inner: Callable[[Any], Any]) -> Any:
    """Return a class's name, and of a user's what it and its bases are made of: source, functions and values."""
    if _by_name(kind):
        return kind.__qualname__
    members = {name: part for name, part in vars(kind).items() if not name.startswith(("__", "_abc")) or name == "__call__"}
    parts = {name: inner(getattr(part, "__func__", getattr(part, "fget", part))) for name, part in members.items()}
    bases = [inner(base) for base in kind.__bases__ if base is not object]
    return _named(kind) | {"holds": parts} | ({"bases": bases} if bases else {})


def _named(thing: Any) -> dict[str, Any]:
    """Return the name of a function or a class, and of a user's a digest of its source text, None where there is none."""
    found = {"name": f"{_module(thing)}.{thing.__qualname__}"}
    return found if _by_name(thing) else found | {"source": _source(thing)}


def anonymous(description: Any) -> bool:
    """Say whether a description has a function without source text and without a name, of which another may pass for it."""
    if isinstance(description, Mapping):
        nameless = str(description.get("name", "")).endswith("<lambda>") and description.get("source", "") is None
        return nameless or any(map(anonymous, description.values()))
    return isinstance(description, list) and any(map(anonymous, description))


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a description, hexadecimal."""
    return hashlib.sha256(json.dumps(described(value), sort_keys=True).encode()).hexdigest()


def _module(thing: Any) -> str:
    """Return the module of a function or a class; of a program that was started, the name under which others import it."""
    if thing.__module__ != "__main__":
        return str(thing.__module__)
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec is not None else PurePath(file).stem if file else "__main__"


def _by_name(thing: Any) -> bool:
    """Say whether a function or a class is of Python, of an installed package or of bayesfl, and counts by its name."""
    module = str(thing.__module__ or "")
    top, file = module.partition(".")[0], getattr(sys.modules.get(module), "__file__", None) or ""
    if module == "builtins":
        return not isinstance(thing, types.FunctionType)  # else of a text that was executed
    return top == "bayesfl" or top in sys.stdlib_module_names or bool({"site-packages", "dist-packages"} & set(PurePath(file).parts))


def _source(thing: Any) -> str | None:
    """Return a digest of the source text of a user's function or class; where there is none, of a function's code, if it has a name."""
    code = getattr(thing, "__code__", thing)
    nameless = thing.__qualname__.endswith("<lambda>")
    try:
        text = textwrap.dedent(_of_lambda(code) if nameless else inspect.getsource(code))
    except (OSError, TypeError, SyntaxError):
        if nameless or not isinstance(code, types.CodeType):
            return None
        text = ADDRESS.sub("", repr((code.co_code, code.co_consts, code.co_names)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _of_lambda(code: types.CodeType) -> str:
    """Return the source text of one lambda, of which several may stand on a line.

    Raises:
        OSError: There is no source text.
        SyntaxError: It does not parse.
    """
    text = "".join(inspect.findsource(code)[0])
    places = [(line, column) for line, _, column, end in code.co_positions() if line and column is not None and end]
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Lambda) and all(_starts(node.body) <= place < _ends(node.body) for place in places)
    ]
    if not found:
        raise OSError(f"no lambda in line {code.co_firstlineno}")
    return ast.get_source_segment(text, max(found, key=_starts)) or ""  # the innermost


def _starts(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _ends(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _contents(cell: types.CellType) -> Any:
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
