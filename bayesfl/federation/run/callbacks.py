"""Callbacks for `simulate(on_round=...)` and `bayesfl.flower.serve(on_round=...)`: early stopping,
and records of a run for other programs.

A callback is called after every round, once its checkpoint is written, with the run so far: a
`bayesfl.federation.run.result.Result` on one machine, a `bayesfl.flower.Deployed` over a network.
It may read all of it, above all `history`; if it returns True, the run ends. The object continues
to change with the run: use `snapshot(result)` to keep it.

A callback may be called twice for a round. A resumed run first calls its callbacks for its last
finished round, because the earlier process may have been killed before it called them. So a run
that was ended by a callback stays ended, and continues if that callback is left out. A run that
ends between evaluations is evaluated then, and its callbacks are called once more with the
measures. Any function of this form is a callback:

    def note(result):
        row = result.history[-1]
        known = {key: value for key, value in row.items() if value == value}
        mlflow.log_metrics(known, step=result.round)
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np

from bayesfl.base.options import Count, declared
from bayesfl.base.processes.ranks import current
from bayesfl.base.warning import warn
from bayesfl.evaluation.history import History
from bayesfl.federation.run.loading import reloaded
from bayesfl.federation.run.result import Result
from bayesfl.federation.store.files import checkpoints, newest

Callback: TypeAlias = Callable[[Any], Any]
"""Function that receives the run so far; if it returns True, the run ends."""


def snapshot(result: Any) -> Any:
    """Copy the run so far, so that further rounds do not change it; callbacks receive an object
    that shares the running state.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> kept = []
        >>> def keep(run):
        ...     kept.append(bf.callbacks.snapshot(run))
        >>> result = bf.simulate(method, clients, rounds=2, on_round=[keep], evaluate_every=None)
        >>> [run.round for run in kept]
        [1, 2]
    """
    own = {"private": current().copied(result.private)} if isinstance(result, Result) else {}
    return replace(result, history=result.history.copy(), **own)


class EarlyStopping:
    """End a run when a column of the history has not improved for some evaluations.

    It reads only the history, so a resumed run keeps its patience. Choose a column of validation
    data: the best value of a test column is too optimistic.

    Args:
        column: Name of the column, such as `validation_nll`.
        patience: Number of evaluations without a better value after which the run ends.
        keep: Whether the run returns its `last` state, or that of the `best` evaluation, with the
            history up to it.
        folder: For `best`, a folder for that state, where a resumed run finds it again; None to
            keep it only in memory. For a deployment, `bayesfl.flower.load` reads the best state
            from this folder; nodes keep their states and finally their models of that round.
        lowest: Whether smaller values are better; None to infer it from the measure's name.

    Raises:
        ValueError: `folder` is given for `last`.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, validation=0.1)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10), epochs=1)
        >>> stop = bf.callbacks.EarlyStopping("validation_nll", patience=2)
        >>> result = bf.simulate(method, clients, rounds=3, on_round=[stop])
        >>> result.history.best("validation_nll")["round"]
        3
    """

    @declared(idle={("keep", "last"): ("folder",)})
    def __init__(
        self,
        column: str,
        *,
        patience: Count = 10,
        keep: Literal["last", "best"] = "last",
        folder: str | os.PathLike[str] | None = None,
        lowest: bool | None = None,
    ) -> None:
        self.column, self.patience, self.keep = column, patience, keep
        self._folder, self._lowest = folder, lowest
        self.best: Any = None

    def described_as(self) -> dict[str, Any]:
        """Return the options without the best state, so that a used callback equals a new one."""
        return {name: value for name, value in vars(self).items() if name != "best"}

    def __call__(self, result: Any) -> bool:
        """Return whether the run ends; keep its state if it is the best so far.

        Raises:
            ValueError: The history has no such column although a round was evaluated, it is unknown
                whether large or small values of the column are better, or the run uses
                `ClientPrivacy`.
        """
        history = result.history
        if result.settings.sampling == "poisson":
            raise ValueError(
                "EarlyStopping ends the run, or chooses a round, based on the clients' data, which "
                "the run's epsilon does not cover: under ClientPrivacy fix the number of rounds "
                "beforehand, or use a callback that reads only the budget, as lambda run: "
                "run.history['epsilon'][-1] > 3"
            )
        rows = [row for row in history if np.isfinite(row.get(self.column, np.nan))]
        if not rows:
            trained = any(row.get("cohort") for row in history)
            evaluated = any(key.startswith(("personal_", "validation_")) for key in history.columns)
            if evaluated or (trained and result.settings.evaluate_every is None):
                history[self.column]  # raises an error with similar columns
            return False
        best = History(rows).best(self.column, lowest=self._lowest)
        if self.keep == "best" and best["round"] == result.round:
            if self._folder is not None and newest(self._folder):
                raise ValueError(
                    f"folder {str(self._folder)!r} holds the run's checkpoints; use a separate "
                    "folder for the best state"
                )
            self.store(snapshot(result))
        elif (
            self.keep == "best"
            and not self._is_of(result, best["round"])
            and self._folder is not None
            and checkpoints(self._folder)
        ):
            # Store it now, because the nodes of a running deployment must not delete their states.
            self.best = reloaded(result, self._folder)
        return sum(row["round"] > best["round"] for row in rows) >= self.patience

    def store(self, best: Any) -> None:
        """Keep the best state, also in the folder if there is one."""
        self.best = best
        if self._folder is not None:
            best.save(self._folder)

    def finish(self, result: Any) -> Any:
        """Return the state that the run returns: the best one if `keep="best"`, else `result`."""
        values = [row for row in result.history if np.isfinite(row.get(self.column, np.nan))]
        if self.keep == "last" or not values:
            return result
        round = History(values).best(self.column, lowest=self._lowest)["round"]
        if not self._is_of(result, round):
            warn(
                f"the best {self.column} is from round {round}, but its state is lost, for example "
                "because the run was resumed without a folder; the last state is returned. Pass "
                "EarlyStopping(folder=...) to keep the best one on disk",
            )
            return result
        return self.best or result

    def _is_of(self, result: Any, round: int) -> bool:
        """Return whether the kept state is from this run after this number of rounds: their
        histories, including seconds, are equal except for later evaluations.
        """
        if self.best is None or self.best.round != round:
            return False
        pairs = zip(self.best.history.rows, result.history.rows, strict=False)
        return all(repr({key: one.get(key) for key in row}) == repr(row) for one, row in pairs)
