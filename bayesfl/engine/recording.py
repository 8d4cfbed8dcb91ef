"""A recording of a module's forward pass: a sequence of torch functions with their tensors and
options, which can be run for many clients at once.

The forward pass is run on a few rows under a `TorchFunctionMode`, which applies only to its own
thread. It is run for one row and for two in float64, and for three in float32: values that grow
with the rows or follow the precision are found by comparing the recordings.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs, call, each, in_precision, named
from bayesfl.models.weights import bound as at_weights

ROWS = (2, 3)
"""Numbers of rows of recorded and compared forward passes, after one row."""
_WIDTHS = (torch.float64, torch.float32)
READS = {
    "__get__",
    "__len__",
    "_set_grad_enabled",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "size",
    "stride",
}
"""Functions that return properties of a tensor other than its numbers."""


PRECISION = object()
"""Placeholder for the run's precision, which forward passes read from a tensor."""


class Given(NamedTuple):
    """Stand for a tensor of the forward pass: an input, a leaf, or the result of a step."""

    place: int


class Times(NamedTuple):
    """Stand for a multiple of the number of a client's rows."""

    times: int


class Operation(NamedTuple):
    """Hold a call of a torch function.

    Args:
        function: The function.
        args: Its arguments, nested as in the call, with tensors as `Given`.
        named: Its keyword arguments.
        places: The places of the tensors in `args` and `named`, in order.
        out: The place of its result.
        piece: Index of the result, if the function has several; None for a function with one.
        draw: Number of earlier draws in the forward pass, if the function draws; otherwise None.
        live: Whether gradients pass through it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    places: tuple[int, ...]
    out: int
    piece: int | None
    draw: int | None
    live: bool


class Recording(NamedTuple):
    """Hold the steps of a forward pass.

    Args:
        inputs: Number of tensors among the inputs, which have the first places.
        leaves: The places of the parameters and buffers that are used, by name.
        constants: Other tensors, by their places.
        steps: The steps in order.
        out: The place of the outputs.
        size: Number of places.
        numbers: Number of entries in all results for one row.
    """

    inputs: int
    leaves: dict[str, int]
    constants: dict[int, Tensor]
    steps: tuple[Operation, ...]
    out: int
    size: int
    numbers: int


class Unrecordable(Exception):
    """Raised when no recording can repeat a forward pass; its text continues "which "."""


def recorded(module: nn.Module, x: Inputs) -> Recording:
    """Record the forward pass of a module; afterwards the module is in float32, with its buffers
    restored.

    Args:
        module: The module in float64, in the mode of its runs.
        x: Inputs in float64 with at least as many examples as the largest of `ROWS`.

    Raises:
        Unrecordable: Its control flow depends on the examples or their number, it calls something
            that torch does not show, or one function makes several draws.
    """
    one, few = (_Recorder(module, x, rows).recording for rows in (1, ROWS[0]))
    if [step.function for step in one.steps] != [step.function for step in few.steps]:
        raise Unrecordable("runs other operations for a batch of one example")
    more = _Recorder(module.float(), in_precision(x, torch.float32), ROWS[1]).recording
    return _needed(_merged(few, more))


class _Recorder(TorchFunctionMode):
    """Record one forward pass on the first `rows` examples."""

    def __init__(self, module: nn.Module, x: Inputs, rows: int) -> None:
        super().__init__()
        self._places: dict[int, int] = {}
        self._kept: list[Tensor] = []  # while they exist, no other tensor gets their ids
        self._steps: list[Operation] = []
        self._draws = 0
        self._constants: dict[int, Tensor] = {}
        inputs = each(lambda t: t[:rows].detach().clone().requires_grad_(t.is_floating_point()), x)
        for count, (_, t) in enumerate(named(inputs)):
            self._place(t, count)
        own = (*module.named_parameters(), *module.named_buffers())
        self._names = {id(t): name for name, t in own}
        kept = {name: t.detach().clone() for name, t in module.named_buffers()}
        live = [name for name, p in module.named_parameters() if p.is_floating_point()]
        self._used: dict[str, int] = {}
        count = len(self._kept)
        with at_weights(module, kept, live), torch.enable_grad():
            with Addressed(rows) as self._drawing, self:
                outputs = call(module, inputs)
        if self._drawing.drawn != self._draws:
            raise Unrecordable("draws numbers outside torch functions of its inputs")
        if not isinstance(outputs, Tensor) or id(outputs) not in self._places:
            raise Unrecordable("returns no result of a torch function")
        self.recording = Recording(
            count,
            self._used,
            self._constants,
            tuple(self._steps),
            self._places[id(outputs)],
            len(self._kept),
            sum(t.numel() for t in self._kept),
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__iter__:
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        options, drawn = kwargs or {}, self._drawing.drawn
        first = self._names.get(id(args[0]), "") if args else ""
        if first.endswith("num_batches_tracked"):  # which no federation reads
            return func(*args, **options)
        known = [id(t) in self._places or id(t) in self._names for t in _tensors((args, options))]
        places: list[int] = []
        given: tuple[Any, Any] | None = None
        given = (self._told(args, places), self._told(options, places)) if any(known) else given
        result = func(*args, **options)
        name = getattr(func, "__name__", str(func))
        several = isinstance(result, tuple | list) and any(isinstance(t, Tensor) for t in result)
        if not isinstance(result, Tensor) and not several:
            if name in READS:
                return result
            raise Unrecordable(f"calls {name}, which reads the numbers of a tensor")
        if given is None:
            return result  # it involves no tensor of the forward pass: a constant, if used
        draws = self._drawing.drawn - drawn
        if draws > 1:
            raise Unrecordable(f"calls {name}, which draws several times")
        if first and name.endswith("_") and not name.endswith("__"):
            raise Unrecordable(f"calls {name} on a parameter or a buffer")
        step = Operation(func, *given, tuple(places), 0, None, drawn if draws else None, False)
        self._draws += draws
        for piece, t in enumerate(result) if several else [(None, result)]:
            if not isinstance(t, Tensor):
                raise Unrecordable(f"calls {name}, which returns something other than tensors")
            place = self._place(t, len(self._kept))
            self._steps.append(step._replace(out=place, piece=piece, live=t.requires_grad))
        return result

    def _place(self, t: Tensor, place: int) -> int:
        """Assign a place to a tensor; a tensor that was modified in place gets a new one."""
        self._places[id(t)] = place
        self._kept.append(t)
        return place

    def _told(self, value: Any, places: list[int]) -> Any:
        """Return arguments with `Given` for their tensors, and append the tensors' places."""
        if isinstance(value, Tensor):
            if id(value) not in self._places:
                name = self._names.get(id(value))
                place = self._place(value, len(self._kept))
                if name is not None:
                    self._used[name] = place
                elif value.requires_grad:
                    raise Unrecordable("calls something other than torch functions, as a Function")
                else:
                    self._constants[place] = value.detach()
            places.append(self._places[id(value)])
            return Given(places[-1])
        return _rebuilt(value, lambda part: self._told(part, places))


