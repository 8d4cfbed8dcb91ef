"""Tables of sites: the design that they make, and what is refused or warned of by name."""

import builtins
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from tests.stats.made import SIZES, TERMS, frames, sites

levels, interaction = bf.stats.levels, bf.stats.interaction
close = np.testing.assert_allclose


def two(**changes: Any) -> dict[str, pd.DataFrame]:
    """Two sites of three rows; changes are columns of the first."""
    plain = pd.DataFrame(
        {"age": [40, 50, 60], "sex": ["f", "m", "f"], "cp": [1, 2, 3], "ill": [0, 1, 1]}
    )
    return {"north": plain.assign(**changes), "south": plain.assign(age=[45, 55, 65])}


def test_the_design():
    """Numbers, truth values, levels and their products, in the order of the terms."""
    given = bf.stats.tables(
        {site: frame.assign(old=frame["age"] > 45) for site, frame in two().items()},
        outcome="ill",
        terms=["age", levels("cp", [2, 1, 3]), "old", interaction("age", levels("cp", [2, 1, 3]))],
    )
    assert given.columns == ("age", "cp[1]", "cp[3]", "old", "age:cp[1]", "age:cp[3]")
    wanted = [[40, 1, 0, 0, 40, 0], [50, 0, 0, 1, 0, 0], [60, 0, 1, 1, 0, 60]]
    assert given.sites[0].x.tolist() == wanted
    assert given.sites[0].y is not None
    assert given.sites[0].y.tolist() == [0, 1, 1]
    assert torch.equal(given.design(two()["north"].assign(old=[0, 1, 1])), given.sites[0].x)
    assert str(given) == "Tables(north 3, south 3; 6 columns, outcome ill)"


def test_any_order_of_sites_is_the_same():
    turned = bf.stats.tables(dict(reversed(two().items())), outcome="ill", terms=["age"])
    straight = bf.stats.tables(two(), outcome="ill", terms=["age"])
    assert turned.names == straight.names == ("north", "south")
    assert all(torch.equal(a.x, b.x) for a, b in zip(turned.sites, straight.sites, strict=True))
    some = sites("binomial").only(["west", "north"])
    assert (some.names, some.ids.tolist()) == (("north", "west"), [0, 1])
    with pytest.raises(ValueError, match="no site 'moon'"):
        some.only(["moon"])


def test_missing_values_are_refused_or_their_rows_left_out():
    """Counted by site, whichever column lacks them; none becomes 0 or a reference."""
    rows = two(age=[40, None, 60], cp=[1.0, 2.0, np.nan])
    terms = ["age", levels("cp", [1, 2, 3]), interaction("age", levels("sex", ["f", "m"]))]
    told = r"north: 2 of 3 rows, age 1, cp 1\).*missing='complete'"
    with pytest.raises(ValueError, match=told):
        bf.stats.tables(rows, outcome="ill", terms=terms)
    with pytest.warns(UserWarning, match="levels at one site"):
        given = bf.stats.tables(rows, outcome="ill", terms=terms, missing="complete")
    assert [site.dropped for site in given.sites] == [2, 0]
    assert given.sites[0].frame["age"].tolist() == [40]
    assert str(given).startswith("Tables(north 1 (-2), south 3;")
    again = bf.stats.tables(two(time=[1, None, 2]) | {"south": two(time=1)["north"]}, also=["time"],
                            missing="complete")  # fmt: skip
    assert [len(site.frame) for site in again.sites] == [2, 3]
    with pytest.raises(ValueError, match="'north' has no row without a missing value"):
        bf.stats.tables(two(age=None), terms=["age"], missing="complete")


def test_nullable_columns_are_numbers():
    rows = {
        "a": pd.DataFrame(
            {"n": pd.array([1, 2, None], "Int64"), "b": pd.array([True, False, None])}
        )
    }
    given = bf.stats.tables(rows, terms=["n", "b"], missing="complete")
    assert given.sites[0].x.tolist() == [[1, 1], [2, 0]]


