"""The reference kernel: pure steps, one client after another, nothing padded. Slow and obviously right."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Info, Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Phase, Repeat
from bayesfl.engine.plan import Plan


def run(algorithm: Algorithm, phase: Phase | Repeat, given: Server, views: View, plan: Plan) -> tuple[View, Info]:
    """Runs `phase` for every client of a chunk, stacked [C, ...]."""
    done = [_client(algorithm, phase, given, tree_map(lambda t, c=c: t[c], views), plan.client(c)) for c in range(len(plan.rows))]
    return tree_map(lambda *rows: _stacked(rows), *done)


def _stacked(rows: tuple[Tensor, ...]) -> Tensor:
    """Clients' tensors as one, [C, ...]; what a phase says of each example is filled up with zeros to the longest client."""
    if len({t.shape for t in rows}) == 1:
        return torch.stack(rows)
    longest = max(len(t) for t in rows)
    return torch.stack([torch.cat([t, t.new_zeros(longest - len(t), *t.shape[1:])]) for t in rows])


def _client(algorithm: Algorithm, phase: Phase | Repeat, given: Server, view: View, plan: Plan) -> tuple[View, Info]:
    if isinstance(phase, Repeat):
        info: Info = {}
        for t in range(phase.times):
            for inner in phase.phases:
                view, new = _steps(algorithm, inner, given, view, plan, [t] * (inner.steps or inner.epochs), data=True)
                info |= new
        return view, info
    return _steps(algorithm, phase, given, view, plan, range(int(plan.steps[0])), data=getattr(phase, "data", True))


def _steps(algorithm: Algorithm, phase: Phase, given: Server, view: View, plan: Plan, steps: Any, *, data: bool) -> tuple[View, Info]:
    carry = phase.begin(algorithm, given, view)
    for t in steps:
        batch = {key: value[0] for key, value in plan.batch(t, 1).items()} if data else {}
        if parts := getattr(phase, "losses", ()):
            batch["losses"] = algorithm.losses_of_copies(parts, view, batch)
        noise = {key: value[0] for key, value in plan.noise(phase.noise(algorithm), 1).items()}
        carry = phase.step(algorithm, carry, given, view, batch, noise)
    return phase.end(algorithm, carry, given, view)
