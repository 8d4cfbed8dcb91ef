"""The layers kernel, which runs a recorded forward for a whole chunk of clients by short rules, one
for each torch function.

Whether a recording is true is not argued but seen: it is compared once with the module itself, for
two clients of different numbers of rows, in outputs, slopes and running statistics.
"""

import copy
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs, call_at, count, each, first, in_precision, named
from bayesfl.engine.network import Pass, Passage, Rows
from bayesfl.engine.recording import (
    PRECISION,
    Given,
    Recording,
    Step,
    Times,
    Unrecordable,
    bound,
    filled,
    recorded,
)
from bayesfl.engine.rules import LIFTING, RULES, Backward, Call, Rule, at_draws, batched
from bayesfl.models.modes import twin

EXAMPLES = 8
"""Fewest examples of the first client with which a recording is compared with its module."""
OTHERS = 5
"""Examples of the second client."""
WEIGHTS, NUMBERS = 100_000, 1_000_000
"""Weights, and results of a step of one client, beyond both of which it is faster to go client by
client (docs/decisions/0008).
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

    step: Step
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


_PLANS: "weakref.WeakKeyDictionary[nn.Module, dict[bool | None, _Plan | str]]" = (
    weakref.WeakKeyDictionary()
)
"""The plans of modules, which all threads' copies share; or why there is none."""
_RECORDINGS: "weakref.WeakKeyDictionary[nn.Module, dict[bool | None, Recording | str]]" = (
    weakref.WeakKeyDictionary()
)
_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""What a forward or torch.func may say to what it is not made for."""


def supported(module: nn.Module, x: Inputs) -> bool:
    """Say whether a module can be run; asked once of a module, which must then stay as it is.

    Args:
        module: The module, in the mode in which it is to run.
        x: Inputs [N, ...] of a client, of at least one example; in training as many as its largest
            batch has, since a forward may ask how many there are.
    """
    return isinstance(_plan(module, x), _Plan)


def heavy(module: nn.Module, x: Inputs) -> bool:
    """Say whether one client's weights and results fill the cache, which several clients' would
    leave; or whether that cannot be known.

    Predictions count as a batch of `USUAL` rows, so that what runs them does not depend on theirs.
    """
    recording = _recording(module, x)
    rows = USUAL if twin(module)[1] is False else count(x)
    if isinstance(recording, str):
        return True
    weights = sum(p.numel() for p in module.parameters())
    return weights > WEIGHTS and recording.numbers * rows > NUMBERS


def refuse(module: nn.Module, x: Inputs) -> None:
    """Raise ValueError, saying why, if a module cannot be run."""
    if isinstance(reason := _plan(module, x), str):
        raise ValueError(
            f"the layers kernel cannot run {type(module).__name__}, which {reason}; use "
            "kernel='auto', which takes one that runs the model"
        )


def _recording(module: nn.Module, x: Inputs) -> Recording | str:
    """Return the recording of a module, or why there is none."""
    origin, train = twin(module)
    recordings = _RECORDINGS.setdefault(origin, {})
    if train not in recordings:
        try:
            if any(part._backward_hooks or part._backward_pre_hooks for part in module.modules()):
                raise Unrecordable("has hooks of gradients")
            recordings[train] = recorded(_wide(module), _examples(x))
        except Unrecordable as error:
            recordings[train] = str(error)
        except _ERRORS as error:
            recordings[train] = f"cannot be recorded: {error}".splitlines()[0]
    return recordings[train]


def _plan(module: nn.Module, x: Inputs) -> _Plan | str:
    """Return how a module is run, or why it is not."""
    origin, train = twin(module)
    plans = _PLANS.setdefault(origin, {})
    plan = plans.get(train)
    if train is False:  # of which a look before training asks more
        x = each(lambda t: t[:EXAMPLES], x)
    if plan is None or (isinstance(plan, _Plan) and plan.rows < count(x)):
        recording = _recording(module, x)
        plan = recording if isinstance(recording, str) else _made(module, recording, x)
        plans[train] = plan
    return plan


def _made(module: nn.Module, recording: Recording, x: Inputs) -> _Plan | str:
    some, wide = _examples(x), _wide(module)
    try:
        plan = _ready(wide, recording, count(some))
        if not _true(wide, plan, some):
            return "computes something else than its torch functions one after another"
    except Unrecordable as error:
        return str(error)
    except _ERRORS as error:
        return f"cannot be run for several clients at once: {error}".splitlines()[0]
    return plan


def _wide(module: nn.Module) -> nn.Module:
    """Return a copy in double precision, in which rounding hides no difference."""
    return copy.deepcopy(module).to(device="cpu", dtype=torch.float64)


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
    """Say whether a plan computes what the module does, for two clients of which one has fewer
    rows.
    """
    counts = count(x), OTHERS
    names = [name for name, _ in module.named_parameters()]
    tensors = _tensors(module)
    chunk = each(lambda t: torch.stack([t, t[torch.arange(len(t)) % counts[1]]]), x)
    leaves = {name: t.expand(2, *t.shape).clone() for name, t in tensors.items()}
    slopes = {name: torch.zeros_like(leaves[name]) for name in names}
    weight = torch.ones(2, counts[0], dtype=torch.float64)
    weight[1, counts[1] :] = 0
    through = isinstance(x, Tensor) and x.is_floating_point()
    rows = Rows(weight, (1, 2))
    passed = _run(plan, module, leaves, slopes, chunk, False, through, rows)
    at = torch.linspace(-1, 1, passed.outputs.numel(), dtype=torch.float64)
    at = at.view(passed.outputs.shape)
    at[1, counts[1] :] = 0
    into = None if passed.back is None else passed.back(at)
    pairs: list[tuple[Tensor, Tensor]] = []
    for c, n in enumerate(counts):
        own = {name: t.clone().requires_grad_(name in slopes) for name, t in tensors.items()}
        given = each(lambda t, n=n: t[:n].clone().requires_grad_(t.is_floating_point()), x)
        with torch.enable_grad(), Addressed(c + 1):
            outputs = call_at(module, own, given)
        ends = [own[name] for name in names] + ([given] if through else [])
        found = torch.autograd.grad(outputs, ends, at[c, :n], materialize_grads=True)
        pairs.append((passed.outputs[c, :n], outputs))
        pairs += zip((slopes[name][c] for name in names), found, strict=False)
        pairs += [(into[c, :n], found[-1])] if into is not None else []
        pairs += [(leaves[name][c], t) for name, t in own.items() if t.is_floating_point()]
    if any(one.shape != other.shape for one, other in pairs):
        return False
    apart = max(float((one - other).detach().abs().max()) for one, other in pairs if one.numel())
    return apart <= 1e-8 * max(float(t.detach().abs().max()) for _, t in pairs if t.numel())


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
            refuse(module, x)
            raise AssertionError
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
    backs: list[tuple[Step, Backward]] = []
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

    outputs = values[recording.out]
    return Pass(outputs, up[recording.out], back if slopes or through else None)


def _named(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer of a module."""
    prefix, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(prefix), leaf)
