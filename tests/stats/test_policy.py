"""A site's policy: for each rule a question that is refused and one that it lets pass."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.stats import Policy
from bayesfl.stats.asking import Questions, Sums
from bayesfl.stats.describe import Quantiles
from bayesfl.stats.diagnostics import Looks
from bayesfl.stats.glm import Likelihood, Meat
from bayesfl.stats.mixed import Draws, Mode
from bayesfl.stats.policy import Refusal
from bayesfl.stats.survival.curves import Counts
from bayesfl.stats.survival.partial import PartialLikelihood, Scores
from bayesfl.stats.survival.piecewise import ByInterval, Exposure
from bayesfl.stats.survival.times import Grid
from bayesfl.stats.tables import Tables
from tests.stats.made import TERMS, frames, sites

FREE: dict[str, Any] = {
    "min_rows": 0,
    "min_level": 0,
    "max_parameters_per_row": 1e9,
    "min_sites": 1,
    "exact_times": True,
    "max_draws": 10**9,
}
"""Rules that let everything pass."""


@dataclass(frozen=True)
class Named(Sums):
    """A question that names columns."""

    named: tuple[str, ...] = ()


def frame(n: int = 30, **columns: Any) -> pd.DataFrame:
    """Rows of one site, half of them ill."""
    return pd.DataFrame(
        {"age": range(n), "ill": [i % 2 for i in range(n)], "arm": ["a", "b"] * (n // 2), **columns}
    )


def refused(
    rows: pd.DataFrame | Mapping[str, pd.DataFrame], rule: str, value: Any, **options: Any
) -> bool:
    """Whether the one rule refuses the question of a fit's sums."""
    given = {"va": rows} if isinstance(rows, pd.DataFrame) else rows
    question = options.pop("question", None)
    aggregation = options.pop("aggregation", None)
    tables = bf.stats.tables(
        given,
        policy=Policy(**{**FREE, rule: value}),
        **{"outcome": "ill", "terms": ["age"], **options},
    )
    question = question or Sums(len(given), len(tables.columns))
    try:
        Questions(tables, aggregation).conduct(question)
    except Refusal as refusal:
        told = f"site 'va' refuses {type(question).__name__} by its policy's rule {rule}"
        return refusal.rules["va"] == rule and str(refusal).startswith(told)
    return False


def refuses(broken: bool, match: str) -> Any:
    """Expects a refusal, or none."""
    return pytest.raises(Refusal, match=match) if broken else nullcontext()


def test_min_rows():
    assert refused(frame(10), "min_rows", 11)
    assert not refused(frame(10), "min_rows", 10)


def state_of(question: Any, **changes: Any) -> dict[str, torch.Tensor]:
    return question.start(None) | {
        name: torch.tensor(value, dtype=torch.float64) for name, value in changes.items()
    }


def after(made: Any, question: Any, theta: tuple[float, ...]) -> Any:
    """A question about a fit."""
    return made(question, at=state_of(question, theta=theta))


HERE = {"centre": (15.0,), "scale": (5.0,)}
STEEP = {"centre": (15.0,), "scale": (1e-2,)}
MODEL: dict[str, Any] = {"columns": 1, "common": (), "effects": (0,), "group": None}
WEIGHED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "binomial": (partial(Likelihood, "binomial", 1, False), {"theta": (0.0, 1.0)}),
    "own": (partial(Likelihood, "binomial", 1, True), {"theta": (1.0,)}),
    "poisson": (partial(Likelihood, "poisson", 1, False), {"theta": (0.0, 0.1)}),
    "counts": (partial(Likelihood, "negative_binomial", 1, False), {"theta": (0.0, 0.1, -1.0)}),
    "mode": (partial(Mode, "binomial", **MODEL, at=(0.0, 1.0, -9.0)), {}),
    "draws": (partial(Draws, "binomial", **MODEL), {"phi": ((0.0, 1.0, -9.0),) * 3}),
    "cox": (partial(PartialLikelihood, "month", "ill", 1, None), {"theta": (0.1,)}),
    "intervals": (
        lambda **given: ByInterval(
            "month", "ill", (15.5,), Likelihood("poisson", 1, False, **given)
        ),
        {"theta": (0.0, 0.1)},
    ),
    "meat": (
        lambda **given: after(Meat, Likelihood("binomial", 1, False, **given), (0.0, 1.0)),
        {},
    ),
    "scores": (
        lambda **given: after(Scores, PartialLikelihood("month", "ill", 1, None, **given), (0.1,)),
        {},
    ),
    "looks": (
        lambda **given: after(Looks, Likelihood("binomial", 1, False, **given), (0.0, 1.0)),
        {},
    ),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_min_rows_bounds_the_weight_of_a_row_in_every_survey(name: str):
    """At parameters of a fit a site answers; at such that one row alone counts it does not."""
    make, changes = WEIGHED[name]
    rows = frame(30, month=7 * np.arange(30) % 30 + 1.0)
    tables = bf.stats.tables(
        {"va": rows}, outcome="ill", terms=["age"], policy=Policy(**{**FREE, "min_rows": 10})
    )
    for given, passes in ((HERE, True), (STEEP, False)):
        question = make(**given)
        state = state_of(question, **changes)
        put = tables.ask(question, None)
        with refuses(not passes, "by its policy's rule min_rows"):
            put(state, question.shapes(state), {})


