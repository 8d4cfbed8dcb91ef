"""What stops a run, or a round of it."""

from typing import Any


class DivergenceError(RuntimeError):
    """Training left the finite numbers.

    Attributes:
        client: Whose training; None for the server.
        round: In which round, from 0.
        phase: In which of the method's phases, from 0; None for the server.
        result: The run up to its last finite round; None while adapting new clients.
    """

    def __init__(self, message: str, *, round: int, client: int | None = None, phase: int | None = None) -> None:
        super().__init__(message)
        self.client, self.round, self.phase = client, round, phase
        self.result: Any = None


class BadClients(RuntimeError):
    """Clients whose replies are missing or bad, where that stops the run."""


class FailedRound(RuntimeError):
    """A round that came to nothing.

    Args:
        message: Why.
        row: What the history says of it beyond its number.
    """

    def __init__(self, message: str, **row: float) -> None:
        super().__init__(message)
        self.row = row


class TooFewClients(FailedRound):
    """Fewer clients replied than a round needs."""


class SmallCohort(TooFewClients):
    """Fewer clients were drawn than a round needs, so nobody is asked; another attempt would draw the same."""


class CheckpointError(RuntimeError):
    """A saved run that is damaged, of another format, or of something else than it is loaded for."""
