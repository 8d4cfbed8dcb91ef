"""Tables of sites: the design that they make, and what is refused or warned of by name."""

import re
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from tests.stats.made import frames, sites

levels = bf.stats.levels
close = np.testing.assert_allclose


def two(**changes: Any) -> dict[str, pd.DataFrame]:
    """Two sites of three rows; changes are columns of the first."""
    plain = pd.DataFrame(
        {"age": [40, 50, 60], "sex": ["f", "m", "f"], "cp": [1, 2, 3], "ill": [0, 1, 1]}
    )
    return {"north": plain.assign(**changes), "south": plain.assign(age=[45, 55, 65])}


def test_the_design():
    """Numbers, truth values and levels, in the order of the terms."""
    given = bf.stats.tables(
        {site: frame.assign(old=frame["age"] > 45) for site, frame in two().items()},
        outcome="ill",
        terms=["age", levels("cp", [2, 1, 3]), "old"],
    )
    assert given.columns == ("age", "cp[1]", "cp[3]", "old")
    wanted = [[40, 1, 0, 0], [50, 0, 0, 1], [60, 0, 1, 1]]
    assert given.sites[0].x.tolist() == wanted
    assert given.sites[0].y is not None
    assert given.sites[0].y.tolist() == [0, 1, 1]
    assert torch.equal(given.design(two()["north"].assign(old=[0, 1, 1])), given.sites[0].x)
    assert str(given) == "Tables(north 3, south 3; 4 columns, outcome ill)"


def test_any_order_of_sites_is_the_same():
    turned = bf.stats.tables(dict(reversed(two().items())), outcome="ill", terms=["age"])
    straight = bf.stats.tables(two(), outcome="ill", terms=["age"])
    assert turned.names == straight.names == ("north", "south")
    assert all(torch.equal(a.x, b.x) for a, b in zip(turned.sites, straight.sites, strict=True))
    some = sites("binomial").only(["west", "north"])
    assert (some.names, some.ids.tolist()) == (("north", "west"), [0, 1])
    numbered = bf.stats.tables(dict.fromkeys(["H10", "H2"], two()["north"]), terms=["age"])
    assert numbered.names == ("H2", "H10")
    with pytest.raises(ValueError, match="no site 'moon'"):
        some.only(["moon"])


def test_missing_values_are_refused_or_their_rows_left_out():
    """Counted by site, whichever column lacks them; none becomes 0 or a reference."""
    rows = two(age=[40, None, 60], cp=[1.0, 2.0, np.nan])
    terms = ["age", levels("cp", [1, 2, 3]), levels("sex", ["f", "m"])]
    told = r"north: 2 of 3 rows, age 1, cp 1\).*missing='complete'"
    with pytest.raises(ValueError, match=told):
        bf.stats.tables(rows, outcome="ill", terms=terms)
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


def test_numbers_of_any_type_and_frame():
    """Of objects, of polars, and of columns whose names are numbers; rows to predict, too."""
    polars = pytest.importorskip("polars", reason="polars is not installed")
    plain = two()["north"]
    objects = plain.assign(age=pd.Series([Decimal(40), 50, 60.0], dtype=object))
    terms = ["age", levels("sex", ["f", "m"])]
    rows = {"a": plain, "b": objects, "c": polars.from_pandas(plain)}
    given = bf.stats.tables(rows, outcome="ill", terms=terms)
    assert all(site.x.tolist() == [[40, 0], [50, 1], [60, 0]] for site in given.sites)
    assert torch.equal(given.design(rows["c"]), given.sites[0].x)
    numbered = plain.rename(columns={"age": 0})
    named = bf.stats.tables({"a": numbered}, terms=[0])  # pyright: ignore[reportArgumentType]
    assert named.columns == ("0",)
    assert torch.equal(named.design(numbered), named.sites[0].x)


@pytest.mark.parametrize("kind", ["object", "str", "string", "category"])
def test_missing_text_is_no_level_whatever_its_type(kind: str):
    """Also where the site has no row of the reference."""
    text = pd.Series(["m", None, "m"], dtype="object").astype(kind)
    rows = {"a": two()["north"].assign(sex=text)}
    given = bf.stats.tables(rows, terms=[levels("sex", ["f", "m"])], missing="complete")
    assert given.sites[0].x.tolist() == [[1], [1]]
    with pytest.raises(ValueError, match="site 'a' has 1 rows without 'sex'"):
        bf.stats.describe(bf.stats.tables(rows, terms=["age"]), by=levels("sex", ["f", "m"]))


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
        ({"cp": ["1", "2", "4"]}, {"terms": ["cp"]}, r"no numbers in 'cp', but \['1', '2', '4'\]"),
        ({"cp": pd.Categorical([1, 2, 4])}, {"terms": ["cp"]}, r"no numbers in 'cp', but \['1'"),
        ({"ill": ["0", "1", "1"]}, {"outcome": "ill"}, "no numbers in 'ill'"),
        ({"w": ["1", "2", "1"]}, {"frequency_weights": "w", "terms": ["age"]}, "no numbers in 'w'"),
        ({"on": pd.Timestamp("2020-01-01")}, {"terms": ["on"]}, "no numbers in 'on', but .'2020"),
        (
            {},
            {"terms": ["sex"]},
            r"\['f', 'm'\]; declare a category by levels\('sex'",
        ),
        ({"age": np.inf}, {"terms": ["age"]}, "infinite numbers in 'age'"),
        ({"cp": [1, 2, 7]}, {"terms": [levels("cp", [1, 2, 3])]}, r"values \[7\] in 'cp'"),
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
    "names", [(7, "7"), (True, "True"), (pd.Timestamp("2020-01-01"), "2020-01-01 00:00:00")],
    ids=["number", "truth", "date"],
)  # fmt: skip
def test_sites_of_one_name_are_refused(names: Any):
    """As of a column of mixed types; none of them vanishes."""
    told = f"the names {names[0]!r} and {names[1]!r} would be two sites of one name"
    rows = {8: two()["south"], **dict.fromkeys(names, two()["north"])}
    with pytest.raises(ValueError, match=re.escape(told)):
        bf.stats.tables(rows, terms=["age"])


@pytest.mark.parametrize(
    "given", ["north.csv", ["north.csv"], {"north": "north.csv"}, [two()], two()["north"]]
)
def test_what_are_no_frames(given: Any):
    with pytest.raises(TypeError, match="frames is a mapping of sites' names to their data frames"):
        bf.stats.tables(given, terms=["age"])


def test_levels_that_do_not_make_a_category():
    for values in ([1], [1, 2, 1]):
        with pytest.raises(ValueError, match="two or more, each once"):
            levels("cp", values)