def test_min_rows_bounds_weights():
    """Which are the rows' own, too; of equal rows each is a person."""
    for often, broken in ((1.0, False), (3.0, False), (5.0, True), (1e9, True)):
        rows = frame(30, often=[often] + [1.0] * 29)
        assert refused(rows, "min_rows", 10, probability_weights="often") == broken
        assert not refused(rows, "min_rows", 10, frequency_weights="often")


def test_draws_at_which_one_row_counts_are_told_to_be_unlikely():
    """The others are those of a site without a policy."""
    given = sites("binomial")
    at = ((0.0, 0.0, 0.0, 0.0, -1.0), (9.0, 1e9, 0.0, 0.0, -1.0), (1.0, 0.1, 0.0, 0.0, -1.0))
    question = Draws("binomial", 3, (), (0,), None, (0.0,) * 3, (10.0, 1.0, 1.0))
    state = state_of(question, phi=at)
    free, told = (
        one.ask(question, None)(state, question.shapes(state), {})["log_likelihood"]
        for one in (given, replace(given, policy=Policy()))
    )
    assert torch.equal(told[[0, 2]], free[[0, 2]])
    assert told[1] < told[[0, 2]].min() - 1000


@pytest.mark.parametrize(
    ("column", "broken"),
    [
        ([0.0] * 28 + [100.0, -100.0], True),
        ([1e-7 * i for i in range(29)] + [5.0], True),
        ([0.0] * 27 + [100.0, -100.0, 100.0], False),
        (list(np.exp(np.linspace(-2, 2, 30))), False),
        ([1e9 + i for i in range(30)], False),
    ],
)
def test_min_level_of_columns_that_few_rows_make(column: list[float], broken: bool):
    """Two rows hold nine tenths of the squares about the median; the site names the column."""
    rows = frame(30, found=column)
    policy = Policy(**{**FREE, "min_level": 3})
    uses: tuple[dict[str, Any], ...] = ({"terms": ["age", "found"]}, {"outcome": "found"})
    for options in (*uses, {"outcome": "ill", "offset": "found"}):
        tables = bf.stats.tables({"va": rows}, policy=policy, **options)
        with refuses(broken, "rule min_level of the column 'found'"):
            Questions(tables).conduct(Sums(1, len(tables.columns)))


@pytest.mark.parametrize("weights", ["frequency_weights", "probability_weights"])
def test_weights_and_offsets_leave_no_single_row_out(weights: str):
    """Nor do they count it twice: the difference to a fit without them would be that row's."""
    rows = frame(60, even=1.0, apart=1.0 + np.arange(60) % 2)
    for one in (1e-9, 2.0) if weights == "probability_weights" else (2.0, 3.0):
        odd = rows.assign(odd=[one] + [1.0] * 59)
        for name, passes in (("even", True), ("odd", False), ("apart", True)):
            named: Any = {weights: name}
            tables = bf.stats.tables(
                {"va": odd}, outcome="ill", terms=["age"], policy=Policy(), **named
            )
            with refuses(not passes, "rule min_level"):
                bf.stats.glm(tables, family="poisson")
    shifted = bf.stats.tables(
        {"va": rows.assign(odd=[-40.0] + [0.0] * 59)},
        outcome="ill",
        terms=["age"],
        offset="odd",
        policy=Policy(),
    )
    with refuses(True, "rule min_level"):
        bf.stats.glm(shifted, family="poisson")


