"""Formulas, as `disease ~ age * sex + C(cp, levels=[1, 2, 3])`, which formulaic reads.

A column of the design must mean the same at all sites, so categories are declared with their
levels, and no transform may learn from a site's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bayesfl.stats.terms import Levels, column_of, numbers


@dataclass(frozen=True)
class Formula:
    """The right side of a formula as a term, see `formula_of`.

    Args:
        text: The right side.
        variables: Columns that it reads.
        columns: Names of the columns that it makes, without an intercept.
    """

    text: str
    variables: tuple[str, ...]
    columns: tuple[str, ...] = ()

    def values(self, frame: Any, site: str) -> np.ndarray:
        """Return the columns of a frame's rows, [n, p]; NaN where a value that a column reads is
        missing.

        Raises:
            ValueError: A column is absent, is no number and not declared as a category, or holds
                another level; a part cannot be evaluated, is infinite, or learns from the rows.
        """
        return self.named(frame, site)[1]

    def named(self, frame: Any, site: str) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the names of the columns, and as by `values`."""
        read = _formulaic().Formula(self.text)
        names, found = _made(read, frame, site)
        if learnt := [str(term) for term in read if _learns(term, frame, site)]:
            raise ValueError(_told(learnt))
        if infinite := [name for name, x in zip(names, found.T, strict=True) if np.isinf(x).any()]:
            raise ValueError(f"site {site!r} has infinite numbers in {infinite}; leave them out")
        return names, found


def formula_of(text: str, frame: Any, site: str) -> tuple[Formula, str | None]:
    """Read a formula: return its right side as a term, and the outcome, if it names one.

    Args:
        text: The formula. Its parts are Python expressions, so take none from people you do not
            trust.
        frame: Rows of one site.
        site: Its name.

    Raises:
        ImportError: formulaic is not installed.
        ValueError: It cannot be read, has several outcomes, leaves out the intercept, or as by
            `Formula.values`.
    """
    formulaic = _formulaic()
    try:
        read = formulaic.Formula(text)
    except formulaic.errors.FormulaSyntaxError as error:
        told = str(error).splitlines()[0]
        raise ValueError(f"formula {text!r} cannot be read: {told}") from error
    right, left = getattr(read, "rhs", read), [str(term) for term in getattr(read, "lhs", ())]
    if not isinstance(right, formulaic.SimpleFormula) or len(left) > 1:
        raise ValueError(f"formula {text!r} must have one outcome and one right side")
    if "1" not in [str(term) for term in right]:
        raise ValueError(
            f"formula {text!r} leaves out the intercept, which is the fit's: take 0 + or - 1 out "
            "of it"
        )
    variables = tuple(sorted(str(name) for name in right.required_variables))
    term = Formula(str(right), variables)
    return Formula(term.text, variables, term.named(frame, site)[0]), left[0] if left else None


def _learns(term: Any, frame: Any, site: str) -> bool:
    """Return whether a term of formulaic's learns from rows: it is not the same where a row stands
    alone, of those with the lowest and the highest values, which any order of rows has.
    """
    if str(term) in ("1", *frame.columns) or not len(frame):
        return False
    one = _formulaic().Formula([term])
    found = _made(one, frame, site)[1]
    known = np.isfinite(found)
    low, high = np.where(known, found, np.inf), np.where(known, found, -np.inf)[::-1]
    return any(
        not np.allclose(
            found[row],
            _made(one, frame.iloc[[row]], site)[1][0],
            rtol=1e-9,
            atol=0,
            equal_nan=True,
        )
        for row in {*low.argmin(0), *(len(frame) - 1 - high.argmax(0))}
    )


def _made(read: Any, frame: Any, site: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of the columns of a formula of formulaic's, and the columns [n, p]."""
    formulaic = _formulaic()
    variables = sorted(map(str, read.required_variables))
    given = {name: column_of(frame, name, site) for name in variables}
    rows = frame.assign(
        **{name: numbers(frame, name, site) for name, x in given.items() if x.dtype.kind in "iufb"}
    )

    def category(values: Any, levels: Sequence[Any]) -> dict[str, np.ndarray]:
        declared = Levels(str(values.name), tuple(levels))
        found = declared.values(values.to_frame(), site)
        return dict(zip(map(str, declared.levels[1:]), found.T, strict=True))

    try:
        matrix = read.get_model_matrix(rows, context={"C": category}, na_action="ignore")
    except formulaic.errors.FactorEvaluationError as error:
        raise ValueError(f"{error} (of site {site!r}; C wants levels=[...])") from error
    spec = matrix.model_spec
    kinds = {part: kind.value for part, (kind, _) in spec.encoder_state.items()}
    if open_ones := [part for part, kind in kinds.items() if kind == "categorical"]:
        raise ValueError(
            f"{open_ones} are no numbers: write C({open_ones[0]}, levels=[...]) for a category, "
            "the reference first, or make numbers of it"
        )
    if spec.transform_state:
        raise ValueError(_told(list(spec.transform_state)))
    names, found = list(matrix.columns), np.array(matrix, np.float64)
    for term, places in spec.term_indices.items():  # comparisons say something of what is missing
        read = [given[str(name)] for name in spec.term_variables[term] if str(name) in given]
        for one in read:
            found[np.ix_(one.isna().to_numpy(), places)] = np.nan
    for factor, read in spec.factor_variables.items():
        if "C" in read:  # `cp[2]` in place of `C(cp, levels=[1, 2, 3])[2]`
            (column,) = {*map(str, read)} - {"C"}
            names = [name.replace(f"{factor}[", f"{column}[") for name in names]
    own = [place for place, name in enumerate(names) if name != "Intercept"]
    return tuple(names[place] for place in own), found[:, own]


def _told(parts: Sequence[str]) -> str:
    return (
        f"{list(parts)} learn from a site's rows, as its mean, so they would differ by site: write "
        "numbers in their place, as I((age - 60) / 10); a fit standardises columns itself"
    )


def _formulaic() -> Any:
    try:
        import formulaic
    except ImportError:
        raise ImportError(
            "formulas need formulaic (pip install formulaic); or name terms=[...] with "
            "bf.stats.levels and bf.stats.interaction"
        ) from None
    return formulaic
