"""Audits of a federation: what their units are, and whose rows fall into them."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from bayesfl.base.checks import probability
from bayesfl.data import FederatedData
from bayesfl.evaluation.audit import Audit, Counting, grouped
from bayesfl.evaluation.surveys import Outputs, conduct
from bayesfl.federation.surveying import asked, put_to

Groups: TypeAlias = Sequence[Sequence[Any]] | Callable[[Any], Any] | str
"""Groups of rows: for each client that of every row, a function that makes these of a client's inputs, or a column of the frame."""
MOST_GROUPS = 20
"""Most values of a column of numbers that are groups."""
COARSE = 1e4
"""Standard deviation of a column beyond which whole numbers near its mean might be read back as others."""


def audited(result: Any, split: str, by: str, groups: Groups | None, delta: float, aggregation: Any) -> Audit:
    """Return the audit of a federation's predictions; see `Result.audit`.

    Args:
        result: The federation, a `Result`, whose module imports this one.
        split: As of `Result.audit`.
        by: As of `Result.audit`.
        groups: As of `Result.audit`.
        delta: As of `Result.audit`.
        aggregation: As of `Result.audit`.

    Raises:
        TypeError: As by `Result.audit`.
        ValueError: As by `Result.audit`.
    """
    probability("delta", delta, "that an interval of a column misses")
    if by not in ("client", "label"):
        raise ValueError(f"by must be 'client' or 'label', got {by!r}; of other groups pass groups=")
    known, used = result.data, {one.step.split for one in result.steps}
    rows = asked(Counting("group", (), split), known.splits)
    if split == "train" or split in used:
        warnings.warn(
            f"the split {split!r} was used for {'training' if split == 'train' else 'calibration'}, so the audit shows more than is "
            f"kept for other rows; audit {'rows that had no part in either' if split == 'test' else repr('test')}",
            stacklevel=3,
        )
    if groups is not None:
        if by != "client":
            raise ValueError(f"by={by!r} and groups= both say what the rows of the table are; give one")
        if isinstance(groups, Mapping):
            raise ValueError(
                "groups must be one list of groups for each client, in the order of clients.client_names, a function of a client's inputs, "
                "or the name of a column of from_frame; got a mapping"
            )
        if isinstance(groups, str):
            groups = _by_column(known, groups)
        each = [groups(rows.client(j, raw=True)[0]) for j in range(known.clients)] if callable(groups) else groups
        names, places = grouped(each, rows.counts)
        survey = Counting("group", names, split, places)
    elif by == "label":
        survey = Counting("label", tuple(known.class_names or map(str, range(known.outputs))), split)
    else:
        survey = Counting("client", tuple(known.client_names), split)
    mine = result.calibrated_mine(rows.to(result.device, result.dtype))
    told = conduct(survey, put_to(survey, mine, aggregation), Outputs(known.task, known.outputs))
    return survey.audit(told, level=mine.predictions.promise, risk=mine.predictions.risk, delta=delta)


def _by_column(data: FederatedData, name: str) -> Callable[[Any], Any]:
    """Return the function of a client's inputs that gives the values of a column of the frame.

    Raises:
        ValueError: The data are no frame's, or have no such column, or one of numbers of many values.
    """
    columns = data.prepared
    if columns is None:
        raise ValueError(f"groups={name!r} names a column, and the data are not of from_frame: pass a function of a client's inputs")

    if any(getattr(part, "scale", 0.0) > COARSE for part in columns.parts if part.name == name):
        raise ValueError(
            f"the column {name!r} has numbers so far apart that small ones cannot be told from inputs, as codes beside 999999: pass groups "
            "as lists, one for each client"
        )

    def values(x: Any) -> Any:
        found = columns.values(x, name)
        if found.dtype != object and len(different := np.unique(found[~np.isnan(found)])) > MOST_GROUPS:
            width = 10 ** math.floor(math.log10(np.ptp(different) / 2))
            raise ValueError(
                f"the column {name!r} has {len(different)} values at one client, too many for groups: make ranges of them, as "
                f"groups=lambda x: columns.values(x, {name!r}) // {width:g} * {width:g}"
            )
        return found

    return values
