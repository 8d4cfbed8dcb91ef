"""The layers kernel, which runs a recorded forward pass for a whole chunk of clients with short
rules, one for each torch function.

Whether a recording is correct is tested, not derived: it is compared once with the module itself,
for two clients with different numbers of rows, in outputs, slopes and running statistics.
"""

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs, count, each, first, form, in_precision, named
from bayesfl.base.numerics import apart
from bayesfl.engine import live
from bayesfl.engine.network import Pass, Passage, Rows, there_and_back
from bayesfl.engine.recording import (
    PRECISION,
    Given,
    Operation,
    Recording,
    Times,
    Unrecordable,
    bound,
    filled,
    recorded,
)
from bayesfl.engine.rules import LIFTING, RULES, Backward, Call, Rule, at_draws, batched
from bayesfl.models.altered import cut
from bayesfl.models.copies import duplicate
from bayesfl.models.modes import halved, twin
from bayesfl.models.weights import call_at

T = TypeVar("T")
EXAMPLES = 8
"""Minimum number of examples of the first client when a recording is compared."""
OTHERS = 5
"""Number of examples of the second client."""
WEIGHTS, FILTERS, NUMBERS, MOST = 100_000, 5_000, 1_000_000, 4_000_000
"""Clients are computed one at a time if a step has more than `MOST` results, or more than `NUMBERS`
and the model has more than `WEIGHTS` weights or `FILTERS` weights of convolutions
(docs/decisions/0008).
"""
USUAL = 50
"""Number of rows of a batch that is assumed for predictions."""


class _Ready(NamedTuple):
    """Hold a step and the rule that runs it.

    Args:
        step: The step.
        rule: Its rule for tensors without draws.
        lifting: Its rule if some tensors have draws.
        args: Its arguments in the rule's order; None if torch.func batches the function.
        flat: Whether only tensors must be filled in.
    """

    step: Operation
    rule: Rule
    lifting: Rule
    args: tuple[Any, ...] | None
    flat: bool


class _Plan(NamedTuple):
    """Hold the data that run a module.

    Args:
        recording: Its recording.
        rows: The largest number of rows in the comparison.
        steps: Its steps, with their rules.
        axes: The number of axes of each parameter and buffer that is used.
        shared: The places that several steps read.
    """

    recording: Recording
    rows: int
    steps: tuple[_Ready, ...]
    axes: dict[str, int]
    shared: frozenset[int]


_KNOWN: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Any]]" = weakref.WeakKeyDictionary()
"""Cached properties of modules, by mode and inputs, which the copies of all threads share:
recordings, plans, features of a few examples, and whether they are light.
"""


def supported(module: nn.Module, x: Inputs) -> bool:
    """Return whether a module can be run; the answer is cached, so the module must not change.

    Args:
        module: The module, in the mode of its runs.
        x: Inputs [N, ...] of a client, at least one example; in training as many as its largest
            batch has, because a forward pass may depend on their number.
    """
    return all(isinstance(_plan(part, some, count(x)), _Plan) for part, some in _parts(module, x))


def _parts(module: nn.Module, x: Inputs) -> list[tuple[nn.Module, Inputs]]:
    """Return the parts that are run separately, with inputs: body and head, or all."""
    some = each(lambda t: t[:EXAMPLES], x)
    if not cut(module):
        return [(module, some)]

    def features() -> Tensor:
        tensors = {name: t.detach().clone() for name, t in module.body.state_dict().items()}
        with torch.no_grad(), Addressed(0):
            return call_at(module.body, tensors, some)

    return [(module.body, some), (module.head, _once("features", module, some, features))]


def light(module: nn.Module, x: Inputs, most: int, rows: int) -> bool:
    """Return whether a module can be run for clients with `most` rows, as many as `x` has, and a
    step with `rows` rows leaves room in the cache for several clients; the answer is cached.
    """
    return _once(
        (most, rows), module, x, lambda: not _heavy(module, x, rows) and supported(module, x)
    )


def _heavy(module: nn.Module, x: Inputs, rows: int) -> bool:
    """Return whether one client's weights and results fill the cache, so that there is no room for
    several clients'; True also if this is unknown.

    Predictions count as a batch of `USUAL` rows, so that the choice of kernel does not depend on
    the number of rows.
    """
    recordings = [_recording(*part) for part in _parts(module, x)]
    rows = USUAL if twin(module)[1] is False else rows
    numbers = sum(0 if isinstance(one, str) else one.numbers for one in recordings) * rows
    sizes = [(p.dim() > 2, p.numel()) for p in module.parameters()]
    weights, filters = sum(n for _, n in sizes), sum(n for wide, n in sizes if wide)
    wide = weights > WEIGHTS or filters > FILTERS
    unknown = any(isinstance(one, str) for one in recordings)
    return unknown or numbers > MOST or (wide and numbers > NUMBERS)


