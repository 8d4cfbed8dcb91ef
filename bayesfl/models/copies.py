"""Copies of a user's module, which share the memory of its frozen parameters, and checks that the
original has not changed.
"""

import copy
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from bayesfl.base.described import held, layers
from bayesfl.base.warning import warn

COMPARED = 1000
"""Maximum number of numbers of a tensor, evenly spaced, that are compared to detect a change."""


Module = TypeVar("Module", bound=nn.Module)
Value = TypeVar("Value")


Mark: TypeAlias = tuple[int, Tensor]
"""Evidence of a tensor's changes: torch's count of changes in place, which misses those of its
`data`; and some of its numbers, as bytes.
"""


class _Origin(NamedTuple):
    """A user's module as it was when a method was made of it.

    Args:
        module: The module, None once nobody else holds it.
        parameters: Its parameters, which may live longer.
        marks: A mark for each of its parameters and buffers.
        parts: Its layers, with their options, the plain values that they hold, and which of their
            own parameters are trained.
        hooks: The numbers that torch gave to its hooks, by the name of the part.
    """

    module: "weakref.ref[nn.Module]"
    parameters: "list[weakref.ref[nn.Parameter]]"
    marks: dict[str, Mark]
    parts: dict[str, str]
    hooks: dict[str, str]


_ORIGINS: "weakref.WeakKeyDictionary[nn.Module, _Origin]" = weakref.WeakKeyDictionary()
"""The user's module of each copy, also of a copy's copy."""


def differentiable(module: nn.Module) -> None:
    """Let every `nn.PReLU` in a module have the gradients of each example under vmap."""
    for part in module.modules():
        if type(part) is nn.PReLU:
            part.__class__ = PReLU


class PReLU(nn.PReLU):
    """torch's activation by plain operations: of its own, vmap does not sum the slopes' gradients
    over an example's units.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Compute max(0, input) + weight min(0, input), [N, channels, ...]."""
        one = len(self.weight) == 1
        slopes = self.weight if one else self.weight.view(-1, *(input.dim() - 2) * (1,))
        return torch.where(input > 0, input, slopes * input)


def duplicate(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """Return a deep copy of a module that shares nothing with the original: functions that reach
    into it, such as hooks and lambdas that close over `self`, are copied, too.

    Args:
        module: The module.
        memo: Objects to use in place of copies, as `copy.deepcopy` takes them.

    Raises:
        ValueError: An attribute cannot be copied, or holds a tensor that shares a parameter's
            memory, as `weight.T` does.
    """
    if named := stand_ins(module):
        raise ValueError(
            "the model holds the id of a part, or a tensor that shares the memory of a parameter, "
            f"as weight.T does, {holder(module, named[0])}; hold the part itself, and compute such "
            "a tensor in forward"
        )
    own = _own(module)

    def due(one: Any) -> bool:
        """Return whether something reaches into the module, or the next forward makes it anew."""
        if isinstance(one, Tensor):
            return not one.is_leaf
        held = _reached((one,)) if isinstance(one, FunctionType | CellType) else ()
        return any(id(inner) in own for inner in held)

    def memo_of() -> _Twins:
        return _Twins(module, memo or {}, due)

    try:
        return copy.deepcopy(module, memo_of())
    except Exception as error:  # an attribute may be of any class
        held = _attribute(module, lambda value: not _copies(value, memo_of()))
        raise ValueError(f"a part of the model cannot be copied ({error}), {held}") from error


def anew(value: Value) -> Value:
    """Return a deep copy of a value, with functions whose closures, such as counters, are copied;
    where a closure cannot be copied, functions stay as they are.
    """

    def due(one: Any) -> bool:
        return isinstance(one, CellType) or (
            isinstance(one, FunctionType) and bool(one.__closure__)
        )

    try:
        return copy.deepcopy(value, _Twins(value, {}, due))
    except Exception:  # as of an open file
        return copy.deepcopy(value)


def _own(module: nn.Module) -> dict[int, Any]:
    """Return a module's parts, parameters and buffers by their ids."""
    return {id(t): t for t in (*module.modules(), *module.parameters(), *module.buffers())}


def stand_ins(module: nn.Module) -> list[Any]:
    """Return the ids of a module's parts, and other tensors in its memory, that it holds: a copy
    would still refer to the original by them.
    """
    own = _own(module)
    places = {t.untyped_storage().data_ptr() for t in own.values() if isinstance(t, Tensor)} - {0}
    return [
        one
        for one in _reached((module,))
        if (isinstance(one, int) and one in own)
        or (
            isinstance(one, Tensor)
            and id(one) not in own
            and one.untyped_storage().data_ptr() in places
        )
    ]


class _Twins(dict[int, Any]):
    """The memo of a deep copy, with copies of functions and results, which `copy.deepcopy` shares
    or loses.
    """

    def __init__(self, root: Any, given: dict[int, Any], due: Callable[[Any], bool]) -> None:
        super().__init__(given)
        self._due = {id(one): one for one in _reached((root,)) if due(one)}

    def get(self, key: int, default: Any = None) -> Any:
        """Return the copy of the object with this id."""
        if key not in self and key in self._due:
            self._make(self._due[key])
        return super().get(key, default)

    def _make(self, one: Any) -> None:
        if isinstance(one, Tensor):
            self[id(one)] = one.detach().clone()
        else:
            cells = tuple(
                self.setdefault(id(cell), CellType()) if id(cell) in self._due else cell
                for cell in one.__closure__ or ()
            )
            twin = FunctionType(one.__code__, one.__globals__, one.__name__, None, cells)
            twin.__qualname__ = one.__qualname__
            self[id(one)] = twin  # before what it holds, which may be itself
            for old, new in zip(one.__closure__ or (), cells, strict=True):
                if new is not old:
                    new.cell_contents = copy.deepcopy(old.cell_contents, self)
            twin.__defaults__ = copy.deepcopy(one.__defaults__, self)
            twin.__kwdefaults__ = copy.deepcopy(one.__kwdefaults__, self)
            twin.__dict__.update(copy.deepcopy(vars(one), self))


def _reached(roots: tuple[Any, ...]) -> Iterator[Any]:
    """Yield objects and all that a deep copy of them reaches, and what functions close over."""
    seen, left = {}, [*roots]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | CodeType):
            continue
        seen[id(one)] = one  # its id is then its alone
        yield one
        if not isinstance(one, Tensor):
            left += _held(one)


