"""The description of sites beside pandas on one table of all rows."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

import bayesfl as bf
from tests.stats.made import SIZES, TERMS, frames, pooled, sites

close = np.testing.assert_allclose


@pytest.fixture(scope="module")
def told() -> Any:
    return bf.stats.describe(sites("binomial"))


def test_numbers_by_site_and_of_all_rows(told: Any):
    rows, table = pooled(), told.statistics.loc["age"]
    groups = {**frames(), "all": rows}
    assert list(table.columns) == [*sorted(SIZES), "all"]
    for name, frame in groups.items():
        age, found = frame["age"], table[name]
        close(found["mean"], age.mean(), rtol=1e-12)
        close(found["sd"], age.std(), rtol=1e-12)
        for share, key in ((0.25, "25 %"), (0.5, "median"), (0.75, "75 %")):
            exact = np.quantile(age, share, method="inverted_cdf")
            close(found[key], exact, rtol=0, atol=age.std() / 1000)
    assert told.statistics.loc[("", "rows")].tolist() == [
        *(SIZES[site] for site in sorted(SIZES)),
        len(rows),
    ]


def test_shares_and_standardised_differences(told: Any):
    rows = pooled()
    counts = told.statistics.loc[("kind[b]", "count")]
    by = rows.groupby("site")
    close(counts, [*by["kind"].apply(lambda k: (k == "b").sum()), (rows["kind"] == "b").sum()])
    share = told.statistics.loc[("ill", "share")]
    close(share, [*by["ill"].mean(), rows["ill"].mean()], rtol=1e-12)
    assert "mean" not in told.statistics.loc["ill"].index
    mean, sd, p = by["age"].mean(), by["age"].std(), by["ill"].mean()
    pairs = [(a, b) for a in SIZES for b in SIZES if a < b]
    of_age = [abs(mean[a] - mean[b]) / ((sd[a] ** 2 + sd[b] ** 2) / 2) ** 0.5 for a, b in pairs]
    own = p * (1 - p)
    of_ill = [abs(p[a] - p[b]) / ((own[a] + own[b]) / 2) ** 0.5 for a, b in pairs]
    close(told.differences["age"], max(of_age), rtol=1e-12)
    close(told.differences["ill"], max(of_ill), rtol=1e-12)


def test_by_the_levels_of_a_column():
    by = bf.stats.levels("kind", ["c", "a", "b"])
    given = bf.stats.tables(frames(), outcome="visits", terms=["age"], also=["kind"])
    told = bf.stats.describe(given, by=by)
    groups = pooled().groupby("kind")
    order = ["c", "a", "b"]
    close(told.statistics.loc[("age", "mean"), order], groups["age"].mean()[order], rtol=1e-12)
    close(told.statistics.loc[("visits", "sd"), order], groups["visits"].std()[order], rtol=1e-12)
    median = groups["visits"].quantile(0.5, interpolation="lower")[order]
    close(told.statistics.loc[("visits", "median"), order], median, rtol=0, atol=0.003)
    with pytest.raises(ValueError, match=r"values \['b'\] in 'kind'"):
        bf.stats.describe(given, by=bf.stats.levels("kind", ["a", "c"]))
    rows = {
        site: frame.assign(arm=[None, *[1] * (len(frame) - 1)]) for site, frame in frames().items()
    }
    with pytest.raises(ValueError, match=r"rows without 'arm'; name it in tables\(also"):
        bf.stats.describe(bf.stats.tables(rows, terms=["age"]), by=bf.stats.levels("arm", [0, 1]))


def test_groups_of_one_row_or_none():
    """Say nothing of spread, and the table leaves out what there is not."""
    rows = {"a": pd.DataFrame({"x": [1.0, 2, 3], "g": [0, 0, 1], "y": [0, 1, 1]})}
    rows["b"] = pd.DataFrame({"x": [5.0], "g": [0], "y": [1]})
    given = bf.stats.tables(rows, outcome="y", terms=["x"], also=["g"])
    told = bf.stats.describe(given)
    assert np.isnan(told.statistics.loc[("x", "sd"), "b"])
    assert np.isnan(told.differences["x"])
    close(told.differences["y"], (1 / 3) / (2 / 9 / 2) ** 0.5)
    by = bf.stats.describe(given, by=bf.stats.levels("g", [0, 1, 2])).table()
    assert by["2"].tolist() == ["0", "", ""]


def test_weights_count_rows():
    given = bf.stats.tables(frames(), outcome="score", terms=["age"], frequency_weights="count")
    told = bf.stats.describe(given).statistics["all"]
    rows = pooled()
    each = rows.loc[rows.index.repeat(rows["count"])]
    close(told[("", "rows")], len(each))
    close(told[("score", "sd")], each["score"].std(), rtol=1e-12)
    exact = np.quantile(each["age"], 0.25, method="inverted_cdf")
    close(told[("age", "25 %")], exact, rtol=0, atol=each["age"].std() / 1000)


def test_probability_weights_are_those_of_a_population():
    """Means, sds and shares are weighted, in any unit of weights; rows are the sites' own."""
    rng = np.random.default_rng(0)
    for unit in (1.0, 1e-6):
        rows = {
            site: frame.assign(w=unit * rng.uniform(0.2, 5, len(frame)))
            for site, frame in frames().items()
        }
        given = bf.stats.tables(rows, outcome="ill", terms=["age"], probability_weights="w")
        told = bf.stats.describe(given).statistics
        whole = pd.concat([rows[site] for site in sorted(rows)])
        for name, group in (("all", whole), ("west", rows["west"])):
            mean = np.average(group["age"], weights=group["w"])
            squares = np.average((group["age"] - mean) ** 2, weights=group["w"])
            n = len(group)
            close(told.loc[("", "rows"), name], n)
            close(told.loc[("", "weight"), name], group["w"].sum(), rtol=1e-12)
            close(told.loc[("age", "mean"), name], mean, rtol=1e-12)
            close(told.loc[("age", "sd"), name], np.sqrt(squares * n / (n - 1)), rtol=1e-12)
            share = np.average(group["ill"], weights=group["w"])
            close(told.loc[("ill", "share"), name], share, rtol=1e-12)


