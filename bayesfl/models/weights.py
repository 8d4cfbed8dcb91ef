"""A module at given weights: its outputs there, their gradients, and whether the module uses
weights that cannot be replaced.

The weights are put into the module's own parameters while it runs forward, and again while autograd
goes backward. So everything that reads a parameter reads the given one: an alias in a list, a hook,
a hand-written backward, a checkpoint that runs its part once more.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from bayesfl.base.inputs import Inputs, at, call, each, named
from bayesfl.models.copies import duplicate, holder, stand_ins

Places: TypeAlias = tuple[Any, dict[str, tuple[dict[str, Any], str]]]
_KNOWN: "weakref.WeakKeyDictionary[nn.Module, Places]" = weakref.WeakKeyDictionary()


def _places(module: nn.Module) -> Places:
    """Return the lock for replacing a module's tensors, and their places, by name."""
    if module not in _KNOWN:
        _KNOWN[module] = (
            threading.RLock(),
            {
                f"{prefix}.{key}".removeprefix("."): (store, key)
                for prefix, part in module.named_modules(remove_duplicate=False)
                for store in (part._parameters, part._buffers)
                for key, t in store.items()
                if t is not None
            },
        )
    return _KNOWN[module]


@contextmanager
def bound(
    module: nn.Module, leaves: Mapping[str, Tensor], live: Collection[str] = ()
) -> Iterator[dict[str, Tensor]]:
    """Enter a context where a module's parameters and buffers use the numbers and the memory of
    `leaves`, and yield those named `live`, which require gradients there.

    Args:
        module: The module. Other threads that enter the context wait.
        leaves: Tensors by name, in the shapes of the module's own.
        live: Names of parameters.
    """
    lock, places = _places(module)
    with lock:
        every = {**leaves, **dict.fromkeys(live)}
        own = {name: store[key] for name in every for store, key in (places[name],)}
        before = [(t, t.data, t.requires_grad) for t in own.values()]
        try:
            for name, t in own.items():
                if name in leaves:
                    t.data = leaves[name]
                t.requires_grad_(False)
            yield {name: own[name].requires_grad_() for name in live}  # of tied names one may be
        finally:
            for t, data, asks in before:
                t.data = data
                t.requires_grad_(asks)


def transformed() -> bool:
    """Return whether the code runs inside a transform of torch.func."""
    return peek_interpreter_stack() is not None


def gradient_of(function: Callable[[Any], tuple[Tensor, Any]], tree: Any) -> tuple[Any, Any]:
    """Return the gradient of a function's first result at a nest of tensors, and its second result,
    as `torch.func.grad(function, has_aux=True)` does; by autograd, so that any network has one,
    where no other transform goes around it.
    """
    if transformed():
        return torch.func.grad(function, has_aux=True)(tree)
    live = tree_map(lambda t: t.detach().requires_grad_(), tree)
    with torch.enable_grad():
        value, aux = function(live)
    leaves, form = tree_flatten(live)
    found = torch.autograd.grad(value, leaves, materialize_grads=True)
    return tree_unflatten([*found], form), tree_map(lambda t: t.detach(), aux)


def call_at(module: nn.Module, leaves: Mapping[str, Tensor], x: Inputs) -> Any:
    """Call a module with inputs at the parameters and buffers `leaves`; all others stay the
    module's own.

    Gradients flow to leaves and inputs, once: for second derivatives, call it inside torch.func.
    """
    if transformed():
        # What else holds the parameters, as a list does, is found by `_Standing`.
        with standing(module, leaves) as given, _Standing(given):
            return call(module, x)
    live = [name for name, t in leaves.items() if t.requires_grad]
    ends = [*(leaves[name] for name in live), *(t for _, t in named(x) if t.requires_grad)]
    if not (ends and torch.is_grad_enabled()):
        with bound(module, leaves):
            return call(module, x)
    starts = each(lambda t: t.detach().requires_grad_() if t.requires_grad else t, x)
    with bound(module, leaves, live):
        outputs = call(module, starts)
    if not isinstance(outputs, Tensor) or not outputs.requires_grad:
        return outputs
    inputs = [t for _, t in named(starts) if t.requires_grad]
    return _Pulled.apply((module, leaves, live, inputs, outputs), *ends)


