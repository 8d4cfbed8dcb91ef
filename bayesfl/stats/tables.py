"""Tables of several sites, and what of their columns a regression reads.

A site's rows stay where they are; what a fit learns of them are sums over sites. All sites must
have the same columns in the design, so categories are declared with their levels.
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
"""What weights of rows are: there are none, numbers of equal rows, or inverse probabilities."""


@dataclass(frozen=True)
class Site:
    """The rows of one site that a fit reads.

    Args:
        name: Its name.
        frame: Its complete rows, as a data frame of pandas.
        x: The design without an intercept, [n, p] in float64.
        y: The outcome [n] in float64; None where the tables have none.
        offset: What is added to the linear predictor, [n].
        weights: The rows' weights, [n]; 1 where there are none.
        dropped: Number of rows that were left out, as a value is missing, or as a policy does not
            count few new rows.
        weighing: What the weights are.
        rows: A hash of the labels of its complete rows in the data frame that was given.
        policy: The rules of what it answers; None where it answers all that is asked.
        local: The log density that its rows have; None of a table alone.
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
    """What the methods found that take long and are asked with each question."""

    @property
    def counts(self) -> Tensor:
        """Return how many rows each one stands for, [n]: its frequency weight, else 1."""
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
        """Return the columns of the design, the outcome if there is one, what is added to the
        linear predictor, and the weights, [n, q].
        """
        given = [t[:, None] for t in (self.y, self.offset, self.weights) if t is not None]
        return torch.cat([self.x, *given], 1)

    def held(self, rows: int) -> Tensor:
        """Return the largest share of a column's squares about its median that this number of rows
        holds, of `columns`, [q]; NaN of constant ones.
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
        """Return how many rows have the rarer value of these; infinity where there are none."""
        two = self.columns[:, self.has_two]
        counts = (two == two.amax(0)).sum(0) if two.numel() else ()
        return float(min((min(n, len(self.x) - n) for n in map(int, counts)), default=math.inf))

    def row_hashes(self, of: tuple[str, ...] | None = None) -> np.ndarray:
        """Return a hash of each row by some columns, or by all, [n], which does not depend on the
        types of numbers.
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
            found = hashes(self.frame[[]].assign(**values), index=False).to_numpy()
            self.known["hashes", *of] = found
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
        """Return a column of numbers that is not in the design, as a time, [n] in float64.

        Raises:
            ValueError: The site has no such column, or a value is missing or no number.
        """
        if ("numbers", name) not in self.known:
            found = numbers(self.frame, name, self.name)
            if np.isnan(found).any():
                raise ValueError(
                    f"site {self.name!r} has {int(np.isnan(found).sum())} rows without {name!r}; "
                    "name it in tables(also=...), which looks at missing values, or leave these "
                    "rows out"
                )
            self.known["numbers", name] = torch.tensor(found)
        return self.known["numbers", name].clone()  # which the caller may write to

    def value_counts(self, name: str) -> Any:
        """Return how many rows have each value of a column, as a series of pandas."""
        if ("counts", name) not in self.known:
            self.known["counts", name] = self.frame[name].value_counts()
        return self.known["counts", name]


