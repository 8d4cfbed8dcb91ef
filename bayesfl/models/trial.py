"""One trial of a network: calls on a few rows, in evaluation and in training, that detect draws,
state and dependence between rows.
"""

import contextlib
import re
import weakref
from collections.abc import Collection, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs, at, call, count, each, form, named
from bayesfl.base.numerics import apart, same
from bayesfl.models.copies import ELSEWHERE, copied, originals, rescaled
from bayesfl.models.modes import STATISTICS, halved, norms, own_copy, rate
from bayesfl.models.remedies import explained
from bayesfl.models.weights import call_at, strangers

ROWS = 32
"""Number of examples on which a network is tried."""
_VIEWS = re.compile(
    "(Alias|Permute|Select|Slice|Squeeze|T|Transpose|UnsafeView|Unsqueeze|View)Back"
)
"""Steps of a graph of autograd that give the same numbers in another shape."""


class Trial(NamedTuple):
    """Describe the result of a network's trial.

    Args:
        outputs: What it returns for the examples in evaluation mode.
        squashed: Whether these come out of a softmax or a sigmoid.
        closed: Whether they depend on no other weights than its parameters.
        draws: Whether its forward draws random numbers in training, or has a layer that may.
        other: Whether it computes something else in training than in evaluation, or has norms that
            follow statistics.
    """

    outputs: Any
    squashed: bool
    closed: bool
    draws: bool = False
    other: bool = False


_TRIALS: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Trial]]" = weakref.WeakKeyDictionary()
"""The trials of a network, by the form and the number of the examples."""


def tried(model: nn.Module, x: Inputs, like: Tensor) -> Trial:
    """Return the trial of a network, made once for examples of one form and number.

    For a network whose outputs are not floats with a row for each example, it has only these
    outputs. Neither the network nor the examples are changed. Draws by other means than torch's
    operations are detected if a second call has other outputs; the generators of NumPy and Python,
    which other threads may use, are neither read nor set.

    Args:
        model: The network, in the modes of its training.
        x: Inputs of N examples, on the CPU.
        like: A tensor in the precision of the run, on the CPU.

    Raises:
        ValueError: The network does not take the inputs, or its forward does something that no run
            could repeat or that a run would skip.
    """
    trials = _TRIALS.setdefault(model, {})
    key = (form(x), count(x))
    if key not in trials:
        # In half precision rounding would hide what the trial looks for.
        whole = copied(model).to(like.dtype) if halved(model) else model
        seen = _evaluated(own_copy(whole, like), x)
        if one_row_each(seen.outputs, x):
            trainable = {name for name, p in model.named_parameters() if p.requires_grad}
            seen = _trained(own_copy(whole, like, train=True), x, seen, trainable)
        trials[key] = seen
    return trials[key]


def trials(model: nn.Module) -> list[Trial]:
    """Return the trials of a network that were made in this process."""
    return [*_TRIALS.get(model, {}).values()]


def draws_in_training(model: nn.Module) -> bool:
    """Return whether a network draws random numbers in training, by its trials or its layers."""
    seen = trials(model)
    return any(trial.draws for trial in seen) if seen else _draws(model)


def lively(model: nn.Module) -> bool:
    """Return whether a network computes something else in training than in evaluation."""
    seen = trials(model)
    other = any(trial.draws or trial.other for trial in seen)
    return other if seen else _draws(model) or bool(norms(model))


def _draws(model: nn.Module) -> bool:
    """Return whether a layer draws random numbers in training."""
    return any(rate(part) > 0 for part in model.modules() if part.training)


def one_row_each(outputs: object, x: Inputs) -> bool:
    """Return whether outputs are floats [N, ..., O] with a row for each of the examples `x`
    [N, ...].
    """
    return (
        isinstance(outputs, Tensor)
        and outputs.dim() >= 2
        and len(outputs) == count(x)
        and outputs.is_floating_point()
    )


