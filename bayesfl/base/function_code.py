"""What a user's function computes, as a digest: its code, and the functions, classes and values of the user's that it reads."""

import dis
import functools
import hashlib
import inspect
import io
import os
import pickle
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base import digest
from bayesfl.base.described import contents

_MEANING = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_INSTALLED = (*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))
_OF_PYTHON = {"__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__slotnames__", "__firstlineno__"}
_OF_PYTHON |= {"__static_attributes__", "__annotate_func__", "__annotations_cache__", "__classdictcell__", "_abc_impl"}
"""Names in a class that say nothing of what it computes, or that Python writes when it likes."""

_ATOMS = (str, bytes, int, float, bool, type(None))

DEEPEST = 20_000
"""Limit of Python's recursion while a function is read: a helper that calls another one takes some twenty levels."""

_ONE_AT_A_TIME = threading.Lock()
"""Held while a function is read, since Python's limit of recursion is that of all threads."""

_Pickler: Any = pickle._Pickler  # the one in Python, whose steps can be changed; type checkers do not know it

_BY_TEXT = (torch.dtype, torch.layout, torch.memory_format, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def function_identity(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what JSON can hold of a function, by which another process knows whether it has the same one.

    Returns:
        `function`: its name and the plain numbers and texts that it holds, for a reader; `code`: the beginning of `digest_of_code`; and
        `under`: the versions with which it was made, of which the digest may depend.

    Raises:
        ValueError: As by `digest_of_code`.
    """
    under = f"Python {sys.version_info[0]}.{sys.version_info[1]}, torch {torch.__version__.split('+')[0]}, NumPy {np.__version__}"
    return {"function": told(function), "code": digest_of_code(function)[:16], "under": under}


def digest_of_code(function: Callable[..., Any]) -> str:
    """Compute a digest of what a function computes, equal in every process with the same versions of Python, torch and NumPy.

    It covers the bytecode and the constants, what the function closes over, has as defaults or is partially applied to, and the global
    functions, classes and values that it names, with all that these read in turn. It does not cover the function's own name and docstring,
    and comments; nor the code of installed packages, which count by name; nor what a function imports when it is called. A module counts by
    name where an object holds it, and so does a function of `np.frompyfunc`. Of what cannot be pickled, as locks, open files and tensors on
    the device `meta`, the type and the attributes count.

    Raises:
        ValueError: What the function reads is nested too deeply.
    """
    with _ONE_AT_A_TIME:
        limit = sys.getrecursionlimit()
        try:
            sys.setrecursionlimit(max(limit, DEEPEST))  # the same whatever the depth from which this is called
            _Reader(stream := io.BytesIO(), {}, {}).dump(function)
            return hashlib.sha256(stream.getvalue()).hexdigest()
        except RecursionError as error:
            raise ValueError(f"{told(function)[0]} reads values that are nested too deeply for a digest; let it read fewer") from error
        finally:
            sys.setrecursionlimit(limit)


def told(function: Any) -> list[Any]:
    """Return a function's name and the plain numbers and texts that it holds."""
    if isinstance(function, functools.partial):
        return [*told(function.func), *_plain([*function.args, *function.keywords.values()])]
    if isinstance(function, types.MethodType):
        return [function.__func__.__qualname__, *_plain(getattr(function.__self__, "__dict__", {}).values())]
    if isinstance(function, types.FunctionType):
        held = [contents(cell) for cell in function.__closure__ or ()]
        return [function.__qualname__, *_plain([*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])]
    if isinstance(function, type | types.BuiltinFunctionType):
        return [function.__name__]
    return [type(function).__qualname__, *_plain(getattr(function, "__dict__", {}).values())]


class _Reader(_Pickler):
    """Pickles what a function computes, to be hashed and never read: functions and classes of the user's by what they are.

    Args:
        stream: Where to.
        within: Objects that are being written, in which this reader writes a part of a set.
        parts: Parts of sets that were written, with their digests.
    """

    def __init__(self, stream: io.BytesIO, within: dict[int, Any], parts: dict[int, tuple[Any, bytes]]) -> None:
        super().__init__(stream, protocol=4)
        self._around, self._within, self._parts = dict(within), dict(within), parts
        self._failed: set[int] = set()
        self.led_back = False

    def memoize(self, obj: Any) -> None:
        """Remember an object, by whose number it is written when it is met again; but texts, as equal ones are not always one object."""
        if not isinstance(obj, str | bytes):
            super().memoize(obj)

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        """Write an object; of one that cannot be pickled its type and its attributes."""
        if id(obj) in self._around:  # a set's part that leads back
            self.led_back = True
            return super().save("around")
        if fresh := not isinstance(obj, _ATOMS) and id(obj) not in self._within:
            self._within[id(obj)] = obj
        try:
            if isinstance(obj, set | frozenset | weakref.WeakSet):  # whose order is another in each process
                return super().save((_part, type(obj), sorted(map(self._of_set, obj)), getattr(obj, "__dict__", None) or None))
            return super().save(obj, save_persistent_id)
        except RecursionError:
            raise
        except Exception:  # __reduce__ is user code and may raise anything; a lock or an open file must not stop a run
            held = getattr(obj, "__dict__", None) if id(obj) not in self._failed else None
            self._failed.add(id(obj))
            return super().save((f"{type(obj).__module__}.{type(obj).__qualname__}", held))
        finally:
            if fresh:
                del self._within[id(obj)]

    def _of_set(self, part: Any) -> bytes:
        if id(part) in self._parts:
            return self._parts[id(part)][1]
        reader = _Reader(stream := io.BytesIO(), self._within, self._parts)
        reader.dump(part)
        self.led_back |= reader.led_back
        found = hashlib.sha256(stream.getvalue()).digest()
        if not reader.led_back:  # else it is another elsewhere
            self._parts[id(part)] = part, found
        return found

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is written: a kind with its parts, then parts that may hold the object itself."""
        if obj is _part:
            return NotImplemented
        if isinstance(obj, types.FunctionType | type) and _counts_by_name(obj):
            return _part, (obj.__module__, obj.__qualname__)
        if isinstance(obj, types.FunctionType):
            inner = obj.__dict__.get("_torchdynamo_orig_callable")  # of torch.compile, whose own parts are another in each process
            return (_part, ("compiled", inner)) if inner is not None else (_part, ("function",), _parts_of_function(obj))
        if isinstance(obj, type):
            return _part, ("class",), [type(obj), obj.__bases__, [(k, part) for k, part in vars(obj).items() if k not in _OF_PYTHON]]
        if isinstance(obj, types.CodeType):
            shape = (obj.co_argcount, obj.co_posonlyargcount, obj.co_kwonlyargcount, obj.co_flags & _MEANING)
            return _part, ("code", shape, obj.co_code, obj.co_exceptiontable, obj.co_names, obj.co_consts)
        if isinstance(obj, torch.jit.ScriptModule):
            return _part, ("script", _plain_graph(obj._c.dump_to_str(True, True, False)), [*obj.state_dict().items()])
        if isinstance(obj, torch.jit.ScriptFunction):
            return _part, ("script", _plain_graph(str(obj.graph)))
        if isinstance(obj, nn.Module):
            held = {key: part for key, part in vars(obj).items() if "state_dict" not in key}
            hooks = {key: list(part.values()) for key, part in held.items() if "_hooks" in key and isinstance(part, dict)}
            return _part, ("network", type(obj)), {**held, **hooks}  # the keys of hooks count those of the whole process
        if isinstance(obj, types.MethodType):
            return _part, ("method",), [obj.__func__, obj.__self__]
        if isinstance(obj, types.MappingProxyType | memoryview):
            return _part, (type(obj).__name__, dict(obj) if isinstance(obj, types.MappingProxyType) else bytes(obj))
        if isinstance(obj, types.ModuleType | np.ufunc) or _is_of_a_module(obj):
            return _part, (getattr(obj, "__module__", None), obj.__name__)
        if isinstance(obj, Tensor) and obj.layout == torch.strided and not obj.is_nested:
            return _part, ("tensor", type(obj), str(obj.dtype), tuple(obj.shape), digest.of_tensor(obj)), obj.__dict__ or None
        if isinstance(obj, np.ndarray) and type(obj) in (np.ndarray, np.memmap) and not obj.dtype.hasobject:
            return _part, ("array", type(obj), obj.dtype.descr, obj.shape, np.ascontiguousarray(obj).tobytes())
        if (parts := _unwrapped(obj)) is not None:
            return _part, (type(obj).__qualname__, *parts)
        if isinstance(obj, _BY_TEXT):
            return _part, (type(obj).__qualname__, str(obj))
        return NotImplemented


def _part(*parts: Any) -> None:
    """Stand in the stream for what has no way of its own to be pickled."""


def _plain_graph(text: str) -> str:
    """Return what TorchScript says of a graph, without addresses, places in files, and the numbers that it gives to names in a process."""
    return re.sub(r"___torch_mangle_\d+\.|0x[0-9a-f]+|# [^\n]*", "", text)


def _is_of_a_module(obj: Any) -> bool:
    """Say whether an object is a function that C code gives a module, and no method of some object."""
    return isinstance(obj, types.BuiltinFunctionType) and isinstance(obj.__self__, types.ModuleType | None)


def _unwrapped(obj: Any) -> tuple[Any, ...] | None:
    """Return the functions in an object that Python makes of them; None for other objects."""
    if isinstance(obj, property):
        return obj.fget, obj.fset, obj.fdel
    if isinstance(obj, staticmethod | classmethod):
        return (obj.__func__,)
    if isinstance(obj, functools.cached_property):
        return (obj.func,)
    return (obj.__wrapped__,) if isinstance(obj, functools._lru_cache_wrapper) else None


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    """Return a function's code without its docstring, and all that it holds and names."""
    code, names = function.__code__, set(_names(function.__code__))
    if function.__doc__ is not None and code.co_consts[:1] == (function.__doc__,):
        code = code.replace(co_consts=(None, *code.co_consts[1:]))
    held = [_of_modules(contents(cell), names) for cell in function.__closure__ or ()]
    read = [(name, _of_modules(function.__globals__[name], names)) for name in _globals(function.__code__) if name in function.__globals__]
    return [code, held, function.__defaults__, function.__kwdefaults__, function.__dict__, read]


def _globals(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code and its inner functions look up as globals."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals(inner)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield all names that code and its inner functions use, of attributes, too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _of_modules(value: Any, names: set[str], depth: int = 0) -> Any:
    """Return, in place of a module of the user's, what code with these names may take from it."""
    if not isinstance(value, types.ModuleType) or _installed(value.__name__) or depth == 5:
        return value
    return [(name, _of_modules(vars(value)[name], names, depth + 1)) for name in sorted(names & vars(value).keys())]


def _counts_by_name(obj: Any) -> bool:
    """Say whether a function or a class is one of Python's, bayesfl's or an installed package's, and not made by a call of theirs."""
    return _installed(obj.__module__ or "") and "<locals>" not in obj.__qualname__


def _installed(module: str) -> bool:
    if module == "__main__" or module not in sys.modules:  # what is started is the user's, also where a package does it, as for notebooks
        return False
    found = sys.modules[module]
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", [])), None)  # a package may have a folder alone
    return file is None or file.startswith(tuple(folder + os.sep for folder in _INSTALLED)) or "-packages" + os.sep in file


def _plain(values: Any) -> list[Any]:
    return [value for value in values if type(value) in (bool, int, str) or (type(value) is float and np.isfinite(value))][:20]
