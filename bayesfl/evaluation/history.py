"""What happened, one row a round."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

HEADLINES = ("personal_accuracy", "personal_rmse")
"""What sums a run up: the one of a classification, the other of a regression."""


class History:
    """Rows of a run, one a round, as columns.

    A column's prefix says whose model was measured on the test split: `personal_` each client's own predictor after aggregation
    (and fine-tuning, where the method has it); `before_pool_` the models as their own training left them, of the clients that
    trained in this round; `global_` the server's model; `validation_` as `personal_`, on the validation split. Without a further
    word a measure is the mean over clients; `pooled_` puts all examples in one pot. `report.write_csv(path, history)` writes it to a
    file.

    Args:
        rows: Mappings from column to number.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.rows: list[dict[str, Any]] = [dict(row) for row in rows]

    @classmethod
    def read(cls, rows: Any) -> "History":
        """Reads a history that was saved.

        Raises:
            ValueError: It is no list of mappings from text to numbers.
        """
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise ValueError("a history is a list of rows")
        for row in rows:
            for column, value in row.items():
                if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= 2**63):
                    raise ValueError(f"column {column!r} holds {value!r}, which is no number")
        return cls(rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a round."""
        self.rows.append(dict(row))

    @property
    def columns(self) -> list[str]:
        """All columns, in order of their first appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, column: str) -> np.ndarray:
        """Gives one column [rounds], NaN where a round has no value."""
        if column not in self.columns:
            raise KeyError(f"no column {column!r}; there are {self.columns}")
        return np.array([row.get(column, np.nan) for row in self.rows], dtype=np.float64)

    def best(self, column: str, *, lowest: bool = False) -> dict[str, Any]:
        """Finds the row where a column is best; to be asked of validation columns, never of test ones."""
        values = self[column]
        return self.rows[int(np.nanargmin(values) if lowest else np.nanargmax(values))]

    def __repr__(self) -> str:
        measured = [row for row in self.rows if any(measure in row for measure in HEADLINES)]
        if not measured:
            return f"History({len(self)} rounds, not evaluated)"
        last = {k: v for k, v in measured[-1].items() if k.startswith("personal_") and "pooled" not in k}
        return f"History({len(self)} rounds; " + ", ".join(f"{k} {v:.3g}" for k, v in last.items()) + ")"
