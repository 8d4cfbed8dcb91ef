"""What a user's function computes, as a digest: its code, and the functions, classes and values of the user's that it reads."""

import copyreg
import dis
import functools
import hashlib
import inspect
import json
import platform
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base.described import DEPTH, contents, described

_ONE_VALUE = (type(None), bool, int, float, str, np.generic, np.ndarray, Tensor, torch.dtype, torch.device)
_OF_CODE = (bytes, complex, range, slice, types.EllipsisType)
_MEANING = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def function_identity(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what JSON can hold of a function, by which another process knows whether it has the same one.

    Returns:
        `function`: what `described` says, with its name; `code`: `digest_of_code`; and `python`: the version that the digest belongs to.
    """
    version = ".".join(platform.python_version_tuple()[:2])
    return {"function": described(function), "code": digest_of_code(function)[:16], "python": version}


def digest_of_code(function: Callable[..., Any]) -> str:
    """Compute a digest of what a function computes, equal in every process of the same version of Python.

    It covers the bytecode and the constants, what the function closes over, has as defaults or is partially applied to, and the global
    functions, classes and values that it names, with all that these read in turn. It does not cover names, docstrings and comments, nor
    the code of installed packages, which count by name, nor what a function imports when it is called.
    """
    return hashlib.sha256(json.dumps(_Reader().read(function), sort_keys=True).encode()).hexdigest()


class _Reader:
    """Describes values with the code that they run; what is met a second time is a number."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, Any]] = {}  # the values, too, so that none has the address of another before the end

    def read(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, _ONE_VALUE):
            return described(value)
        if isinstance(value, _OF_CODE):
            return repr(value)
        if depth == DEPTH:
            return "..."
        inner = functools.partial(self.read, depth=depth + 1)
        if isinstance(value, types.CodeType):
            shape = [value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags & _MEANING]
            raw = [value.co_code.hex(), value.co_exceptiontable.hex()]
            return [*shape, *raw, list(value.co_names), [inner(constant) for constant in value.co_consts]]
        if isinstance(value, list | tuple):
            return [inner(part) for part in value]
        if isinstance(value, set | frozenset):
            return sorted((inner(part) for part in value), key=json.dumps)
        if isinstance(value, Mapping):
            return sorted(([inner(key), inner(part)] for key, part in value.items()), key=json.dumps)
        if isinstance(value, functools.partial):
            return [inner(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, types.MethodType):
            return [inner(value.__func__), inner(value.__self__)]
        if isinstance(value, types.ModuleType):
            return value.__name__
        if _of_library(value):
            return f"{value.__module__}.{value.__qualname__}"
        if id(value) in self._met:
            return {"met": self._met[id(value)][0]}
        self._met[id(value)] = (len(self._met), value)
        if isinstance(value, types.FunctionType):
            return self._function(value, inner)
        if isinstance(value, type):
            return [{name: inner(part) for name, part in _own(kind)} for kind in value.__mro__ if not _of_library(kind)]
        return [inner(type(value)), self._state(value, inner), inner(getattr(value, "__wrapped__", None))]

    @staticmethod
    def _function(value: types.FunctionType, inner: Callable[[Any], Any]) -> list[Any]:
        code = value.__code__
        if value.__doc__ is not None and code.co_consts[:1] == (value.__doc__,):
            code = code.replace(co_consts=(None, *code.co_consts[1:]))
        held = [contents(cell) for cell in value.__closure__ or ()]
        return [inner(part) for part in (code, held, value.__defaults__, value.__kwdefaults__, dict(_globals(value.__code__, value)))]

    @staticmethod
    def _state(value: Any, inner: Callable[[Any], Any]) -> Any:
        """Describe what an object holds: a network's weights and options, a data class's fields, what any other is pickled by."""
        if isinstance(value, nn.Module):
            options = {name: part for name, part in vars(value).items() if not name.startswith("_")}
            own = [dict(value.named_parameters(recurse=False)), dict(value.named_buffers(recurse=False)), dict(value.named_children())]
            return inner([options, *own])
        if is_dataclass(value):
            return inner({f.name: getattr(value, f.name, None) for f in fields(value)})
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            found = reduce(value) if reduce else value.__reduce_ex__(2)
        except Exception:  # user code, or a lock, a generator, an open file: nothing that numbers follow from
            return None
        return inner(found)


def _of_library(value: Any) -> bool:
    """Say whether a function or a class belongs to Python, bayesfl or an installed package, whose code counts by its name."""
    return isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and _installed(value.__module__ or "")


def _installed(module: str) -> bool:
    if module == "__main__":  # the user's, also where a package starts it, as that of notebooks does
        return False
    root, file = module.partition(".")[0], getattr(sys.modules.get(module), "__file__", None) or ""
    return root in sys.stdlib_module_names or root == "bayesfl" or "site-packages" in file or "dist-packages" in file


def _globals(code: types.CodeType, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global values that code names, that of inner functions included, and what it takes from the user's own modules."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in function.__globals__:
            found = function.__globals__[step.argval]
            yield step.argval, found
            if isinstance(found, types.ModuleType) and not _installed(found.__name__):
                yield from ((f"{step.argval}.{name}", getattr(found, name)) for name in code.co_names if hasattr(found, name))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant, function)


def _own(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield a class's functions, and its values but those that Python itself writes."""
    for name, part in vars(kind).items():
        part = getattr(part, "__func__", None) or getattr(part, "fget", None) or getattr(part, "func", None) or part
        if isinstance(part, types.FunctionType) or not name.startswith("__"):
            yield name, part
