"""Rules of a site on what it answers, which its own machine keeps.

The rules are those of DataSHIELD's disclosure filters (`nfilter.subset`, `nfilter.tab`,
`nfilter.glm`) and of vantage6's limits on columns and on the number of organisations. They look at
each question before it is answered, and a refusal tells the rule's name alone.

They bound what honest questions give away by accident. They are no proof against who asks many
questions made for it, or whose code runs on the site's machine.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_origin, get_type_hints

import torch
from torch import Tensor

from bayesfl.base.options import Count, Natural, Positive, declared

if TYPE_CHECKING:
    from bayesfl.stats.tables import Site, Tables

LOG_LIKELIHOOD = "log_likelihood"
"""The answer's name under which log likelihoods at shared draws leave a site."""


class Refusal(ValueError):
    """An error raised when sites refuse a question.

    Args:
        question: The question's name.
        rules: {site: the rule that the question breaks there}.
    """

    def __init__(self, question: str, rules: Mapping[str, str]) -> None:
        super().__init__(
            "; ".join(
                f"site {site!r} refuses {question} by its policy's rule {rule}"
                for site, rule in rules.items()
            )
        )
        self.rules = rules


@dataclass
@declared
class Policy:
    """Set the rules for what a site answers.

    Args:
        min_rows: Fewest rows with which a site answers at all.
        min_level: Fewest rows of each level that a site has, of categories, of outcomes and other
            columns with two values, and of products of these; a level without rows may be.
        max_parameters_per_row: Largest number of parameters, or of columns, for each row.
        min_sites: Fewest sites whose answers are added where the sum hides each; without effect
            where answers are seen singly, as over a network.
        columns: The only columns that may be read; None for all.
        exact_times: Whether a question may be about the exact times of events.
        max_draws: Most log likelihoods at shared draws, as of `mixed`, in all; over a network in
            one run.

    A site with a level rarer than `min_level` is left out by name; any other refusal ends the fit.

    Example:
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> frames = {"va": pd.DataFrame({"age": [50, 60, 70], "ill": [0, 1, 1]})}
        >>> sites = bf.stats.tables(frames, outcome="ill", terms=["age"], policy=bf.stats.Policy())
        >>> bf.stats.glm(sites, family="binomial")
        Traceback (most recent call last):
        bayesfl.stats.policy.Refusal: site 'va' refuses Sums by its policy's rule min_rows
    """

    min_rows: Natural = 10
    min_level: Natural = 3
    max_parameters_per_row: Positive = 0.33
    min_sites: Count = 3
    columns: Sequence[str] | None = None
    exact_times: bool = False
    max_draws: Natural = 4000
    drawn: int = field(default=0, init=False, repr=False)
    """Number of log likelihoods at shared draws that were answered."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Policy":
        """Read a policy from a file.

            min_rows = 20
            columns = ["age", "sex", "disease"]

        Args:
            path: Path of the file, in TOML.

        Raises:
            TypeError: There is no such rule.
            ValueError: A rule has a value that it cannot have.
        """
        return cls(**tomllib.loads(Path(path).read_text()))

    def broken(
        self,
        survey: Any,
        tables: "Tables",
        site: "Site",
        shapes: Mapping[str, tuple[int, ...]],
        *,
        hidden: bool,
    ) -> str | None:
        """Return the rule that a question breaks at a site, before its answer is made; None if
        none.

        Args:
            survey: The question.
            tables: The sites that are asked.
            site: The site, one of these.
            shapes: The shapes of an answer.
            hidden: Whether only the sum of the sites' answers is seen.
        """
        draws = drawn(shapes)
        parts = list(_parts(survey))
        texts = {part for part in parts if isinstance(part, str)}
        sizes = [getattr(part, "size", 0) for part in parts if is_dataclass(part)]
        exact = any(getattr(part, "exact_times", False) for part in parts)
        parameters = max([len(tables.columns), *sizes])
        design = {name for term in tables.terms for name in term.variables} | {*tables.beside}
        named = texts & {*site.frame.columns}  # as those of groups and times
        rules = {
            "columns": self.columns is not None and not design | named <= {*self.columns},
            "min_rows": len(site.x) < self.min_rows,
            "min_level": _rarest(site, tables, named) < self.min_level,
            "max_parameters_per_row": parameters > self.max_parameters_per_row * len(site.x),
            "exact_times": exact and not self.exact_times,
            "min_sites": hidden and len(tables.sites) < self.min_sites,
            "max_draws": draws > 0 and self.drawn + draws > self.max_draws,
        }
        return next((rule for rule, so in rules.items() if so), None)


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many log likelihoods at shared draws an answer of such shapes has."""
    return torch.Size(shapes.get(LOG_LIKELIHOOD, (0,))).numel()


def _parts(value: Any) -> Iterator[Any]:
    """Return a question, the questions in it, and all values of their fields but words of a fixed
    list, which name no column.
    """
    yield value
    if is_dataclass(value):
        hints = get_type_hints(type(value))
        for one in fields(value):
            if get_origin(hints[one.name]) is not Literal:
                yield from _parts(getattr(value, one.name))
    elif isinstance(value, tuple):
        for one in value:
            yield from _parts(one)


def _rarest(site: "Site", tables: "Tables", named: set[str]) -> float:
    """Return the number of rows of a site's rarest level; infinite where it has none."""
    columns = site.x if site.y is None else torch.cat([site.x, site.y[:, None]], 1)
    counts = [_of_two(columns)]
    inner: list[Any] = [one for term in tables.terms for one in getattr(term, "terms", (term,))]
    categories = {one.column for one in inner if hasattr(one, "levels")}
    for name in categories | named:
        values = site.frame[name]
        if name in categories or values.nunique() == 2 or values.dtype.kind not in "iuf":
            counts.append(float(values.value_counts().min()))
    return min(counts)


def _of_two(columns: Tensor) -> float:
    """Return the smaller count of the values of those columns [n, p] that have two."""
    if not columns.numel():
        return torch.inf
    low, high = columns.min(0).values, columns.max(0).values
    two = ((columns == low) | (columns == high)).all(0) & (low < high)
    at_low = (columns == low).sum(0).double()
    smaller = torch.minimum(at_low, len(columns) - at_low)
    return float(torch.where(two, smaller, torch.inf).min())
