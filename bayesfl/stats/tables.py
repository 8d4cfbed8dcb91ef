"""Tables of several sites, with the columns that a regression reads.

A site's rows stay where they are; a fit receives only sums over sites. All sites must have the same
columns in the design, so categories are declared with their levels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.options import declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Survey
from bayesfl.data.names import natural
from bayesfl.data.tables.table import is_frame, pandas_of
from bayesfl.federation.clients.surveying import Adder, ask_here
from bayesfl.stats.formulas import Formula, formula_of
from bayesfl.stats.policy import Policy, Put, Question, Refusal, drawn
from bayesfl.stats.terms import (
    Levels,
    Number,
    Term,
    column_of,
    is_number,
    numbers,
)

DEFAULT = Policy()

Weighing: TypeAlias = Literal["none", "frequency", "probability"]
"""Kind of weights: none, numbers of equal rows, or inverse probabilities."""


@dataclass(frozen=True)
class Site:
    """The rows of one site that a fit reads.

    Args:
        name: Its name.
        frame: Its complete rows, as a data frame of pandas.
        x: The design without an intercept, [n, p] in float64.
        y: The outcome [n] in float64; None if the tables have none.
        offset: Offset of the linear predictor, [n].
        weights: The rows' weights, [n]; 1 if there are none.
        dropped: Number of rows left out because a value is missing, or because a policy does not
            count few new rows.
        weighing: The kind of weights.
        rows: A hash of the labels of its complete rows in the original data frame.
        policy: The rules for its answers; None if it answers every question.
        local: The log density of its rows; None for a table alone.
    """

    name: str
    frame: Any
    x: Tensor
    y: Tensor | None
    offset: Tensor
    weights: Tensor
    dropped: int = 0
    weighing: Weighing = "none"
    rows: str = ""
    policy: Policy | None = None
    local: Any = field(default=None, repr=False, compare=False)
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """Cache of slow methods that every question uses."""

    @property
    def counts(self) -> Tensor:
        """Return the number of rows that each one represents, [n]: its frequency weight, or 1."""
        return self.weights if self.weighing == "frequency" else torch.ones_like(self.weights)

    @property
    def outcome(self) -> Tensor:
        """Return the outcomes, [n].

        Raises:
            ValueError: There are none.
        """
        if self.y is None:
            raise ValueError("these tables have no outcome; name it, tables(outcome=...)")
        return self.y

    @cached_property
    def columns(self) -> Tensor:
        """Return the columns of the design, the outcome if there is one, the offset, and the
        weights, [n, q].
        """
        given = [t[:, None] for t in (self.y, self.offset, self.weights) if t is not None]
        return torch.cat([self.x, *given], 1)

    def held(self, rows: int) -> Tensor:
        """Return the largest share of the squares about the median that this number of rows holds,
        for each of `columns`, [q]; NaN for constant ones.
        """
        if rows not in self.known:
            squares = (self.columns - self.columns.median(0).values).square()
            most = squares.topk(min(len(squares), rows), 0).values
            self.known[rows] = most.sum(0) / squares.sum(0)
        return self.known[rows]

    @cached_property
    def has_two(self) -> Tensor:
        """Return which of `columns` have two values, [q]."""
        low, high = self.columns.amin(0), self.columns.amax(0)
        return ((self.columns == low) | (self.columns == high)).all(0) & (low < high)

    @cached_property
    def least_of_two(self) -> float:
        """Return the number of rows with the rarest value of these; infinity without such
        columns.
        """
        two = self.columns[:, self.has_two]
        counts = (two == two.amax(0)).sum(0) if two.numel() else ()
        return float(min((min(n, len(self.x) - n) for n in map(int, counts)), default=math.inf))

    def row_hashes(self, of: tuple[str, ...] | None = None) -> np.ndarray:
        """Return a hash of each row by some columns, or by all, [n], independent of the types of
        numbers.
        """
        from pandas.util import hash_pandas_object

        of = tuple(sorted(self.frame)) if of is None else of
        if ("hashes", *of) not in self.known:
            hashes: Any = hash_pandas_object  # whose type is not known to be a function
            values = {
                name: x.to_numpy(np.float64, na_value=np.nan) if is_number(x) else x.astype(str)
                for name in of
                for x in [self.frame[name]]
            }
            self.known["hashes", *of] = hashes(
                self.frame[[]].assign(**values), index=False
            ).to_numpy()
        return self.known["hashes", *of]

    def some(self, rows: np.ndarray) -> "Site":
        """Return the site with some of its rows, [n] of bools."""
        at = torch.from_numpy(rows)
        return replace(
            self,
            frame=self.frame[rows].reset_index(drop=True),
            x=self.x[at],
            y=None if self.y is None else self.y[at],
            offset=self.offset[at],
            weights=self.weights[at],
        )

    def column(self, name: str) -> Tensor:
        """Return a column of numbers outside the design, such as times, [n] in float64.

        Raises:
            ValueError: The site has no such column, or a value is missing or no number.
        """
        if ("numbers", name) not in self.known:
            found = numbers(self.frame, name, self.name)
            if np.isnan(found).any():
                raise ValueError(
                    f"site {self.name!r} has {int(np.isnan(found).sum())} rows without {name!r}; "
                    "name it in tables(also=...), which checks for missing values, or leave these "
                    "rows out"
                )
            self.known["numbers", name] = torch.tensor(found)
        return self.known["numbers", name].clone()  # because the caller may write to it

    def value_counts(self, name: str) -> Any:
        """Return the number of rows with each value of a column, as a series of pandas."""
        if ("counts", name) not in self.known:
            self.known["counts", name] = self.frame[name].value_counts()
        return self.known["counts", name]


@dataclass(frozen=True, repr=False)
class Tables:
    """Hold the rows of several sites for the questions of `bf.stats`; see `tables`.

    Args:
        sites: The sites, by name.
        terms: The terms of the design.
        columns: Names of the p columns of the design.
        outcome: Name of the outcome; None if there is none.
        ids: The sites' numbers among all sites, [J].
        beside: Names of the columns that outcome, offset and weights are made of.
        policy: The rules for the sites' answers; None to answer every question.
        offset: Name of the offset column of the linear predictor; None if there is none.

    Example:
        >>> import pandas as pd
        >>> ages = {"north": [40, 50], "south": [60]}
        >>> frames = {site: pd.DataFrame({"age": age}) for site, age in ages.items()}
        >>> sites = bf.stats.tables(frames, terms=["age"])
        >>> sites.names, sites.columns
        (('north', 'south'), ('age',))
    """

    sites: tuple[Site, ...]
    terms: tuple[Number | Levels | Formula, ...]
    columns: tuple[str, ...]
    outcome: str | None
    ids: np.ndarray
    beside: tuple[str, ...] = ()
    policy: Policy | None = None
    offset: str | None = None
    over = None

    def __post_init__(self) -> None:
        if (policy := self.policy) is not None:
            sites = (
                site
                if site.policy is policy
                else policy.ledger.settled(replace(site, policy=policy))
                for site in self.sites
            )
            object.__setattr__(self, "sites", tuple(sites))

    def __repr__(self) -> str:
        told = ", ".join(
            f"{site.name} {len(site.x)}" + (f" (-{site.dropped})" if site.dropped else "")
            for site in self.sites
        )
        return f"Tables({told}; {len(self.columns)} columns, outcome {self.outcome})"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the sites."""
        return tuple(site.name for site in self.sites)

    @property
    def weighing(self) -> Weighing:
        """Return the kind of weights."""
        return self.sites[0].weighing

    def only(self, names: Sequence[str]) -> "Tables":
        """Return the tables of some sites.

        Raises:
            ValueError: There is no such site.
        """
        if strangers := [name for name in names if name not in self.names]:
            raise ValueError(f"there is no site {strangers[0]!r}; the sites are {self.names}")
        kept = tuple(site for site in self.sites if site.name in names)
        return replace(self, sites=kept, ids=np.arange(len(kept)))

    def ask(self, survey: Survey[Any], aggregation: Adder | None) -> Put:
        """Return the function that puts a question to all sites here.

        It raises `bayesfl.stats.policy.Refusal` if the question breaks a site's rule.
        """
        added, hidden = ask_here(survey, self, aggregation), aggregation is not None

        def put(
            state: Tensors, shapes: Mapping[str, tuple[int, ...]], beyond: dict[str, str]
        ) -> Tensors:
            question = Question(survey, state, self, shapes, hidden)
            refused = {
                site.name: rule
                for site in self.sites
                if site.policy is not None and (rule := site.policy.broken(question, site))
            }
            if refused:
                raise Refusal(type(survey).__name__, refused)
            for site in self.sites:
                if site.policy != DEFAULT and (rule := DEFAULT.unsafe(question, site)):
                    beyond[site.name] = rule
                if site.policy is not None:
                    site.policy.keep(question, site)
            if self.policy is not None:
                self.policy.ledger.drawn += drawn(shapes)
            return added(state, shapes)

        return put

    def design(self, frame: Any) -> Tensor:
        """Return the design of other rows, [n, p] in float64, NaN where a value is missing.

        Raises:
            ValueError: A column is absent, or has an invalid value.
        """
        return design(pandas_of(frame), self.terms)


