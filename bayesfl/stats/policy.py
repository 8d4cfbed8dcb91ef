"""A site's rules for its answers, which its own machine enforces.

The rules are those of DataSHIELD's disclosure filters (`nfilter.subset`, `nfilter.tab`,
`nfilter.glm`) and of vantage6's limits on columns and on the number of organisations. They check
each question before it is answered; a refusal contains only the rule's name.

They bound what an answer reveals about one person. They do not stop somebody who has all other
rows, who puts as many tailored questions as there are rows, or whose code runs on the site's
machine; the guide to privacy lists the attacks.
"""

import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from decimal import Decimal
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.options import Count, Natural, Positive, declared
from bayesfl.base.protocols import Tensors
from bayesfl.stats.kept.ledger import Indicators, Ledger

if TYPE_CHECKING:
    from bayesfl.stats.tables import Site, Tables

LOG_LIKELIHOOD = "log_likelihood"
"""Name of log likelihoods at shared draws in an answer."""
Put: TypeAlias = Callable[[Tensors, Mapping[str, tuple[int, ...]], dict[str, str]], Tensors]
"""Function that puts a question to sites and returns the sum of the answers. Its arguments are the
state, the shapes of the answer, and {site: the rule of the default policy that its answer breaks},
which it fills.
"""
MOST = 0.9
"""Share of a column's squares about the median above which a few rows make the column."""


class Refusal(ValueError):
    """An error raised when sites refuse a question.

    Args:
        question: The question's name.
        rules: {site: the rule that the question breaks there}.
    """

    def __init__(self, question: str, rules: Mapping[str, str]) -> None:
        told = [
            f"site {site!r} refuses {question} by its policy's rule {rule}"
            for site, rule in rules.items()
        ]
        super().__init__("; ".join([*told, "go on with others by sites.only([...])"]))
        self.rules = rules