def test_weights_and_offsets():
    rows = {site: frame.assign(w=[1, 2, 3], o=0.5) for site, frame in two().items()}
    given = bf.stats.tables(rows, outcome="ill", terms=["age"], frequency_weights="w", offset="o")
    assert given.sites[0].weights.tolist() == [1, 2, 3]
    assert given.sites[1].offset.tolist() == [0.5] * 3
    rows["south"]["w"] = 0
    with pytest.raises(ValueError, match="'south' has weights <= 0 in 'w'"):
        bf.stats.tables(rows, outcome="ill", terms=["age"], frequency_weights="w")


def test_a_column_beside_the_design():
    given = bf.stats.tables(two(time=[1.0, None, 2]) | {"south": two(time=1)["north"]})
    assert given.sites[1].column("time").tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="'north' has 1 rows without 'time'; name it in tables"):
        given.sites[0].column("time")


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"terms": ["weight"]}, "'north' has no column 'weight'; its columns are"),
        ({}, {"outcome": "dead"}, "'north' has no column 'dead'"),
        ({}, {"terms": ["sex"]}, r"no numbers in 'sex', but \['f', 'm'\]; take levels\('sex'"),
        ({"age": np.inf}, {"terms": ["age"]}, "infinite numbers in 'age'"),
        ({"cp": [1, 2, 7]}, {"terms": [levels("cp", [1, 2, 3])]}, r"values \[7\] in 'cp'"),
        ({}, {"terms": ["age", "age"]}, "'age' stands twice"),
    ],
)
def test_what_is_refused(changes: Any, options: Any, words: str):
    with pytest.raises(ValueError, match=words):
        bf.stats.tables(two(**changes), **options)


def test_a_sites_name_is_text():
    """As of `dict(iter(frame.groupby("inst")))`, whose keys are numbers."""
    rows = pd.concat([frame.assign(inst=i) for i, frame in enumerate(frames().values())])
    given = bf.stats.tables(dict(iter(rows.groupby("inst"))), outcome="ill", terms=["age"])
    assert given.names == ("0", "1", "2", "3")
    fit = bf.stats.glm(given, family="binomial")
    assert "4 sites, 330 rows: 0 70" in str(fit)
    assert list(fit.without("0").rows) == ["1", "2", "3"]


@pytest.mark.parametrize(
    "given", ["north.csv", ["north.csv"], {"north": "north.csv"}, [two()], two()["north"]]
)
def test_what_are_no_frames(given: Any):
    with pytest.raises(TypeError, match="frames is a mapping of sites' names to their data frames"):
        bf.stats.tables(given, terms=["age"])


def test_levels_and_sites_that_do_not_make_a_table():
    for values in ([1], [1, 2, 1]):
        with pytest.raises(ValueError, match="two or more, each once"):
            levels("cp", values)
    with pytest.raises(ValueError, match="one site at least"):
        bf.stats.tables({})


def test_what_is_warned_of():
    with pytest.warns(UserWarning, match=r"constant: age at north\. Coefficients"):
        bf.stats.tables(two(age=1), terms=["age"])
    told = "constant: .*; levels at one site: cp=3 at south only"
    with pytest.warns(UserWarning, match=told):
        bf.stats.tables(two(cp=[1, 2, 2]), terms=[levels("cp", [1, 2, 3])])


def formula(text: str, **changes: Any) -> Any:
    pytest.importorskip("formulaic", reason="formulaic is not installed")
    return bf.stats.tables(two(**changes), formula=text)


