"""The identity of a method: a description by which a saved state, or another machine, recognises the method it belongs to."""

import functools
import hashlib
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
from bayesfl.base.copies import refuse_changed
from bayesfl.composition.algorithm import Algorithm
from bayesfl.federation.errors import CheckpointError

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
DEPTH = 40  # deepest level of nested values that an identity describes


def identity(algorithm: Algorithm) -> dict[str, Any]:
    """Return a description of an algorithm that is equal for two algorithms whose saved states are interchangeable.

    It can be written as JSON and is the same in every process. It holds numbers, names and types of all options, also of what functions
    close over, have as defaults or are partially applied to; the model's layers, the shapes of its parameters, and the values of its
    buffers and of the parameters that no block covers. It does not hold the code of functions: two lambdas of one function differ only
    where they close over something else.
    """
    parameters = dict(algorithm.model.named_parameters())
    named: dict[str, Any] = {f.name: _plain(getattr(algorithm, f.name)) for f in fields(algorithm) if f.name != "model"}
    named["layers"] = _layers(algorithm.model)
    named["parameters"] = {name: list(p.shape) for name, p in parameters.items()}
    named["constants"] = _constants(algorithm)
    return named


def _constants(algorithm: Algorithm) -> dict[str, str]:
    """Describe the parameters that no block covers, and the buffers; once for each algorithm, since a frozen backbone may be large."""
    refuse_changed(algorithm.model)
    if "_constants" not in algorithm.__dict__:
        covered = {name for block in algorithm.blocks for name in algorithm.layout(block).names}
        model = algorithm.model
        constants = {name: p for name, p in model.named_parameters() if name not in covered} | dict(model.named_buffers())
        object.__setattr__(algorithm, "_constants", {name: _plain(t) for name, t in constants.items()})
    return algorithm.__dict__["_constants"]


def fingerprint(algorithm: Algorithm) -> str:
    """Return a digest of a method's identity, by which two machines recognise that they run the same method."""
    return hashlib.sha256(json.dumps(identity(algorithm), sort_keys=True).encode()).hexdigest()


def differences(one: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the places where two identities differ, with what stands there in each."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = [(f"{path}.{key}" if path else key, one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{path}[{place}]", *both) for place, both in enumerate(zip(one, other, strict=True))]
    else:
        return {} if one == other else {path: (one, other)}
    return {place: both for inner, a, b in pairs for place, both in differences(a, b, inner).items()}


def check_method(what: str, made_with: dict[str, Any], algorithm: Algorithm) -> None:
    """Check by its identity that a saved run was made with this method.

    Args:
        what: The saved run's name, which begins the error message.
        made_with: Identity of the method that made it, see `identity`.
        algorithm: The method for which it is loaded.

    Raises:
        CheckpointError: The two methods differ.
    """
    if different := differences(made_with, identity(algorithm)):
        told = "; ".join(f"{path}: saved {saved}, given {given}" for path, (saved, given) in different.items())
        raise CheckpointError(f"{what} was made with another algorithm, which differs in {told}")


def check_network(what: str, made_with: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Check by its identity that a saved state is one of this method's network; the method's options are free.

    The state's tensors alone would not tell another activation, or another frozen backbone.

    Args:
        what: The state's name, which begins the error message.
        made_with: Identity of the method that made it, see `identity`.
        algorithm: The method that is to go on from it.

    Raises:
        CheckpointError: The layers, the shapes of the parameters, or the values of frozen parameters and buffers differ.
    """
    now = identity(algorithm)
    different = {}
    for part in ("layers", "parameters", "constants"):
        different |= differences(made_with.get(part), now[part], part)
    if different:
        told = "; ".join(f"{path.rstrip('.')}: there {then}, here {given}" for path, (then, given) in list(different.items())[:3])
        more = f", and {len(different) - 3} more" if len(different) > 3 else ""
        raise CheckpointError(
            f"{what} has the state of another network, which differs in {told}{more}; build the method on the network of that run, frozen "
            "weights and buffers included"
        )


def _plain(value: Any, path: tuple[int, ...] = ()) -> Any:
    """Return a JSON-able description of any value, without memory addresses; values inside themselves or nested too deeply are cut off."""
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
    # The values in a closure are part of what a function computes: a prior's strength, a schedule's rate.
    cells = [_contents(cell) for cell in getattr(value, "__closure__", None) or ()]
    more = [getattr(value, key, None) for key in ("__defaults__", "__kwdefaults__", "__wrapped__")]
    return [value.__qualname__, *(inner(part) for part in (*cells, *more) if part is not None)]


def _attributes(value: Any, inner: Callable[[Any], Any]) -> Any:
    """Describe an object by its type and attributes, unless it is of a kind that `_plain` describes."""
    if isinstance(value, type | nn.Module) or is_dataclass(value):
        return inner(value)
    return {"type": type(value).__qualname__, **inner(getattr(value, "__dict__", {}))}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _layers(model: nn.Module) -> dict[str, str]:
    """Return every layer's type and options, by name."""
    return {name: f"{type(layer).__qualname__}({_options(layer)})" for name, layer in model.named_modules()}


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
