"""Where the clients of a deployed federation began, if they began from the states of earlier runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayesfl.base.checks import whole
from bayesfl.base.protocols import View
from bayesfl.flower.states import EXPERIMENT, STATE


@dataclass(frozen=True)
class Place:
    """The place of a client's last state that was taken.

    Args:
        experiment: Name of the experiment under which the client keeps it.
        client: The client's number in that experiment.
        base: The state's name; empty for the initial one of that experiment.
    """

    experiment: str
    client: int
    base: str


@dataclass(frozen=True)
class Before:
    """The states of earlier runs from which the clients of a run begin.

    Args:
        places: For each client of this run the place of its state; None for a new client.
        starts: {experiment: a client's private state at its start}, of the experiments from whose initial state a client begins.
    """

    places: tuple[Place | None, ...]
    starts: Mapping[str, View]


def read_before(found: Any, starts: Mapping[str, Any], clients: int) -> Before | None:
    """Return where the clients of a checkpoint began, if they began from states of earlier runs.

    Raises:
        KeyError: An entry is missing.
        ValueError: There is not one place for each client, or an experiment or a state has no valid name.
    """
    if found is None:
        return None
    if isinstance(found, Mapping):  # as bayesfl 0.2 wrote it, which matched clients by number
        base = state_names(found["base"])[:clients]
        starts = {str(found["experiment"]): starts}
        found = [{"experiment": found["experiment"], "client": client, "base": name} for client, name in enumerate(base)]
        found += [None] * (clients - len(base))
    places = tuple(
        None if one is None else Place(str(one["experiment"]), whole("client", one["client"], least=0), one["base"]) for one in found
    )
    if len(places) != clients or not all(EXPERIMENT.fullmatch(place.experiment) and state_names([place.base]) for place in places if place):
        raise ValueError("before must place the state of each client")
    return Before(places, starts)


def state_names(base: Any) -> tuple[str, ...]:
    """Return the names of states in a checkpoint.

    Raises:
        ValueError: `base` is no list of such names.
    """
    if not isinstance(base, list) or not base or not all(isinstance(name, str) and (not name or STATE.fullmatch(name)) for name in base):
        raise ValueError("base must name a state of each client")
    return tuple(base)