def _once(
    what: Hashable,
    module: nn.Module,
    x: Inputs,
    make: Callable[[], T],
    *,
    rows: int = 0,
    axes: int = 1,
) -> T:
    """Return a cached property of a module and its copies, for its mode and a form of inputs with
    `axes` axes before an example's; in training, a plan for fewer rows is made again.
    """
    origin, train = twin(module)
    known, key = _KNOWN.setdefault(origin, {}), (what, train, form(x, axes))
    if key not in known or (train is not False and getattr(known[key], "rows", rows) < rows):
        known[key] = make()
    return known[key]


def _tried(make: Callable[[], T]) -> T | str:
    """Return the result of a function, or the reason why it fails."""
    try:
        return make()
    except Unrecordable as error:
        return str(error)
    except Exception as error:  # a forward pass may raise anything; it is then run unrecorded
        return f"cannot be run for several clients at once: {error}".splitlines()[0]


def _recording(module: nn.Module, x: Inputs) -> Recording | str:
    """Return the recording of a module, or the reason why there is none."""

    def made() -> Recording:
        if any(p._backward_hooks or p._backward_pre_hooks for p in module.modules()):
            raise Unrecordable("has hooks of gradients")
        if halved(module):
            raise Unrecordable("has frozen layers in half precision")
        return recorded(_wide(module), _examples(x, EXAMPLES))

    return _once("recording", module, x, lambda: _tried(made))


def _plan(module: nn.Module, x: Inputs, rows: int = EXAMPLES, axes: int = 1) -> _Plan | str:
    """Return the plan of a module for clients with this number of rows, or the reason why there is
    none.

    Args:
        module: The module.
        x: Inputs [N, ...], or of several clients.
        rows: The number of rows.
        axes: Number of the inputs' axes before an example's own.
    """

    def made() -> _Plan:
        one, wide = each(lambda t: t[(0,) * (axes - 1)], x), _wide(module)
        recording = _recording(module, one)
        if isinstance(recording, str):
            raise Unrecordable(recording)
        # In evaluation mode, a check before training needs more rows.
        most = EXAMPLES if twin(module)[1] is False else max(EXAMPLES, rows)
        plan = _ready(wide, recording, most)
        if not _true(wide, plan, _examples(one, most)):
            raise Unrecordable("computes something other than a sequence of torch functions")
        return plan

    return _once("plan", module, x, lambda: _tried(made), rows=rows, axes=axes)


def _wide(module: nn.Module) -> nn.Module:
    """Return a copy in double precision, so that rounding hides no difference."""
    return duplicate(module).to(device="cpu", dtype=torch.float64)


def _examples(x: Inputs, rows: int) -> Inputs:
    """Return inputs in double precision, repeated to this number of rows."""
    places = torch.arange(rows) % count(x)
    return in_precision(each(lambda t: t[places.to(t.device)].cpu(), x), torch.float64)


def _ready(module: nn.Module, recording: Recording, rows: int) -> _Plan:
    steps = []
    for step in recording.steps:
        rule, args = RULES.get(step.function), None
        if rule is not None and step.piece is None:
            try:
                args = bound(rule, step)
            except TypeError:  # the rule does not have these options
                rule = None
        if rule is None or args is None:
            if step.draw is not None:
                raise Unrecordable(f"draws by {step.function.__name__}, which has no rule")
            rule, args = batched(step), None
        lifting = LIFTING.get(rule) or at_draws(rule)
        flat = args is not None and not any(
            part is PRECISION or type(part) in (tuple, list, slice, Times) for part in args
        )
        steps.append(_Ready(step, rule, lifting, args, flat))
    tensors = _tensors(module)
    read = [place for step in recording.steps for place in step.places] + [recording.out]
    return _Plan(
        recording,
        rows,
        tuple(steps),
        {name: tensors[name].dim() for name in recording.leaves},
        frozenset(place for place in read if read.count(place) > 1),
    )


def _true(module: nn.Module, plan: _Plan, x: Inputs) -> bool:
    """Return whether a plan computes the same as the module, for two clients with different weights
    and numbers of rows.

    The weights are changed, so that no slope is 0, as it is before a head of zeros.
    """
    counts = count(x), OTHERS
    rng = torch.Generator().manual_seed(0)
    names = [name for name, _ in module.named_parameters()]
    leaves = {name: t.expand(2, *t.shape).clone() for name, t in _tensors(module).items()}
    for name in names:
        noise = torch.randn(leaves[name].shape, generator=rng, dtype=torch.float64)
        leaves[name] += (0.01 + 0.1 * leaves[name].abs().mean()) * noise
    start = {name: leaf.clone() for name, leaf in leaves.items()}
    chunk = each(lambda t: torch.stack([t, t[torch.arange(len(t)) % counts[1]]]), x)
    weight = torch.ones(2, counts[0], dtype=torch.float64)
    weight[1, counts[1] :] = 0
    through = isinstance(x, Tensor) and x.is_floating_point()
    every, rows = partial(_run, plan, module), Rows(weight, (1, 2))
    outputs, slopes, into = there_and_back(every, leaves, names, chunk, through=through, rows=rows)
    for c, n in enumerate(counts):
        alone, rows = live.kernel(module), Rows(keys=(c + 1,))
        own = {name: t[c : c + 1].clone() for name, t in start.items()}
        given = each(lambda t, n=n: t[None, :n], x)
        wanted, found, at = there_and_back(alone, own, names, given, through=through, rows=rows)
        pairs = [(slopes[name][c], t[0]) for name, t in found.items()]
        pairs += [] if into is None or at is None else [(into[c, :n], at[0])]
        size = max((float(t.abs().max()) for _, t in pairs if t.numel()), default=0.0)
        values = [(leaves[name][c], t[0]) for name, t in own.items() if t.is_floating_point()]
        values.append((outputs[c, :n], wanted[0]))
        if any(t.isnan().any() for _, t in (*pairs, *values)):
            return False
        if any(apart(*pair, 1e-8, size) for pair in pairs) or any(
            apart(*pair, 1e-8) for pair in values
        ):
            return False
    return True


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}