def _held(one: Any) -> list[Any]:
    if isinstance(one, FunctionType):
        return [one.__closure__, one.__defaults__, one.__kwdefaults__, vars(one)]
    return gc.get_referents(one)


ELSEWHERE = "in a global variable or a class"
_OWN = ("_parameters", "_buffers", "_modules")


def holder(module: nn.Module, tensor: Tensor) -> str:
    """Return where a module holds a tensor that is not its own, for error messages."""
    return _attribute(module, lambda value: any(one is tensor for one in _reached((value,))))


def _attribute(module: nn.Module, wanted: Callable[[Any], bool]) -> str:
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in _OWN and wanted(value):
                return f"in its attribute {f'{name}.{key}'.lstrip('.')!r}"
    return ELSEWHERE


def _copies(value: Any, memo: dict[int, Any]) -> bool:
    """Return whether a value can be copied."""
    try:
        copy.deepcopy(value, memo)
    except Exception:
        return False
    return True


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose frozen parameters share the original's storage; they are
    never written.

    An `nn.TransformerEncoder` in it computes the same with gradients and without, and gradients of
    an `nn.PReLU` are those of each example under vmap.

    Embeddings with `max_norm` are an exception, since torch rescales their rows in place whenever
    they are read.
    """
    written = rescaled(module)
    frozen = [
        p for name, p in module.named_parameters() if not p.requires_grad and name not in written
    ]
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in frozen}
    made = duplicate(module, shared)
    for part in made.modules():
        if isinstance(part, nn.TransformerEncoder):
            # Otherwise torch puts 0 at masked places without gradients, and only there.
            part.use_nested_tensor = False
    differentiable(made)
    _ORIGINS[made] = _ORIGINS.get(module) or _Origin(
        weakref.ref(module),
        [weakref.ref(p) for p in module.parameters()],
        _marks(module),
        _parts(module),
        _hooks(module),
    )
    return made


def originals(made: nn.Module) -> set[int]:
    """Return the ids of the parameters of the user's module from which `made` was copied."""
    origin = _ORIGINS.get(made)
    return {id(p()) for p in origin.parameters} if origin else set()


