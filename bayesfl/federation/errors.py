"""Errors that stop a run or a round."""

from collections.abc import Sequence
from typing import Any


class DivergenceError(RuntimeError):
    """Raised when training, or the server's state, is no longer finite.

    Attributes:
        client: The client whose training diverged; None for the server.
        round: The round of the divergence, from 1.
        phase: The method's phase at that time, from 1; None for the server.
        result: The run up to its last finite round; None while new clients are adapted.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> wild = bf.algorithms.fedavg(bf.models.mlp(64, outputs=10), optimiser=bf.optim.SGD(1e30))
        >>> try:
        ...     bf.simulate(wild, clients, rounds=1)
        ... except bf.DivergenceError as error:
        ...     print(error.result.round)
        0
    """

    def __init__(
        self, message: str, *, round: int, client: int | None = None, phase: int | None = None
    ) -> None:
        super().__init__(message)
        self.client, self.round, self.phase = client, round, phase
        self.result: Any = None


class BadClients(RuntimeError):
    """Raised when clients' replies are missing or bad and the admission rules stop the run.

    Example:
        >>> def train(grid, method):
        ...     try:
        ...         strict = bf.Admission("stop")
        ...         return bf.flower.serve(grid, method, clients=4, rounds=10, admission=strict)
        ...     except bf.flower.BadClients as error:
        ...         print(error)
    """


class FailedSurvey(RuntimeError):
    """Raised when a question of a survey over a network has fewer answers than the survey needs;
    the survey then starts again, or is abandoned.
    """


class FailedRound(RuntimeError):
    """Raised when a round does not produce a new state of the server.

    Args:
        message: The reason.
        row: Columns of the history for this round, beyond its number.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> rules = bf.Admission("skip", min_clients=2, below_minimum="repeat")
        >>> plan = bf.faults.at_random(1.0, kinds=("lost",))
        >>> try:
        ...     bf.simulate(method, clients, rounds=1, admission=rules, faults=plan)
        ... except RuntimeError as error:
        ...     print(error)
        round 1 has 0 replies and needs 2 (min_clients)
    """

    def __init__(self, message: str, **row: float) -> None:
        super().__init__(message)
        self.row = row


class SmallCohort(FailedRound):
    """Raised when fewer clients were drawn than a round needs; no client is asked, because another
    attempt would draw the same cohort.
    """


def called(client: int, names: Sequence[str]) -> str:
    """Return a client's number for messages and, if it has a distinctive name, also the name."""
    plain = not names or names[client] in ("", str(client), f"client {client}")
    return f"client {client}" if plain else f"client {client} ({names[client]!r})"
