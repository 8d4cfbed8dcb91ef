"""Formulas: the design is the one that formulaic makes of all rows together; what is refused."""

import re
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.stats import wire
from tests.stats.made import SIZES, TERMS, frames
from tests.stats.test_tables import two

formulaic = pytest.importorskip("formulaic", reason="formulaic is not installed")
levels = bf.stats.levels
ARM, SEX = "C(arm, levels=['a', 'b', 'c'])", "C(sex, levels=['m', 'f'])"
SPLINE = "knots=[50, 60, 70], lower_bound=20, upper_bound=100"
SAME = (
    f"y ~ {ARM} + {ARM}:z",
    f"y ~ {SEX}:z",
    f"y ~ {SEX} / z",
    f"y ~ {SEX}:{ARM}",
    f"y ~ x * {ARM} * {SEX}",
    f"y ~ (x + z + {ARM}) ** 2 - x:z",
    f"y ~ z:{SEX} + {SEX}",
    "y ~ {x + z}",
    "y ~ x + {z - x} + z:{x - 60}",
    "y ~ {x ** 2} + {x / 10} + I(x * z)",
    "y ~ `blood pressure` + np.log(`blood pressure`) + `ph.ecog`:x",
    "y ~ C(`ph.ecog`, levels=[0, 1, 2, 3])",
    "Q('blood pressure') ~ Q('ph.ecog')",
    "np.log(pay) ~ age",
    "{pay / 2} ~ np.sqrt(z) + log10(age) + exp(x)",
    "I(y > 0) ~ flag * z",
    f"y ~ bs(age, {SPLINE})",
    f"y ~ cr(age, {SPLINE}):{SEX}",
    "y ~ poly(x, 3, raw=True) + scale(age, center=60, scale=10)",
    "y ~ {x.clip(-1, 1)} + C(stage, levels=list('1234'))",
    "y ~ C(arm, Sum, levels=['a', 'b', 'c']) + C(stage, contr.treatment('3'), levels=list('1234'))",
    "y ~ C(arm, levels=['a', 'b', 'c', 'none has this'])",
    "y ~ C(flag, levels=[False, True]):x + C(age > 60, levels=[False, True])",
    "y ~ C(np.where(age > 60, 'old', 'young'), levels=['young', 'old']) * x",
    "y ~ C(np.digitize(age, [40, 60]), levels=[0, 1, 2])",
    "y ~ I(sex == 'f'):x + sex.map({'f': 0.0, 'm': 1.0})",
    "y ~ I((day - np.datetime64('2020-01-01')) / np.timedelta64(1, 'D'))",
    "y ~ {day.dt.year} + C(day.dt.month, levels=list(range(1, 13)))",
    "y ~ x %in% z + hashed(arm, levels=4)",
    "y ~ 1",
    "~ z + x - x",
)


LEARNERS = (
    "center(age)",
    "standardize(age)",
    "poly(age, 2)",
    "bs(age, df=4)",
    "bs(age, knots=[50])",
    "cs(age, knots=[45, 50], lower_bound=0, upper_bound=99, constraints='center')",
    "I(age - age.mean())",
    "age.rank()",
    "lag(age)",
    "age.cumsum()",
    "age.shift(fill_value=0)",
    "I(age.diff().fillna(0))",
    "np.random.normal(size=len(age))",
)


@cache
def apart() -> dict[str, pd.DataFrame]:
    """Three sites, each of which has one arm, and some stages, alone."""
    rng, n = np.random.default_rng(0), 240
    rows = pd.DataFrame(
        {
            "x": rng.normal(size=n),
            "z": rng.gamma(2, 2, n),
            "age": rng.uniform(25, 90, n),
            "y": rng.normal(size=n),
            "pay": rng.gamma(2, 2, n),
            "flag": rng.random(n) < 0.4,
            "sex": rng.choice(["m", "f"], n),
            "arm": np.repeat(["a", "b", "c"], n // 3),
            "stage": np.repeat(["1", "2", "3", "4"], n // 4),
            "blood pressure": rng.normal(120, 9, n),
            "ph.ecog": rng.integers(0, 4, n),
            "day": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, n), unit="D"),
        }
    )
    return dict(zip(["west", "east", "south"], [rows[:80], rows[80:160], rows[160:]], strict=True))


@pytest.mark.parametrize("text", SAME)
def test_the_design_is_formulaics_of_all_rows_to_the_bit(text: str):
    """Where levels are absent at sites, and of rows to predict."""
    given = bf.stats.tables(apart(), formula=text)
    rows = pd.concat(apart()[site] for site in sorted(apart()))
    wanted = formulaic.model_matrix(text, rows, na_action="ignore")
    right = getattr(wanted, "rhs", wanted).drop(columns="Intercept").to_numpy(float)
    assert np.array_equal(torch.cat([site.x for site in given.sites]), right)
    assert np.array_equal(given.design(rows[:7]), right[:7])
    assert given.columns == given.terms[0].columns
    if given.outcome is not None:
        outcome = torch.cat([site.y for site in given.sites if site.y is not None])
        assert np.array_equal(outcome, wanted.lhs.to_numpy(float)[:, 0])


