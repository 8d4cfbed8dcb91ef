"""Descriptions of any values as JSON, identical in every process, to recognise them in a saved run
or on another machine.
"""

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import math
import os
import re
import sys
import sysconfig
import textwrap
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base.archive import digest_of_tensor

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
FIRST = 3  # differences that an error message lists
LONGEST = 300  # characters of a value in an error message
DEPTH = 40  # deepest level of nested values that is described


def described(value: Any, path: tuple[int, ...] = ()) -> Any:
    """Describe any value as JSON, without memory addresses; values inside themselves, or nested too
    deeply, are cut off.

    - A user's function is described by its module, its name, a digest of its own source text (of
      its code if there is no text), its defaults and its closure. Global names that it reads do not
      count. A user's class also counts with its bases, functions and values.
    - Functions and classes of Python, installed packages and bayesfl count by name only.
    - Data classes are described by the fields that differ from their defaults, modules by their
      layers, other objects by class and attributes.
    - An object with a method `described_as` provides its own description.
    """
    value = value.item() if isinstance(value, np.generic) else value
    kind = type(value)
    if (
        kind.__module__ != "builtins"
        and isinstance(value, int | float | str | list | tuple | dict | set | frozenset)
        and not _by_name(kind)
    ):
        base = next(one for one in kind.__mro__ if one.__module__ == "builtins")
        return {
            "class": described(kind, path),
            "value": described(base(value), path),
            "holds": described(_attributes(value), path),
        }
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
    if isinstance(value, list | tuple | deque):
        return [inner(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((inner(v) for v in value), key=json.dumps)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return inner(value.tolist())
        text = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return f"{kind.__qualname__}({value.dtype.str}, {list(value.shape)}, {text})"
    if isinstance(value, Tensor):
        return f"{type(value).__qualname__}({value.dtype}, {list(value.shape)}, {_sum_of(value)})"
    if isinstance(value, Enum) and not _by_name(kind):
        return {"class": inner(kind), "name": value.name, "value": inner(value.value)}
    if isinstance(value, torch.dtype | torch.device | np.dtype | PurePath | Enum):
        return str(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, re.Pattern):
        return [value.pattern, value.flags]
    if isinstance(value, logging.Logger):
        return value.name
    if isinstance(value, weakref.ref):
        return "a weak reference"  # its text would contain an address
    if isinstance(value, type):
        return _of_class(value, inner)
    if hasattr(kind, "described_as"):
        return inner(value.described_as())
    if is_dataclass(value):
        # Options at their defaults are left out, so that new options change no description.
        parts = {f: inner(getattr(value, f.name, None)) for f in fields(value) if f.init}
        told = {
            f.name: part
            for f, part in parts.items()
            if f.default is MISSING or part != inner(f.default)
        }
        return {"class": inner(kind), **told}
    if isinstance(value, nn.Module):
        own = {
            name: {key: part for key, part in vars(layer).items() if key not in _OF_MODULES}
            for name, layer in value.named_modules()
        }
        hooks = [
            list(part.values())
            for layer in value.modules()
            for key, part in vars(layer).items()
            if key.endswith("_hooks") and part
        ]
        kinds = [inner(one) for one in dict.fromkeys(type(layer) for layer in value.modules())]
        tensors = entries(value.state_dict(keep_vars=True))
        return {
            "layers": layers(value),
            "holds": inner(own),
            "hooks": inner(hooks),
            "classes": kinds,
            "tensors": tensors,
        }
    if isinstance(value, functools.partial):
        return {
            "partial": inner(value.func),
            "args": inner(value.args),
            "keywords": entries(value.keywords),
        }
    if isinstance(value, types.MethodType):
        return {"method": inner(value.__func__), "of": inner(value.__self__)}
    if isinstance(value, types.FunctionType):
        if (compiled := value.__dict__.get("_torchdynamo_orig_callable")) is not None:
            # The function that torch.compile wraps.
            return inner(compiled)
        cells = {
            name: inner(_contents(cell))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        }
        holds = cells | entries(value.__kwdefaults__ or {})
        defaults = {"defaults": inner(value.__defaults__)} if value.__defaults__ else {}
        return _named(value) | defaults | ({"holds": holds} if holds else {})
    attributes = _attributes(value)
    found = {"class": inner(kind), **({"holds": entries(attributes)} if attributes else {})}
    name = _attribute(value, "__qualname__") or _attribute(value, "__name__")
    if isinstance(name, str):
        found["name"] = name
        if not isinstance(whose := _attribute(value, "__self__"), types.ModuleType | None):
            found["of"] = inner(whose)
    elif not attributes and isinstance(found["class"], str):
        # An object of C code or of an installed package.
        found["is"] = ADDRESS.sub("", repr(value))
    return found


_OF_MODULES = {*vars(nn.Module()), "name_or_path", "_flat_weights", "_flat_weight_refs"}
"""Attributes that torch gives every module, or recurrent modules for their own weights."""


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute; None where there is none, or where a user's class raises."""
    try:
        return getattr(value, name, None)
    except Exception:  # a user's code; it must not stop a run
        return None


def _attributes(value: Any) -> dict[str, Any]:
    """Return the values in an object's slots and dictionary."""
    slots = [
        f"_{kind.__name__.lstrip('_')}{name}"
        if name.startswith("__") and not name.endswith("__")
        else name
        for kind in type(value).__mro__
        for held in [getattr(kind, "__slots__", ())]
        for name in ((held,) if isinstance(held, str) else held)
    ]
    own = _attribute(value, "__dict__")
    found = {name: _attribute(value, name) for name in slots} | (
        dict(own) if isinstance(own, Mapping) else {}
    )
    return {
        name: part
        for name, part in found.items()
        if name == "__wrapped__" or not str(name).startswith("__")
    }


def _of_class(kind: type, inner: Callable[[Any], Any]) -> Any:
    """Return the name of a class; for a user's class, also the source, functions and values of it
    and its bases.
    """
    if _by_name(kind):
        return kind.__qualname__
    members = {
        name: part
        for name, part in vars(kind).items()
        if not name.startswith(("__", "_abc")) or name == "__call__"
    }
    parts = {
        name: inner(getattr(part, "__func__", getattr(part, "fget", part)))
        for name, part in members.items()
    }
    bases = [inner(base) for base in (*kind.__bases__, type(kind)) if base not in (object, type)]
    return _named(kind) | {"holds": parts} | ({"bases": bases} if bases else {})


def _named(thing: Any) -> dict[str, Any]:
    """Return the name of a function or a class; for a user's, also a digest of its source text, or
    None if there is no text.
    """
    module = _module(thing)
    if module.partition(".")[0] == "bayesfl":  # its modules may be renamed
        return {"name": f"bayesfl.{thing.__qualname__}"}
    found = {"name": f"{module}.{thing.__qualname__}"}
    return found if _by_name(thing) else found | {"source": _source(thing)}


def anonymous(description: object) -> bool:
    """Return whether a description contains a function without source text or name; another
    function could then have the same description.
    """
    if isinstance(description, Mapping):
        nameless = (
            str(description.get("name", "")).endswith("<lambda>")
            and description.get("source", "") is None
        )
        return nameless or any(map(anonymous, description.values()))
    return isinstance(description, list) and any(map(anonymous, description))


def digest_of(value: object) -> str:
    """Return the SHA-256 of a description, hexadecimal."""
    return hashlib.sha256(json.dumps(described(value), sort_keys=True).encode()).hexdigest()


def differences(
    one: object, other: object, path: str = "", absent: Any = None
) -> dict[str, tuple[Any, Any]]:
    """Return the places where two descriptions differ, with both values; `absent` where one of
    them has no entry. The module does not count for a function or a class with source text. For
    objects of two classes only the classes are compared.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if (source := one.get("source")) is not None and source == other.get("source"):
            names = [str(of.get("name")).rpartition(".")[2] for of in (one, other)]
            one = {**one, "name": other.get("name")} if names[0] == names[1] else one
        alike = one.get("class") == other.get("class")
        keys = dict.fromkeys([*one, *other]) if alike else ["class"]
        pairs = [
            (f"{path}.{key}" if path else key, one.get(key, absent), other.get(key, absent))
            for key in keys
        ]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [
            (f"{path}[{place}]", *both) for place, both in enumerate(zip(one, other, strict=True))
        ]
    else:
        return {} if one == other else {path: (one, other)}
    return {
        place: both
        for inner, a, b in pairs
        for place, both in differences(a, b, inner, absent).items()
    }


def in_words(different: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the first differences as text, and the number of further ones; empty for none."""
    first = "; ".join(
        f"{path.rstrip('.')}: saved {_short(then)}, given {_short(now)}"
        for path, (then, now) in list(different.items())[:FIRST]
    )
    return first + (f"; and {len(different) - FIRST} more" if len(different) > FIRST else "")


def _short(value: object) -> str:
    return text if len(text := str(value)) <= LONGEST else f"{text[:LONGEST]} ..."


def _module(thing: Any) -> str:
    """Return the module of a function or a class; for the main program, the name under which others
    would import it.
    """
    if thing.__module__ != "__main__":
        return str(thing.__module__)
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec is not None else PurePath(file).stem if file else "__main__"


def _by_name(thing: Any) -> bool:
    """Return whether a function or a class belongs to Python, an installed package or bayesfl, so
    that its name describes it.
    """
    module, code = str(thing.__module__ or ""), getattr(thing, "__code__", None)
    if module == "builtins":
        return code is None  # otherwise it comes from a text that was executed
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if module.partition(".")[0] == "bayesfl" or (
        not file and module.partition(".")[0] in sys.stdlib_module_names
    ):
        return True
    # A wrapper has the module of the function that it wraps.
    places = (file, code.co_filename) if code is not None else (file,)
    parts = {part for place in places for part in PurePath(place).parts}
    installed = bool(INSTALLED & parts)
    read = _READ.get()
    if installed and read is not None and module.partition(".")[0] not in ("torch", "numpy"):
        read[module] = _package(module, file)
    return installed or any(place.startswith(_STDLIB) for place in places)


INSTALLED = {"site-packages", "dist-packages"}
"""Folders in which packages are installed."""
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def _source(thing: Any) -> str | None:
    """Return a digest of the source text of a user's function or class, without comments,
    docstrings and layout; of a named function's code if there is no text.
    """
    code = getattr(thing, "__code__", thing)
    nameless = getattr(code, "co_name", "") == "<lambda>"
    try:
        text = _bare(textwrap.dedent(_of_lambda(code) if nameless else inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        if nameless or not isinstance(code, types.CodeType):
            return None
        text = json.dumps(_of_code(code))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bare(text: str) -> str:
    """Return a source text in one layout, without comments and docstrings.

    Raises:
        SyntaxError: It does not parse.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body[:1] = [] if len(node.body) > 1 else [ast.Pass()]
    return ast.unparse(tree)


def _of_code(code: types.CodeType) -> list[Any]:
    """Describe code that has no source text; the description depends on the version of Python."""
    constants = [
        _of_code(one)
        if isinstance(one, types.CodeType)
        else sorted(map(repr, one))
        if isinstance(one, frozenset)
        else repr(one)
        for one in code.co_consts
    ]
    return [code.co_code.hex(), code.co_names, constants]


def _of_lambda(code: types.CodeType) -> str:
    """Return the source text of one lambda; a line may contain several.

    Raises:
        OSError: There is no source text.
        SyntaxError: It does not parse.
    """
    text = "".join(inspect.findsource(code)[0])
    places = [
        (line, column)
        for line, _, column, end in code.co_positions()
        if line and column is not None and end
    ]
    found = [
        node
        for node in _lambdas(text)
        if all(_starts(node.body) <= place < _ends(node.body) for place in places)
    ]
    if not found or not places:  # for example where Python stores no columns
        raise OSError(f"no lambda in line {code.co_firstlineno}")
    return ast.get_source_segment(text, max(found, key=_starts)) or ""  # the innermost


@functools.lru_cache(maxsize=8)
def _lambdas(text: str) -> list[ast.Lambda]:
    """Return the lambdas of a file; parsing it is slow compared with one lambda."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]


def _starts(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _ends(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _contents(cell: types.CellType) -> Any:
    """Return the content of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


_READ: ContextVar[dict[str, Any] | None] = ContextVar("_READ", default=None)


@contextmanager
def packages() -> Iterator[dict[str, Any]]:
    """Collect the packages whose code is named in the descriptions made inside the block: for each
    module the distribution's version and a digest of its source, because a name alone does not
    identify the code.

    Python, torch, NumPy and bayesfl are left out.
    """
    token = _READ.set(found := {})
    try:
        yield found
    finally:
        _READ.reset(token)


@functools.cache
def _package(module: str, file: str) -> list[Any]:
    """Return the versions of a module's distributions, and a digest of its file."""
    names = sorted(set(_distributions().get(module.partition(".")[0], ())))
    source = hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()
    return [{name: importlib.metadata.version(name) for name in names}, source[:16]]


_distributions = functools.cache(importlib.metadata.packages_distributions)


def network(model: nn.Module) -> dict[str, Any]:
    """Describe a network so that it can be recognised: the type and options of every part, its
    plain values, its hooks, and the source of the user's classes; weights are left out.
    """
    kinds = dict.fromkeys(type(part) for part in model.modules())
    code: dict[str, list[Any]] = {}
    for kind in kinds:
        if not _by_name(kind):
            code.setdefault(kind.__qualname__, []).append(described(kind))
    return {
        "layers": layers(model),
        "held": {name: _held(vars(part), type(part)) for name, part in model.named_modules()},
        "hooks": [
            _held(dict(enumerate(of.values())), nn.Module)
            for part in model.modules()
            for key, of in vars(part).items()
            if key.endswith("_hooks") and of
        ],
        "code": code,
    }


def layers(model: nn.Module) -> dict[str, str]:
    """Return every layer's type and options, by name."""
    return {
        name: f"{type(layer).__qualname__}({_options(layer)})"
        for name, layer in model.named_modules()
    }


def held(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the plain values that every part of a model has in addition to its layers' options, by
    name: numbers, texts, functions with their closures, and those inside a configuration.
    """
    return {name: _held(vars(part), nn.Module) for name, part in model.named_modules()}


_UNREAD = ("training", "name_or_path", "transformers_version")


def _held(attributes: Mapping[Any, Any], kind: type, depth: int = 0) -> dict[Any, Any]:
    """Return the plain attributes of an object; objects among them, such as a configuration, are
    represented by their own attributes and the user's class.

    Names with an underscore count only if a user's class defines them; possible caches do not.
    """
    found = {}
    for key, value in attributes.items():
        private = str(key).startswith("_")
        cache = value is None or isinstance(value, Tensor | Mapping | list | set)
        if key in _UNREAD or (private and (key in _OF_MODULES or cache or _by_name(kind))):
            continue
        plain = _plain(value)
        if value is None or plain is not None:
            found[key] = plain
        elif depth < DEPTH and not isinstance(value, nn.Module | Tensor):
            inner = _held(_attributes(value), type(value), depth + 1)
            own = {} if _by_name(type(value)) else {"class": described(type(value))}
            if inner or own:
                found[key] = inner | own
    return found


def _plain(value: Any) -> Any:
    """Return a plain value or a function as JSON represents it; None for all else."""
    if isinstance(value, _PLAIN) or type(value) is Tensor:
        return described(value)
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return _of_function(value)
    if isinstance(value, types.BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, type):
        return described(value)
    return str(value) if isinstance(value, Enum) else None


_PLAIN = (
    *(bool, int, float, complex, str, bytes, range, Decimal, np.generic, np.ndarray, torch.dtype),
    *(tuple, list, dict, set, frozenset, deque),
)


def _of_function(value: Any, path: tuple[int, ...] = ()) -> Any:
    """Describe a function as `described` does, without itself and without modules and parameters
    in its closure, whose weights are not part of a network's description.
    """
    if isinstance(value, nn.Module | nn.Parameter) or id(value) in path:
        return None
    inner = functools.partial(_of_function, path=(*path, id(value)))
    if isinstance(value, functools.partial):
        given = [*value.args, *value.keywords.items()]
        return {"partial": inner(value.func), "given": [*map(inner, given)]}
    if isinstance(value, types.MethodType):
        return {"method": inner(value.__func__), "of": inner(value.__self__)}
    if not isinstance(value, types.FunctionType):
        return described(value)
    held = [*map(_contents, value.__closure__ or ()), *(value.__defaults__ or ())]
    held += (value.__kwdefaults__ or {}).values()
    return _named(value) | ({"holds": [*map(inner, held)]} if held else {})


def _options(layer: nn.Module) -> str:
    try:
        return ADDRESS.sub("", layer.extra_repr())
    except Exception:  # extra_repr is user code; its failure must not stop a run from being saved
        return ""


def _sum_of(t: Tensor) -> str:
    try:
        return digest_of_tensor(t)[:16]
    except (RuntimeError, NotImplementedError, TypeError):  # sparse, or without data
        return ""
