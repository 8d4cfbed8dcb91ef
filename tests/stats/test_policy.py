"""A site's policy: for each rule a question that is refused and one that it lets pass."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.stats import Policy
from bayesfl.stats.asking import Questions, Sums
from bayesfl.stats.glm import Likelihood, Meat
from bayesfl.stats.policy import Refusal
from bayesfl.stats.survival.curves import Counts
from bayesfl.stats.survival.partial import PartialLikelihood, Scores
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


def test_min_rows():
    assert refused(frame(10), "min_rows", 11)
    assert not refused(frame(10), "min_rows", 10)


@pytest.mark.parametrize("two", [(0, 1), (1, 0), (True, False), (3.5, 7.5)])
def test_min_level_of_columns_with_two_values(two: tuple[Any, Any]):
    """Of the design, and of the outcome."""
    rows = frame(30, sex=[two[0]] * 28 + [two[1]] * 2)
    assert refused(rows, "min_level", 3, terms=["sex"])
    assert not refused(rows, "min_level", 2, terms=["sex"])
    assert refused(rows, "min_level", 3, outcome="sex")
    assert not refused(rows, "min_level", 2, outcome="sex")


@pytest.mark.filterwarnings("ignore:constant. arm")
def test_min_level_of_categories():
    """The reference counts, too; a level without rows tells nothing of anyone."""
    arm = bf.stats.levels("arm", ["a", "b", "c", "none"])
    rows = frame(30, arm=["a"] * 2 + ["b"] * 20 + ["c"] * 8)
    assert refused(rows, "min_level", 3, terms=[arm])
    assert not refused(rows, "min_level", 2, terms=[arm])


def test_min_level_of_products():
    """Of which each part alone has rows enough."""
    rows = frame(30, one=[1] * 15 + [0] * 15, two=[0] * 14 + [1] * 16)
    both = ["one", "two", bf.stats.interaction("one", "two")]
    assert refused(rows, "min_level", 3, terms=both)
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
        if broken:
            with pytest.raises(Refusal, match="'va' refuses Mode by its policy's rule min_level"):
                bf.stats.mixed(given, family="gaussian", group="ward")
        else:
            bf.stats.mixed(given, family="gaussian", group="ward")


def test_max_parameters_per_row():
    """The question's own, or the design's columns."""
    assert refused(frame(10), "max_parameters_per_row", 0.09)
    assert not refused(frame(10), "max_parameters_per_row", 0.1)
    survey = Likelihood("binomial", columns=1, per_site=False, centre=(0.0,), scale=(1.0,))
    for question in (survey, Meat(survey, (0.0, 0.0))):  # an intercept and a coefficient
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
    """Of the design, its products, outcome, offset and weights, and those that a question names."""
    rows = frame(30, exposure=1.0, often=1)
    for options, needs in (
        ({}, ["age", "ill"]),
        ({"terms": [bf.stats.levels("arm", ["a", "b"])]}, ["arm", "ill"]),
        ({"terms": [bf.stats.interaction("age", "often")]}, ["age", "often", "ill"]),
        ({"offset": "exposure"}, ["age", "ill", "exposure"]),
        ({"probability_weights": "often"}, ["age", "ill", "often"]),
        ({"question": Named(1, 1, named=("age", "arm"))}, ["age", "ill", "arm"]),
    ):
        assert not refused(rows, "columns", needs, **options)
        for name in needs:
            fewer = [one for one in needs if one != name]
            assert refused(rows, "columns", fewer, **options), (options, name)
    by_site = Scores(PartialLikelihood("age", "ill", 1, None), (0.0,), by="site")  # a word
    assert not refused(frame(site="va", age=50), "columns", ["age", "ill"], question=by_site)


def test_exact_times():
    """Those of events, and counts at times that were told."""
    given = {site: frame(month=7 * np.arange(30) % 30 + 1.0) for site in ("va", "west")}

    def tables(exact_times: bool) -> Tables:
        policy = Policy(**{**FREE, "exact_times": exact_times})
        return bf.stats.tables(given, terms=["age"], also=["month", "ill"], policy=policy)

    counts = Counts("month", "ill", Grid((2.0, 4.0), exact_times=True), None, ("all",))
    for fit in (bf.stats.cox, bf.stats.kaplan_meier):
        with pytest.raises(Refusal, match="'va' refuses EventTimes by its policy's rule exact_tim"):
            fit(tables(False), time="month", event="ill", exact_times=True)
        fit(tables(False), time="month", event="ill")
        fit(tables(True), time="month", event="ill", exact_times=True)
    with pytest.raises(Refusal, match="'va' refuses Counts by its policy's rule exact_times"):
        Questions(tables(False)).conduct(counts)


def test_a_policy_of_each_site():
    """Of those named; a site that is not answers all."""
    rows = {"va": frame(20), "west": frame(20), "zoo": frame(20)}
    strict, free = Policy(min_rows=30), Policy()
    for policy in (free, {"va": free, "west": free}, {"zoo": free}):
        given = bf.stats.tables(rows, outcome="ill", terms=["age"], policy=policy)
        assert bf.stats.glm(given, family="binomial").n == 60
    given = bf.stats.tables(rows, outcome="ill", terms=["age"], policy={"va": free, "west": strict})
    with pytest.raises(Refusal, match=r"^site 'west' refuses Sums by its policy's rule min_rows$"):
        bf.stats.glm(given, family="binomial")
    assert bf.stats.glm(given.only(["va", "zoo"]), family="binomial").n == 40
    with pytest.raises(ValueError, match="policy= names 'vx'; the sites are"):
        bf.stats.tables(rows, outcome="ill", terms=["age"], policy={"vx": free})


def test_max_draws_are_counted_over_all_fits():
    """A fit of 1000; the next one passes, the third does not."""
    policy = Policy(**{**FREE, "max_draws": 2000})
    given = replace(sites("binomial"), policy=policy)
    for _ in range(2):
        fit = bf.stats.mixed(given, family="binomial")
        assert fit.released.log_likelihoods == 1000
    assert policy.drawn == 2000
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
    (bf.stats.cox, {"time": "months", "event": "dead"}),
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
    wanted = fit(bf.stats.tables(others, **design), **options)
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
    found = fit(bf.stats.tables(rows, policy=Policy(), **design), **options)
    others = {site: one for site, one in rows.items() if site != "north"}
    wanted = fit(bf.stats.tables(others, **design), **options)
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
