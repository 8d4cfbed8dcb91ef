"""User-defined measures, which become columns of the history in addition to those of
`bayesfl.metrics`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from bayesfl.base.warning import noted
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions

Measure: TypeAlias = Callable[[Predictions, Tensor], Any]
"""Function (one client's predictions [n, ...], its labels [n] or targets [n, ...]) -> a number; NaN
where it is not defined. Labels [n, T] hold -100 where one is not known."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def check_measures(name: str, measures: Mapping[str, Measure]) -> None:
    """Check the names of measures.

    Raises:
        ValueError: A name has other characters than small letters, digits and underscores.
    """
    for column in measures:
        if not isinstance(column, str) or not NAME.fullmatch(column):
            raise ValueError(
                f"{name}: {column!r} must be a name of small letters, digits and _, as it becomes "
                "a part of a column's name"
            )


def measured(
    measures: Mapping[str, Measure], local: LocalPredictions, taken: Collection[str] = ()
) -> dict[str, np.ndarray]:
    """Compute the measures of clients, [J] each in float64; NaN for a client without rows.

    Args:
        measures: The measures by name.
        local: Predictions of the clients, with labels.
        taken: Names of other measures.

    Raises:
        ValueError: A name is taken.
    """
    clash = sorted(measures.keys() & set(taken))
    if clash:
        raise ValueError(
            f"measures {clash} have names of the library's own measures; choose others"
        )
    counts, starts = local.clients.counts.tolist(), local.clients.starts.tolist()
    out = {name: np.full(len(counts), np.nan) for name in measures}
    for name, measure in measures.items():
        for j in np.flatnonzero(counts).tolist():
            own = slice(starts[j], starts[j] + counts[j])
            with noted(f"raised by the measure {name!r} for client {local.ids[j]}"):
                out[name][j] = float(measure(local.predictions.at(own), local.labels[own]))
    return out


def means(measured: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the means of measures [J] over the clients with a value; NaN without any."""
    known = {name: values[~np.isnan(values)] for name, values in measured.items()}
    return {
        name: float(np.mean(values)) if len(values) else float("nan")
        for name, values in known.items()
    }