@dataclass
@declared
class Policy:
    """Set the rules for what a site answers.

    Args:
        min_rows: No row has more than 1 / min_rows of an answer's weight: its own weight times the
            model's, such as $mu (1 - mu)$ or $exp(eta)$. So a site has at least `min_rows` rows.
            Two analyses, and two columns with two values, are equal or differ in at least
            `min_rows` rows.
        min_level: Minimum number of people, unless there are none, of a level, of either value of a
            column with two values, such as the outcome or weights, of products of these, of a
            group, of a bin of times, and of the rows that hold nine tenths of a column's, an
            offset's or the weights' squares about the median. Counts below a quantile's threshold
            are returned in steps of this size.
        max_parameters_per_row: Maximum number of parameters, or of columns, for each row.
        min_sites: Minimum number of sites in a sum that hides single answers, also in combinations
            of several such sums; without effect if answers are seen singly, as over a network.
        columns: The only columns that may be read; None for all.
        exact_times: Whether a question may use exact times of events, or its own grid.
        digits: Digits of times and thresholds.
        max_draws: Maximum number of log likelihoods at shared draws, as for `mixed`, over all runs.

    A site that refuses the first question by `min_level` is left out and named; any other refusal
    ends the fit. The guide to privacy lists the attacks that each rule stops.

    Example:
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> frames = {"va": pd.DataFrame({"age": [50, 60, 70], "ill": [0, 1, 1]})}
        >>> sites = bf.stats.tables(frames, outcome="ill", terms=["age"], policy=bf.stats.Policy())
        >>> bf.stats.glm(sites, family="binomial")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bayesfl.stats.policy.Refusal: site 'va' refuses Sums by its policy's rule min_rows; go ...
    """

    min_rows: Natural = 10
    min_level: Natural = 3
    max_parameters_per_row: Positive = 0.33
    min_sites: Count = 3
    columns: Sequence[str] | None = None
    exact_times: bool = False
    digits: Count = 2
    max_draws: Natural = 4000
    ledger: Ledger = field(default_factory=Ledger, init=False, repr=False, compare=False)
    """The earlier questions."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Policy":
        """Read a policy from a file.

            min_rows = 20
            columns = ["age", "sex", "disease"]

        Args:
            path: Path of the file, in TOML.

        Raises:
            TypeError: There is no such rule.
            ValueError: A rule has an invalid value.
        """
        return cls(**tomllib.loads(Path(path).read_text()))

    def broken(self, question: "Question", site: "Site") -> str | None:
        """Return the rule that a question breaks at a site, before it is answered; None if none."""
        return self.unsafe(question, site) or self._with_others(question, site)

    def keep(self, question: "Question", site: "Site") -> None:
        """Record an answer for the check of later questions."""
        self.ledger.keep(site, self._indicators(question, site))
        for (time, event), ends in question.ends.items():
            known = self.ledger.ends.setdefault(site.name, {})
            known[f"{time}, {event}"] = sorted({*known.get(f"{time}, {event}", []), *ends})
        if question.hidden:
            self.ledger.hidden.add(frozenset(question.tables.names))

    def unsafe(self, question: "Question", site: "Site") -> str | None:
        """Return the rule that a question breaks without regard to earlier ones; None if none."""
        survey, tables, state, n = question.survey, question.tables, question.state, len(site.x)
        named = question.named(site)
        read = {name for term in tables.terms for name in term.variables} | {*tables.beside}
        exact = question.digits > self.digits
        sizes = [len(tables.columns), *(getattr(part, "size", 0) for part in question.parts)]
        rules: dict[str, Callable[[], Any]] = {
            "columns": lambda: self.columns is not None and not read | named <= {*self.columns},
            "min_rows": lambda: not self.even(site.weights, site.counts),
            "min_level": lambda: (
                site.least_of_two < self.min_level
                or any(
                    site.value_counts(name).min() < self.min_level
                    for name in _categories(site, question)
                )
            ),
            "min_level of the column": lambda: (
                self.min_level > 1
                and next(compress(_names(tables), site.held(self.min_level - 1) >= MOST), None)
            ),
            "max_parameters_per_row": lambda: max(sizes) > self.max_parameters_per_row * n,
            "exact_times": lambda: (
                exact
                and not self.exact_times
                and f"(exact times, an own grid, or times of more than {self.digits} digits)"
            ),
            "min_sites": lambda: question.hidden and len(tables.sites) < self.min_sites,
            "min_level of a cell": lambda: (
                not exact
                and any(
                    int(labels.unique(return_counts=True)[1].min()) < self.min_level
                    for labels in survey.cells(state, site)
                    if len(labels)
                )
            ),
            "min_rows of weights": lambda: (
                not self.even(survey.row_weights(state, site), site.counts).all()
            ),
        }
        return _first(rules)

    def _with_others(self, question: "Question", site: "Site") -> str | None:
        hidden = question.hidden and self.min_sites > 1
        draws, drawn_before = drawn(question.shapes), self.ledger.drawn
        rules: dict[str, Callable[[], Any]] = {
            "max_draws": lambda: draws and drawn_before + draws > self.max_draws,
            "min_sites, as the difference to earlier sums is one site's": lambda: (
                hidden and self.ledger.tells_one(question.tables.names)
            ),
            "min_level of a cell, as an earlier analysis had other bins of times": lambda: (
                not self.exact_times
                and any(
                    self.ledger.fewest(site, *of, ends) < self.min_level
                    for of, ends in question.ends.items()
                )
            ),
            "min_rows, as": lambda: self.ledger.differs(
                site, self._indicators(question, site), self.min_rows
            ),
        }
        return _first(rules)

    def even(self, weight: Tensor, people: Tensor) -> Tensor:
        """Return whether no person has too much of rows' weights [..., n], [...]; see `min_rows`.

        Args:
            weight: The weights.
            people: Number of people of each row, [n].
        """
        total = weight.sum(-1)
        most = (weight / people).amax(-1) if len(people) else total
        even = (total > 0) & (most * self.min_rows <= total * (1 + 1e-9))
        return even | (self.min_rows == 0)

    def _indicators(self, question: "Question", site: "Site") -> Indicators:
        """Return the rows with one of two values, or with each level, in the site's columns and in
        those that a question names.
        """
        columns = zip(_names(question.tables), site.columns.T, site.has_two, strict=False)
        found = {name: values == values.max() for name, values, two in columns if two}
        for name in _categories(site, question):
            levels, codes = np.unique(site.frame[name].astype(str), return_inverse=True)
            found |= {
                f"{name!r} = {level}": torch.from_numpy(codes == k)
                for k, level in enumerate(levels)
            }
        return found


@dataclass(frozen=True)
class Question:
    """A question as a policy checks it.

    Args:
        survey: The survey, a `SiteSurvey`.
        state: Its state.
        tables: The sites.
        shapes: The shapes of an answer.
        hidden: Whether only the sum of the sites' answers is seen.
    """

    survey: Any
    state: Tensors
    tables: "Tables"
    shapes: Mapping[str, tuple[int, ...]]
    hidden: bool

    @cached_property
    def parts(self) -> list[Any]:
        """Return the question, the questions in it, and the texts in their fields."""
        return list(_parts(self.survey))

    @cached_property
    def digits(self) -> float:
        """Return the number of digits of the times in the question; infinity for exact times."""
        if any(getattr(part, "exact_times", False) for part in self.parts):
            return math.inf
        ends = [
            end
            for part in self.parts
            for end in (*getattr(part, "ends", ()), *getattr(part, "cuts", ()))
        ]
        return max(
            (len(Decimal(repr(end)).normalize().as_tuple().digits) for end in ends), default=0
        )

    @cached_property
    def ends(self) -> dict[tuple[str, str], set[float]]:
        """Return the ends of the question's bins by the columns of times and events; empty for
        exact times.
        """
        found: dict[tuple[str, str], set[float]] = {}
        for part in self.parts if self.digits < math.inf else ():
            if hasattr(part, "event"):
                ends = found.setdefault((part.time, part.event), set())
                of = getattr(part, "grid", None) or part
                ends |= {*getattr(of, "ends", ()), *getattr(of, "cuts", ())}
                ends |= {*self.state.get("ends", torch.zeros(0)).tolist()}
        return found

    def named(self, site: "Site") -> set[str]:
        """Return a site's columns that the question names, such as groups and times."""
        return {part for part in self.parts if isinstance(part, str) and part in site.frame}


