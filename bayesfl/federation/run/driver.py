"""The loop of a run, the same for a simulation and for a deployment: rounds, evaluations,
checkpoints and callbacks.

`Clients` reaches the clients, on one machine or over a network. Each operation that only one
process may do is in one place: `Clients.save` writes checkpoints, `_told` calls callbacks, and
`drive` shows a progress bar.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from bayesfl.base.display.progress import progress_bar
from bayesfl.base.processes.ranks import current
from bayesfl.evaluation.history import HEADLINES, PREFIXES, History
from bayesfl.federation.errors import FailedRound, SmallCohort
from bayesfl.federation.rounds.round import KNOWN, Rules, known_of, run_round
from bayesfl.federation.run.callbacks import Callback
from bayesfl.federation.run.record import Run

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Run)
ATTEMPTS = 3
"""Number of attempts at a round before the run stops for lack of clients."""
LOGGED = ("cohort", "seconds", "train_nll", *HEADLINES)
"""Columns of the history that are logged in every round."""
RELEASED = ("round", "releases", "epsilon", "epsilon_own")
"""Columns of the history that callbacks see under `ClientPrivacy`. Other columns would leak data
into the stopping time, which epsilon does not cover.
"""


def check_callbacks(name: str, on_round: Iterable[object]) -> None:
    """Check that callbacks are functions.

    Raises:
        TypeError: They are not a list, or one of them is not a function.
    """
    for callback in on_round:
        if not callable(callback) or isinstance(callback, type):  # otherwise fails after a round
            raise TypeError(
                f"{name} must hold functions, or objects as EarlyStopping('validation_nll'), got "
                f"{callback!r}"
            )


class Clients(ABC, Generic[R]):
    """Provide access to all clients of a run for the loop."""

    @abstractmethod
    def attempt(self, run: R) -> Any:
        """Return the `Transport` of one attempt at the next round."""

    def taken(self, run: R, attempt: Any) -> R:
        """Return the run, updated with the clients' accepted states after a successful attempt."""
        return run

    @abstractmethod
    def evaluate(self, run: R, attempt: Any) -> R:
        """Add measures of the models to the last row of the history, and return the run with the
        objects fitted for them.

        Args:
            run: The run.
            attempt: The attempt of its last round if that was just made; None otherwise.
        """

    @abstractmethod
    def save(self, run: R) -> None:
        """Write a checkpoint, if the run has a folder for checkpoints."""

    def finish(self, run: R) -> R:
        """Return the state that callbacks have chosen, after final work on it."""
        return run


def drive(
    run: R,
    rules: Rules,
    clients: Clients[R],
    callbacks: Sequence[Any],
    *,
    every: int,
    progress: bool | None,
) -> R:
    """Return a run after its remaining rounds, or after a round that a callback makes the last one.

    Any error, including Ctrl-C and a full disk, has the run after its last round as `result`.

    Args:
        run: The run, new or continued.
        rules: The rules of its rounds.
        clients: The clients.
        callbacks: Functions that are called after every round.
        every: Rounds between checkpoints; the last round always has one.
        progress: Whether to show a progress bar; None shows one on a terminal.
    """
    settings = run.settings
    hidden = current().rank > 0 or (None if progress is None else not progress)
    try:
        ended = bool(run.round) and _told(callbacks, run)
        with progress_bar(
            total=settings.rounds, initial=run.round, unit="round", disable=hidden
        ) as bar:
            while run.round < settings.rounds and not ended:
                evaluates = settings.evaluates(run.round)
                run, attempt = _round(run, rules, clients)
                run = clients.evaluate(run, attempt) if evaluates else run
                if shown := _logged(run):
                    bar.set_postfix(shown, refresh=False)
                if run.round % every == 0 or run.round == settings.rounds:
                    clients.save(run)
                bar.update()
                ended = _told(callbacks, run)
        measures = tuple(PREFIXES.values())
        if (
            ended
            and settings.evaluate_every is not None
            and not any(column.startswith(measures) for column in run.history[-1])
        ):
            run = clients.evaluate(run, None)
            _logged(run)
            clients.save(run)
            _told(callbacks, run)  # again, with the measures
        elif ended:
            clients.save(run)
        chosen = run
        for callback in callbacks:
            chosen = callback.finish(chosen) if hasattr(callback, "finish") else chosen
        done = clients.finish(chosen)
        if done is not chosen:
            _logged(done)
            if done.round == run.round:
                clients.save(done)
            for callback in callbacks:
                if getattr(callback, "best", None) is chosen:
                    callback.store(done)
    except BaseException as error:
        error.result = run  # type: ignore[attr-defined]  # as in a DivergenceError
        raise
    return done


def _round(run: R, rules: Rules, clients: Clients[R]) -> tuple[R, Any]:
    """Return a run after one more round, and the attempt that succeeded; None if the round is
    skipped.

    Raises:
        FailedRound: The round failed in every attempt.
    """
    number, earlier = run.round + 1, 0
    drawn = run.algorithm.redrawn(run.server, seed=run.settings.seed, round=run.round)
    run = replace(run, server=drawn)
    while True:
        attempt = clients.attempt(run)
        try:
            server, row, absent, known = run_round(
                rules, run.server, run.round, run.history, attempt, attempt=earlier
            )
            run = clients.taken(replace(run, server=server), attempt)
            break
        except FailedRound as error:
            attempt, row, absent = None, {"round": number, "cohort": 0, **error.row}, []
            known = known_of(rules, run.history)
            # Another attempt would draw the same small cohort.
            if rules.admission.below_minimum == "skip" or isinstance(error, SmallCohort):
                log.warning("%s; the round is skipped", error)
                break
            earlier += 1
            log.warning("%s; attempt %d of %d", error, earlier, ATTEMPTS)
            if earlier == ATTEMPTS:
                raise
    run.history.append(row, absent)
    if known:
        run.history.record({KNOWN + name: values for name, values in known.items()})
    return replace(run, round=number, after=()), attempt


def _told(callbacks: Sequence[Callback], run: Run) -> bool:
    """Call every callback with the run so far, at every rank; return whether one ends the run."""
    shown = run
    if run.settings.sampling == "poisson":
        rows = [{key: row[key] for key in RELEASED if key in row} for row in run.history]
        shown = replace(run, history=History(rows))

    def call() -> bool:
        said = [callback(shown) for callback in callbacks]
        return any(isinstance(one, bool | np.bool_ | Tensor) and bool(one) for one in said)

    try:
        return any(current().every(call))
    except Exception as error:  # a user's function may raise anything; it is raised again
        error.add_note(
            f"raised by a callback after round {run.round}; the run so far is this error's "
            "attribute `result`"
        )
        raise


def _logged(run: Run) -> dict[str, str]:
    """Log the last row of the history, and return its main columns for a progress bar."""
    row = run.history[-1] if run.history.rows else {}
    said = {key: f"{row[key]:.4g}" for key in LOGGED if key in row}
    parts = ", ".join(f"{key} {value}" for key, value in said.items())
    log.info("round %d of %d: %s", run.round, run.settings.rounds, parts)
    return {key: said[key] for key in HEADLINES if key in said}
