"""Questions to sites, and the sheet of what left them.

Every fit is made of surveys (`bayesfl.base.surveys`) whose answers are sums over sites. `Sites` is
the interface that a fit uses, in a simulation or over a network.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.display.html import table, text
from bayesfl.base.display.sheet import Shown
from bayesfl.base.options import instance
from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import (
    NotNegative,
    NotNegativePerClient,
    PerClient,
    Survey,
    conduct,
    uplink_bytes,
)
from bayesfl.federation.clients.surveying import Adder
from bayesfl.stats.families import FAMILIES
from bayesfl.stats.policy import Put, Refusal
from bayesfl.stats.tables import DEFAULT, Site, Tables, Weighing

COARSE = 2.0**-12
"""A variance below this, in squared units, is computed again in a finer unit."""


class SiteSurvey(ABC):
    """A question that each site answers from its own rows; the answers add up.

    A subclass is a frozen dataclass of plain values. A site on another machine makes the same
    question from these.
    """

    split = "train"
    exact_times = False
    """Whether an answer reveals the exact times of single events, which a `Policy` may refuse."""

    def start(self, about: Any, /) -> Tensors:
        """Return the state at first: nothing."""
        return {}

    @abstractmethod
    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a site's answer; see `Survey`."""

    def answer(self, state: Tensors, local: Tables) -> Tensors:
        """Return the answers of all sites of `local`, [J, ...], each computed at one rank."""
        own = current().dealt([len(site.x) for site in local.sites])

        def make() -> list[Tensors]:
            pairs = zip(local.sites[own], local.ids[own].tolist(), strict=True)
            return [self.of_site(state, site, place) for site, place in pairs]

        found = list(chain(*current().every(make)))
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}

    @abstractmethod
    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's answer.

        Args:
            state: The survey's state.
            site: The site.
            place: Its number among all sites.
        """

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return how much each row weighs in an answer, [..., n], which a `Policy` bounds: its own
        weight, times what the state gives it.
        """
        return site.weights

    def cells(self, state: Tensors, site: Site) -> Sequence[Tensor]:
        """Return the cells whose sums or counts an answer contains: for each way to divide rows,
        the cell of each row, [n].
        """
        return ()

    def kept(self, state: Tensors, site: Site, place: int) -> Any:
        """Return what a site on another machine stores after its answer, as a data frame of pandas;
        None for nothing.
        """
        return None

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the sums: there is one question."""
        return total, True


@dataclass(frozen=True)
class FromState(SiteSurvey):
    """A question whose first state is given.

    Args:
        at: The state.
    """

    at: Tensors = field(default_factory=dict, compare=False, repr=False, kw_only=True)

    def start(self, about: Any, /) -> Tensors:
        """Return the state, laid out in memory as it arrives over a network, to the same bits."""
        return {name: t.contiguous() for name, t in self.at.items()}


@dataclass(frozen=True)
class AfterFit(FromState):
    """A question about a fit, whose first state is the fit's last.

    Args:
        likelihood: The question that was fitted.
    """

    likelihood: Any

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return those of the fitted question; see `SiteSurvey`."""
        return self.likelihood.row_weights(state, site)

    def cells(self, state: Tensors, site: Site) -> Sequence[Tensor]:
        """Return those of the fitted question; see `SiteSurvey`."""
        return self.likelihood.cells(state, site)


