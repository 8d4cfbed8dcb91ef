"""Columns of a data frame as inputs of a network: learnt from training rows, applied to all."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bayesfl.base import archive
from bayesfl.base.inputs import as_tuples
from bayesfl.base.warning import warn
from bayesfl.data.tables.frame_warnings import of_levels, of_units
from bayesfl.data.tables.table import Table, Values
from bayesfl.data.tables.texts import check_levels, check_text, in_order

STRANGE = 0.2
"""Smallest share of rows with unknown levels that causes a warning."""
SINGLE, SEVERAL, SEVERAL_ROWS = 20.0, 3.0, 5
"""Distances from the training rows' mean, in standard deviations, above which a row, and the median
of several rows, cause a warning; and the smallest number of several rows.
"""


@dataclass(frozen=True)
class Number:
    """A column of numbers, which is standardised.

    Args:
        name: The column's name.
        mean: Mean of the training rows that have a value; it replaces missing values.
        scale: Standard deviation of the training rows, missing values replaced; 1 for a constant.
        flagged: Whether the column has an indicator of missing values, because training rows lack
            some.
    """

    name: str
    mean: float
    scale: float
    flagged: bool


@dataclass(frozen=True)
class Category:
    """A column of categories, which becomes a column of zeros and ones for each level.

    Args:
        name: The column's name.
        levels: The levels of the training rows, sorted; all others, and missing values, are zeros.
    """

    name: str
    levels: tuple[str, ...]


@dataclass(frozen=True)
class Columns:
    """Turn rows of a data frame into inputs: learnt from training rows, applied to all others,
    never fitted again.

    Args:
        parts: The columns, in the order of the frame.
        classes: Names of the classes of a target that is text, in the order of their numbers; None
            for others.
        outputs: Number of classes; None where it is not known, or for numbers.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"site": list("aabb") * 5, "age": range(20)})
        >>> frame["sex"], frame["ill"] = list("mf") * 10, [0, 1] * 10
        >>> clients, columns = bf.data.from_frame(frame, client="site", target="ill")
        >>> columns.names
        ('age', 'sex is f', 'sex is m')
    """

    parts: tuple[Number | Category, ...]
    classes: tuple[str, ...] | None = None
    outputs: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the inputs that `apply` makes."""
        found: list[str] = []
        for part in self.parts:
            if isinstance(part, Number):
                found += [part.name, *([f"{part.name} is missing"] if part.flagged else [])]
            else:
                found += [f"{part.name} is {level}" for level in part.levels]
        return tuple(found)

    def apply(self, frame: Any) -> np.ndarray:
        """Make inputs of the rows of a frame; it needs these columns, in any order, and may have
        others.

        Args:
            frame: A data frame of pandas, or of polars and others by Arrow's capsule interface.

        Returns:
            Inputs [N, len(names)] float32.

        Raises:
            TypeError: It is no frame.
            ValueError: A column is absent, or of another kind than in training; or numbers are
                infinite.

        Warns:
            UserWarning: Rows are unlike the training rows: numbers far off, as in another unit, new
                levels, or no value in any row.
        """
        x, strange = self.applied(frame if isinstance(frame, Table) else Table(frame))
        if strange:
            told = "; ".join(f"column {name!r}: {one}" for name, one in strange.items())
            warn(f"rows are unlike the training rows: {told}")
        return x

    def applied(self, table: Table) -> tuple[np.ndarray, dict[str, str]]:
        """Return inputs as `apply` does, and by column how rows differ from the training rows.

        Args:
            table: The frame.

        Raises:
            ValueError: As by `apply`.
        """
        table.need([part.name for part in self.parts], "column")
        out = np.zeros((table.rows, len(self.names)), np.float32)
        place, strange = 0, {}
        for part in self.parts:
            values = table.values(part.name)
            if table.rows >= SEVERAL_ROWS and values.missing.all():
                strange[part.name] = f"none of {table.rows} rows has a value"
            if isinstance(part, Category):
                found = values.levels()
                for k, level in enumerate(part.levels):
                    out[:, place + k] = found == level
                other = found[~out[:, place : place + len(part.levels)].any(1) & ~values.missing]
                if len(other) and len(other) >= STRANGE * table.rows:
                    strange[part.name] = (
                        f"{len(other)} of {table.rows} rows have no level of the training rows, "
                        f"{list(part.levels[:5])}, but for instance {other[0]!r}, so that all are "
                        "0; look at how it is written"
                    )
                place += len(part.levels)
                continue
            numbers = _numbers(values)
            missing = np.isnan(numbers)
            away = (np.where(missing, part.mean, numbers) - part.mean) / part.scale
            out[:, place] = away
            lacking = int(missing.sum())
            told = _far(away[~missing], part, numbers[~missing])
            if told:
                strange[part.name] = told
            elif not part.flagged and lacking >= max(1, STRANGE * table.rows):
                strange[part.name] = (
                    f"{lacking} of {table.rows} rows lack it, which no training row did: the mean "
                    "stands there"
                )
            if part.flagged:
                out[:, place + 1] = missing
            place += 1 + part.flagged
        return out, strange

    def values(self, x: Any, name: str) -> np.ndarray:
        """Read a column's values back from inputs that `apply` made, as
        `clients.test.client(j)[0]`.

        Args:
            x: Inputs, [N, len(names)].
            name: The column's name.

        Returns:
            Values [N]. Numbers are in their unit, to a hundred-thousandth of their deviation, and
            NaN where missing values are flagged; categories are their levels, None where a row has
            none of them. A comparison with NaN is False.

        Raises:
            ValueError: There is no such column.
        """
        at = [part.name for part in self.parts].index(name)
        part, place = self.parts[at], len(Columns(self.parts[:at]).names)
        x = np.asarray(x)
        if isinstance(part, Number):
            decimals = 5 - math.floor(math.log10(part.scale))
            found = np.round(part.mean + part.scale * x[:, place].astype(np.float64), decimals)
            return np.where(x[:, place + 1] > 0, np.nan, found) if part.flagged else found
        of = x[:, place : place + len(part.levels)]
        found = np.array(part.levels, dtype=object)[of.argmax(1)]
        found[~of.any(1)] = None
        return found

    def to_json(self) -> str:
        """Return the columns as JSON text, to travel to other machines; it holds means, deviations
        and levels, and no rows.
        """
        parts = [{"kind": type(part).__name__.lower(), **asdict(part)} for part in self.parts]
        return json.dumps({"columns": parts, "classes": self.classes, "outputs": self.outputs})

    @classmethod
    def from_json(cls, text: str) -> "Columns":
        """Read what `to_json` wrote."""
        found, kinds = as_tuples(json.loads(text)), {"number": Number, "category": Category}
        parts = (
            kinds[part["kind"]](**{name: part[name] for name in part if name != "kind"})
            for part in found["columns"]
        )
        return cls(tuple(parts), found["classes"], found["outputs"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the columns into a file, completely or not at all."""
        archive.write(path, "columns", json.loads(self.to_json()), {})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Columns":
        """Read the file that `save` wrote.

        Raises:
            CheckpointError: The file is absent or damaged, or holds something else.
        """
        found, _ = archive.read_kind(path, "columns")
        return cls.from_json(json.dumps(found))

    @classmethod
    def of(cls, statistics: Sequence[Mapping[str, Any]]) -> "Columns":
        """Learn columns from the statistics of several clients, which `frame_statistics` returns,
        without their rows.

        Means and deviations are those of all training rows together, by sums of each client's:
        Chan, Golub, LeVeque, "Algorithms for computing the sample variance", The American
        Statistician 37(3), 1983, eq. 2.1.

        Args:
            statistics: Those of one client or of several each; inputs are in the order of the
                first's columns.

        Raises:
            ValueError: A client occurs twice, they are of other columns or kinds, a column has no
                value anywhere, or a category too many levels.

        Warns:
            UserWarning: A client's mean of a column is far from all others', or levels or classes
                differ by case alone.
        """
        found = [
            {column["name"]: column for column in one}
            for each in statistics
            for one in each["clients"].values()
        ]
        if any(other.keys() != found[0].keys() for other in found):
            apart = sorted(set().union(*found) - set(found[0]).intersection(*found))
            raise ValueError(
                f"clients have other columns: {apart[:10]} are not everywhere; select the same "
                "everywhere"
            )
        parts: list[Number | Category] = []
        for name in found[0]:
            mine = [one[name] for one in found]
            kinds = {column["kind"] for column in mine if column["rows"] > column.get("missing", 0)}
            if len(kinds) != 1:
                held = (
                    "numbers at some clients and text at others; name it in categories= everywhere"
                    if kinds
                    else "no value in any training row; leave it out"
                )
                raise ValueError(f"column {name!r} has {held}")
            parts.append(_number(name, mine) if kinds == {"number"} else _category(name, mine))
        classes = _classes(statistics)
        outputs = [each["outputs"] for each in statistics if each["outputs"] is not None]
        clients = [client for each in statistics for client in each["clients"]]
        if twice := sorted({client for client in clients if clients.count(client) > 1}):
            raise ValueError(
                f"statistics has the clients {twice[:5]} more than once: pass those of each once"
            )
        told: list[str] = []
        for part in parts:
            if isinstance(part, Category):
                told += of_levels(f"levels of {part.name!r}", part.levels)
        if classes and not any(each["ordered"] for each in statistics):
            told += of_levels("classes of the target", classes)
        told += of_units(
            {name: one for each in statistics for name, one in each["clients"].items()}
        )
        if told:
            warn(f"look at these columns: {'; '.join(told)}. Correct them unless this is intended")
        return cls(tuple(parts), classes, len(classes) if classes else max(outputs, default=None))


def _far(away: np.ndarray, part: Number, numbers: np.ndarray) -> str:
    """Return a warning about rows far from the training rows; '' for none.

    Args:
        away: Each row's distance from the training rows' mean, in standard deviations, [n].
        part: The column.
        numbers: The rows' numbers, [n].
    """
    size = np.abs(away)
    if 0 <= part.mean <= 1:
        # A rare yes, coded as 1, is far from a mean near 0, and correct.
        size = np.where((numbers == 0) | (numbers == 1), 0, size)
    known = (
        f"training rows have a mean of {part.mean:.4g} and a standard deviation of {part.scale:.4g}"
    )
    if len(away) and size.max() > SINGLE:
        return (
            f"{int((size > SINGLE).sum())} of {len(away)} rows are far from the training rows, for "
            f"instance {numbers[size.argmax()]:g}; {known}"
        )
    if len(away) >= SEVERAL_ROWS and np.median(size) > SEVERAL:
        return (
            f"half of the rows are far off, their median is {np.median(numbers):g}; {known}: is it "
            "another unit?"
        )
    return ""


def _classes(statistics: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """Return the names of the classes: those of all clients, sorted, or the one order that all
    give; None where targets are no text.

    Raises:
        ValueError: Some targets are text and others are not, or clients give other names or orders.
    """
    given = [None if each["classes"] is None else tuple(each["classes"]) for each in statistics]
    named = [names for names in given if names is not None]
    if not named:
        return None
    if len(named) < len(given):
        raise ValueError(
            "the target is text at some clients and numbers at others; make it one kind everywhere"
        )
    if not any(each["ordered"] for each in statistics):
        return in_order(set().union(*named))
    if len(set(named)) > 1:
        raise ValueError(
            f"clients give the classes in different orders or names, {sorted(set(named))[:3]}; "
            "pass one class_names= everywhere"
        )
    return named[0]


def _number(name: str, mine: Sequence[Mapping[str, Any]]) -> Number:
    count, mean, squares, rows = 0, 0.0, 0.0, 0
    for one in mine:
        rows += one["rows"]
        n = one["rows"] - one["missing"]
        if n and one["kind"] == "number":
            away = one["mean"] - mean
            squares += one["squares"] + away**2 * count * n / (count + n)
            mean += away * n / (count + n)
            count += n
    spread = math.sqrt(squares / rows)
    constant = spread <= 1e-12 * max(abs(mean), 1e-300)
    return Number(name, mean, 1.0 if constant else spread, count < rows)


def _category(name: str, mine: Sequence[Mapping[str, Any]]) -> Category:
    levels = sorted({level for one in mine for level in one.get("levels", ())})
    check_levels(name, levels)
    return Category(name, tuple(levels))


def statistics_of(
    table: Table, clients: Mapping[str, np.ndarray], names: Sequence[str], categories: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the statistics of clients' training rows for `Columns.of`: counts, means, sums of
    squares and levels, as values that JSON can hold.

    Args:
        table: The frame.
        clients: The training rows of each client, [n_j], by its name.
        names: The columns that are inputs.
        categories: Those among them that are categories, even if they hold numbers.

    Raises:
        ValueError: A column holds neither numbers nor text, or infinite numbers, or numbers as
            text.
    """
    found: dict[str, list[dict[str, Any]]] = {client: [] for client in clients}
    for name in names:
        values = table.values(name)
        if values.texts is not None and name not in categories and not values.declared:
            check_text(
                name,
                sorted(set(values.levels()[~values.missing].tolist())),
                "name it in categories= if they are codes",
            )
        for client, rows in clients.items():
            own = replace(
                values,
                numbers=None if values.numbers is None else values.numbers[rows],
                texts=None if values.texts is None else values.texts[rows],
                exact=None if values.exact is None else values.exact[rows],
            )
            found[client].append(_statistics(own, name in categories))
    return found


def _statistics(values: Values, category: bool) -> dict[str, Any]:
    missing = values.missing
    about = {"name": values.name, "rows": len(missing), "missing": int(missing.sum())}
    if category or values.numbers is None:
        texts = sorted(set(values.levels()[~missing].tolist()))
        check_levels(values.name, texts)
        return {**about, "kind": "category", "levels": texts}
    known = _numbers(values)[~missing]
    mean = float(known.mean()) if len(known) else 0.0
    if len(known) and known.min() == known.max():  # the mean may differ by rounding
        return {**about, "kind": "number", "mean": float(known[0]), "squares": 0.0}
    return {
        **about,
        "kind": "number",
        "mean": mean,
        "squares": float(np.square(known - mean).sum()),
    }


def _numbers(values: Values) -> np.ndarray:
    """Return a column's numbers, NaN where missing.

    Raises:
        ValueError: It holds text.
    """
    if values.numbers is None:
        if values.missing.all():
            return np.full(len(values.missing), np.nan)
        raise ValueError(
            f"column {values.name!r} holds text where the training data hold numbers; make numbers "
            "of it by pandas.to_numeric"
        )
    return values.numbers
