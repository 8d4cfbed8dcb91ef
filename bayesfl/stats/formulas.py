"""Formulas, as `disease ~ age * C(sex, levels=["f", "m"])`, which formulaic reads.

formulaic makes the specification of a design once, of the formula and the types of columns, and
each site applies this one to its rows. So the design is the one that formulaic makes of all rows
together. For this a category is declared with all its levels, and no part may learn from rows.
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
"""Number of rows whose values by themselves are compared with those among all rows."""


@dataclass(frozen=True)
class Formula:
    """One side of a formula as a term, see `formula_of`.

    Args:
        text: The formula.
        variables: Columns that the side reads.
        columns: Names of the columns that it makes, without an intercept.
        spec: formulaic's specification, by which each site makes these columns. It stays where it
            was made: a formula that arrived from another machine has none, and is never evaluated.
    """

    text: str
    variables: tuple[str, ...]
    columns: tuple[str, ...]
    spec: Any = field(default=None, compare=False, repr=False)

    def values(self, frame: Any, site: str) -> np.ndarray:
        """Return the columns of a frame's rows, [n, p]; NaN where a value that a column reads is
        missing.

        Raises:
            ValueError: A column is absent or of another type, or a category has another level; a
                part cannot be evaluated, is infinite or undefined, or learns from rows; or the
                formula arrived from another machine.
        """
        if self.spec is None:
            raise ValueError(
                f"the formula {self.text!r} arrived from another machine, and runs no code here: "
                "give it in this machine's own code, as analyse(formula=...)"
            )
        rows = _rows(frame, self.variables, site)
        found, gone = self._made(rows, site)
        known = np.isfinite(found)
        wrong = (~known & ~gone).any(0)  # also of what formulaic learnt, see `_specified`
        own = _own(self.spec)
        parts = [at for at, term in own.items() if not all(_column(f, rows) for f in term.factors)]
        # A part that learns is not the same where a row stands alone: one of those with the lowest
        # and the highest values, which any order of rows has, and some between.
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
                f"{np.array(self.spec.column_names)[wrong].tolist()} learn from a site's rows, as "
                f"their mean or range, or are infinite or undefined at site {site!r}: write "
                "numbers, as I((age - 60) / 10) or bs(age, knots=[50, 60], lower_bound=20, "
                "upper_bound=90), and leave rows out which have none"
            )
        return found[:, list(own)]

    def _made(self, rows: Any, site: str) -> tuple[np.ndarray, np.ndarray]:
        """Return all columns, and where a value that they read is missing, [n, q] each."""
        found = _matrix(self.text, self.spec, rows, site)[1]
        gone = np.zeros(found.shape, bool)
        for term, places in self.spec.term_indices.items():
            read = _variables(self.spec.term_variables[term], rows)
            gone[:, places] = rows[read].isna().any(axis=1).to_numpy()[:, None]
        # A comparison is False where a value is missing, and a category 0 at each level.
        return np.where(gone, np.nan, found), gone


def formula_of(
    text: str, frames: Mapping[str, Any], *, right_only: bool = False
) -> tuple[Formula, Formula | None]:
    """Read a formula: return its right side as a term, and its outcome as one of a single column,
    if it names one.

    Args:
        text: The formula. Its parts are Python expressions, so take none from people you do not
            trust.
        frames: {site: its data frame}, of which only the types of columns are used.
        right_only: Whether the outcome is left out, as of rows that have none.

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
            f"formula {text!r} leaves out the intercept, which is the fit's: take 0 + or - 1 out "
            "of it"
        )
    return _specified(text, right, frames), outcome


def _specified(text: str, side: Any, frames: Mapping[str, Any]) -> Formula:
    """Return one side of a formula with its specification, which is made of a row of which all is
    missing: what formulaic learns of that is NaN, and so is then each site's column.
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
                f"{factor.expr!r} is a category, whose levels a formula declares, the reference "
                f"first, as C({column}, levels={sorted(given, key=str)[:20]}); or make it numbers"
            )
        if column := _column(factor, rows):
            # `cp[2]` in place of `C(cp, levels=[1, 2, 3])[T.2]`, as of bf.stats.levels
            names = [re.sub(rf"{re.escape(str(factor))}\[(T\.)?", f"{column}[", n) for n in names]
    return Formula(text, tuple(sorted(read)), tuple(names[at] for at in _own(spec)), spec)


def _matrix(text: str, spec: Any, rows: Any, site: str) -> tuple[Any, np.ndarray]:
    """Return what formulaic makes of rows by a specification, or by one side of a formula: the
    specification, and all columns [n, q].
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
            "(parts make numbers of a row by itself, without learning from others: of text C(..., "
            "levels=[...]), of a date {(day - np.datetime64('2020-01-01')) / "
            "np.timedelta64(1, 'D')})"
        ) from error


def _category(
    data: Any, contrasts: Any = None, *, gone: np.ndarray, levels: Any = (), **options: Any
) -> Any:
    """Return what C of formulaic returns, which takes a level that is not declared for the
    reference.

    Args:
        data: The values, [n].
        contrasts: The coding, as of formulaic.
        gone: Of which rows something is missing, [n].
        levels: The levels; none where they are not declared.
        **options: Further ones of formulaic.

    Raises:
        ValueError: There are other levels.
    """
    import pandas
    from formulaic.transforms import C

    levels, given = list(levels), pandas.Series(np.asarray(data), dtype=object)
    known = given.isin(levels)
    if others := sorted({*given[~known & ~gone]}, key=str) if levels else []:
        raise ValueError(f"{others[:5]} are none of the levels {levels}; list them")
    return C(given.where(known, next(iter(levels), None)), contrasts, levels=levels, **options)


def _rows(frame: Any, names: Any, site: str) -> Any:
    """Return columns as a formula reads them: all numbers in float64, so that an expression is the
    same for all types of these, dates, and all else as objects.
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
    """Return the places of the columns but the intercept, with their terms."""
    return {at: t for t, places in spec.term_indices.items() for at in places if str(t) != "1"}


def _column(factor: Any, rows: Any) -> str | None:
    """Return the column that a part of a term is, or whose category it is."""
    starts = {name: (f"C({name},", f"C(`{name}`,") for name in rows}
    return next((n for n, of in starts.items() if factor.expr.startswith(of) or factor == n), None)


def _variables(read: Any, rows: Any) -> list[str]:
    """Return the columns among the variables of formulaic, of which `age` of `age.clip`."""
    return sorted({str(v) if str(v) in rows else str(v.root) for v in read} & {*rows})
