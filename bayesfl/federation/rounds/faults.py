"""Simulated faults: plans for `simulate(faults=)`, to test a federation's tolerance before it is
deployed.

A plan is a function (round, attempt, ids) -> {id: fault} of the clients that train in a round.
`Lost` represents every fault after which the server has no reply: a client that times out or stops
during the round, or a reply that does not arrive. The other faults alter the reply so that the
server must reject it. In both cases the client starts its next round from the last state that the
server acknowledged, and the round proceeds without that client.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch

from bayesfl.base.options import Natural, Range, declared
from bayesfl.base.random import Purpose, generator
from bayesfl.federation.rounds.admission import Message


@dataclass(frozen=True)
class Lost:
    """Lose the client's reply on its way to the server.

    Example:
        >>> clients = bf.data.iid("digits", clients=3)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> def plan(round, attempt, ids):
        ...     return {0: bf.faults.Lost()}
        >>> result = bf.simulate(method, clients, rounds=1, faults=plan)
        >>> result.history["lost"].tolist()
        [1.0]
    """


@dataclass(frozen=True)
class Altered:
    """Replace the client's reply by another one.

    Args:
        change: Function from the client's `Message` to the one that the server receives.

    Example:
        >>> from dataclasses import replace
        >>> late = bf.faults.Altered(lambda message: replace(message, round=message.round - 1))
    """

    change: Callable[[Message], Message]


Fault: TypeAlias = Lost | Altered
FaultPlan: TypeAlias = Callable[[int, int, np.ndarray], Mapping[int, Fault]]


def _tensor(change: Callable[[Any], Any]) -> Altered:
    """Return a fault that changes the first tensor of a message, if it has one."""

    def altered(message: Message) -> Message:
        name = next(iter(message.tensors), None)
        if name is None:
            return message
        return replace(message, tensors={**message.tensors, name: change(message.tensors[name])})

    return Altered(altered)


def _first_is(tensor: torch.Tensor, value: float) -> torch.Tensor:
    first = torch.arange(tensor.numel(), device=tensor.device).view_as(tensor) == 0
    return tensor.masked_fill(first, value)


FAULTS: dict[str, Fault] = {
    "lost": Lost(),
    "stale": Altered(lambda message: replace(message, round=message.round - 1)),
    "protocol": Altered(lambda message: replace(message, protocol=message.protocol + 1)),
    "missing": Altered(
        lambda message: replace(message, tensors=dict(list(message.tensors.items())[1:]))
    ),
    "extra": Altered(
        lambda message: replace(message, tensors={**message.tensors, "more": torch.zeros(1)})
    ),
    "shape": _tensor(lambda tensor: tensor.unsqueeze(0)),
    "dtype": _tensor(lambda tensor: tensor.half()),
    "larger": _tensor(lambda tensor: torch.cat([tensor, tensor])),
    "nan": _tensor(lambda tensor: _first_is(tensor, math.nan)),
    "infinite": _tensor(lambda tensor: _first_is(tensor, math.inf)),
    "far": _tensor(lambda tensor: 1e6 + 1e6 * tensor),
}
"""One example of each kind of fault, by name."""


@declared
def at_random(
    share: Annotated[float, Range(0, 1, "[]")],
    *,
    kinds: tuple[str, ...] = tuple(FAULTS),
    seed: Natural = 0,
) -> FaultPlan:
    """Return a plan of failures with the same probability for every client, independent in every
    round and every attempt.

    Args:
        share: The probability, in [0, 1].
        kinds: Names of `FAULTS`, from which each fault is drawn uniformly; all by default.
        seed: Seed of the draws.

    Raises:
        KeyError: `kinds` contains an unknown name.

    Example:
        >>> import numpy as np
        >>> plan = bf.faults.at_random(0.5, kinds=("lost",))
        >>> plan(0, 0, np.arange(4))
        {0: Lost()}
    """
    faults = [FAULTS[kind] for kind in kinds]

    def plan(round: int, attempt: int, ids: np.ndarray) -> Mapping[int, Fault]:
        found: dict[int, Fault] = {}
        for client in ids.tolist():
            rng = generator(seed, Purpose.FAULT, round=round, client=client, index=attempt)
            if rng.random() < share:
                found[client] = faults[int(rng.integers(len(faults)))]
        return found

    return plan
