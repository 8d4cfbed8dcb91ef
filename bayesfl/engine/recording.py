"""A recording of what a module's forward calls: torch functions one after another, with the
tensors and options that they are given, so that they can be run for many clients at once.

The forward is run in float64 on a few rows and watched by a `TorchFunctionMode`, which holds in its
own thread alone. It is run for one row, two and three; a number that grows with the rows is told
from one that stays by comparing the recordings.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs, call, each, in_precision, named
from bayesfl.models.copies import duplicate
from bayesfl.models.weights import bound as at_weights

ROWS = (2, 3)
"""Numbers of rows on which forwards are recorded and compared, after one row alone."""
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
"""Functions that say of a tensor what does not depend on its numbers."""


PRECISION = object()
"""Stands for the precision of the run, which forwards ask of a tensor."""


class Given(NamedTuple):
    """Stand for a tensor of the forward: an input, a leaf, or the result of a step."""

    place: int


class Times(NamedTuple):
    """Stand for a whole number that is so many times the number of a client's rows."""

    times: int


class Operation(NamedTuple):
    """Hold a call of a torch function.

    Args:
        function: The function.
        args: Its arguments, nested as they were given, tensors as `Given`.
        named: Those by name.
        places: The places of the tensors in `args` and `named`, in their order.
        out: The place of its result.
        piece: Which of several results it is; None for a function with one.
        draw: How many draws the forward had made before, where the function makes one; else None.
        live: Whether gradients go through it.
        dtype: The type of its result.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    places: tuple[int, ...]
    out: int
    piece: int | None
    draw: int | None
    live: bool
    dtype: torch.dtype


class Recording(NamedTuple):
    """Hold the steps of a forward.

    Args:
        inputs: Number of tensors among the inputs, whose places are the first.
        leaves: The places of the parameters and buffers that are used, by name.
        constants: The places of other tensors, with these.
        steps: The steps in their order.
        out: The place of the outputs.
        size: Number of places.
        numbers: How many numbers all results have for one row.
    """

    inputs: int
    leaves: dict[str, int]
    constants: dict[int, Tensor]
    steps: tuple[Operation, ...]
    out: int
    size: int
    numbers: int


class Unrecordable(Exception):
    """A forward does what no recording can repeat; its text says what, after "which "."""


def recorded(module: nn.Module, x: Inputs) -> Recording:
    """Record the forward of a module, whose buffers are left as they were.

    Args:
        module: The module in float64, in the mode in which it is to run.
        x: Inputs of at least as many examples as the largest of `ROWS`.

    Raises:
        Unrecordable: Its control flow depends on the examples or their number, it calls what torch
            does not show, or its draws are not one a function.
    """
    one, few, more = (_Recorder(module, x, rows).recording for rows in (1, *ROWS))
    if [step.function for step in one.steps] != [step.function for step in few.steps]:
        raise Unrecordable("takes other steps for an example alone")
    merged = _merged(few, more)
    single = duplicate(module).float()
    narrow = _Recorder(single, in_precision(x, torch.float32), ROWS[0]).recording
    return _needed(_in_any_precision(merged, narrow))


class _Recorder(TorchFunctionMode):
    """Records one forward on the first `rows` examples."""

    def __init__(self, module: nn.Module, x: Inputs, rows: int) -> None:
        super().__init__()
        self._places: dict[int, int] = {}
        self._kept: list[Tensor] = []  # as long as they live, their ids are theirs alone
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
            raise Unrecordable("draws numbers that no function of its inputs makes")
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
        if self._counts(args):
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
            return result  # of no tensor of the forward: a constant, where it is used
        draws = self._drawing.drawn - drawn
        if draws > 1:
            raise Unrecordable(f"calls {name}, which draws several times")
        written = args and isinstance(args[0], Tensor) and id(args[0]) in self._names
        if written and name.endswith("_") and not name.endswith("__"):
            raise Unrecordable(f"calls {name} on a parameter or a buffer")
        step = Operation(
            func, *given, tuple(places), 0, None, drawn if draws else None, False, torch.bool
        )
        self._draws += draws
        for piece, t in enumerate(result) if several else [(None, result)]:
            if not isinstance(t, Tensor):
                raise Unrecordable(f"calls {name}, which returns something beside tensors")
            place = self._place(t, len(self._kept))
            self._steps.append(
                step._replace(out=place, piece=piece, live=t.requires_grad, dtype=t.dtype)
            )
        return result

    def _place(self, t: Tensor, place: int) -> int:
        """Give a tensor a place; one that was written into has a new one from here on."""
        self._places[id(t)] = place
        self._kept.append(t)
        return place

    def _counts(self, args: tuple[Any, ...]) -> bool:
        """Say whether a norm counts its batches, which no federation reads."""
        return (self._names.get(id(args[0]), "") if args else "").endswith("num_batches_tracked")

    def _told(self, value: Any, places: list[int]) -> Any:
        """Return arguments with `Given` for their tensors, whose places are added."""
        if isinstance(value, Tensor):
            if id(value) not in self._places:
                name = self._names.get(id(value))
                place = self._place(value, len(self._kept))
                if name is not None:
                    self._used[name] = place
                elif value.requires_grad:
                    raise Unrecordable("calls what is no torch function, as a Function of its own")
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))


def filled(value: Any, tensors: Iterator[Any], rows: int, precision: Any) -> Any:
    """Return a step's arguments with the next of the tensors for each `Given`, with numbers for
    `Times`, of clients that have `rows` rows, and with the precision for `PRECISION`.
    """
    if isinstance(value, Given):
        return next(tensors)
    if isinstance(value, Times):
        return value.times * rows
    if value is PRECISION:
        return precision
    return _rebuilt(value, lambda part: filled(part, tensors, rows, precision))


def _merged(one: Recording, other: Recording) -> Recording:
    """Return the recording of any number of rows that gives two of `ROWS`."""
    if len(one.steps) != len(other.steps) or one[:2] != other[:2] or one.out != other.out:
        raise Unrecordable("takes other steps for other numbers of rows")
    for place, t in one.constants.items():
        again = other.constants.get(place)
        if again is None or again.dtype != t.dtype or not torch.equal(again, t):
            raise Unrecordable("makes tensors anew that differ from call to call")
    steps = []
    for a, b in zip(one.steps, other.steps, strict=True):
        if (a.function, *a[3:]) != (b.function, *b[3:]):
            raise Unrecordable("takes other steps for other numbers of rows")
        steps.append(a._replace(args=_joint(a.args, b.args), named=_joint(a.named, b.named)))
    return one._replace(
        steps=tuple(steps), numbers=(other.numbers - one.numbers) // (ROWS[1] - ROWS[0])
    )


def _in_any_precision(wide: Recording, narrow: Recording) -> Recording:
    """Return a recording made in float64 with `PRECISION` for what it asked of a tensor, by one of
    as many rows as the fewest of `ROWS` in float32.
    """
    if [step.function for step in wide.steps] != [step.function for step in narrow.steps]:
        raise Unrecordable("takes other steps in another precision")
    steps = []
    for a, b in zip(wide.steps, narrow.steps, strict=True):
        if (a.dtype, b.dtype) != (torch.float64, torch.float32) and a.dtype != b.dtype:
            raise Unrecordable("computes in a precision of its own")
        places = iter([Given(place) for place in a.places])
        mine = filled((a.args, a.named), places, ROWS[0], PRECISION)
        args, named = _typed(mine, (b.args, b.named), (a.args, a.named))
        steps.append(a._replace(args=args, named=named))
    return wide._replace(steps=tuple(steps))


def _typed(one: Any, other: Any, told: Any) -> Any:
    """Return the arguments `told` with `PRECISION` where they hold float64 in one recording and
    float32 in the other.
    """
    if (one, other) == (torch.float64, torch.float32):
        return PRECISION
    if isinstance(one, Mapping):
        return {key: _typed(part, other[key], told[key]) for key, part in one.items()}
    if isinstance(one, tuple | list) and not isinstance(one, Given):
        parts = [*map(_typed, one, other, told)]
        return parts if isinstance(one, list) else tuple(parts)
    if isinstance(one, slice) or one == other:
        return told
    raise Unrecordable("computes with the limits of its precision")


def _joint(one: Any, other: Any) -> Any:
    """Return arguments that stand in two recordings, numbers that grow with the rows as `Times`."""
    if type(one) is not type(other):
        raise Unrecordable("gives a function other arguments for other numbers of rows")
    if isinstance(one, Mapping):
        return {key: _joint(part, other.get(key)) for key, part in one.items()}
    if isinstance(one, tuple | list) and not isinstance(one, Given):
        if len(one) != len(other):
            raise Unrecordable("gives a function other arguments for other numbers of rows")
        joint = [*map(_joint, one, other)]
        return joint if isinstance(one, list) else tuple(joint)
    if isinstance(one, slice):
        return slice(
            *map(_joint, (one.start, one.stop, one.step), (other.start, other.stop, other.step))
        )
    if one == other:
        return one
    few, many = ROWS
    if isinstance(one, int) and one % few == 0 and one // few * many == other:
        return Times(one // few)
    raise Unrecordable("computes with the number of rows")


def _needed(recording: Recording) -> Recording:
    """Return a recording without steps whose results nobody reads, norms that follow their
    batches excepted.
    """
    read, steps = {recording.out}, []
    for step in reversed(recording.steps):
        if step.out in read or (step.function is nn.functional.batch_norm):
            read |= {*step.places}
            steps.append(step)
    return recording._replace(steps=_pooled_first(steps[::-1], recording.out))


def _pooled_first(steps: list[Operation], out: int) -> tuple[Operation, ...]:
    """Let a max pooling go before a ReLU, with which it commutes: the same function with less
    work.
    """
    readers = [place for step in steps for place in step.places] + [out]
    of = {step.out: i for i, step in enumerate(steps)}
    for i, pool in enumerate(steps):
        before = of.get(pool.places[0]) if pool.places else None
        if pool.function is not nn.functional.max_pool2d or before is None:
            continue
        relu = steps[before]
        if relu.function not in _RELUS or readers.count(relu.out) > 1 or pool.piece is not None:
            continue
        steps[before] = pool._replace(
            args=(relu.args[0], *pool.args[1:]), places=relu.places, out=relu.out
        )
        steps[i] = relu._replace(args=(Given(relu.out),), places=(relu.out,), out=pool.out)
    return tuple(steps)


_RELUS = (nn.functional.relu, torch.relu, Tensor.relu)


def bound(function: Callable[..., Any], step: Operation) -> tuple[Any, ...]:
    """Return a step's arguments in the order in which a rule for its function names them, with
    the rule's own defaults.

    Raises:
        TypeError: The rule does not know one.
    """
    call = inspect.signature(function).bind(None, *step.args, **step.named)
    call.apply_defaults()
    return call.args[1:]