def test_a_sites_digits_are_its_own():
    """Beside an outlier elsewhere, and far from 0; in small units under secure sums."""
    rows = {site: frame.copy() for site, frame in frames().items()}
    rows["west"].loc[0, "age"] = 1e15
    rows["north"]["age"] += 1.7e9
    told = bf.stats.describe(bf.stats.tables(rows, terms=["age"])).statistics
    for site, rtol in (("east", 1e-13), ("south", 1e-13), ("north", 1e-6), ("west", 1e-12)):
        exact = rows[site]["age"] - rows[site]["age"].iloc[-1]
        close(told.loc[("age", "sd"), site], exact.std(), rtol=rtol)
    whole = pd.concat(rows.values())["age"]
    close(told.loc[("age", "sd"), "all"], whole.std(), rtol=1e-12)
    small = {site: frame.assign(age=1e-6 * frame["age"]) for site, frame in frames().items()}
    given = bf.stats.tables(small, terms=["age"])
    hidden = bf.stats.describe(given, aggregation=bf.SecureSum()).statistics
    close(
        hidden.loc[("age", "sd")], bf.stats.describe(given).statistics.loc[("age", "sd")], rtol=1e-5
    )


def test_rows_left_out_are_counted_by_site():
    rows = {site: frame.copy() for site, frame in frames().items()}
    rows["west"].loc[:4, "age"] = np.nan
    rows["east"].loc[2:3, "kind"] = None
    given = bf.stats.tables(rows, outcome="ill", terms=TERMS, missing="complete")
    told = bf.stats.describe(given)
    assert told.dropped == {"east": 2, "north": 0, "south": 0, "west": 5}
    assert told.statistics.loc[("", "rows"), "west"] == SIZES["west"] - 5
    assert "left out, with a missing value or as few new ones: east 2, west 5" in str(told)


def test_what_is_printed(told: Any):
    text = told.to_markdown().splitlines()
    assert text[0].replace("|", "").split() == [*SIZES, "all", "difference"]
    rows = text[: text.index("")]
    assert len(rows) == 2 + 1 + len(sites("binomial").columns) + 1
    assert "rounds 3 to 14, Quantiles: below [5, 4, 3]" in str(told)
    assert "count (share)" in str(told)
    alone = bf.stats.describe(bf.stats.tables(frames(), terms=["age"]))
    assert list(alone.differences.index) == ["age"]


def test_secure_sums_and_any_order_are_the_same(told: Any):
    hidden = bf.stats.describe(sites("binomial"), aggregation=bf.SecureSum(range=2.0**20))
    close(hidden.statistics, told.statistics, rtol=1e-6, atol=1e-6)
    turned = {site: frames()[site] for site in reversed(SIZES)}
    again = bf.stats.describe(bf.stats.tables(turned, outcome="ill", terms=TERMS))
    pd.testing.assert_frame_equal(again.statistics, told.statistics, check_exact=True)
