"""The layers kernel, which runs a recorded forward for a whole chunk of clients by short rules, one
for each torch function.

Whether a recording is true is not argued but seen: it is compared once with the module itself, for
two clients of different numbers of rows, in outputs, slopes and running statistics.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs, count, each, first, in_precision, named
from bayesfl.engine.network import Pass, Passage, Rows
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
from bayesfl.models.modes import twin
from bayesfl.models.weights import call_at

T = TypeVar("T")
EXAMPLES = 8
"""Fewest examples of the first client with which a recording is compared with its module."""
OTHERS = 5
"""Examples of the second client."""
WEIGHTS, FILTERS, NUMBERS, MOST = 100_000, 5_000, 1_000_000, 4_000_000
"""A client whose step has more results than the last goes alone, and one that has more than the
last but one, if it has more weights, or weights of convolutions (docs/decisions/0008).
"""
USUAL = 50
"""Rows of a batch, as which predictions count."""


class _Ready(NamedTuple):
    """Hold a step with the rule that runs it.

    Args:
        step: The step.
        rule: Its rule, for tensors without draws.
        lifting: Its rule where some have draws.
        args: Its arguments in the rule's order; None where torch.func batches the function.
        flat: Whether nothing is to be filled in but tensors.
    """

    step: Operation
    rule: Rule
    lifting: Rule
    args: tuple[Any, ...] | None
    flat: bool


class _Plan(NamedTuple):
    """Hold what runs a module.

    Args:
        recording: Its recording.
        rows: The largest number of rows with which it was compared.
        steps: Its steps, with their rules.
        axes: The number of axes of each parameter and buffer that is used.
        shared: The places that several steps read.
    """

    recording: Recording
    rows: int
    steps: tuple[_Ready, ...]
    axes: dict[str, int]
    shared: frozenset[int]


_PLANS: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, _Plan | str]]" = (
    weakref.WeakKeyDictionary()
)
"""The plans of modules by mode and inputs, which all threads' copies share; or why there is
none.
"""
_RECORDINGS: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Recording | str]]" = (
    weakref.WeakKeyDictionary()
)


def supported(module: nn.Module, x: Inputs) -> bool:
    """Say whether a module can be run; asked once of a module, which must then stay as it is.

    Args:
        module: The module, in the mode in which it is to run.
        x: Inputs [N, ...] of a client, of at least one example; in training as many as its largest
            batch has, since a forward may ask how many there are.
    """
    return all(isinstance(_plan(part, given), _Plan) for part, given in _parts(module, x))


def _parts(module: nn.Module, x: Inputs) -> Iterator[tuple[nn.Module, Inputs]]:
    """Yield what is run by itself, with its inputs: body and head, or the whole."""
    if not cut(module):
        yield module, x
        return
    yield module.body, x
    tensors = {name: t.detach().clone() for name, t in module.body.state_dict().items()}
    with torch.no_grad(), Addressed(0):
        features = call_at(module.body, tensors, x)
    yield module.head, features


def heavy(module: nn.Module, x: Inputs) -> bool:
    """Say whether one client's weights and results fill the cache, which several clients' would
    leave; or whether that cannot be known.

    Predictions count as a batch of `USUAL` rows, so that what runs them does not depend on theirs.
    """
    recordings = [_recording(part, given) for part, given in _parts(module, x)]
    rows = USUAL if twin(module)[1] is False else count(x)
    numbers = sum(0 if isinstance(one, str) else one.numbers for one in recordings) * rows
    sizes = [(p.dim() > 2, p.numel()) for p in module.parameters()]
    weights, filters = sum(n for _, n in sizes), sum(n for wide, n in sizes if wide)
    wide = weights > WEIGHTS or filters > FILTERS
    unknown = any(isinstance(one, str) for one in recordings)
    return unknown or numbers > MOST or (wide and numbers > NUMBERS)


def refuse(module: nn.Module, x: Inputs) -> None:
    """Raise ValueError, saying why, if a module cannot be run."""
    for part, given in _parts(module, x):
        if isinstance(reason := _plan(part, given), str):
            raise _refusal(module, reason)


def _refusal(module: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"the layers kernel cannot run {type(module).__name__}, which {reason}; use "
        "kernel='auto', which takes one that runs the model"
    )


def _recording(module: nn.Module, x: Inputs) -> Recording | str:
    """Return the recording of a module, or why there is none."""
    origin, key = _key(module, x)
    recordings = _RECORDINGS.setdefault(origin, {})
    if key not in recordings:
        hooked = any(p._backward_hooks or p._backward_pre_hooks for p in module.modules())
        recordings[key] = (
            "has hooks of gradients"
            if hooked
            else _tried(lambda: recorded(_wide(module), _examples(x)))
        )
    return recordings[key]


def _tried(make: Callable[[], T]) -> T | str:
    """Return what a function makes, or why it cannot."""
    try:
        return make()
    except Unrecordable as error:
        return str(error)
    except Exception as error:  # a forward may raise anything, and then runs as it is
        return f"cannot be run for several clients at once: {error}".splitlines()[0]


def _key(module: nn.Module, x: Inputs) -> tuple[nn.Module, Hashable]:
    """Return the module of which all threads' copies are, and what else a recording is made for:
    the mode, and the inputs' names, shapes and types.
    """
    origin, train = twin(module)
    kinds = [(name, tuple(t.shape[1:]), t.is_floating_point() or t.dtype) for name, t in named(x)]
    return origin, (train, *kinds)


def _plan(module: nn.Module, x: Inputs) -> _Plan | str:
    """Return how a module is run, or why it is not."""
    origin, key = _key(module, x)
    plans = _PLANS.setdefault(origin, {})
    plan = plans.get(key)
    if twin(module)[1] is False:  # of which a look before training asks more
        x = each(lambda t: t[:EXAMPLES], x)
    if plan is None or (isinstance(plan, _Plan) and plan.rows < count(x)):
        recording = _recording(module, x)
        plan = plans[key] = (
            recording if isinstance(recording, str) else _tried(lambda: _made(module, recording, x))
        )
    return plan


def _made(module: nn.Module, recording: Recording, x: Inputs) -> _Plan:
    some, wide = _examples(x), _wide(module)
    plan = _ready(wide, recording, count(some))
    if not _true(wide, plan, some):
        raise Unrecordable("computes something else than its torch functions one after another")
    return plan


def _wide(module: nn.Module) -> nn.Module:
    """Return a copy in double precision, in which rounding hides no difference."""
    return duplicate(module).to(device="cpu", dtype=torch.float64)


def _examples(x: Inputs) -> Inputs:
    """Return inputs in double precision, of `EXAMPLES` rows at least."""
    rows = torch.arange(max(EXAMPLES, count(x))) % count(x)
    return in_precision(each(lambda t: t[rows.to(t.device)].cpu(), x), torch.float64)


def _ready(module: nn.Module, recording: Recording, rows: int) -> _Plan:
    steps = []
    for step in recording.steps:
        rule, args = RULES.get(step.function), None
        if rule is not None and step.piece is None:
            try:
                args = bound(rule, step)
            except TypeError:  # options that the rule does not know
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
    """Say whether a plan computes what the module does, for two clients with other weights, of
    which one has fewer rows.

    The weights are moved, so that no slope is 0 as those before a head of zeros are.
    """
    counts = count(x), OTHERS
    rng = torch.Generator().manual_seed(0)
    names = [name for name, _ in module.named_parameters()]
    tensors = _tensors(module)
    chunk = each(lambda t: torch.stack([t, t[torch.arange(len(t)) % counts[1]]]), x)
    leaves = {name: t.expand(2, *t.shape).clone() for name, t in tensors.items()}
    for name in names:
        noise = torch.randn(leaves[name].shape, generator=rng, dtype=torch.float64)
        leaves[name] += (0.01 + 0.1 * tensors[name].abs().mean()) * noise
    mine = {name: leaf.clone() for name, leaf in leaves.items()}
    slopes = {name: torch.zeros_like(leaves[name]) for name in names}
    weight = torch.ones(2, counts[0], dtype=torch.float64)
    weight[1, counts[1] :] = 0
    through = isinstance(x, Tensor) and x.is_floating_point()
    passed = _run(plan, module, leaves, slopes, chunk, False, through, Rows(weight, (1, 2)))
    at = torch.randn(passed.outputs.shape, generator=rng, dtype=torch.float64)
    at[1, counts[1] :] = 0
    into = None if passed.back is None else passed.back(at)
    for c, n in enumerate(counts):
        own = {name: t[c].clone().requires_grad_(name in slopes) for name, t in mine.items()}
        given = each(lambda t, n=n: t[:n].clone().requires_grad_(t.is_floating_point()), x)
        with torch.enable_grad(), Addressed(c + 1):
            outputs = call_at(module, own, given)
        ends = [own[name] for name in names] + ([given] if through else [])
        found = torch.autograd.grad(outputs, ends, at[c, :n], materialize_grads=True)
        size = max(float(t.abs().max()) for t in found if t.numel()) if found else 0.0
        pairs = [(passed.outputs[c, :n], outputs, 0.0)]
        pairs += [(slopes[m][c], t, size) for m, t in zip(names, found, strict=False)]
        pairs += [(into[c, :n], found[-1], size)] if into is not None else []
        pairs += [(leaves[m][c], t, 0.0) for m, t in own.items() if t.is_floating_point()]
        if not all(_alike(*pair) for pair in pairs):
            return False
    return True


def _alike(one: Tensor, other: Tensor, size: float) -> bool:
    """Say whether two tensors agree to rounding, that of numbers of a size where it is larger."""
    if one.shape != other.shape:
        return False
    one, other = one.detach(), other.detach()
    if torch.equal(one, other) or not one.numel():
        return True
    largest = max(size, float(other.abs().max()))
    return bool((one - other).abs().max() <= 1e-8 * largest < torch.inf)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}


def kernel(module: nn.Module) -> Passage:
    """Return the passage of a module that has a recording, see `network.Kernel`."""

    def passage(
        leaves: dict[str, Tensor],
        slopes: dict[str, Tensor],
        x: Inputs,
        lifted: bool,
        through: bool,
        rows: Rows = Rows(),
    ) -> Pass:
        plan = _plan(module, each(lambda t: t[0, 0] if lifted else t[0], x))
        if isinstance(plan, str):
            raise _refusal(module, plan)
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
    rows: Rows,
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
            own = _named(module, name)
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
            if found is None:  # nothing reads it
                to.zero_()
            elif found is not to:
                to.copy_(found)
        return at.get(0, torch.zeros_like(first(x))) if through else None

    return Pass(values[recording.out], up[recording.out], back if slopes or through else None)


def _named(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer of a module."""
    prefix, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(prefix), leaf)