def rescaled(module: nn.Module) -> set[str]:
    """Return the names of the parameters that torch rescales whenever it reads them, as of
    embeddings with `max_norm`.
    """
    return {
        f"{name}.{leaf}".removeprefix(".")
        for name, part in module.named_modules()
        if getattr(part, "max_norm", None) is not None
        for leaf, _ in part.named_parameters(recurse=False)
    }


def refuse_changed(made: nn.Module) -> None:
    """Check that the layers and the frozen parameters of a copy by `copied` have not changed; these
    parameters share memory with the original's.

    A change of `p.data` is detected if one of the `COMPARED` numbers of a tensor changes.

    Raises:
        ValueError: A layer was given other options, or replaced; or a frozen parameter was changed
            in place, as by `load_state_dict` or by training the original.
    """
    origin = _ORIGINS.get(made)
    if origin is None:
        return
    if other := _apart(_parts(made), origin.parts):
        raise ValueError(
            f"{other[:3]} of the method's own copy of the model were changed after the method was "
            "made; change the model, and make the method anew"
        )
    shared = {name for name, p in made.named_parameters() if not p.requires_grad} - rescaled(made)
    if changed := [
        name
        for name, (version, sample) in _marks(made, shared).items()
        for then, before in (origin.marks[name],)
        if version != then or not torch.equal(sample, before)
    ]:
        raise ValueError(
            f"frozen parameters {changed[:3]} were changed after the method was made, which shares "
            "their memory, so that its results would change, too; make the method anew, or make "
            "it of a copy: copy.deepcopy(model)"
        )


def check_original(made: nn.Module) -> None:
    """Check that the original of a copy by `copied` has not changed since: a method trains the
    copy.

    A warning names weights of the original that have changed since.

    Raises:
        ValueError: Parameters of the original were frozen or unfrozen since, parts were replaced or
            given other options, or hooks were added or removed.
    """
    origin = _ORIGINS.get(made)
    module = origin and origin.module()
    if origin is None or module is None:
        return
    if names := sorted(
        {*_apart(_parts(module), origin.parts), *_apart(_hooks(module), origin.hooks)}
    ):
        raise ValueError(
            f"{names[:3]} of the model {type(module).__name__} were replaced, frozen or unfrozen, "
            "or given other options, values or hooks after the method was made, which trains a "
            "copy made before; make the method anew, or make it of a copy: copy.deepcopy(model)"
        )
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    if changed := [
        name
        for name, mark in _marks(module, trained).items()
        if not torch.equal(mark[1], origin.marks[name][1])
    ]:
        warn(
            f"{changed[:3]} of the model {type(module).__name__} have changed since the method "
            "was made, which begins with the old ones; make the method anew to begin with the "
            "new ones",
        )


def _parts(module: nn.Module) -> dict[str, str]:
    """Return every part's kind, options, plain values and own tensors, by name; without what
    `copied` sets.
    """
    values = held(module)
    for name, part in module.named_modules():
        values[name].pop("use_nested_tensor", None)
        values[name]["trained"] = {
            key: p is not None and p.requires_grad for key, p in part._parameters.items()
        }
        values[name]["buffers"] = [*part._buffers]
    return {name: f"{told} {json.dumps(values[name])}" for name, told in layers(module).items()}


def _apart(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the innermost parts that differ, a model itself by its class."""
    names = [name for name in {**other, **one} if one.get(name) != other.get(name)]
    inner = [name for name in names if not any(of.startswith(f"{name}.") for of in names)]
    return [name or "the model itself" for name in inner]


def _marks(module: nn.Module, names: set[str] | None = None) -> dict[str, Mark]:
    """Return a mark for each of a module's parameters and buffers, or of those with the given
    names.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: _mark(t.detach()) for name, t in tensors.items() if names is None or name in names
    }


def _mark(tensor: Tensor) -> Mark:
    flat = tensor.reshape(-1)
    sample = flat[:: max(1, len(flat) // COMPARED)].clone().cpu()
    return (
        0 if tensor.is_inference() else tensor._version,
        sample.view(torch.uint8) if len(sample) else sample,
    )


def _hooks(module: nn.Module) -> dict[str, str]:
    """Return the numbers of a module's hooks by the name of its part."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        name: str([key for kind in kinds for key in getattr(part, kind)])
        for name, part in module.named_modules()
    }