def test_min_level_of_cells():
    """Of a table, by groups; of bins of times, by who has an event there and who leaves."""
    rows = frame(30, hiv=[1, 1] + [0] * 13 + [1] * 5 + [0] * 10, sex=[1] * 15 + [0] * 15)
    sex = bf.stats.levels("sex", [0, 1])
    policy = Policy(**{**FREE, "min_level": 3})
    tables = bf.stats.tables({"va": rows}, outcome="age", terms=["hiv"], policy=policy)
    with pytest.raises(Refusal, match="'va' refuses Totals by its policy's rule min_level"):
        bf.stats.describe(tables, by=sex)
    bf.stats.describe(tables)
    grid = Grid((1.0, 2.0, 3.0), False, middles=(0.5, 1.5, 2.5))
    told = (
        Counts("month", "dead", grid),
        PartialLikelihood("month", "dead", 1, grid, None, (15.0,), (5.0,)),
        Exposure("month", "dead", (2.0,)),
    )
    for died, broken in ((2, True), (3, False), (0, False)):
        rows = frame(
            30,
            month=[1.0] * 8 + [2.0] * 16 + [3.0] * 6,
            dead=[1] * 18 + [0] * 6 + [1] * died + [0] * (6 - died),
        )
        tables = bf.stats.tables({"va": rows}, terms=["age"], policy=policy)
        for question in told:
            with refuses(broken, "by its policy's rule min_level of a cell"):
                Questions(tables).conduct(question)


@pytest.mark.parametrize(("sd", "step"), [(9, 1), (13, 2), (32, 5)])
def test_thresholds_lie_on_a_lattice_and_counts_are_told_in_steps(sd: float, step: int):
    """However many thresholds are asked for; the quartiles are near those of the rows, whatever the
    first digit of the standard deviation.
    """
    rng = np.random.default_rng(0)
    rows = {"va": pd.DataFrame({"age": rng.normal(62, sd, 60).round(2)})}
    tables = bf.stats.tables(rows, terms=["age"], policy=Policy())
    ages, told = rows["va"]["age"].sort_values().to_numpy(), set()
    for threshold in np.linspace(35, 90, 400):
        at = torch.full((2, 2, 3), float(threshold), dtype=torch.float64)
        question = Quantiles(sites=1, columns=1, at={"low": at, "high": at})
        state = question.start(None)
        below = tables.ask(question, None)(state, question.shapes(state), {})["below"][0, 0, 0]
        assert below <= (ages <= step * round(threshold / step)).sum() + 2
        told.add(int(below))
    assert (np.diff(sorted(told)) >= 3).all()
    assert len(told) < 21
    found = bf.stats.describe(tables).statistics.loc["age", "va"]
    assert abs(found["median"] - np.median(ages)) < sd / 4
    assert abs(found["25 %"] - np.quantile(ages, 0.25)) < sd / 4


def test_diagnostics_are_the_same_under_a_policy():
    fits = [
        bf.stats.glm(replace(sites("binomial"), policy=policy), family="binomial").diagnostics()
        for policy in (None, Policy())
    ]
    assert fits[1].sites.equals(fits[0].sites)
    assert fits[1].concordance.equals(fits[0].concordance)


def test_two_analyses_differ_in_rows_enough():
    """Few new rows do not count until there are enough; few that are gone are refused."""
    policy, rows = Policy(), frame(60)

    def total(of: pd.DataFrame) -> float:
        tables = bf.stats.tables({"va": of}, outcome="ill", terms=["age"], policy=policy)
        sums = Questions(tables).conduct(Sums(1, 1, "binomial"))
        return float(sums["centre"][0] * sums["weight"])

    first = total(rows.head(40))
    assert total(rows.head(43).iloc[::-1]) == pytest.approx(first)
    again = bf.stats.tables({"va": rows.head(43)}, outcome="ill", terms=["age"], policy=policy)
    assert bf.stats.glm(again, family="binomial").dropped == {"va": 3}
    assert total(rows.head(50)) == sum(range(50))
    for lost in (1, 9):
        with pytest.raises(Refusal, match="min_rows, as its rows differ from those of an earlier"):
            total(rows.head(50).iloc[lost:])
    with pytest.raises(Refusal, match="min_rows, as its rows differ"):
        total(rows.head(50).assign(age=[99, *range(1, 50)]))