class _Pulled(torch.autograd.Function):
    """The outputs of a module as a function of leaves and inputs, whose gradients the module's own
    parameters receive first.

    A graph is the module, its weights in the forward, the names of those and the inputs that get
    gradients, and the outputs, whose autograd graph ends at the module's parameters.
    """

    @staticmethod
    def forward(ctx: Any, graph: tuple[Any, ...], *ends: Tensor) -> Tensor:
        ctx.graph = graph
        return graph[-1].detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (whose context has another name)
        module, leaves, live, inputs, outputs = ctx.graph
        with bound(module, leaves, live) as own:
            ends = [*own.values(), *inputs]
            back = partial(outputs.backward, *slopes, retain_graph=True)
            try:
                back()
            except RuntimeError as error:
                if "use_reentrant" not in str(error):
                    raise
                # Such a checkpoint refuses to run in a thread that is inside torch.autograd.grad.
                _taken(ends)
                with ThreadPoolExecutor(
                    1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
                ) as pool:
                    pool.submit(back).result()
            return None, *_taken(ends)


def _taken(ends: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of tensors, and remove them."""
    found = [t.grad for t in ends]
    for t in ends:
        t.grad = None
    return found


@contextmanager
def standing(module: nn.Module, leaves: Mapping[str, Tensor]) -> Iterator[dict[int, Tensor]]:
    """Enter a context inside torch.func, with `leaves`, which no parameter can hold, in the
    parameters' places; yield them by the parameters' ids.
    """
    lock, places = _places(module)
    with lock:
        # By the parameter, as a tied one, or one of a shared layer, has several names and places.
        given = {id(places[name][0][places[name][1]]): leaf for name, leaf in leaves.items()}
        before = [(of, key, of[key]) for of, key in places.values() if id(of[key]) in given]
        try:
            for store, key, t in before:
                store[key] = given[id(t)]
            yield given
        finally:
            for store, key, t in before:
                store[key] = t


class _Standing(TorchFunctionMode):
    """Replaces tensors by their ids in calls of torch's functions, such as tensors in a list."""

    def __init__(self, given: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda t: self._given.get(id(t), t), (args, kwargs or {}))
        return func(*args, **kwargs)


def strangers(module: nn.Module, x: Inputs) -> tuple[list[Any], list[tuple[Tensor, str]]]:
    """Return a module's outputs at `x` in two calls with gradients; and the tensors that require
    gradients, that these depend on, and that are none of the module's own parameters, and what a
    forward has kept in a parameter's memory, each with the place where it is held, as text.
    """
    outputs: list[Any] = []
    found: list[tuple[Tensor, str]] = []
    copies = [(module, x)]
    with suppress(ValueError):  # a forward may keep what shares a parameter's memory
        # Of a second copy, too, as a store may take the parameters of the first for its own.
        copies.append((duplicate(module), at(x, slice(0, 2))))
    for one, rows in copies:
        live = [name for name, p in one.named_parameters() if p.is_floating_point()]
        with torch.enable_grad(), bound(one, {}, live) as own:
            calls = [
                (out := call(one, each(Tensor.clone, rows)), [*_sources(out), *stand_ins(one)])
                for _ in range(2)
            ]
        outputs += [out for out, _ in calls]
        (_, first), (_, again) = calls
        # What a forward makes anew, as inputs of a checkpoint, is none.
        kept = {id(t) for t in first} - {id(p) for p in own.values()}
        found += [(t, holder(one, t)) for t in again if id(t) in kept]
    return outputs[:2], found


def refuse_unseen(module: nn.Module, x: Inputs) -> None:
    """Refuse a module whose outputs depend on weights that cannot be replaced: their curvature and
    their gradients would silently be 0.

    Raises:
        ValueError: The outputs at `x` depend on another tensor that requires gradients than the
            module's own parameters.
    """
    if strange := strangers(module, at(x, slice(0, 2)))[1]:
        raise ValueError(
            f"the outputs of this {type(module).__name__} depend on weights that are none of its "
            f"parameters, {strange[0][1]}, as PyroParam's, which Pyro keeps in its "
            "store: their curvature and gradients would be 0. Make them nn.Parameter, or constrain "
            "them by torch.nn.utils.parametrize"
        )


def _sources(outputs: Any) -> list[Tensor]:
    """Return the tensors that would receive a result's gradient."""
    found, seen, left = [], set(), [getattr(outputs, "grad_fn", None)]
    while left:
        step = left.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if (leaf := getattr(step, "variable", None)) is not None:
            found.append(leaf)
        left += [inner for inner, _ in step.next_functions]
    return found