def formula(text: str, **changes: Any) -> Any:
    return bf.stats.tables(two(**changes), formula=text)


def test_a_formula_is_its_terms():
    """The same design, names and fit as of the terms that it stands for."""
    products = {
        f"age:kind[{kind}]": lambda rows, kind=kind: rows["age"] * (rows["kind"] == kind)
        for kind in "bc"
    }
    made = {site: rows.assign(**products) for site, rows in frames().items()}
    by_hand = bf.stats.tables(made, outcome="ill", terms=[*TERMS, *products])
    text = "ill ~ age * C(kind, levels=['a', 'b', 'c'])"
    read = bf.stats.tables(frames(), formula=text)
    assert (read.columns, read.outcome) == (by_hand.columns, "ill")
    assert all(torch.equal(a.x, b.x) for a, b in zip(read.sites, by_hand.sites, strict=True))
    rows = made["west"].head(3)
    assert torch.equal(read.design(rows), by_hand.design(rows))
    fits = [bf.stats.glm(given, family="binomial") for given in (read, by_hand)]
    assert torch.equal(fits[0].estimate, fits[1].estimate)
    assert read.only(["west"]).columns == read.columns
    assert [len(site.x) for site in read.sites] == [SIZES[site] for site in sorted(SIZES)]


def test_expressions_of_a_row():
    """Beside their values by hand; an outcome may be named beside, or be none."""
    given = formula("ill ~ np.log(age) + I((age - 60) / 10) + I(age > 45):cp", flag=True)
    x = given.sites[0].x.numpy()
    np.testing.assert_allclose(x[:, 0], np.log([40, 50, 60]), rtol=1e-12)
    np.testing.assert_allclose(x[:, 1], [-2, -1, 0], rtol=1e-12)
    np.testing.assert_allclose(x[:, 2], [0, 2, 3])
    north = two()["north"]
    beside = bf.stats.tables({"north": north}, formula="~ age", outcome="ill")
    assert (beside.columns, beside.outcome) == (("age",), "ill")
    assert bf.stats.tables({"north": north}, formula="~ age").outcome is None