def test_two_columns_differ_in_rows_enough():
    """In one analysis or two; a column and its opposite tell the same, and rare levels of one
    category share nobody.
    """
    cut = {f"upto{k}": (np.arange(60) < k).astype(int) for k in (20, 21, 29, 30, 31)}
    rows = frame(60, **cut, over20=1 - cut["upto20"], over21=1 - cut["upto21"])
    rows["kind"] = ["a"] * 50 + ["b"] * 5 + ["c"] * 5
    kinds = bf.stats.levels("kind", ["a", "b", "c"])
    for first, then, broken in (
        (["upto20"], ["upto21"], True),
        (["upto20"], ["upto29"], True),
        (["upto20"], ["upto30"], False),
        (["upto20"], ["over20"], False),
        (["upto20"], ["over21"], True),
        (["upto30"], ["upto31"], True),
        (["upto20", "age"], ["upto20", kinds], False),
    ):
        policy, both = Policy(), list(dict.fromkeys([*first, *then]))
        for terms, by, fails in (
            (first, policy, False),
            (then, policy, broken),
            (both, Policy(), broken),
        ):
            tables = bf.stats.tables({"va": rows}, outcome="age", terms=terms, policy=by)
            with refuses(fails, "min_rows, as .* differs by fewer from another column"):
                Questions(tables).conduct(Sums(1, len(tables.columns)))


@pytest.mark.parametrize(
    ("before", "then", "broken"),
    [
        (["abcd"], "abc", True),
        (["abc"], "abcd", True),
        (["abcd", "abef"], "cdef", False),
        (["abcd", "abef"], "cdeg", False),
        (["abc", "bcd", "acd"], "abd", True),
        (["abcd"], "efgh", False),
    ],
)
def test_sums_over_sites_do_not_tell_one(before: list[str], then: str, broken: bool):
    """In whatever way they are added and taken off; without a policy nothing is refused."""
    rows = {name: frame(30) for name in "abcdefgh"}
    hides = bf.SecureSum(range=2.0**20)
    for policy in (Policy(), None):
        tables = bf.stats.tables(rows, outcome="ill", terms=["age"], policy=policy)
        for names in before:
            Questions(tables.only(list(names)), hides).conduct(Sums(len(names), 1))
        with refuses(broken and policy is not None, "min_sites, as the difference to earlier sums"):
            Questions(tables.only(list(then)), hides).conduct(Sums(len(then), 1))


def test_leave_one_out_says_why_it_is_not_offered():
    """Under secure sums, where the sheet says which numbers are each site's own."""
    fit = bf.stats.glm(
        sites("binomial"), family="binomial", aggregation=bf.SecureSum(range=2.0**20)
    )
    with pytest.raises(ValueError, match="leave_one_out is not available where answers are added"):
        fit.leave_one_out("age")
    assert "rows [4], each site's own, outcome [4], each site's own" in str(fit.released)
    assert "sum [3]," in str(fit.released)


def test_what_the_default_policy_would_have_refused_is_counted():
    """In a simulation without a policy, and where a site opened its own."""
    rows = {site: frame(30, rare=[1] + [0] * 29) for site in ("va", "west")}
    for policy in (None, Policy(**FREE)):
        tables = bf.stats.tables(rows, outcome="ill", terms=["age", "rare"], policy=policy)
        fit = bf.stats.glm(tables, family="gaussian")
        asked = len(fit.released.questions)
        line = f"answers that rest on fewer than 3 people: {2 * asked}; answers that the default "
        assert line + f"policy refuses, by its rule: min_level {2 * asked}" in str(fit.released)
        assert json.loads(fit.released.to_json())["judged"] in fit.released.html()
    tables = bf.stats.tables(rows, outcome="ill", terms=["age"], policy=Policy())
    fit = bf.stats.glm(tables, family="binomial")
    assert str(fit.released).endswith("answers that rest on fewer than 3 people: 0")


