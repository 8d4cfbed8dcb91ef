"""Curves of survival and log-rank over sites beside lifelines' on one table of all rows."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from tests.stats.survival.made import SIZES, TIMES, frames, pooled, sites

lifelines = pytest.importorskip("lifelines", reason="lifelines is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:Starting with pandas")  # within lifelines
close = np.testing.assert_allclose


def curves(time: str, by: Any = None, given: Any = None, **options: Any) -> Any:
    chosen = {"exact_times": True, **options}
    return bf.stats.kaplan_meier(given or sites(), time=time, event="event", by=by, **chosen)


@pytest.mark.parametrize("level", [0.95, 0.8])
@pytest.mark.parametrize("by", [None, "kind"])
@pytest.mark.parametrize("time", TIMES)
def test_curves_errors_and_medians(time: str, by: str | None, level: float):
    """At the times of events, and at marks between them, up to the last row."""
    rows = pooled()
    found = curves(time, by)
    for place, group in enumerate(found.groups):
        own = rows if by is None else rows[rows[by] == group]
        wanted = lifelines.KaplanMeierFitter(alpha=1 - level).fit(own[time], own["event"])
        table = found.table(level).loc[group]
        assert found.at_risk[place, 0] == len(own)
        close(table["survival"], wanted.predict(table.index), atol=1e-12)
        followed = table[(table["at risk"] > 0) & (table["survival"] > 0)]
        low, high = followed.iloc[:, 4], followed.iloc[:, 5]
        known = wanted.confidence_interval_.reindex(followed.index, method="ffill").to_numpy()
        close(np.stack([low, high], 1), known, atol=1e-12)
        error = wanted.survival_function_.iloc[:, 0] * np.sqrt(wanted._cumulative_sq_)
        close(followed["se"], error.reindex(followed.index, method="ffill"), atol=1e-12)
        median = found.median(level).loc[group]
        assert median["median"] == wanted.median_survival_time_
        ends = lifelines.utils.median_survival_times(wanted.confidence_interval_).to_numpy()
        close(median.iloc[3:].to_numpy(float), ends.ravel())
        assert median["events"] == own["event"].sum()
    assert dict(found.rows) == SIZES
    assert "exact event times" in str(found)


def test_a_curve_down_to_nothing_and_one_without_events():
    """Where survival is 0 or 1 there is no interval about it, and a median may be infinite."""
    rows = {
        "a": pd.DataFrame({"t": [1.0, 2.0], "e": [1, 1], "g": [0, 0]}),
        "b": pd.DataFrame({"t": [1.0, 2.0], "e": [0, 0], "g": [1, 1]}),
    }
    given = bf.stats.tables(rows, also=["t", "e", "g"])
    found = bf.stats.kaplan_meier(given, time="t", event="e", by="g", grid=[1.0, 2.0, 3.0])
    assert found.survival.tolist() == [[0.5, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert found.error[1].tolist() == [0.0, 0.0, 0.0]
    table = found.table()
    assert table.notna().all().all()
    assert table.loc[("0", 2.0)].tolist()[2:] == [0.0, 0.0, 0.0, 0.0]
    assert found.median()["median"].tolist() == [1.0, np.inf]


@pytest.mark.parametrize("by", ["arm", "kind"])
@pytest.mark.parametrize("time", TIMES)
def test_logrank(time: str, by: str):
    rows = pooled()
    found = bf.stats.logrank(sites(), time=time, event="event", by=by, exact_times=True)
    wanted = lifelines.statistics.multivariate_logrank_test(rows[time], rows[by], rows["event"])
    close(found.statistic, wanted.test_statistic, rtol=1e-10)
    close(found.p, wanted.p_value, rtol=1e-9)
    assert found.degrees == rows[by].nunique() - 1
    close(found.table["expected"].sum(), found.table["events"].sum())
    assert f"groups of {by}" in str(found)


def test_a_grid_is_times_rounded_up():
    """By default, and by ends."""
    rows = pooled()
    for grid, ends in (
        ({}, 40 * np.arange(1, 101) / 100),
        ({"grid": [1, 5, 40]}, np.array([1, 5, 40])),
    ):
        found = curves("untied", given=sites(), exact_times=False, **grid)
        rounded = ends[np.searchsorted(ends, rows["untied"])]
        wanted = lifelines.KaplanMeierFitter().fit(rounded, rows["event"])
        close(found.survival[0], wanted.predict(found.times.tolist()), atol=1e-12)
        test = bf.stats.logrank(sites(), time="untied", event="event", by="arm", **grid)
        known = lifelines.statistics.multivariate_logrank_test(rounded, rows["arm"], rows["event"])
        close(test.statistic, known.test_statistic, rtol=1e-10)


def test_weights_count_rows():
    rows = pooled()
    found = curves("tied", given=sites(frequency_weights="count"))
    wanted = lifelines.KaplanMeierFitter().fit(rows["tied"], rows["event"], weights=rows["count"])
    close(found.survival[0], wanted.predict(found.times.tolist()), atol=1e-12)


def test_secure_sums_and_any_order_of_sites_are_the_same():
    """Counts are whole numbers, which secure sums do not round."""
    plain = curves("untied", "kind")
    hidden = curves("untied", "kind", aggregation=bf.SecureSum(range=2.0**20))
    turned = curves("untied", "kind", sites({site: frames()[site] for site in reversed(SIZES)}))
    whole = curves("untied", "kind", sites({"all": pooled()}))
    for other in (hidden, turned, whole):
        assert torch.equal(plain.times, other.times)
        assert torch.equal(plain.survival, other.survival)
    assert "SecureSum" in str(hidden)


def test_groups_that_are_not_there():
    by = bf.stats.levels("kind", ["a", "b", "c", "d"])
    with pytest.raises(ValueError, match=r"\['d'\] of 'kind' have no row"):
        bf.stats.logrank(sites(), time="tied", event="event", by=by)
    with pytest.raises(ValueError, match="none of its levels"):
        curves("tied", bf.stats.levels("kind", ["a", "b"]))
    with pytest.raises(ValueError, match="'site' has one value only"):
        curves("tied", "site", sites({"east": frames()["east"]}))
    with pytest.raises(ValueError, match="'east' has no column 'ward'"):
        curves("tied", "ward")
    gaps = {**frames(), "west": frames()["west"].assign(kind=None)}
    with pytest.raises(ValueError, match="'west' has 90 rows without 'kind'"):
        curves("tied", "kind", bf.stats.tables(gaps, also=["tied", "event"]))


def test_the_diagram_has_a_curve_for_each_group_and_numbers_at_risk():
    pytest.importorskip("matplotlib")
    found = curves("tied", "kind")
    ax = bf.plots.kaplan_meier(found, title="t")
    assert [line.get_label() for line in ax.lines] == ["a", "b", "c"]
    for place, line in enumerate(ax.lines):
        there = found.at_risk[place] > 0
        np.testing.assert_array_equal(line.get_ydata()[1:], found.survival[place, there])
    ax.figure.canvas.draw()
    written = [text.get_text() for text in ax.texts]
    assert {"a", "b", "c", *(f"{n:g}" for n in found.at_risk[:, 0].tolist())} <= {*written}
    bare = bf.plots.kaplan_meier(found, level=None, at_risk=False)
    assert not bare.texts
    assert not bare.collections