def _rebuilt(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a nest of lists, tuples, mappings and slices with its parts changed."""
    if isinstance(value, slice):
        return slice(*map(function, (value.start, value.stop, value.step)))
    if isinstance(value, Mapping):
        return {key: function(part) for key, part in value.items()}
    if isinstance(value, tuple | list) and not isinstance(value, Given | Times):
        return tuple(map(function, value)) if isinstance(value, tuple) else [*map(function, value)]
    return value


def _parts(value: Any) -> list[Any]:
    """Return the parts of a list, tuple, mapping or slice; none of anything else."""
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, Mapping):
        return [*value.values()]
    nest = isinstance(value, tuple | list) and not isinstance(value, Given | Times)
    return [*value] if nest else []


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in _parts(value) for t in _tensors(part)]


def filled(value: Any, tensors: Iterator[Any], rows: int, precision: Any) -> Any:
    """Return a step's arguments: the next of the tensors for each `Given`, numbers for `Times` with
    `rows` rows for each client, and the precision for `PRECISION`.
    """
    if isinstance(value, Given):
        return next(tensors)
    if isinstance(value, Times):
        return value.times * rows
    if value is PRECISION:
        return precision
    return _rebuilt(value, lambda part: filled(part, tensors, rows, precision))


def _merged(one: Recording, other: Recording) -> Recording:
    """Merge the recordings for `ROWS`, the first in float64 and the second in float32, into one for
    any number of rows and any precision.
    """
    mine, theirs = (
        [(step.function, *step[3:]) for step in recording.steps] for recording in (one, other)
    )
    if mine != theirs or one[:2] != other[:2] or one.out != other.out:
        raise Unrecordable("takes other steps for other numbers of rows, or in another precision")
    steps = tuple(
        a._replace(args=_joint(a.args, b.args), named=_joint(a.named, b.named))
        for a, b in zip(one.steps, other.steps, strict=True)
    )
    return one._replace(steps=steps, numbers=other.numbers - one.numbers)


def _joint(one: Any, other: Any) -> Any:
    """Merge the arguments of two recordings: numbers that grow with the rows become `Times`, and
    the precision `PRECISION`.
    """
    mine, theirs = _parts(one), _parts(other)
    if type(one) is not type(other) or len(mine) != len(theirs):
        raise Unrecordable("gives a function other arguments for other numbers of rows")
    if mine:
        rest = iter(theirs)
        return _rebuilt(one, lambda part: _joint(part, next(rest)))
    if one == other:
        return one
    if (one, other) == _WIDTHS:
        return PRECISION
    few, many = ROWS
    if isinstance(one, int) and one % few == 0 and one // few * many == other:
        return Times(one // few)
    raise Unrecordable("computes with the number of rows, or with the limits of its precision")


def _needed(recording: Recording) -> Recording:
    """Return a recording without unused steps, except norms that track batches."""
    read, steps = {recording.out}, []
    for step in reversed(recording.steps):
        if step.out in read or (step.function is nn.functional.batch_norm):
            read |= {*step.places}
            steps.append(step)
    return recording._replace(steps=_pooled_first(steps[::-1], recording.out))


def _pooled_first(steps: list[Operation], out: int) -> tuple[Operation, ...]:
    """Move a max pooling before a ReLU to reduce the work; the two commute."""
    readers = [place for step in steps for place in step.places] + [out]
    of = {step.out: i for i, step in enumerate(steps)}
    for i, pool in enumerate(steps):
        before = of.get(pool.places[0]) if pool.places else None
        if pool.function is not nn.functional.max_pool2d or before is None:
            continue
        relu = steps[before]
        if (
            relu.function not in (nn.functional.relu, torch.relu, Tensor.relu)
            or readers.count(relu.out) > 1
            or pool.piece is not None
        ):
            continue
        steps[before] = pool._replace(
            args=(relu.args[0], *pool.args[1:]), places=relu.places, out=relu.out
        )
        steps[i] = relu._replace(args=(Given(relu.out),), places=(relu.out,), out=pool.out)
    return tuple(steps)


def bound(function: Callable[..., Any], step: Operation) -> tuple[Any, ...]:
    """Return a step's arguments in the order of the parameters of the rule for its function, with
    the rule's defaults.

    Raises:
        TypeError: The rule does not have one of the arguments.
    """
    call = inspect.signature(function).bind(None, *step.args, **step.named)
    call.apply_defaults()
    return call.args[1:]