def test_what_is_asked_about_a_fit_stands_on_its_sheet():
    """Also where the fit fails."""
    fit = bf.stats.glm(sites("binomial"), family="binomial")
    before = len(fit.released.questions)
    single = fit.diagnostics()
    assert len(fit.released.questions) == before + len(single.released.questions)
    before = len(fit.released.questions)
    without = fit.without("north")
    assert len(fit.released.questions) == before + len(without.released.questions)
    before = len(fit.released.questions)
    fit.by_site("age")
    assert len(fit.released.questions) > before + 4 * 3
    assert {one.sites for one in fit.released.questions[before:]} == {(name,) for name in frames()}


@pytest.mark.parametrize("two", [(0, 1), (1, 0), (True, False), (3.5, 7.5)])
def test_min_level_of_columns_with_two_values(two: tuple[Any, Any]):
    """Of the design, and of the outcome."""
    rows = frame(30, sex=[two[0]] * 28 + [two[1]] * 2)
    assert refused(rows, "min_level", 3, terms=["sex"])
    assert not refused(rows, "min_level", 2, terms=["sex"])
    assert refused(rows, "min_level", 3, outcome="sex")
    assert not refused(rows, "min_level", 2, outcome="sex")


def test_min_level_of_categories():
    """The reference counts, too; a level without rows tells nothing of anyone."""
    arm = bf.stats.levels("arm", ["a", "b", "c", "none"])
    rows = frame(30, arm=["a"] * 2 + ["b"] * 20 + ["c"] * 8)
    assert refused(rows, "min_level", 3, terms=[arm])
    assert not refused(rows, "min_level", 2, terms=[arm])


def test_min_level_of_products():
    """Of which each part alone has rows enough."""
    rows = frame(30, one=[1] * 15 + [0] * 15, two=[0] * 14 + [1] * 16)
    made = rows.assign(both=rows["one"] * rows["two"])
    assert refused(made, "min_level", 3, terms=["one", "two", "both"])
    assert not refused(rows, "min_level", 3, terms=["one", "two"])


def test_min_level_of_columns_that_a_question_names():
    """As the groups within a site."""
    wards = ["a"] * 2 + ["b"] * 28
    rows = {"va": frame(30, ward=wards), "west": frame(30), "zoo": frame(30)}
    rows = {site: one if "ward" in one else one.assign(ward="a") for site, one in rows.items()}
    for least, broken in ((3, True), (2, False)):
        given = bf.stats.tables(
            rows, outcome="age", also=["ward"], policy=Policy(**{**FREE, "min_level": least})
        )
        with refuses(broken, "'va' refuses Mode by its policy's rule min_level"):
            bf.stats.mixed(given, family="gaussian", group="ward", random=())


def test_max_parameters_per_row():
    """The question's own, or the design's columns."""
    assert refused(frame(10), "max_parameters_per_row", 0.09)
    assert not refused(frame(10), "max_parameters_per_row", 0.1)
    survey = Likelihood("binomial", columns=1, per_site=False, centre=(0.0,), scale=(1.0,))
    for question in (survey, after(Meat, survey, (0.0, 0.0))):  # an intercept and a coefficient
        assert refused(frame(10), "max_parameters_per_row", 0.19, question=question)
        assert not refused(frame(10), "max_parameters_per_row", 0.2, question=question)


def test_min_sites():
    """Where a sum hides each."""
    rows = {"va": frame(), "west": frame()}
    hides = bf.SecureSum(range=2.0**20)
    assert refused(rows, "min_sites", 3, aggregation=hides)
    assert not refused(rows, "min_sites", 2, aggregation=hides)
    assert not refused(rows, "min_sites", 3)


def test_columns():
    """Of the design, outcome, offset and weights, and those that a question names."""
    rows = frame(30, exposure=1.0, often=1)
    for options, needs in (
        ({}, ["age", "ill"]),
        ({"terms": [bf.stats.levels("arm", ["a", "b"])]}, ["arm", "ill"]),
        ({"offset": "exposure"}, ["age", "ill", "exposure"]),
        ({"probability_weights": "often"}, ["age", "ill", "often"]),
        ({"question": Named(1, 1, named=("age", "arm"))}, ["age", "ill", "arm"]),
    ):
        assert not refused(rows, "columns", needs, **options)
        for name in needs:
            fewer = [one for one in needs if one != name]
            assert refused(rows, "columns", fewer, **options), (options, name)
    by_site = after(partial(Scores, by="site"), PartialLikelihood("age", "ill", 0, None), ())
    # "site" is a word there, no column.
    assert not refused(frame(site="va", age=50), "columns", ["age", "ill"], question=by_site)