def test_a_formula_is_its_terms():
    """The same design, names and fit as of the terms that it stands for."""
    pytest.importorskip("formulaic", reason="formulaic is not installed")
    by_hand = bf.stats.tables(
        frames(), outcome="ill", terms=[*TERMS, interaction("age", levels("kind", ["a", "b", "c"]))]
    )
    text = "ill ~ age * C(kind, levels=['a', 'b', 'c'])"
    read = bf.stats.tables(frames(), formula=text)
    assert (read.columns, read.outcome) == (by_hand.columns, "ill")
    assert all(torch.equal(a.x, b.x) for a, b in zip(read.sites, by_hand.sites, strict=True))
    rows = frames()["west"].head(3)
    assert torch.equal(read.design(rows), by_hand.design(rows))
    fits = [bf.stats.glm(given, family="binomial") for given in (read, by_hand)]
    assert torch.equal(fits[0].estimate, fits[1].estimate)
    assert read.only(["west"]).columns == read.columns
    assert [len(site.x) for site in read.sites] == [SIZES[site] for site in sorted(SIZES)]


def test_expressions_of_a_row():
    """Beside their values by hand; an outcome may be named beside, or be none."""
    given = formula("ill ~ np.log(age) + I((age - 60) / 10) + I(age > 45):cp", flag=True)
    x = given.sites[0].x.numpy()
    close(x[:, 0], np.log([40, 50, 60]), rtol=1e-12)
    close(x[:, 1], [-2, -1, 0], rtol=1e-12)
    close(x[:, 2], [0, 2, 3])
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
    with pytest.warns(UserWarning, match="constant"):
        given = bf.stats.tables(rows, formula=text, missing="complete")
    assert [site.dropped for site in given.sites] == [1, 0]
    assert given.sites[0].missing == (1, 0, 0, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ill ~ center(age)", r"\['center\(age\)'\] learn from a site's rows"),
        ("ill ~ bs(age, df=4)", r"learn from a site's rows"),
        ("ill ~ cp + I(age - age.mean())", r"\['I\(age - age.mean\(\)\)'\] learn"),
        ("ill ~ I(age.cumsum())", r"learn from a site's rows"),
        ("ill ~ I(age.shift(fill_value=0))", r"learn from a site's rows"),
        ("ill ~ sex", r"\['sex'\] are no numbers: write C\(sex, levels"),
        ("ill ~ C(sex)", r"C wants levels"),
        ("ill ~ C(cp, levels=[1, 2])", r"values \[3.*\] in 'cp'"),
        ("ill ~ weight", "'north' has no column 'weight'"),
        ("ill ~ np.log(age - 40)", r"infinite numbers in \['np.log\(age - 40\)'\]"),
        ("ill ~ age - 1", "leaves out the intercept"),
        ("ill ~ age +", "cannot be read"),
        ("ill + cp ~ age", "one outcome and one right side"),
        ("ill ~ age | cp", "one outcome and one right side"),
        ("np.log(age) ~ cp", r"'north' has no column 'np.log\(age\)'"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of log(0)
def test_formulas_that_are_refused(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        formula(text)


@pytest.mark.parametrize("part", ["age / age.max()", "age - age.min()", "age > age.median()"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_a_formula_that_learns_is_refused_in_any_order_of_rows(order: list[int], part: str):
    pytest.importorskip("formulaic", reason="formulaic is not installed")
    rows = {site: frame.iloc[order].reset_index(drop=True) for site, frame in two().items()}
    with pytest.raises(ValueError, match="learn from a site's rows"):
        bf.stats.tables(rows, formula=f"ill ~ I({part})")


def test_a_formula_stands_in_place_of_terms():
    pytest.importorskip("formulaic", reason="formulaic is not installed")
    options: list[dict[str, Any]] = [{"terms": ["cp"]}, {"outcome": "ill"}]
    for more in options:
        with pytest.raises(ValueError, match="in place of terms= and outcome="):
            bf.stats.tables(two(), formula="ill ~ age", **more)


def test_without_formulaic_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "formulaic":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install formulaic.*terms="):
        bf.stats.tables(two(), formula="ill ~ age")