@declared
def tables(
    frames: Mapping[str, Any],
    *,
    outcome: str | None = None,
    terms: Sequence[Term] = (),
    formula: str | None = None,
    offset: str | None = None,
    frequency_weights: str | None = None,
    probability_weights: str | None = None,
    also: Sequence[str] = (),
    missing: Literal["refuse", "complete"] = "refuse",
    policy: Policy | None = None,
) -> Tables:
    """Make the tables of several sites, a row for each person, from data frames.

    Nothing is split, imputed or standardised. On a machine of one site, pass its frame alone.

    Args:
        frames: {site: its data frame, of pandas, or of polars and others by Arrow's capsule
            interface}; the name of a site or of a column is text, a number's its digits.
        outcome: Column of the outcome: numbers, or 0 and 1; None for `cox` and `kaplan_meier`,
            which name theirs.
        terms: The terms of the design: names of columns of numbers or truth values, and `levels`.
        formula: Replaces outcome and terms: a formula for formulaic, if it is installed, such as
            `np.log(pay) ~ age * C(sex, levels=["f", "m"])`. The design is the one that formulaic
            makes of the pooled rows. C declares each category with its levels, the reference first,
            here and over a network, because no machine has all rows. Other expressions use a row's
            own values, such as `bs(age, knots=[50, 60], lower_bound=20, upper_bound=90)`.
        offset: Offset column of the linear predictor, such as a logarithm of exposure.
        frequency_weights: Column with the number of equal rows that each row represents: whole
            numbers > 0. Fits, errors and numbers of rows equal those of the repeated rows, except
            for ties of `cox`, whose weighted form is Therneau and Grambsch's.
        probability_weights: Column of weights of sampling or of treatment, > 0, in any unit, such
            as 1 over the probability of being in the sample, or in one's arm. `glm` and `cox` then
            report robust errors. There is no likelihood, and methods that need one refuse them.
        also: Further columns without missing values, such as times, events and groups.
        missing: What happens to rows with a missing value: `refuse` raises, `complete` leaves them
            out, and fits report their number by site.
        policy: The rules for the sites' answers; None to answer every question. Over a network each
            node has its own.

    Raises:
        ImportError: A formula is given, and formulaic is not installed.
        TypeError: `frames` is no mapping of names to data frames.
        ValueError: Two sites have one name; a site lacks a column or has no row; a value is missing
            or invalid; a formula learns from rows, as center(age) does, or has a category without
            its levels.

    Example:
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> frames = {
        ...     "north": pd.DataFrame({"age": [40, 60], "sex": ["f", "m"], "ill": [0, 1]}),
        ...     "south": pd.DataFrame({"age": [50, 70], "sex": ["m", "f"], "ill": [1, 0]}),
        ... }
        >>> terms = ["age", bf.stats.levels("sex", ["f", "m"])]
        >>> bf.stats.tables(frames, outcome="ill", terms=terms)
        Tables(north 2, south 2; 2 columns, outcome ill)
    """
    if not isinstance(frames, Mapping) or not all(is_frame(x) for x in frames.values()):
        raise TypeError(
            "frames is a mapping of sites' names to their data frames, as "
            "{'north': pandas.read_csv('north.csv')}"
        )
    names = [str(name) for name in frames]
    if twice := sorted((name for name in frames if names.count(str(name)) > 1), key=str):
        raise ValueError(
            f"the names {twice[0]!r} and {twice[1]!r} would be two sites of one name: give one "
            "site's rows one name, as frame.groupby(frame['site'].astype(str)) does"
        )
    frames = {str(name): pandas_of(frame) for name, frame in frames.items()}
    parts: tuple[Any, ...] = tuple(
        term if hasattr(term, "columns") else Number(str(term)) for term in terms
    )
    sources: tuple[str, ...] = () if outcome is None else (outcome,)
    if formula is not None:
        right, left = formula_of(formula, frames)
        if terms or (outcome is not None and left is not None):
            raise ValueError("a formula replaces terms= and outcome=; leave these out")
        parts = (right,)
        if left is not None:
            (outcome,), sources = left.columns, left.variables
            frames = {
                name: frame
                if outcome in frame
                else frame.assign(**{outcome: left.values(frame, name)[:, 0]})
                for name, frame in frames.items()
            }
    columns = tuple(name for part in parts for name in part.columns)
    if frequency_weights is not None and probability_weights is not None:
        raise ValueError(
            "rows have frequency_weights= or probability_weights=; give the product of both as "
            "probability_weights="
        )
    weights = frequency_weights or probability_weights
    weighing = "frequency" if frequency_weights else "probability" if weights else "none"
    beside = tuple(name for name in (outcome, offset, weights) if name is not None)
    wanted = dict.fromkeys((*beside, *also))
    sites, gaps = [], {}
    for name in sorted(frames, key=natural):  # so that sums do not depend on the order given
        frame = frames[name]
        x = design(frame, parts, name).numpy()
        given = {column: numbers(frame, column, name) for column in beside}
        absent = np.asarray(np.isnan(x).any(1))
        for column in wanted:
            absent |= column_of(frame, column, name).isna().to_numpy()
        if absent.any():
            read = dict.fromkeys([*(of for part in parts for of in part.variables), *wanted])
            counts = {of: int(frame[of].isna().sum()) for of in read}
            lacking = ", ".join(f"{of} {count}" for of, count in counts.items() if count)
            gaps[name] = f"{int(absent.sum())} of {len(frame)} rows, {lacking}"
        kept = ~absent
        if not kept.any():
            raise ValueError(f"site {name!r} has no row without a missing value; leave it out")
        found = {column: torch.from_numpy(values[kept]) for column, values in given.items()}
        if weights is not None and bool((found[weights] <= 0).any()):
            raise ValueError(f"site {name!r} has weights <= 0 in {weights!r}; leave these rows out")
        if frequency_weights and bool((found[frequency_weights] % 1 != 0).any()):
            raise ValueError(
                f"site {name!r} has weights in {weights!r} that are not whole numbers; pass "
                "weights of sampling or treatment as probability_weights="
            )
        n = int(kept.sum())
        sites.append(
            Site(
                name=name,
                frame=frame[kept].reset_index(drop=True),
                x=torch.from_numpy(x[kept]),
                y=None if outcome is None else found[outcome],
                offset=found[offset] if offset else torch.zeros(n, dtype=torch.float64),
                weights=found[weights] if weights else torch.ones(n, dtype=torch.float64),
                dropped=int(absent.sum()),
                weighing=weighing,
                rows=sha256(repr(frame.index[kept].tolist()).encode()).hexdigest(),
            )
        )
    if gaps and missing == "refuse":
        told = "; ".join(f"{site}: {counts}" for site, counts in gaps.items())
        raise ValueError(
            f"values are missing ({told}); pass missing='complete' to leave these rows out, or "
            "impute them before"
        )
    places = np.arange(len(sites))
    sources += tuple(name for name in (offset, weights) if name is not None)
    return Tables(tuple(sites), parts, columns, outcome, places, sources, policy, offset)


def design(frame: Any, terms: Sequence[Any], site: str = "the frame") -> Tensor:
    """Return the columns of terms for a frame's rows, [n, p] in float64, NaN where a value is
    missing.

    Raises:
        ValueError: A column is absent, or has an invalid value.
    """
    parts = [term.values(frame, site).astype(np.float64) for term in terms]
    return torch.from_numpy(np.concatenate([np.zeros((len(frame), 0)), *parts], 1))


def offsets(frame: Any, column: str | None) -> Tensor:
    """Return the offsets of a frame's rows from a column, [n]; 0 if there is none."""
    return torch.tensor(0.0 if column is None else numbers(frame, column, "the frame"))