def test_exact_times():
    """Those of events, and counts at times that were told."""
    given = {site: frame(month=7 * np.arange(30) % 30 + 1.0) for site in ("va", "west")}

    def tables(exact_times: bool) -> Tables:
        policy = Policy(**{**FREE, "exact_times": exact_times})
        return bf.stats.tables(given, terms=["age"], also=["month", "ill"], policy=policy)

    counts = Counts("month", "ill", Grid((2.0, 4.0), exact_times=True))
    for fit in (bf.stats.cox, bf.stats.kaplan_meier):
        with pytest.raises(Refusal, match="'va' refuses EventTimes by its policy's rule exact_tim"):
            fit(tables(False), time="month", event="ill", exact_times=True)
        with pytest.raises(Refusal, match=r"'va' refuses .* by its policy's rule exact_times"):
            fit(tables(False), time="month", event="ill", grid=[10.0, 20.5, 40.0, 123.0])
        fit(tables(True), time="month", event="ill", exact_times=True)
    with pytest.raises(Refusal, match="'va' refuses Counts by its policy's rule exact_times"):
        Questions(tables(False)).conduct(counts)


def test_strata_are_cells():
    """Of pairs, and of one pair among people alone, of whom a partial likelihood tells nothing."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"age": rng.normal(60, 9, 40), "t": rng.exponential(9, 40), "d": 1})
    told: dict[str, Any] = {"terms": ["age"], "also": ["t", "d", "born"]}
    fit: Any = {"time": "t", "event": "d", "baseline": "per_site", "strata": "born"}
    for born, broken in (
        ([*range(38), 38, 38], "min_level"),
        ([0] * 20 + [1] * 20, ""),
    ):
        tables = bf.stats.tables({"va": rows.assign(born=born)}, **told, policy=Policy())
        with refuses(bool(broken), broken):
            bf.stats.cox(tables, **fit)
    some = rows.assign(born=[0] * 20 + [1] * 4 + [2] * 16, d=[0] * 20 + [1] * 4 + [0] * 16)
    with refuses(True, "min_rows of weights"):  # four people alone are in the sums
        bf.stats.cox(bf.stats.tables({"va": some}, **told, policy=Policy()), **fit)


def test_the_weights_are_those_of_what_is_told():
    """Pearson's statistic weighs by 1 / mean, and a negative binomial's slope its outcomes by
    1 / (1 + alpha mean): a row whose mean is low has most, and little of the information.
    """
    rows = frame(300, far=[0.0] * 299 + [-1.0])
    policy = Policy(**{**FREE, "min_rows": 10})
    tables = bf.stats.tables({"va": rows}, outcome="ill", terms=["far"], policy=policy)
    unit: Any = {"centre": (0.0,), "scale": (1.0,)}
    counts = Likelihood("negative_binomial", 1, False, **unit)
    for question, theta in (
        (after(Looks, Likelihood("poisson", 1, False, **unit), (0.0, 4.0)), (0.0, 4.0)),
        (counts, (7.0, 7.0, 0.0)),
    ):
        state = state_of(question, theta=theta)
        for near in (True, False):
            here = state | ({"theta": 0 * state["theta"]} if near else {})
            with refuses(not near, "rule min_rows of weights"):
                tables.ask(question, None)(here, question.shapes(here), {})


def test_levels_together_are_told_anyway():
    """Two levels of four people each are fewer than `min_rows` together, and no secret."""
    rows = pd.DataFrame({"cp": np.repeat([1, 2, 3, 4], [4, 4, 17, 95]), "ill": np.arange(120) % 2})
    kinds = bf.stats.levels("cp", [4, 1, 2, 3])
    tables = bf.stats.tables({"va": rows}, outcome="ill", terms=[kinds], policy=Policy())
    assert bf.stats.glm(tables, family="binomial").rows == {"va": 120}


def test_a_site_that_refuses_is_named():
    """The others go on."""
    rows = {"va": frame(20), "west": frame(8), "zoo": frame(20)}
    given = bf.stats.tables(rows, outcome="ill", terms=["age"], policy=Policy())
    with pytest.raises(
        Refusal, match=r"^site 'west' refuses Sums by its policy's rule min_rows; go on"
    ):
        bf.stats.glm(given, family="binomial")
    assert sum(bf.stats.glm(given.only(["va", "zoo"]), family="binomial").rows.values()) == 40


def test_max_draws_are_counted_over_all_fits():
    """A fit of 1000; the next one passes, the third does not."""
    policy = Policy(**{**FREE, "max_draws": 2000})
    given = replace(sites("binomial"), policy=policy)
    for _ in range(2):
        bf.stats.mixed(given, family="binomial")
    assert policy.ledger.drawn == 2000
    with pytest.raises(Refusal, match="Draws by its policy's rule max_draws"):
        bf.stats.mixed(given, family="binomial")


def test_a_policy_that_lets_a_fit_pass_changes_nothing():
    wanted = bf.stats.glm(sites("binomial"), family="binomial")
    given = bf.stats.tables(frames(), outcome="ill", terms=TERMS, policy=Policy())
    found = bf.stats.glm(given, family="binomial")
    assert torch.equal(found.estimate, wanted.estimate)
    assert torch.equal(found.without("east").estimate, wanted.without("east").estimate)
    with pytest.raises(Refusal, match="'east'"):
        bf.stats.glm(replace(given, policy=Policy(min_rows=71)), family="binomial")


FITS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (bf.stats.glm, {"family": "binomial", "intercept": "per_site"}),
    (bf.stats.mixed, {"family": "binomial"}),
    (bf.stats.cox, {"time": "months", "event": "dead", "exact_times": True}),
    (bf.stats.cox, {"time": "months", "event": "dead", "baseline": "per_site"}),
    (bf.stats.piecewise, {"time": "months", "event": "dead", "cuts": [5]}),
)


@pytest.mark.parametrize(("fit", "options"), FITS)
def test_a_site_with_a_rare_level_is_left_out_and_named(fit: Any, options: dict[str, Any]):
    """Two of its rows have an event; the fit is that of the others, with or without it."""
    rng = np.random.default_rng(0)
    rows = {
        site: one.assign(months=rng.exponential(9, len(one)), dead=one["ill"].astype(int))
        for site, one in frames().items()
    }
    rare = (np.arange(len(rows["north"])) < 2).astype(int)
    rows["north"] = rows["north"].assign(ill=rare, dead=rare)
    survival = "time" in options
    design: dict[str, Any] = {"terms": ["age"], "also": ["months", "dead"]}
    design |= {} if survival else {"outcome": "ill"}
    policy = Policy(**{**FREE, "min_level": 3})
    found = fit(bf.stats.tables(rows, policy=policy, **design), **options)
    others = {site: one for site, one in rows.items() if site != "north"}
    wanted = fit(bf.stats.tables(others, policy=policy, **design), **options)
    assert found.table().equals(wanted.table())
    why = "its policy's rule min_level refuses, as a level has too few rows"
    assert found.left_out == {"north": why}
    assert f"left out: north, {why}" in str(found)
    assert "north" not in {site for one in found.released.questions for site in one.sites}
    first = found.released.questions[0]
    assert (first.sites, first.refused) == (("east", "south", "west"), {"north": "min_level"})
    assert f"round 1, {first.question}, refused by north: " in str(found.released)
    first = json.loads(found.released.to_json())["questions"][0]
    assert first["refused"] == {"north": "min_level"}
    assert found.without("north").table().equals(wanted.table())
    with pytest.raises(Refusal, match=r"'north' refuses .* rule min_level"):
        fit(bf.stats.tables({"north": rows["north"]}, policy=policy, **design), **options)


def described(found: Any) -> list[Any]:
    """What is told of the rows, without the sheet."""
    if isinstance(found, bf.stats.Tested):
        return [found.statistic, found.table.to_dict()]
    if isinstance(found, bf.stats.Description):
        return [found.statistics.fillna(-1).to_dict(), found.differences.to_dict()]
    return [found.table().to_dict(), found.rows]


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("what", ["kaplan_meier", "logrank", "describe"])
def test_a_site_with_a_rare_level_is_left_out_of_what_is_described(what: str, late: bool):
    """Of its outcome or events, or of the groups, of which it is asked later."""
    rng = np.random.default_rng(0)
    rows = {
        site: one.assign(
            months=rng.integers(1, 9, len(one)),
            dead=one["ill"].astype(int),
            arm=[0, 1] * (len(one) // 2),
        )
        for site, one in frames().items()
    }
    rare = (np.arange(len(rows["north"])) < 2).astype(int)
    rows["north"] = rows["north"].assign(**{"arm" if late else "dead": rare})
    by = bf.stats.levels("arm", [0, 1])
    options: Any = {"time": "months", "event": "dead", "by": by, "grid": [4.0, 9.0]}
    design: dict[str, Any] = {"terms": ["age"], "also": ["months", "dead", "arm"]}
    if what == "describe":
        design, options = {"outcome": "dead", **design}, {"by": by}
    fit = getattr(bf.stats, what)
    policy = Policy(exact_times=True)
    found = fit(bf.stats.tables(rows, policy=policy, **design), **options)
    others = {site: one for site, one in rows.items() if site != "north"}
    wanted = fit(bf.stats.tables(others, policy=policy, **design), **options)
    assert described(found) == described(wanted)
    why = "its policy's rule min_level refuses, as a level has too few rows"
    assert found.left_out == {"north": why}
    assert f"left out: north, {why}" in str(found)
    assert "left out: " not in str(wanted)


def test_a_policy_is_read_from_a_file(tmp_path: Path):
    file = tmp_path / "policy.toml"
    file.write_text('min_rows = 20\ncolumns = ["age", "ill"]\nexact_times = true\n')
    assert Policy.read(file) == Policy(min_rows=20, columns=["age", "ill"], exact_times=True)
    file.write_text("min_row = 20")
    with pytest.raises(TypeError, match="min_row"):
        Policy.read(file)
    file.write_text('min_rows = "20"')
    with pytest.raises(ValueError, match="min_rows"):
        Policy.read(file)
    with pytest.raises(ValueError, match="max_parameters_per_row"):
        Policy(max_parameters_per_row=0)


def test_rows_outside_a_models_range_hide_no_others():
    """No parameters leave some rows out of a sum, by which that tells of the others."""
    ages, dead = np.arange(30.0, 90.0), [0, 1] * 30
    rows = pd.DataFrame({"age": ages, "sbp": ages * 7 % 60, "dead": dead, "month": ages})
    tables = bf.stats.tables({"va": rows}, outcome="dead", terms=["age", "sbp"], policy=Policy())
    (site,) = tables.sites
    for slope in (40.0, -40.0):
        survey = Likelihood("log_binomial", 2, per_site=False, centre=(60.0, 0.0), scale=(1.0, 1.0))
        state = survey.start(None) | {"theta": torch.tensor([-1.0, slope, 0.0]).double()}
        told = tables.ask(survey, None)(state, survey.shapes(state), {})
        assert told.pop("n_outside") == 1
        assert not any(t.any() for t in told.values())
        cox = PartialLikelihood("month", "dead", 2, None, None, (60.0, 0.0), (1.0, 1.0))
        told = cox.of_site({"theta": torch.tensor([slope, 0.0]).double()}, site, 0)
        assert told.pop("n_outside") == 1
        assert not any(t.any() for t in told.values())


def test_the_same_sums_by_other_questions():
    """Four sites' sums in one question, and three of these sites' in another one."""
    rng = np.random.default_rng(0)
    frames = {
        name: pd.DataFrame({"age": rng.normal(60, 9, 40), "sex": [0, 1] * 20}) for name in "abcd"
    }
    tables = bf.stats.tables(frames, outcome="sex", terms=["age"], policy=Policy())
    bf.stats.glm(tables, family="binomial", aggregation=bf.SecureSum())
    with pytest.raises(Refusal, match="min_sites, as the difference to earlier sums"):
        bf.stats.describe(
            tables.only("abc"), by=bf.stats.levels("sex", [0, 1]), aggregation=bf.SecureSum()
        )


def test_groups_have_levels_whatever_their_names():
    rows = frame(30, patient=np.repeat(np.arange(15), 2))
    tables = bf.stats.tables(
        {"va": rows, "ny": rows}, outcome="age", also=["patient"], policy=Policy()
    )
    with pytest.raises(Refusal, match="by its policy's rule min_level"):
        bf.stats.mixed(tables, family="gaussian", group="patient")
