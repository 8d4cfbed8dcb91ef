"""A look at what a module's forward does besides giving each example its outputs."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs, call, count, each, named
from bayesfl.base.numerics import same
from bayesfl.models.copies import ELSEWHERE, originals, rescaled
from bayesfl.models.modes import STATISTICS, norms
from bayesfl.models.weights import call_at, strangers


def looked_at(module: nn.Module, x: Inputs) -> tuple[Any, str]:
    """Return a module's outputs, and the first thing that its forward does and may not do here, as
    text; empty if there is none.

    The examples and the module's buffers are left as they were. Draws by other means than torch's
    operations are noticed where outputs differ when the module is called again; the generators of
    NumPy and Python, which other threads may use, are neither read nor set.

    Args:
        module: The module, in evaluation mode; without gradients of its own.
        x: Inputs of N examples.
    """
    with _untouched(module) as before, torch.no_grad():
        seen = each(Tensor.clone, x)
        with Addressed(0) as drawing:
            outputs = call(module, seen)
        if drawing.drawn:
            fault = (
                "draws random numbers in evaluation mode, too; remove that, or let it depend on "
                "self.training, as "
            )
            return outputs, fault + "F.dropout(x, p, self.training)"
        if wrote := _wrote(seen, x):
            return outputs, wrote
        if changed := [name for name, t in module.named_buffers() if not same(t, before[0][name])]:
            return (
                outputs,
                f"changes the buffers {changed[:3]} in evaluation mode, too; let it do that under "
                "`if self.training` or never",
            )
        faults = itertools.chain(
            _effects(module, before),
            _unlike(module, x, outputs) if one_row_each(outputs, x) else (),
        )
        return outputs, next(faults, "")


class Training(NamedTuple):
    """Describe what a module does in training.

    Args:
        fault: The first thing that it does and may not do here, as text; empty if there is none.
        draws: Whether its forward draws random numbers.
        other: Whether it computes something else than in evaluation.
    """

    fault: str
    draws: bool
    other: bool


def looked_at_training(
    module: nn.Module, x: Inputs, outputs: Tensor, trainable: Collection[str]
) -> Training:
    """Look at a step of training, forward and backward; the examples and the module are left as
    they were.

    Args:
        module: A copy as `own_copy(train=True)` makes it.
        x: Inputs of N examples.
        outputs: What the module gives for them in evaluation mode, [N, O].
        trainable: Names of the parameters that are not frozen.
    """
    with _untouched(module) as before, torch.enable_grad():
        seen = each(Tensor.clone, x)
        leaves = {
            name: p.detach().requires_grad_()
            for name, p in module.named_parameters()
            if name in trainable
        }
        with Addressed(0) as forward:
            found = call_at(module, leaves, seen)
        drew = forward.drawn > 0
        fault = _wrote(seen, x) or next(_effects(module, before), "")
        if fault or not one_row_each(found, x):
            return Training(
                fault or "returns outputs of another form in training mode than in evaluation mode",
                drew,
                True,
            )
        followed = {
            f"{norm}.{name}".removeprefix(".")
            for norm in norms(module)
            for name in (*STATISTICS, "num_batches_tracked")
        }
        if changed := [
            name
            for name, t in module.named_buffers()
            if name not in followed and not same(t, before[0][name])
        ]:
            return Training(
                f"changes the buffers {changed[:3]} in training, which are no statistics of a "
                "norm and would be lost; put that part in eval mode, or make them parameters",
                drew,
                True,
            )
        if not found.requires_grad:
            fault = (
                "gives outputs without gradients in training, as under torch.no_grad() or after "
                ".detach(); leave that out"
            )
            return Training(fault, drew, True)
        if fault := _backward(module, found, leaves) or next(_effects(module, before), ""):
            return Training(fault, drew, True)
        with Addressed(0):
            again = call_at(module, leaves, each(Tensor.clone, x))
        if _apart(found, again, 100):
            fault = (
                "gives other outputs in training when its draws are repeated: it counts, or draws "
                "by other means than torch's "
            )
            return Training(
                fault + "operations, which no seed could repeat; remove that", drew, True
            )
        return Training("", drew, _apart(found, outputs, 100))


def _backward(module: nn.Module, outputs: Tensor, leaves: dict[str, Tensor]) -> str:
    """Compute gradients and return what stands against them, with the part of the module that draws
    if it is called again for them.
    """
    called: list[tuple[str, int]] = []
    with Addressed(1) as drawing, contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            handle = part.register_forward_hook(
                lambda *_, name=name: called.append((name, drawing.drawn)), always_call=True
            )
            stack.callback(handle.remove)
        try:
            torch.autograd.grad(outputs.sum(), list(leaves.values()), allow_unused=True)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            return f"has no gradients ({said}); train a part whose backward pass raises no error"
        if not drawing.drawn:
            return ""
    of = next((f" of {name!r}" for name, drawn in called if name and drawn), "")
    return (
        f"draws random numbers in its backward pass{of}, as checkpointing of a part with dropout "
        "does, which have no address; leave checkpointing out"
    )


def _wrote(seen: Inputs, x: Inputs) -> str:
    """Return which of the inputs `seen` by a forward it changed."""
    wrote = [
        name
        for (name, one), (_, other) in zip(named(seen), named(x), strict=True)
        if not same(one, other)
    ]
    return (
        f"changes its inputs in place; let it begin with {wrote[0]} = {wrote[0]}.clone()"
        if wrote
        else ""
    )


_State: TypeAlias = tuple[dict[str, Tensor], dict[str, int], dict[str, Any]]
"""What a forward may leave changed, beside its inputs: copies of the module's buffers, how often
each parameter was changed in place, and the plain numbers that its parts hold, by name.
"""


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[_State]:
    """Enter a context that gives the state of a module, and after which its buffers are as they
    were.
    """
    buffers = {name: t.clone() for name, t in module.named_buffers()}
    try:
        yield buffers, _written(module), _numbers(module)
    finally:
        with torch.no_grad():
            for name, t in module.named_buffers():
                t.copy_(buffers[name])


def one_row_each(outputs: object, x: Inputs) -> bool:
    """Say whether outputs are floats [N, ..., O] with a row for each of the examples `x`
    [N, ...].
    """
    return (
        isinstance(outputs, Tensor)
        and outputs.dim() >= 2
        and len(outputs) == count(x)
        and outputs.is_floating_point()
    )


def _written(module: nn.Module) -> dict[str, int]:
    excused = rescaled(module)
    return {
        name: p._version
        for name, p in module.named_parameters()
        if name not in excused and not p.is_inference()
    }


def _numbers(module: nn.Module) -> dict[str, Any]:
    held = [
        (f"{name}.{key}".lstrip("."), value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
    ]
    return {name: value for name, value in held if type(value) in (bool, int, float)}


def _effects(module: nn.Module, before: _State) -> Iterator[str]:
    """Yield what a forward has done besides returning outputs and drawing by torch's operations."""
    if wrote := [name for name, count in _written(module).items() if count != before[1][name]]:
        yield (
            f"writes to the parameters {wrote[:3]}, as F.embedding with max_norm does; remove that"
        )
    if counted := [
        name for name, value in _numbers(module).items() if value != before[2].get(name)
    ]:
        yield (
            f"changes the numbers {counted[:3]}, so that later calls may differ, which no seed "
            "could repeat; remove that"
        )


