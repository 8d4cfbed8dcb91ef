"""The reference kernel, which runs pure steps, one client after another, without padding. It is
slow, and simple enough to verify by reading.
"""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Batch, Info, Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Phase, Repeat
from bayesfl.engine.crew import apart
from bayesfl.engine.plan import PhasePlan


def run(
    algorithm: Algorithm, phase: Phase | Repeat, given: Server, views: View, plan: PhasePlan
) -> tuple[View, Info]:
    """Run `phase` for every client of a chunk, stacked [C, ...]."""
    done = [
        _client(algorithm, phase, given, tree_map(lambda t, c=c: t[c], views), plan.client(c))
        for c in range(len(plan.ids))
    ]
    return tree_map(lambda *rows: _stacked(rows), *done)


def _stacked(rows: tuple[Tensor, ...]) -> Tensor:
    """Stack clients' tensors, [C, ...]; tensors with an entry for each example are padded with
    zeros to the longest client.
    """
    if len({t.shape for t in rows}) == 1:
        return torch.stack(rows)
    longest = max(len(t) for t in rows)
    return torch.stack([torch.cat([t, t.new_zeros(longest - len(t), *t.shape[1:])]) for t in rows])


def _client(
    algorithm: Algorithm, phase: Phase | Repeat, given: Server, view: View, plan: PhasePlan
) -> tuple[View, Info]:
    info: Info = {}
    for inner, batch in plan.turns(phase):
        with apart(inner):
            view, new = _steps(algorithm, inner, given, view, plan, batch)
        info |= new
    return phase.end(view) if isinstance(phase, Repeat) else view, info


def _steps(
    algorithm: Algorithm,
    phase: Phase,
    given: Server,
    view: View,
    plan: PhasePlan,
    batch: Batch | None,
) -> tuple[View, Info]:
    carry = phase.begin(algorithm, given, view)
    for _, *everything in plan.walk(phase, phase.noise(algorithm), batch):
        data, noise = tree_map(lambda t: t[0], everything)
        if parts := getattr(phase, "losses", ()):
            data["losses"] = algorithm.losses_of_copies(parts, view, data)
        carry = phase.step(algorithm, carry, given, view, data, noise)
    return phase.end(algorithm, carry, given, view)