class Kept(SiteSurvey):
    """Request no numbers; each site stores what `kept` returns."""

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"n_kept": ()}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return 1; see `SiteSurvey`."""
        return {"n_kept": torch.tensor(1)}

    @abstractmethod
    def kept(self, state: Tensors, site: Site, place: int) -> Any:
        """Return what the site keeps."""


_open: list[list["Asked"]] = []
"""Further release sheets that list current questions; see `Released.also`."""


class Asked(NamedTuple):
    """A question that was put.

    Args:
        question: Its name.
        answer: {name: shape} of what each site answered.
        sites: The sites that answered.
        refused: {site: the rule of its policy that refused}.
        beyond: {site: the rule of the default policy that its answer breaks}.
    """

    question: str
    answer: Mapping[str, tuple[int, ...]]
    sites: tuple[str, ...]
    refused: Mapping[str, str]
    beyond: dict[str, str]


@dataclass(frozen=True)
class Released:
    """List what left each site, for its data protection officer.

    Args:
        questions: The questions in order; the first is round 1. Later questions about the fit are
            added.
        hidden: How the answers were added where nobody saw a single one; None where they were open.
        over: The network over which they were sent; None in a simulation.
    """

    questions: list[Asked]
    hidden: str | None
    over: str | None

    @property
    def bytes(self) -> Mapping[str, int]:
        """Return the number of bytes that each site sent, eight for each number."""
        found: Counter[str] = Counter()
        for asked in self.questions:
            found.update(dict.fromkeys(asked.sites, uplink_bytes(asked.answer)))
        return found

    @property
    def seen(self) -> str:
        """Return a text on who saw what a site sent."""
        if self.hidden is not None:
            return (
                f"answers were added by {self.hidden}, and nobody saw a single site's, but for the "
                "numbers that are called each site's own"
            )
        if self.over is not None:
            return f"they were sent over {self.over}, and the server saw each site's answers"
        return "each site's answers were seen"

    @property
    def judged(self) -> str:
        """Return a text with the number of answers that rest on few people, and of those that the
        default policy refuses.
        """
        beyond = Counter(
            rule.split()[0] for asked in self.questions for rule in asked.beyond.values()
        )
        few = sum(beyond[rule] for rule in ("min_level", "exact_times"))
        told = f"answers that rest on fewer than {DEFAULT.min_level} people: {few}"
        if beyond:
            rules = ", ".join(f"{rule} {count}" for rule, count in beyond.items())
            told += f"; answers that the default policy refuses, by its rule: {rules}"
        return told

    @contextmanager
    def also(self) -> Iterator[None]:
        """List the questions of this context, too."""
        _open.append(self.questions)
        try:
            yield
        finally:
            _open.pop()

    def __str__(self) -> str:
        least, most = min(self.bytes.values(), default=0), max(self.bytes.values(), default=0)
        sent = f"{most:,} bytes" if least == most else f"{least:,} to {most:,} bytes"
        lines = [f"What left the sites: each site sent {sent}; {self.seen}."]
        lines += [f"  {rounds}, {question}: {told}" for rounds, question, told in self._rounds()]
        lines.append(f"  {self.judged}")
        return "\n".join(lines)

    def html(self) -> str:
        """Return the sheet as HTML, for a report."""
        titles = ("when", "question", "what each site answered")
        rounds = zip(*self._rounds(), strict=True)
        told = self.seen[0].upper() + self.seen[1:]
        listed = table(dict(zip(titles, rounds, strict=True)))
        return f"<p>{text(told)}; {text(self.judged)}.</p>{listed}"

    def _rounds(self) -> Iterator[tuple[str, str, str]]:
        """Yield groups of equal questions and answers: rounds, question, answer."""
        alike: dict[tuple[str, ...], dict[int, str]] = {}
        for at, asked in enumerate(self.questions, 1):
            told = ", ".join(
                f"{key} {list(shape) if shape else 'a number'}"
                + (", each site's own" if self.hidden and isinstance(shape, PerClient) else "")
                for key, shape in asked.answer.items()
            )
            absent = [site for site in self.bytes if site not in (*asked.sites, *asked.refused)]
            without = f" without {', '.join(absent)}" if absent else ""
            refused = f", refused by {', '.join(asked.refused)}" if asked.refused else ""
            key = (asked.question, refused, told if asked.sites else "no site answered")
            alike.setdefault((*key, str(bool(absent))), {})[at] = without
        for (question, refused, told, _), rounds in alike.items():
            first, last, without = min(rounds), max(rounds), {*rounds.values()}
            when = f"rounds {first} to {last}" if last > first else f"round {first}"
            if last - first >= len(rounds):
                when = f"{len(rounds)} of {when}"
            whom = without.pop() if len(without) == 1 else " of some sites in turn"
            yield when, question + whom + refused, told

    def to_json(self) -> str:
        """Return the sheet as JSON."""
        rows = [{"round": at, **asked._asdict()} for at, asked in enumerate(self.questions, 1)]
        return json.dumps(
            {
                "seen": self.seen,
                "bytes": self.bytes,
                "judged": self.judged,
                "questions": rows,
            }
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class Answered(Shown):
    """Hold the facts about sites that all results have.

    Args:
        dropped: {site: number of rows left out, with a missing value, or few new ones}.
        left_out: {site: the reason why it is left out}.
        released: What left each site.
    """

    dropped: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    released: Released

    @property
    def _below(self) -> list[str]:
        """Return the last lines below a table."""
        return [
            *(f"left out: {site}, {why}" for site, why in self.left_out.items()),
            str(self.released),
        ]


@runtime_checkable
class Sites(Protocol):
    """Declare the interface of sites, on this machine (`Tables`) or on others."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of the sites."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns of the design."""

    @property
    @abstractmethod
    def terms(self) -> tuple[Any, ...]:
        """Return the terms of the design."""

    @property
    @abstractmethod
    def offset(self) -> str | None:
        """Return the offset column of linear predictors; None if there is none."""

    @property
    @abstractmethod
    def over(self) -> str | None:
        """Return the name of the network; None on this machine."""

    @property
    @abstractmethod
    def weighing(self) -> Weighing:
        """Return the kind of weights."""

    @abstractmethod
    def design(self, frame: Any) -> Tensor:
        """Return the design of other rows, [n, p]."""

    @abstractmethod
    def ask(self, survey: Survey[Any], aggregation: Adder | None) -> Put:
        """Return the function that puts a question to all sites."""

    @abstractmethod
    def only(self, names: Any) -> "Sites":
        """Return some of the sites."""


class Questions:
    """Put the questions of one fit, and keep its release sheet.

    Args:
        sites: The sites.
        aggregation: What adds the answers; None adds them openly.

    Attributes:
        left_out: {site: the reason}, of sites that receive no further questions.
        through: Function from a question to the one that sites answer instead; None for the
            question itself.
    """

    def __init__(self, sites: Sites, aggregation: Adder | None = None) -> None:
        instance("sites", sites, Sites, "make them by bf.stats.tables({site: frame}, ...)")
        self.sites, self._aggregation = sites, aggregation
        self.left_out: dict[str, str] = {}
        self.through: Callable[[Survey[Any]], Survey[Any]] | None = None
        self._asked: list[Asked] = []

    def first(self, survey: Callable[[int], Survey[Any]]) -> Tensors:
        """Put the first question about some columns, and leave out sites that refuse it because a
        level has too few rows.

        Args:
            survey: Function from the number of sites to the question.

        Raises:
            Refusal: All sites refuse, or one refuses for another reason.
        """
        try:
            return self.conduct(survey(len(self.sites.names)))
        except Refusal as refusal:
            everyone = len(refusal.rules) == len(self.sites.names)
            if everyone or {rule.split()[0] for rule in refusal.rules.values()} != {"min_level"}:
                raise
            why = "its policy's rule {} refuses, as a level has too few rows"
            self.leave_out({name: why.format(rule) for name, rule in refusal.rules.items()})
            return self.first(survey)

    def leave_out(self, why: Mapping[str, str]) -> None:
        """Put no further questions to some sites, {site: the reason}."""
        self.left_out |= why
        self.sites = self.sites.only([name for name in self.sites.names if name not in why])

    def again(self) -> "Questions":
        """Return questions to the same sites, with a sheet of their own."""
        made = Questions(self.sites, self._aggregation)
        made.through = self.through
        return made

    def conduct(self, survey: Survey[Any]) -> Tensors:
        """Put a survey's questions and return its last state.

        Raises:
            ValueError: As by `bayesfl.base.surveys.conduct`.
        """
        put = self.sites.ask((self.through or (lambda one: one))(survey), self._aggregation)
        names = self.sites.names

        def ask(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
            question = Asked(type(survey).__name__, dict(shapes), names, {}, {})
            try:
                total = put(state, shapes, question.beyond)
            except Refusal as refusal:
                others = tuple(name for name in names if name not in refusal.rules)
                note(question._replace(sites=others, refused=refusal.rules, beyond={}))
                raise
            note(question)
            return total

        def note(question: Asked) -> None:
            for questions in (self._asked, *_open):
                questions.append(question)

        return conduct(survey, ask, None)

    @property
    def released(self) -> Released:
        """Return the release sheet so far."""
        hidden = None if self._aggregation is None else repr(self._aggregation)
        return Released(self._asked, hidden, self.sites.over)


def with_likelihood(rows: Any, what: str) -> None:
    """Refuse probability weights where a likelihood is needed.

    Args:
        rows: Sites, or a fit to their rows.
        what: What needs it, in words.

    Raises:
        ValueError: The rows have such weights.
    """
    if rows.weighing == "probability":
        raise ValueError(
            f"{what} rests on the likelihood of rows, which probability weights do not define; "
            "glm, cox, kaplan_meier and describe take them, with robust errors"
        )


@dataclass(frozen=True)
class UsedRows(SiteSurvey):
    """Ask for a keyed hash of the rows that a fit used, which shows whether fits used the same.

    It covers their places in the data frame, their weights and their outcomes, and is sent as four
    whole numbers of 16 bits, which secure sums do not round.

    Args:
        sites: Number of sites J.
        key: The key, drawn for one comparison.
        columns: Columns that replace the outcome, such as times and events.
    """

    sites: int
    key: str
    columns: tuple[str, ...] = ()

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"n_hash": PerClient((self.sites, 4))}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's hash; see `SiteSurvey`."""
        outcomes = [site.column(name) for name in self.columns] or [site.y]
        values = [site.weights, *(t for t in outcomes if t is not None)]
        told = b"".join([site.rows.encode(), *(t.numpy().tobytes() for t in values)])
        digest = hashlib.blake2b(told, key=self.key.encode(), digest_size=8).digest()
        words = torch.from_numpy(np.frombuffer(digest, "<u2").astype(np.float64))
        return {"n_hash": slot(words, place, self.sites)}