def _unlike(module: nn.Module, x: Inputs, outputs: Tensor) -> Iterator[str]:
    """Yield why a forward does not give each example the same outputs whenever it is called."""

    def again(change: Callable[[Tensor], Tensor]) -> Tensor:
        return call(module, each(lambda t: change(t).clone(), x))

    if _apart(outputs, again(Tensor.clone), 100):
        yield (
            "gives other outputs when it sees the same examples again: it draws its own randomness "
            "or counts, which no seed could repeat; remove that"
        )
    leaves = {
        name: p.detach().requires_grad_(p.is_floating_point())
        for name, p in module.named_parameters()
    }
    with torch.enable_grad():
        graded = call_at(module, leaves, each(Tensor.clone, x)).detach()
    theirs = originals(module)
    for t, where in strangers(module, each(Tensor.clone, x)):
        # Another leaf of the copy's own is a constant.
        if id(t) in theirs or where == ELSEWHERE or not t.requires_grad or not t.is_leaf:
            yield (
                f"uses weights {where}, where no copy of the model can follow, so that they would "
                "not be trained; hold them as parameters, and reach them through self"
            )
    if _apart(outputs, graded, 100):
        yield (
            "gives other outputs where gradients are computed (torch.is_grad_enabled()), and would "
            "train another model; remove that"
        )
    mixes = (
        "gives an example other outputs beside other examples: it mixes the rows of a batch, as x "
        "- x.mean(0) or batch norm do, and batches are filled up with rows of padding here; "
        "normalise each example alone, as nn.GroupNorm does"
    )
    half = count(x) // 2
    if _apart(outputs[half:], again(lambda t: t[half:]), 1e4) or _apart(
        outputs, again(lambda t: t.flip(0)).flip(0), 1e4
    ):
        yield mixes
    if _apart(outputs[:1], again(lambda t: t[:1]), 1e4):
        yield (
            "gives other outputs, or another shape, for an example alone; leave out a squeeze that "
            "takes the axis of examples away"
        )


def _apart(one: Tensor, other: Tensor, times: float) -> bool:
    """Say whether two outputs differ in shape, or by more than so many times the rounding of the
    largest.
    """
    return one.shape != other.shape or bool(
        (one - other).abs().max() > times * torch.finfo(one.dtype).eps * other.abs().max()
    )