def kernel(module: nn.Module) -> Passage:
    """Return the passage of a module with a recording, see `network.Kernel`."""

    def passage(
        leaves: dict[str, Tensor],
        slopes: dict[str, Tensor],
        x: Inputs,
        lifted: bool,
        through: bool,
        rows: Rows = Rows(),
    ) -> Pass:
        plan = _plan(module, x, first(x).shape[1 + lifted], 2 + lifted)
        if isinstance(plan, str):
            raise ValueError(
                f"the layers kernel cannot run {type(module).__name__}, which {plan}; use "
                "kernel='auto', which selects a kernel that can run the model"
            )
        return _run(plan, module, leaves, slopes, x, lifted, through, rows)

    return passage


def _run(
    plan: _Plan,
    module: nn.Module,
    leaves: dict[str, Tensor],
    slopes: dict[str, Tensor],
    x: Inputs,
    lifted: bool,
    through: bool,
    rows: Rows = Rows(),
) -> Pass:
    """Run the steps of a plan, see `network.Passage`."""
    recording = plan.recording
    clients, width = count(x), first(x).shape[1 + lifted]
    like = next(iter(leaves.values()), first(x))
    values: list[Any] = [None] * recording.size
    up, reached = [False] * recording.size, [False] * recording.size
    buffers: dict[int, Tensor] = {}
    for place, (_, t) in enumerate(named(x)):
        values[place], up[place], reached[place] = t, lifted, through
    for name, place in recording.leaves.items():
        leaf = leaves.get(name)
        if leaf is None:  # no block covers it, so it is the same for all clients
            prefix, _, key = name.rpartition(".")
            own = getattr(module.get_submodule(prefix), key)
            leaf = own.detach().expand(clients, *own.shape)
        values[place], up[place] = leaf, leaf.dim() > plan.axes[name] + 1
        if name in slopes:
            reached[place], buffers[place] = True, slopes[name]
    draws = max((values[place].shape[1] for place, has in enumerate(up) if has), default=1)
    for place, t in recording.constants.items():
        dtype = like.dtype if t.is_floating_point() else t.dtype
        values[place] = t.to(like.device, dtype).expand(clients, *t.shape)
    backs: list[tuple[Operation, Backward]] = []
    for ready in plan.steps:
        step = ready.step
        tensors = [values[place] for place in step.places]
        lifts = tuple([up[place] for place in step.places])
        wanted = tuple([step.live and reached[place] for place in step.places])
        into = tuple(
            [None if place in plan.shared else buffers.get(place) for place in step.places]
        )
        call = Call(wanted, into, lifts, rows, step.draw, draws)
        rule = ready.lifting if True in lifts else ready.rule
        if ready.args is None:
            found, backward = rule(call, *tensors, rows=width, precision=like.dtype)
        elif ready.flat:
            args = [values[part.place] if type(part) is Given else part for part in ready.args]
            found, backward = rule(call, *args)
        else:
            args = filled(ready.args, iter(tensors), width, like.dtype)
            found, backward = rule(call, *args)
        values[step.out], up[step.out] = found, True in lifts
        if True in wanted:
            reached[step.out] = True
            backs.append((step, backward))

    def back(slope: Tensor) -> Tensor | None:
        at: dict[int, Tensor] = {recording.out: slope}
        for step, backward in reversed(backs):
            if (own := at.pop(step.out, None)) is None:
                continue
            for place, found in zip(step.places, backward(own), strict=True):
                if found is not None and reached[place]:
                    at[place] = at[place] + found if place in at else found
        for name, to in slopes.items():
            found = at.get(recording.leaves.get(name, -1))
            if found is None:  # no step uses it
                to.zero_()
            elif found is not to:
                to.copy_(found)
        return at.get(0, torch.zeros_like(first(x))) if through else None

    return Pass(values[recording.out], up[recording.out], back)
