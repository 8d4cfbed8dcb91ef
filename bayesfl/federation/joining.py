"""Clients that join a federation after training."""

import warnings
from dataclasses import replace
from typing import Any

from bayesfl.base.checks import instance
from bayesfl.composition.phases import Descend, Repeat
from bayesfl.data import FederatedData
from bayesfl.evaluation.history import History
from bayesfl.federation import surveying
from bayesfl.federation.client import State, private_rows
from bayesfl.federation.form import other_transform
from bayesfl.federation.settings import FEDERATION, same_problem
from bayesfl.optim import rate_at


def adapted(result: Any, novel: FederatedData) -> Any:
    """Return the federation with new clients; see `Result.adapt`.

    Args:
        result: The federation, a `Result`, whose module imports this one.
        novel: The new clients' data.

    Raises:
        TypeError: As by `Result.adapt`.
        ValueError: As by `Result.adapt`.
        DivergenceError: A new client's training is not finite.
    """
    instance("novel", novel, FederatedData, FEDERATION)
    same_problem("novel", novel, result.known)
    if other := other_transform(novel, result.known):
        raise ValueError(f"novel has other inputs, {other}; pass novel.transformed(...) with the federation's function")
    kept = [name for name in result.algorithm.parts if result.algorithm.blocks[name].keep]
    if kept and not result.algorithm.adapt:
        raise ValueError(
            f"each client predicts with its own {kept}, and the method has no `adapt` phases, by which a new client would learn them; "
            "give it some, as dataclasses.replace(algorithm, adapt=algorithm.phases)"
        )
    if slowed := _slowed(result):
        warnings.warn(slowed, stacklevel=3)
    server = result.algorithm.newcomers(result.server, novel.clients)
    private = private_rows(result.algorithm, server, novel.clients)
    with result.engine.crew(result.device) as crew:
        result.local(novel.to(result.device, result.dtype).train).adapt(State(server, private, result.round), crew)
    new = replace(
        result, known=novel, server=server, private=private, history=History(), novel=True, chosen=result.known_choice(), steps=()
    )
    if not result.steps:
        return new
    moved, steps = novel.to(result.device, result.dtype), [one.step for one in result.steps]
    there = {step.split: split for step in steps if (split := moved.splits.get(step.split)) is not None and split.counts.any()}
    predicted = dict(zip(there, new.mine(*there.values(), steps=steps), strict=True)) if there else {}
    if missing := {step.split for step in steps} - there.keys():
        like = next(iter(predicted.values())) if predicted else new.mine(moved.train, steps=steps)[0]
        predicted |= dict.fromkeys(missing, surveying.without_rows(like))
    return replace(new, steps=surveying.settled(result.steps, predicted))


def _slowed(result: Any) -> str:
    """Say where the rate of a phase of `adapt` has fallen below a tenth of its first; '' if none has."""
    inner = [one for phase in result.algorithm.adapt for one in (phase.phases if isinstance(phase, Repeat) else (phase,))]
    rates = [phase.optimiser.rate for phase in inner if isinstance(phase, Descend)]
    last = min(result.round, result.settings.rounds - 1)  # as in `Algorithm.given`
    pairs = [tuple(rate_at(rate, round, result.settings.rounds) for round in (0, last)) for rate in rates]
    fallen = [f"{first:.3g} to {now:.3g}" for first, now in pairs if now < 0.1 * first]
    if not fallen:
        return ""
    return (
        f"the learning rate of the method's adapt phases has fallen from {', '.join(dict.fromkeys(fallen))} after {result.round} rounds, "
        "so new clients hardly learn; adapt them at a constant rate, as dataclasses.replace(result, algorithm=dataclasses.replace("
        "result.algorithm, adapt=constant.adapt)).adapt(novel) does, where `constant` is the method with an optimiser such as SGD(0.1)"
    )
