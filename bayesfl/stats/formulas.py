"""Formulas for formulaic, such as `disease ~ age * C(sex, levels=["f", "m"])`.

formulaic makes the specification of a design once, from the formula and the types of columns, and
each site applies it to its rows. So the design is the one that formulaic makes of the pooled rows.
This requires that a category declares all its levels, and that no part learns from rows.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bayesfl.stats.terms import column_of, is_number

ALONE = 12
"""Number of rows that are evaluated alone, for comparison with their values among all rows."""


@dataclass(frozen=True)
class Formula:
    """One side of a formula as a term, see `formula_of`.

    Args:
        text: The formula.
        variables: Columns that the side reads.
        columns: Names of the columns that it makes, without an intercept.
        spec: formulaic's specification, from which a site makes these columns. It is never sent: a
            formula from another machine has none, and is never evaluated.
    """

    text: str
    variables: tuple[str, ...]
    columns: tuple[str, ...]
    spec: Any = field(default=None, compare=False, repr=False)

    def values(self, frame: Any, site: str) -> np.ndarray:
        """Return the columns of a frame's rows, [n, p]; NaN if a value that the column reads is
        missing.

        Raises:
            ValueError: A column is absent or of another type, or a category has another level; a
                part cannot be evaluated, is infinite or undefined, or learns from rows; or the
                formula arrived from another machine.
        """
        if self.spec is None:
            raise ValueError(
                f"the formula {self.text!r} comes from another machine, and runs no code here: "
                "pass it in this machine's own code, as analyse(formula=...)"
            )
        rows = _rows(frame, self.variables, site)
        found, gone = self._made(rows, site)
        known = np.isfinite(found)
        wrong = (~known & ~gone).any(0)  # also if formulaic learns, see `_specified`
        own = _own(self.spec)
        parts = [at for at, term in own.items() if not all(_column(f, rows) for f in term.factors)]
        # A part that learns differs for a row alone. Rows with the lowest and highest values and
        # some between are evaluated, so the order of rows does not matter.
        order = np.where(known, found, np.inf)[:, parts].argsort(0, kind="stable")
        counts = enumerate(known[:, parts].sum(0))
        places = {
            at for k, n in counts if n for at in order[np.linspace(0, n - 1, ALONE, dtype=int), k]
        }
        for row in places:
            alone = self._made(rows.iloc[[row]].reset_index(drop=True), site)[0][0]
            wrong |= ~np.isclose(found[row], alone, rtol=1e-9, atol=0, equal_nan=True)
        if wrong.any():
            raise ValueError(
                f"{np.array(self.spec.column_names)[wrong].tolist()} learn from a site's rows, for "
                f"example their mean, or are infinite or undefined at site {site!r}: write "
                "numbers, as I((age - 60) / 10) or bs(age, knots=[50, 60], lower_bound=20, "
                "upper_bound=90), and leave out rows without a value"
            )
        return found[:, list(own)]

    def _made(self, rows: Any, site: str) -> tuple[np.ndarray, np.ndarray]:
        """Return all columns, and whether a value that they read is missing, [n, q] each."""
        found = _matrix(self.text, self.spec, rows, site)[1]
        gone = np.zeros(found.shape, bool)
        for term, places in self.spec.term_indices.items():
            read = _variables(self.spec.term_variables[term], rows)
            gone[:, places] = rows[read].isna().any(axis=1).to_numpy()[:, None]
        # For a missing value a comparison is False, and a category 0 at each level.
        return np.where(gone, np.nan, found), gone


def formula_of(
    text: str, frames: Mapping[str, Any], *, right_only: bool = False
) -> tuple[Formula, Formula | None]:
    """Read a formula: return its right side as a term, and its outcome as one of a single column,
    if it names one.

    Args:
        text: The formula. Its parts are Python expressions, so evaluate only formulas that you
            trust.
        frames: {site: its data frame}; only the types of columns are used.
        right_only: Whether to ignore the outcome, for rows without one.

    Raises:
        ImportError: formulaic is not installed.
        ValueError: It cannot be read, has several outcomes or leaves out the intercept, or has a
            category without its levels.
    """
    import formulaic
    from formulaic.errors import FormulaParsingError

    try:
        read = formulaic.Formula.from_spec(text)
    except (FormulaParsingError, SyntaxError) as error:
        why = (
            "`.` takes all other columns, times, weights and names of sites among them: name each"
            if type(error) is FormulaParsingError
            else str(error).splitlines()[0]
        )
        raise ValueError(f"formula {text!r} cannot be read: {why}") from error
    right, left = getattr(read, "rhs", read), None if right_only else getattr(read, "lhs", None)
    outcome = left and _specified(text, left, frames)
    if not isinstance(right, formulaic.SimpleFormula) or (outcome and len(outcome.columns) != 1):
        raise ValueError(f"formula {text!r} must have one outcome and one right side, of numbers")
    if "1" not in [str(term) for term in right]:
        raise ValueError(
            f"formula {text!r} removes the intercept, which the fit controls: delete 0 + or - 1"
        )
    return _specified(text, right, frames), outcome


def _specified(text: str, side: Any, frames: Mapping[str, Any]) -> Formula:
    """Return one side of a formula with its specification, made from a row of missing values.
    Whatever formulaic learns from that row is NaN, and so are the columns of each site.
    """
    first = min(frames)
    names = frames[first].columns.drop_duplicates(keep=False)
    rows = _rows(frames[first], names, first).iloc[:0].reindex([0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the mean of what is missing, and the like
        spec = _matrix(text, side, rows, first)[0]
    names, read = list(spec.column_names), set()
    for factor, variables in sorted(spec.factor_variables.items(), key=str):
        of = _variables(variables, rows)
        read |= {*of}
        if spec.encoder_state.get(factor.expr, (None, {}))[1].get("categories") == []:
            column = min(of, default=factor.expr)
            given = {v for site, x in frames.items() for v in column_of(x, column, site).dropna()}
            raise ValueError(
                f"{factor.expr!r} is a category: declare its levels, the reference first, as "
                f"C({column}, levels={sorted(given, key=str)[:20]}), or convert it to numbers"
            )
        if column := _column(factor, rows):
            # `cp[2]` for `C(cp, levels=[1, 2, 3])[T.2]`, as bf.stats.levels names it
            names = [re.sub(rf"{re.escape(str(factor))}\[(T\.)?", f"{column}[", n) for n in names]
    return Formula(text, tuple(sorted(read)), tuple(names[at] for at in _own(spec)), spec)


def _matrix(text: str, spec: Any, rows: Any, site: str) -> tuple[Any, np.ndarray]:
    """Return formulaic's specification and columns [n, q] of rows, from a specification or from one
    side of a formula.
    """
    gone = rows.isna().any(axis=1).to_numpy()
    try:
        matrix = spec.get_model_matrix(
            rows, context={"C": partial(_category, gone=gone)}, na_action="ignore"
        )
        return matrix.model_spec, np.array(matrix, np.float64)
    except Exception as error:  # expressions may raise anything
        raise ValueError(
            f"formula {text!r} cannot be evaluated at site {site!r} of {[*rows]}: "
            f"{'it has text, dates or spans of time' if isinstance(error, TypeError) else error} "
            "(each part makes numbers of a single row, without learning from others: write C(..., "
            "levels=[...]) for text, {(day - np.datetime64('2020-01-01')) / "
            "np.timedelta64(1, 'D')} for a date)"
        ) from error


def _category(
    data: Any, contrasts: Any = None, *, gone: np.ndarray, levels: Any = (), **options: Any
) -> Any:
    """Return formulaic's C. Undeclared levels, which formulaic would treat as the reference, raise
    an error.

    Args:
        data: The values, [n].
        contrasts: The coding, as in formulaic.
        gone: Whether a value of the row is missing, [n].
        levels: The levels; empty if they are not declared.
        **options: Further options of formulaic.

    Raises:
        ValueError: There are other levels.
    """
    import pandas
    from formulaic.transforms import C

    levels, given = list(levels), pandas.Series(np.asarray(data), dtype=object)
    known = given.isin(levels)
    if others := sorted({*given[~known & ~gone]}, key=str) if levels else []:
        raise ValueError(f"{others[:5]} are not among the levels {levels}; list them")
    return C(given.where(known, next(iter(levels), None)), contrasts, levels=levels, **options)


def _rows(frame: Any, names: Any, site: str) -> Any:
    """Return columns for a formula: all numbers in float64, so that expressions do not depend on
    their types, dates as they are, and all else as objects.
    """
    given = {name: column_of(frame, name, site) for name in names}
    typed = {
        name: x.to_numpy(np.float64, na_value=np.nan)
        if is_number(x)
        else (x if x.dtype.kind in "mM" else x.astype(object))
        for name, x in given.items()
    }
    return frame[[]].assign(**typed).reset_index(drop=True)


def _own(spec: Any) -> dict[int, Any]:
    """Return the places of the columns except the intercept, with their terms."""
    return {at: t for t, places in spec.term_indices.items() for at in places if str(t) != "1"}


def _column(factor: Any, rows: Any) -> str | None:
    """Return the column that a part of a term is, or declares as a category."""
    starts = {name: (f"C({name},", f"C(`{name}`,") for name in rows}
    return next((n for n, of in starts.items() if factor.expr.startswith(of) or factor == n), None)


def _variables(read: Any, rows: Any) -> list[str]:
    """Return the columns among the variables of formulaic, such as `age` for `age.clip`."""
    return sorted({str(v) if str(v) in rows else str(v.root) for v in read} & {*rows})