def _evaluated(module: nn.Module, x: Inputs) -> Trial:
    """Try a copy in evaluation mode."""

    def called(rows: Tensor) -> Any:
        with explained(x, every=True):
            return call(module, at(x, rows))

    with _watched(module, x) as given, torch.no_grad():
        with Addressed(0) as drawing, explained(x, every=True):
            outputs = call(module, given)
        if drawing.drawn:
            raise _refused(
                module,
                "draws random numbers in evaluation mode, too; remove that, or let it depend on "
                "self.training, as F.dropout(x, p, self.training)",
            )
    if not one_row_each(outputs, x):
        return Trial(outputs, squashed=False, closed=False)
    every = torch.arange(count(x))
    with _watched(module, x), torch.no_grad():
        with explained(x, every=True):
            (first, again), strange = strangers(module, x)
        if _apart(first, again, 100):
            raise _refused(
                module,
                "gives other outputs when it sees the same examples again: it draws its own "
                "randomness or counts, which no seed could repeat; remove that",
            )
        theirs = originals(module)
        for t, where in strange:
            # Another leaf of the copy's own is a constant.
            if id(t) in theirs or where == ELSEWHERE or not t.requires_grad or not t.is_leaf:
                raise _refused(
                    module,
                    f"uses weights {where}, where no copy of the model can follow, so that they "
                    "would not be trained; hold them as parameters, and reach them through self",
                )
        if _apart(outputs, again, 100):
            raise _refused(
                module,
                "gives other outputs where gradients are computed (torch.is_grad_enabled()), and "
                "would train another model; remove that",
            )
        mixes = (
            "an example other outputs beside other examples: it mixes the rows of a batch, as x - "
            "x.mean(0) or batch norm do, and batches are filled up with rows of padding here; "
            "normalise each example alone, as nn.GroupNorm does"
        )
        alone = (
            "other outputs, or another shape, for an example alone; leave out a squeeze that takes "
            "the axis of examples away"
        )
        rows = ((every[len(every) // 2 :], mixes), (every.flip(0), mixes), (every[:1], alone))
        for some, fault in rows:
            if _apart(outputs[some], called(some), 1e4):
                raise _refused(module, f"gives {fault}")
    last = first.grad_fn
    while last is not None and _VIEWS.match(last.name()):
        last = last.next_functions[0][0]
    squashed = last is not None and last.name().startswith(("Softmax", "Sigmoid"))
    return Trial(outputs, squashed, not strange)


def _trained(module: nn.Module, x: Inputs, seen: Trial, trainable: Collection[str]) -> Trial:
    """Try a step of training, forward and backward, on a copy in the modes of training.

    Args:
        module: The copy.
        x: Inputs of N examples.
        seen: Its trial in evaluation mode.
        trainable: Names of the parameters that are not frozen.
    """
    leaves = {
        name: p.detach().requires_grad_()
        for name, p in module.named_parameters()
        if name in trainable
    }
    with _watched(module, x, train=True) as given, torch.enable_grad():
        with Addressed(0) as forward:
            outputs = call_at(module, leaves, given)
        if not one_row_each(outputs, x):
            raise _refused(
                module, "returns outputs of another form in training mode than in evaluation mode"
            )
        if not outputs.requires_grad:
            raise _refused(
                module,
                "gives outputs without gradients in training, as under torch.no_grad() or after "
                ".detach(); leave that out",
            )
        _go_back(module, outputs, leaves)
    with _watched(module, x, train=True) as given, torch.enable_grad(), Addressed(0):
        again = call_at(module, leaves, given).detach()
    if _apart(outputs.detach(), again, 100):
        raise _refused(
            module,
            "gives other outputs in training when its draws are repeated: it counts, or draws by "
            "other means than torch's operations, which no seed could repeat; remove that",
        )
    return seen._replace(
        draws=forward.drawn > 0 or _draws(module),
        other=_apart(again, seen.outputs, 100) or bool(norms(module)),
    )


def _go_back(module: nn.Module, outputs: Tensor, leaves: dict[str, Tensor]) -> None:
    """Compute gradients; raise an error if there are none, or if the backward pass draws."""
    with Addressed(1) as drawing:
        try:
            torch.autograd.grad(outputs.sum(), list(leaves.values()), allow_unused=True)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise _refused(
                module,
                f"has no gradients ({said}); train a part whose backward pass raises no error",
            ) from error
    if drawing.drawn:
        raise _refused(
            module,
            "draws random numbers in its backward pass, as checkpointing of a part with dropout "
            "does, which have no address; leave checkpointing out",
        )


@contextlib.contextmanager
def _watched(module: nn.Module, x: Inputs, *, train: bool = False) -> Iterator[Inputs]:
    """Enter a context for calls of a module, which yields a copy of the inputs and restores the
    module's buffers afterwards.

    Raises:
        ValueError: The calls changed that copy, a parameter, a plain number that a part holds, or
            a buffer that is no running statistic of a norm in training mode.
    """
    given, buffers = each(Tensor.clone, x), {name: t.clone() for name, t in module.named_buffers()}
    statistics = {
        f"{norm}.{name}".removeprefix(".")
        for norm in norms(module)
        for name in (*STATISTICS, "num_batches_tracked")
    }
    versions, numbers = _versions(module), _numbers(module)
    try:
        yield given
        pairs = zip(named(given), named(x), strict=True)
        wrote = [name for (name, one), (_, other) in pairs if not same(one, other)]
        kept = [
            name
            for name, t in module.named_buffers()
            if name not in statistics and not same(t, buffers[name])
        ]
        written = [name for name, count in _versions(module).items() if count != versions[name]]
        counted = [name for name, now in _numbers(module).items() if now != numbers.get(name)]
        first = "".join(wrote[:1])
        mode = (
            "training, which are no statistics of a norm and would be lost; put that part in eval "
            "mode, or make them parameters"
            if train
            else "evaluation mode, too; let it do that under `if self.training` or never"
        )
        for names, fault in (
            (wrote, f"changes its inputs in place; let it begin with {first} = {first}.clone()"),
            (kept, f"changes the buffers {kept[:3]} in {mode}"),
            (
                written,
                f"writes to the parameters {written[:3]}, as F.embedding with max_norm does; "
                "remove that",
            ),
            (
                counted,
                f"changes the numbers {counted[:3]}, so that later calls may differ, which no seed "
                "could repeat; remove that",
            ),
        ):
            if names:
                raise _refused(module, fault)
    finally:
        with torch.no_grad():
            for name, t in module.named_buffers():
                t.copy_(buffers[name])


def _versions(module: nn.Module) -> dict[str, int]:
    """Return how often each parameter was changed in place, but for those that torch rescales."""
    excused = rescaled(module)
    return {
        name: p._version
        for name, p in module.named_parameters()
        if name not in excused and not p.is_inference()
    }


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Return the plain numbers that a module's parts hold."""
    held = [
        (f"{name}.{key}".lstrip("."), value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
    ]
    return {name: value for name, value in held if type(value) in (bool, int, float)}


def _refused(module: nn.Module, fault: str) -> ValueError:
    return ValueError(f"the model {type(module).__name__} is refused: its forward {fault}")


def _apart(one: Tensor, other: Tensor, times: float) -> bool:
    """Return whether outputs differ by more than this multiple of the largest one's rounding."""
    return apart(one, other, times * torch.finfo(one.dtype).eps)