def _names(tables: "Tables") -> list[str]:
    """Return the names of a site's `columns`."""
    outcome = () if tables.outcome is None else (tables.outcome,)
    return [repr(name) for name in (*tables.columns, *outcome, tables.offset, "weights")]


def _first(rules: Mapping[str, Callable[[], Any]]) -> str | None:
    """Return the first broken rule, with the name of what breaks it, if it has one."""
    for rule, broken in rules.items():
        if what := broken():
            return f"{rule} {what}" if isinstance(what, str) else rule
    return None


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of log likelihoods at shared draws in an answer of these shapes."""
    return torch.Size(shapes.get(LOG_LIKELIHOOD, (0,))).numel()


def _parts(value: Any) -> Iterator[Any]:
    """Yield a question, the questions in it, and all texts in their fields except `Literal` ones,
    which name no column.
    """
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        yield value
        hints = get_type_hints(type(value))
        for one in fields(value):
            if get_origin(hints[one.name]) is not Literal:
                yield from _parts(getattr(value, one.name))
    elif isinstance(value, tuple):
        for one in value:
            yield from _parts(one)


def _categories(site: "Site", question: Question) -> list[str]:
    """Return the columns of categories, and among those that a question names the ones of groups,
    with two values, or without numbers.
    """
    terms: Any = question.tables.terms
    found = {one.column for one in terms if hasattr(one, "levels")}
    named = question.named(site)
    found |= {getattr(part, "group", None) for part in question.parts} & named
    return sorted(
        found
        | {
            name
            for name in named - found
            if len(site.value_counts(name)) == 2 or site.frame[name].dtype.kind not in "iuf"
        }
    )
