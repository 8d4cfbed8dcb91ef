"""The history of a run: measurements, one row for each round."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bayesfl.base.options import nearest
from bayesfl.evaluation.report import better

HEADLINES = ("personal_accuracy", "personal_rmse")
"""Columns that summarise a run: the first for classification, the second for regression."""
PREFIXES = {"test": "personal", "validation": "validation"}
"""Prefixes of columns for each client's own predictor, by split."""
CALIBRATED = "calibrated"
"""Prefix of columns for calibrated predictions of test data, after a run over a network."""


class History:
    """Hold the measurements of a run, one row for each round, with access by column.

    A column's prefix names the models that were measured on the test split: `personal_` each
    client's own predictor after aggregation (and fine-tuning, where the method has it);
    `before_pool_` the models before aggregation, of the clients that trained in this round;
    `global_` the server's model; `validation_` as `personal_`, on the validation split. Without
    `pooled_` a measure is the mean over clients; with it, the measure of all clients' examples
    together. `pandas.DataFrame(list(history))` has the rows as a data frame.

    Args:
        rows: Mappings from column to number.
        absent: {round: ids of selected clients without a contribution}.
        recorded: {round: {column: a value for each client, [J]}}, if a run records them.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> history = bf.simulate(method, clients, rounds=2).history
        >>> history["round"].tolist(), history["personal_accuracy"].shape
        ([1.0, 2.0], (2,))
        >>> history.best("personal_nll")["round"]
        2
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]] = (),
        absent: Mapping[int, Sequence[int]] | None = None,
        recorded: Mapping[int, Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        self.rows: list[dict[str, Any]] = [dict(row) for row in rows]
        self.absent = dict(absent or {})
        self.recorded = dict(recorded or {})

    def append(self, row: Mapping[str, Any], absent: Sequence[int] = ()) -> None:
        """Add the row of a round, and the ids of the clients that did not reply."""
        self.rows.append(dict(row))
        if absent:
            self.absent[row["round"]] = absent

    def record(self, values: Mapping[str, np.ndarray]) -> None:
        """Record clients' own values, {column: [J]}, for the last row's round."""
        # A new mapping, because copies share those of their rounds.
        self.recorded[self.rows[-1]["round"]] = {
            **self.recorded.get(self.rows[-1]["round"], {}),
            **values,
        }

    def copy(self) -> "History":
        """Return a history with rows of its own."""
        return History(self.rows, self.absent, self.recorded)

    @property
    def columns(self) -> list[str]:
        """Return all columns, in order of their first appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, column: str | int | np.integer | slice) -> Any:
        """Return one column [rounds], NaN for rounds without a value; the row at a place,
        `history[-1]` the last; or a history of a slice.

        Raises:
            KeyError: No row has such a column; the message offers the nearest names.
            IndexError: There is no such row.
        """
        if isinstance(column, slice):
            return History(self.rows[column], self.absent, self.recorded)
        if isinstance(column, int | np.integer):
            return self.rows[int(column)]
        if column not in self.columns:
            raise KeyError(
                f"no column {column!r}; the nearest of {len(self.columns)} are "
                f"{nearest(column, self.columns, 4)}, history.columns has all"
            )
        return np.array([row.get(column, np.nan) for row in self.rows], dtype=np.float64)

    def clients(self, column: str) -> np.ndarray:
        """Return every client's own values of a column, [rounds, J] in float64; NaN for rounds
        without evaluation and for clients without a value, such as those without rows.

        The clients stand in the order of `clients.client_names`.

        Args:
            column: The column, such as `personal_accuracy`; `history["personal_accuracy"]` is the
                mean over clients.

        Raises:
            KeyError: The run did not record it; the message has the option that does.

        Example:
            >>> clients = bf.data.iid("digits", clients=3)
            >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
            >>> history = bf.simulate(method, clients, rounds=2, record_clients=["nll"]).history
            >>> history.clients("personal_nll").shape
            (2, 3)
        """
        found = {
            round: values[column] for round, values in self.recorded.items() if column in values
        }
        if not found:
            there = list(dict.fromkeys(name for of in self.recorded.values() for name in of))
            raise KeyError(
                f"clients' own {column!r} were not recorded, only {there}: pass the measures, as "
                "bf.simulate(..., record_clients=('accuracy', 'nll'))"
            )
        nothing = np.full_like(next(iter(found.values())), np.nan)
        rows = [found.get(row["round"], nothing) for row in self.rows]
        return np.array(rows).reshape(len(rows), len(nothing))

    def best(self, column: str, *, lowest: bool | None = None) -> dict[str, Any]:
        """Return the row in which a column is best; use it with validation columns, never with test
        columns.

        Args:
            column: The column.
            lowest: Whether the smallest value is best; None derives it from the measure's name, as
                for `validation_nll`.

        Raises:
            KeyError: No row has such a column.
            ValueError: The column has no values, or `lowest` is None and the measure's name is
                unknown.
        """
        values = self[column]
        if lowest is None:
            which = better(column)
            if which is None:
                raise ValueError(
                    f"whether the best value of column {column!r} is the lowest is not known; pass "
                    "lowest=True or lowest=False"
                )
            lowest = which == "lower"
        return self.rows[int(np.nanargmin(values) if lowest else np.nanargmax(values))]

    def __repr__(self) -> str:
        measured = [row for row in self.rows if any(measure in row for measure in HEADLINES)]
        if not measured:
            return f"History({len(self)} rounds, not evaluated)"
        last = {
            k: v for k, v in measured[-1].items() if k.startswith("personal_") and "pooled" not in k
        }
        return (
            f"History({len(self)} rounds; "
            + ", ".join(f"{k} {v:.3g}" for k, v in last.items())
            + ")"
        )