def used_rows(asked: Questions, key: str, columns: tuple[str, ...] = ()) -> dict[str, list[float]]:
    """Return {site: hash of the rows that it used}; see `UsedRows`."""
    found = asked.conduct(UsedRows(len(asked.sites.names), key, columns))
    return dict(zip(asked.sites.names, found["n_hash"].tolist(), strict=True))


def counted(names: Sequence[str], weights: Tensor) -> dict[str, float]:
    """Return the sites' numbers of rows, counted by weight; whole numbers as ints."""
    values = [int(n) if n.is_integer() else n for n in weights.tolist()]
    return dict(zip(names, values, strict=True))


def slot(value: Tensor | float, place: int, sites: int) -> Tensor:
    """Return a site's number or numbers at its own place, [J, ...], and 0 at other sites' places,
    so that the sum contains each site's.
    """
    found = torch.zeros(sites, *torch.as_tensor(value).shape, dtype=torch.float64)
    found[place] = value
    return found


@dataclass(frozen=True)
class Sums(SiteSurvey):
    """Ask for each site's number of rows and sum of the outcome, and for the sums of the columns;
    then for sums of squares about the resulting means, in units chosen from these.

    A column's unit begins at 1 or at the size of its mean, and falls to its standard deviation.
    So a variance keeps its digits for means far from 0 and under the rounding of secure sums.

    The last state has `n_dropped`, `rows` and `outcome` [J], the `weight` of all rows, the
    `outcome_mean`, the `offset_mean`, and `centre` and `scale` of the columns and, last, of a
    Gaussian outcome; the scale of constants is 0.

    Args:
        sites: Number of sites J.
        columns: Number of columns p.
        family: Name of the outcome's family; None where there is none.
    """

    sites: int
    columns: int
    family: str | None = None

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        p, j = (self.columns + (self.family == "gaussian"),), PerClient((self.sites,))
        if "unit" in state:
            return {"sum": p, "square": NotNegative(p)}
        rows = {"n_dropped": j, "rows": NotNegativePerClient(j), "outcome": j}
        return {**rows, "weight": NotNegative(), "offset": (), "sum": p}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's sums; see `SiteSurvey`."""
        y = torch.zeros_like(site.weights) if site.y is None else site.y
        values = torch.cat([site.x, y[:, None]], 1) if self.family == "gaussian" else site.x
        if "unit" in state:
            weights = site.weights / unit_of(state)
            away = (values - state["centre"]) / state["unit"]
            return {"sum": weights @ away, "square": weights @ away.square()}
        if self.family is not None:
            FAMILIES[self.family].check(site.outcome, site.name)
        return {
            "n_dropped": slot(site.dropped, place, self.sites),
            "rows": slot(site.counts.sum(), place, self.sites),
            "outcome": slot(site.counts @ y, place, self.sites),
            "weight": site.weights.sum(),
            "offset": site.weights @ site.offset,
            "sum": site.weights @ values,
        }

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the means first, then better means and units, until they are precise."""
        if "unit" not in state:
            centre, offset = (total.pop(name) / total["weight"] for name in ("sum", "offset"))
            begun = {"centre": centre, "unit": centre.abs().clamp_min(1.0), "offset_mean": offset}
            return total | begun, False
        found = refined(state["centre"], state["unit"], state["rows"].sum(), total)
        gaussian = self.family == "gaussian"
        mean = found["centre"][-1] if gaussian else state["outcome"].sum() / state["rows"].sum()
        return state | found | {"outcome_mean": mean}, bool(found["known"].all())


def refined(centre: Tensor, unit: Tensor, n: Tensor, total: Tensors) -> Tensors:
    """Return better means and units, [..., p], from sums about the current ones.

    Args:
        centre: The means so far, [..., p].
        unit: The units of the sums.
        n: The weight of the rows, [..., 1] or a number.
        total: `sum` and `square` of the values less `centre`, over `unit`, [..., p].

    Returns:
        `centre`; the next `unit`; `scale`, the standard deviations, 0 for constants; and `known`,
        whether each is precise.
    """
    n = n.clamp_min(1e-300)
    mean, square = total["sum"] / n, total["square"] / n
    centre, variance = centre + unit * mean, square - mean.square()
    # Precise: the rounding of secure sums and the square of the mean cost no digits.
    known = (variance >= COARSE) & (mean.square() <= variance)
    unit = unit * variance.clamp_min(COARSE**2).sqrt()
    constant = unit <= (1e-13 * centre.abs()).clamp_min(1e-15)  # below rounding
    return {
        "centre": centre,
        "unit": unit,
        "scale": unit.where(~constant, 0.0),
        "known": known | constant,
    }


def unit_of(sums: Tensors) -> float:
    """Return the unit of weights: the mean of probability weights, so that results do not depend on
    their unit; 1 for counts.
    """
    return float(sums["weight"] / sums["rows"].sum())


def standard(sums: Tensors, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Return means and standard deviations [p] of the columns of all sites, with which a fit
    standardises them.

    Raises:
        ValueError: A column is constant.
    """
    centre, scale = (sums[name][: len(names)] for name in ("centre", "scale"))
    if constant := [names[i] for i in np.flatnonzero((scale == 0).numpy())]:
        raise ValueError(
            f"the columns {constant} are constant over all sites, so they have no coefficients: "
            "leave these terms out"
        )
    return centre, scale


def outcome_unit(family: str, sums: Tensors, outcome: str) -> tuple[float, float]:
    """Return mean and standard deviation of a Gaussian outcome, so that sums have moderate size in
    any unit; 0 and 1 for other families.

    Raises:
        ValueError: It is constant.
    """
    if family != "gaussian":
        return 0.0, 1.0
    if not sums["scale"][-1]:
        raise ValueError(
            f"the outcome {outcome!r} is constant over all sites to the digits of the sums, so "
            "there is nothing to fit"
        )
    return float(sums["outcome_mean"]), float(sums["scale"][-1])