@dataclass(frozen=True, repr=False)
class Tables:
    """Hold the rows of several sites, to which `bf.stats` puts its questions; see `tables`.

    Args:
        sites: The sites, by name.
        terms: The terms of the design.
        columns: Names of the p columns of the design.
        outcome: Name of the outcome; None where there is none.
        ids: The sites' numbers among all sites, [J].
        beside: Names of the columns that outcome, offset and weights are made of.
        policy: What the sites answer; None for all that is asked.
        offset: Name of the column of what is added to the linear predictor; None where there is
            none.

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
        """Return what the weights of rows are."""
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
        """Return how a question is put to all sites here.

        The question raises `bayesfl.stats.policy.Refusal` where it breaks a rule of a site's.
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
            ValueError: A column is absent, or holds what no row of a fit may hold.
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
        outcome: Column of the outcome: numbers, or 0 and 1; None where only `cox` and
            `kaplan_meier` follow, which name theirs.
        terms: What stands in the design: names of columns of numbers or truth values, and `levels`.
        formula: In place of outcome and terms, what formulaic reads, if it is installed, as
            `np.log(pay) ~ age * C(sex, levels=["f", "m"])`. Its design is the one that formulaic
            makes of all rows together. Each category is declared by C with its levels, the
            reference first, here and over a network alike, where no machine has all rows; other
            expressions are of a row's own values, as `bs(age, knots=[50, 60], lower_bound=20,
            upper_bound=90)`.
        offset: Column of what is added to the linear predictor, as a logarithm of exposure.
        frequency_weights: Column of how many equal rows each one stands for: whole numbers > 0.
            Fits, errors and numbers of rows are those of a table in which it stands so often, but
            for ties of `cox`, whose weighted form is Therneau and Grambsch's.
        probability_weights: Column of weights of sampling or of treatment, > 0, in any unit, as 1
            over the probability to be in the sample, or in one's arm. Errors of `glm` and `cox` are
            then robust, and there is no likelihood: what needs one refuses them.
        also: Further columns whose values may not be missing, as times, events and groups.
        missing: What becomes of rows in which a value is missing: `refuse` raises, `complete`
            leaves them out, and fits say how many at which site.
        policy: What each site answers; None for all that is asked. Over a network each node has its
            own.

    Raises:
        ImportError: A formula is given, and formulaic is not installed.
        TypeError: `frames` is no mapping of names to data frames.
        ValueError: Two sites have one name; one lacks a column or has no row, a value is missing
            and none may be, or is none that its column may hold; a formula learns from rows, as by
            center(age), or has a category without its levels.

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
    frames = {name: pandas_of(frame) for name, frame in _by_text(frames).items()}
    parts: tuple[Any, ...] = tuple(
        term if hasattr(term, "columns") else Number(str(term)) for term in terms
    )
    sources: tuple[str, ...] = () if outcome is None else (outcome,)
    if formula is not None:
        right, left = formula_of(formula, frames)
        if terms or (outcome is not None and left is not None):
            raise ValueError("a formula stands in place of terms= and outcome=; leave these out")
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
    for name in sorted(frames):  # so that sums do not depend on the order given
        frame = frames[name]
        x = design(frame, parts, name).numpy()
        given = {column: numbers(frame, column, name) for column in beside}
        absent = np.asarray(np.isnan(x).any(1))
        for column in wanted:
            absent |= column_of(frame, column, name).isna().to_numpy()
        if absent.any():
            gaps[name] = _gaps(frame, parts, wanted, absent)
        kept = ~absent
        if not kept.any():
            raise ValueError(f"site {name!r} has no row without a missing value; leave it out")
        found = {column: torch.from_numpy(values[kept]) for column, values in given.items()}
        if weights is not None and bool((found[weights] <= 0).any()):
            raise ValueError(f"site {name!r} has weights <= 0 in {weights!r}; leave these rows out")
        if frequency_weights and bool((found[frequency_weights] % 1 != 0).any()):
            raise ValueError(
                f"site {name!r} has weights in {weights!r} that are no whole numbers; weights of "
                "sampling or treatment are probability_weights="
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
            f"values are missing ({told}); pass missing='complete' to leave such rows out, or fill "
            "them before"
        )
    places = np.arange(len(sites))
    sources += tuple(name for name in (offset, weights) if name is not None)
    return Tables(tuple(sites), parts, columns, outcome, places, sources, policy, offset)


def _by_text(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what is given by site by the sites' names as text.

    Raises:
        ValueError: Two names are one text.
    """
    names = [str(name) for name in given]
    if twice := sorted((name for name in given if names.count(str(name)) > 1), key=str):
        raise ValueError(
            f"the names {twice[0]!r} and {twice[1]!r} would be two sites of one name: give one "
            "site's rows one name, as frame.groupby(frame['site'].astype(str)) does"
        )
    return dict(zip(names, given.values(), strict=True))


def design(frame: Any, terms: Sequence[Any], site: str = "the frame") -> Tensor:
    """Return the columns of terms for a frame's rows, [n, p] in float64, NaN where a value is
    missing.

    Raises:
        ValueError: A column is absent, or holds what no row of a fit may hold.
    """
    parts = [term.values(frame, site).astype(np.float64) for term in terms]
    return torch.from_numpy(np.concatenate([np.zeros((len(frame), 0)), *parts], 1))


def offsets(frame: Any, column: str | None) -> Tensor:
    """Return what is added to the linear predictors of a frame's rows, by a column, [n]; 0 where
    there is none.
    """
    return torch.tensor(0.0 if column is None else numbers(frame, column, "the frame"))


def _gaps(frame: Any, terms: Sequence[Any], wanted: Mapping[str, None], absent: np.ndarray) -> str:
    """Say which columns lack values, and in how many rows one at least does."""
    names = dict.fromkeys([*(name for term in terms for name in term.variables), *wanted])
    counts = {name: int(frame[name].isna().sum()) for name in names}
    told = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return f"{int(absent.sum())} of {len(frame)} rows, {told}"