def test_rows_without_a_value_are_left_out_of_a_formula():
    """Where the expression itself would say something of them, as a comparison does."""
    rows = two(age=[40, None, 60])
    text = "ill ~ I(age > 45) + C(cp, levels=[1, 2, 3])"
    with pytest.raises(ValueError, match="north: 1 of 3 rows, age 1"):
        bf.stats.tables(rows, formula=text)
    given = bf.stats.tables(rows, formula=text, missing="complete")
    assert [site.dropped for site in given.sites] == [1, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((f"ill ~ cp + {part}", rf"^\[.{re.escape(part)}.*\] learn from") for part in LEARNERS),
        ("scale(age) ~ cp", r"\['scale\(age\)'\] learn from a site's rows"),
        ("I(age - age.min()) ~ cp", r"\['I\(age - age.min\(\)\)'\] learn"),
        ("ill ~ age:cr(age, df=4)", r"evaluate factor `cr\(age, df=4\)`.*without learning"),
        ("ill ~ C(age > age.mean(), levels=[False, True])", "learn from a site's rows"),
        ("ill ~ sex", r"'sex' is a category.* as C\(sex, levels=\['f', 'm'\]\)"),
        ("ill ~ C(cp):age", r"'C\(cp\)' is a category.* as C\(cp, levels=\[1, 2, 3\]\)"),
        ("ill ~ C(cp, [1, 2, 3])", r"is a category.* as C\(cp, levels=\[1, 2, 3\]\)"),
        ("ill ~ grade", r"'grade' is a category.* as C\(grade, levels=\['1', '2'\]\)"),
        ("ill ~ coded", r"'coded' is a category.* as C\(coded, levels=\[1, 2\]\)"),
        ("sex ~ age", "'sex' is a category.*or convert it to numbers"),
        ("C(sex, levels=['f', 'm']) ~ age", "one outcome and one right side, of numbers"),
        ("1 ~ age", "one outcome and one right side, of numbers"),
        ("ill ~ C(cp, levels=[1, 2])", r"site 'north'.*\[3.0\] are not among the levels \[1, 2\]"),
        ("ill ~ C(grade, levels=[1, 2])", r"\['1', '2'\] are not among the levels \[1, 2\]"),
        ("ill ~ C(sex.map({'f': 1}), levels=[1])", r"\[nan\] are not among the levels \[1\]"),
        ("ill ~ weight", "'north' of .*'age', 'sex'.*`weight` is not present"),
        ("ill ~ day", r"at site 'north' of .*: it has text, dates or.*\{\(day - np.datetime64"),
        ("ill ~ age:I(day)", "it has text, dates or spans of time"),
        ("day ~ age", "it has text, dates or spans of time"),
        ("ill ~ .", "`.` takes all other columns, times, weights and names of sites"),
        ("ill ~ . - age", "`.` takes all other columns"),
        (
            "ill ~ np.log(age - 40)",
            r"\['np.log\(age - 40\)'\] .*infinite or undefined at site 'north'",
        ),
        ("ill ~ np.log(age - 45)", r"\['np.log\(age - 45\)'\] .*or are infinite or undefined"),
        ("ill ~ np.where(age > 45, 'old', 'young')", "it has text"),
        ("ill ~ age - 1", "removes the intercept"),
        ("ill ~ 0 + age", "removes the intercept"),
        ("ill ~ age +", "cannot be read"),
        ("open('age').read() ~ age", "cannot be "),
        ("ill + cp ~ age", "one outcome and one right side"),
        ("ill ~ age | cp", "one outcome and one right side"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of log(0)
def test_formulas_that_are_refused(text: str, words: str):
    more = {
        "grade": ["1", "2", "1"],
        "coded": pd.Categorical([1, 2, 1]),
        "day": pd.to_datetime(["2020-01-01", "2020-02-01", "2020-03-01"]),
    }
    rows = {site: frame.assign(**more) for site, frame in two().items()}
    with pytest.raises(ValueError, match=words):
        bf.stats.tables(rows, formula=text)


def test_sites_whose_columns_are_of_other_types():
    """Numbers of all kinds are the same; text at one site is refused there."""
    kinds = [np.int8, np.float32, "Int64", object]
    rows = {
        str(kind): frame.assign(age=frame["age"].astype(kind))
        for kind, frame in zip(kinds, [two()["north"]] * 4, strict=True)
    }
    given = bf.stats.tables(rows, formula="ill ~ {age ** 2}")
    assert all(site.x[:, 0].tolist() == [1600, 2500, 3600] for site in given.sites)
    rows["text"] = two()["north"].astype({"age": str})
    with pytest.raises(ValueError, match=r"site 'text'.*too many columns"):
        bf.stats.tables(rows, formula="ill ~ age")


def test_what_is_missing_in_text_is_no_level():
    """Of each of pandas' types, and no other row is lost."""
    for kind in ("object", "str", "string", "category"):
        text = pd.Series(["f", None, "m"], dtype="object").astype(kind)
        given = bf.stats.tables(
            {"a": two()["north"].assign(sex=text, b=[1.0, 2.0, None])},
            formula=f"ill ~ {SEX} * b",
            missing="complete",
        )
        assert given.sites[0].x.tolist() == [[1, 1, 1]]


def test_the_outcome_is_what_policies_and_gaps_name():
    """An expression's columns for the one, and its rows without a value for the other."""
    rows = two(age=[40.0, None, 60.0])
    given = bf.stats.tables(rows, formula="np.log(age) ~ cp", missing="complete")
    assert (given.outcome, given.beside) == ("np.log(age)", ("age",))
    with pytest.raises(ValueError, match=r"north: 1 of 3 rows, np.log\(age\) 1"):
        bf.stats.tables(rows, formula="np.log(age) ~ cp")


def test_a_formula_that_arrived_is_never_evaluated():
    """Its names and text come back, and no specification, whatever is sent as one."""
    (term,) = formula("ill ~ age * cp").terms
    arrived = wire.read(wire.written((term,)))
    assert arrived == (term,)
    sent = '{"class": "Formula", "options": {"text": "{open(1)}", "variables": [], "columns": []}}'
    for one in (*arrived, wire.read(sent)):
        with pytest.raises(ValueError, match="comes from another machine, and runs no code"):
            one.values(two()["north"], "north")


@pytest.mark.parametrize("part", ["age / age.max()", "age - age.min()", "age > age.median()"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_a_formula_that_learns_is_refused_in_any_order_of_rows(order: list[int], part: str):
    rows = {site: frame.iloc[order].reset_index(drop=True) for site, frame in two().items()}
    with pytest.raises(ValueError, match="learn from a site's rows"):
        bf.stats.tables(rows, formula=f"ill ~ I({part})")


def test_a_formula_that_learns_between_the_ends_is_refused():
    """The rows with the lowest and the highest value are what they are alone."""
    age = [20.0, 41, 43, 45, 46, 48, 49, 71]
    rows = {"a": pd.DataFrame({"age": age, "ill": [0, 1] * 4})}
    with pytest.raises(ValueError, match="learn from a site's rows"):
        bf.stats.tables(rows, formula="ill ~ I(age.groupby(age // 10).transform('mean'))")


def test_a_formula_stands_in_place_of_terms():
    options: list[dict[str, Any]] = [{"terms": ["cp"]}, {"outcome": "ill"}]
    for more in options:
        with pytest.raises(ValueError, match="replaces terms= and outcome="):
            bf.stats.tables(two(), formula="ill ~ age", **more)
