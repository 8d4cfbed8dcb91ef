"""Where the clients of a deployed federation began, if they began from the states of
earlier runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayesfl.base.protocols import View


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
        starts: {experiment: a client's private state at its start}, of the experiments from whose
            initial state a client begins.
    """

    places: tuple[Place | None, ...]
    starts: Mapping[str, View]

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "Before":
        """Return what a file holds."""
        return cls(tuple(one and Place(**one) for one in found["places"]), found["starts"])
