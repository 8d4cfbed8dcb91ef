"""Columns of data frames, of pandas or of any library with Arrow's capsule interface, as plain
arrays with their missing values.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from bayesfl.data.tables.texts import tidied

WHOLE_TEXT = re.compile(r"-?(0|[1-9]\d*)\.0+")
"""A whole number as text, as whole numbers become where one is missing."""
LARGEST = float(np.finfo(np.float32).max)
"""Largest number that inputs hold."""


@dataclass(frozen=True, eq=False)
class Values:
    """The values of one column.

    Args:
        name: The column's name.
        numbers: Numbers [N] in float64, NaN where one is missing; None for text.
        texts: Texts [N] as `tidied` returns them, None where one is missing; None for numbers.
        exact: The same numbers [N] without rounding, None where one is missing, if their type holds
            whole numbers alone; None else.
        order: Levels of a category in the order that its type gives them; None without an order.
        declared: Whether the column's type is a category.
    """

    name: str
    numbers: np.ndarray | None = None
    texts: np.ndarray | None = None
    exact: np.ndarray | None = None
    order: tuple[str, ...] | None = None
    declared: bool = False

    @property
    def missing(self) -> np.ndarray:
        """Return which rows have no value, [N] bool."""
        if self.numbers is not None:
            return np.isnan(self.numbers)
        assert self.texts is not None
        return np.array([value is None for value in self.texts], dtype=bool)

    def levels(self) -> np.ndarray:
        """Return each row's level of a category as text [N], None where it is missing; 3, 3.0 and
        the text 3.0 are one level.
        """
        held = (
            self.exact
            if self.exact is not None
            else self.numbers
            if self.numbers is not None
            else self.texts
        )
        assert held is not None
        return np.array(
            [None if v is None or v != v else _level(v) for v in held.tolist()], dtype=object
        )


def _level(value: Any) -> str:
    """Return a level of a category as text."""
    if isinstance(value, str):
        return value[: value.index(".")] if WHOLE_TEXT.fullmatch(value) else value
    return str(int(value)) if value == int(value) else repr(float(value))


class Table:
    """A data frame that is read column by column.

    Args:
        frame: The frame: of pandas, or of polars, pyarrow and others, by way of pyarrow.
        name: Its name, for error messages.

    Raises:
        TypeError: It is no frame.
        ImportError: It is not of pandas, and pyarrow is absent.
        ValueError: Two columns have one name.
    """

    def __init__(self, frame: Any, name: str = "frame") -> None:
        self._name, self._frame = name, pandas_of(frame)
        self.columns, self.rows = list(self._frame.columns), len(self._frame)
        if twice := sorted({column for column in self.columns if self.columns.count(column) > 1}):
            raise ValueError(
                f"{name} has several columns called {twice[:5]}; give them names of their own"
            )

    def need(self, names: Sequence[str], role: str) -> None:
        """Check that columns are there.

        Raises:
            ValueError: One is absent; the message names it.
        """
        if absent := [name for name in names if name not in self.columns]:
            raise ValueError(
                f"{role}: {self._name} has no columns {absent[:10]}, only {self.columns[:40]}"
            )

    def values(self, name: str) -> Values:
        """Read one column.

        Raises:
            ValueError: It holds dates, several types, numbers that are infinite or too large, or
                anything that is neither number nor text.
        """
        column = self._frame.iloc[:, self.columns.index(name)]
        kind, missing = getattr(column.dtype, "kind", "O"), column.isna().to_numpy()
        if kind == "f" or (kind in "biu" and not missing.any()):
            whole = {"b": "int64", "i": "int64", "u": "uint64"}.get(kind)
            return _finite(
                Values(
                    name,
                    numbers=column.to_numpy(dtype=np.float64, na_value=np.nan),
                    exact=None if whole is None else column.to_numpy(dtype=whole),
                )
            )
        pairs = zip(missing, column.astype(object), strict=True)
        found = _finite(_of_objects(name, [None if none else value for none, value in pairs]))
        if column.dtype.name != "category":
            return found
        return _declared(found, column.dtype.categories if column.dtype.ordered else None)


def _finite(values: Values) -> Values:
    """Return a column, after a check that inputs can hold its numbers."""
    if values.numbers is not None and (large := np.abs(values.numbers) > LARGEST).any():
        row = int(large.argmax())
        raise ValueError(
            f"column {values.name!r} holds infinite or too large numbers, first "
            f"{values.numbers[row]} in row {row}; replace them"
        )
    return values


def _declared(values: Values, order: Any) -> Values:
    """Return a column of a category's type as text, with its levels in their order where they have
    one.
    """
    texts = values.levels() if values.texts is None else values.texts
    named = None
    if order is not None:
        found = [tidied(one) if isinstance(one, str) else one for one in order]
        known = [one if isinstance(one, str) else _level(one) for one in found if one is not None]
        named = tuple(dict.fromkeys(known))
    return Values(values.name, texts=texts, order=named, declared=True)


def pandas_of(frame: Any) -> Any:
    """Return a data frame as one of pandas, whose columns' names are text.

    Args:
        frame: A data frame of pandas, or of polars and others by Arrow's capsule interface, which
            needs pyarrow; whole numbers stay such where some are missing.
    """
    if not hasattr(frame, "iloc"):
        import pyarrow

        table = pyarrow.table(frame)
        frame = table.to_pandas(integer_object_nulls=True)
        for field in table.schema:
            if any(key.startswith(b"_PL_ENUM") for key in field.metadata or ()):
                frame[field.name] = frame[field.name].cat.as_ordered()
    return frame.set_axis([str(column) for column in frame.columns], axis=1)


def is_frame(value: object) -> bool:
    """Return whether a value is a data frame, of pandas or of a library with Arrow's capsule
    interface; a single column is not.
    """
    return (hasattr(value, "iloc") or hasattr(value, "__arrow_c_stream__")) and (
        hasattr(value, "columns") or hasattr(value, "column_names")
    )


def _of_objects(name: str, values: list[Any]) -> Values:
    """Read values of any type, None where one is missing."""
    values = [tidied(value) if isinstance(value, str) else value for value in values]
    found = {type(value) for value in values if value is not None}
    if found and (
        found <= {bool, np.bool_}
        or all(issubclass(kind, int | float | np.integer | np.floating | Decimal) for kind in found)
    ):
        whole = all(issubclass(kind, int | np.integer | np.bool_) for kind in found)
        return Values(
            name,
            numbers=np.array([np.nan if v is None else float(v) for v in values]),
            exact=np.array([None if v is None else int(v) for v in values], dtype=object)
            if whole
            else None,
        )
    if any(not issubclass(kind, str) for kind in found):
        shown = sorted(kind.__name__ for kind in found)
        raise ValueError(
            f"column {name!r} holds values of the types {shown}: make it of one, as "
            f"frame[{name!r}].astype(str) or pandas.to_numeric does, and of dates numbers that "
            f"mean something at prediction, as days since an event, (frame[{name!r}] - start)"
            ".dt.days; or leave it out"
        )
    return Values(name, texts=np.array(values, dtype=object))
