"""Curves of survival and log-rank over sites beside lifelines' on one table of all rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from tests.stats.survival.made import SIZES, TIMES, frames, pooled, rounded, sites

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
    assert found.times.tolist() == [1.0, 2.0]  # after which nobody is at risk
    assert found.survival.tolist() == [[0.5, 0.0], [1.0, 1.0]]
    assert found.error[1].tolist() == [0.0, 0.0]
    table = found.table()
    assert table.notna().all().all()
    assert table.loc[("0", 2.0)].tolist()[2:] == [0.0, 0.0, 0.0, 0.0]
    assert found.median()["median"].tolist() == [1.0, np.inf]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "bins"])
def test_curves_end_with_the_last_patient(exact: bool):
    """Of each group; all rows are counted, also who is censored before any event."""
    km = pd.DataFrame(
        {"t": [1.0, 2, 3, 50, 60, 70, 80, 1022], "d": [0, 0, 0, 1, 1, 0, 1, 0], "g": [0, 1] * 4}
    )
    given = bf.stats.tables({"s": km}, also=["t", "d", "g"])
    found = bf.stats.kaplan_meier(given, time="t", event="d", exact_times=exact)
    assert found.median()["rows"].tolist() == [8]
    assert found.times[-1] == 1000  # a mark of the lattice
    assert found.at_risk.tolist()[0] == [5, 4, 2] + [1] * (len(found.times) - 3)
    by = bf.stats.kaplan_meier(given, time="t", event="d", by="g", exact_times=exact)
    assert by.median()["rows"].tolist() == [4, 4]
    table = by.table()
    assert table.loc["0"].index.max() == 80
    assert table.loc["1"].index.max() == 1000
    assert (table["at risk"] > 0).all()


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


@pytest.mark.parametrize("early", [["east"], ["south", "west"], ["east", "north", "south"]])
def test_groups_that_are_censored_before_any_event_have_no_part(early: list[str]):
    """As in R's survdiff: the test, and its degrees of freedom, are those of the others."""
    rows = pooled()
    first = rows.loc[rows["event"] == 1, "untied"].min()
    gone = rows["site"].isin(early)
    rows.loc[gone, ["untied", "event"]] = [first / 2, 0]
    given = sites({"all": rows}, also=["untied", "event", "site"])
    options: Any = {"time": "untied", "event": "event", "by": "site", "exact_times": True}
    if len(early) == 3:
        with pytest.raises(ValueError, match="no two groups of 'site' are at risk together"):
            bf.stats.logrank(given, **options)
        return
    found, rest = bf.stats.logrank(given, **options), rows[~gone]
    wanted = lifelines.statistics.multivariate_logrank_test(
        rest["untied"], rest["site"], rest["event"]
    )
    close(found.statistic, wanted.test_statistic, rtol=1e-9)
    assert found.degrees == 3 - len(early)
    assert [said.split()[1] for said in found.said] == early
    assert found.table["rows"].tolist() == [*SIZES.values()]


def test_a_test_of_nothing_is_refused():
    """All die at once, or each group after the other is gone."""
    rows = pd.DataFrame({"t": 5.0, "d": 1, "g": list("aabbb")})
    apart = pd.DataFrame({"t": [1.0, 1, 2, 3], "d": [0, 0, 1, 1], "g": list("aabb")})
    for frame in (rows, apart):
        given = bf.stats.tables({"s": frame}, also=["t", "d", "g"])
        with pytest.raises(ValueError, match="nothing to test"):
            bf.stats.logrank(given, time="t", event="d", by="g", exact_times=True)


@pytest.mark.filterwarnings("ignore:survival may be off")
def test_a_grid_is_times_rounded():
    """By default bins of the events, or by ends."""
    for grid in (100, [1, 5, 40]):
        made, rows = rounded("untied", grid)
        found = curves("untied", given=sites(), exact_times=False, grid=grid)
        wanted = lifelines.KaplanMeierFitter().fit(rows["untied"], rows["event"])
        close(found.survival[0], wanted.predict(found.times.tolist()), atol=1e-12)
        assert str(made) in str(found)
        for given in (grid, made):
            test = bf.stats.logrank(sites(), time="untied", event="event", by="arm", grid=given)
            known = lifelines.statistics.multivariate_logrank_test(
                rows["untied"], rows["arm"], rows["event"]
            )
            close(test.statistic, known.test_statistic, rtol=1e-10)


@pytest.mark.parametrize("time", TIMES)
def test_entry_times(time: str):
    """Curves beside lifelines'; log-rank beside the score test of Cox's regression, whose variance
    is the same, in a loop over times.
    """
    rows = {
        site: frame.assign(entry=np.floor(frame[time] * (np.arange(len(frame)) % 3) / 3))
        for site, frame in frames().items()
    }
    given, known = sites(rows), pooled(rows)
    found = curves(time, "arm", given, entry="entry")
    for place, arm in enumerate((0, 1)):
        own = known[known["arm"] == arm]
        wanted = lifelines.KaplanMeierFitter().fit(own[time], own["event"], entry=own["entry"])
        table = found.table().loc[str(arm)]
        close(table["survival"], wanted.predict(table.index), atol=1e-12)
        risk = [((own["entry"] < t) & (own[time] >= t)).sum() for t in found.times.tolist()]
        close(found.at_risk[place], risk)
        steps = table["events"] / table["at risk"] / (table["at risk"] - table["events"])
        wanted = (table["survival"] * steps.cumsum() ** 0.5).where(table["survival"] > 0, 0.0)
        close(table["se"], wanted, atol=1e-12)
    test = bf.stats.logrank(
        given, time=time, event="event", by="arm", exact_times=True, entry="entry"
    )
    excess = variance = 0.0
    for t in known.loc[known["event"] == 1, time].unique():
        there = known[(known["entry"] < t) & (known[time] >= t)]
        n, d = len(there), ((there[time] == t) & (there["event"] == 1)).sum()
        share = there["arm"].mean()
        excess += (
            (there[time] == t) & (there["event"] == 1) & (there["arm"] == 1)
        ).sum() - d * share
        variance += d * share * (1 - share) * (n - d) / (n - 1) if n > 1 else 0.0
    close(test.statistic, excess**2 / variance, rtol=1e-10)
    assert "entry at 'entry'" in str(found)
    assert "entry at 'entry'" in str(test)
    cells = found.table(), curves(time, "arm", given, entry="entry", exact_times=False).table()
    assert abs(cells[0]["at risk"].iloc[0] - cells[1]["at risk"].iloc[0]) < 30
    with pytest.raises(ValueError, match="no robust errors"):
        curves(time, None, weighted(lambda n: np.ones(n))[0], entry="entry")


def test_how_far_survival_may_be_off_on_a_grid():
    """By how much it moves where neighbouring bins are one, in a loop; a long tail warns."""
    rng = np.random.default_rng(2)
    t, c = rng.weibull(0.8, 4000) * 10 + 1e-3, rng.exponential(12, 4000)
    rows = pd.DataFrame({"t": np.minimum(t, c), "d": t <= c})
    given = bf.stats.tables({"a": rows[::2], "b": rows[1::2]}, also=["t", "d"])
    with pytest.warns(UserWarning, match="survival may be off by .* standard errors") as told:
        found = bf.stats.kaplan_meier(given, time="t", event="d")
    n, d = found.at_risk[0].tolist(), found.events[0].tolist()
    off = [0.0] * len(n)
    for begin in (0, 1):
        survival = 1 - d[0] / n[0] if begin else 1.0
        for k in range(begin, len(n) - 1, 2):
            left = n[k] - d[k] - n[k + 1]
            survival *= 1 - (d[k] + d[k + 1]) / (n[k] - left / 2)
            moved = abs(survival - float(found.survival[0, k + 1]))
            error = float(found.error[0, k + 1])
            off[k + 1] = moved / error if error else 0.0
    most = int(np.argmax(off))
    assert f"off by {off[most]:.2g} standard errors" in found.said
    first = found.times[int(np.argmax(np.array(off) > 1))]
    assert f"Estimates from time {first:g} on are unreliable" in str(told[0].message)
    assert f"(at {found.times[most]:g})" in str(found)
    exact = bf.stats.kaplan_meier(given, time="t", event="d", exact_times=True)
    assert not exact.said
    before = found.times < found.times[most]
    wanted = lifelines.KaplanMeierFitter().fit(rows["t"], rows["d"])
    true = torch.tensor(wanted.predict(found.times.tolist()).to_numpy())
    moved = (found.survival[0] - true).abs() / found.error[0]
    assert float(moved[before].max()) < 1 < float(moved[most])


def weighted(weights: Any) -> Any:
    """Sites whose rows have probability weights, and the rows."""
    rows = {site: frame.assign(w=weights(len(frame))) for site, frame in frames().items()}
    given = sites(rows)
    own = [
        replace(site, weights=torch.tensor(site.frame["w"].to_numpy()), weighing="probability")
        for site in given.sites
    ]
    return replace(given, sites=tuple(own)), pooled(rows)


@pytest.mark.parametrize("by", [None, "kind"])
@pytest.mark.parametrize("time", TIMES)
def test_robust_errors_of_weighted_curves(time: str, by: str | None):
    """By the derivatives of the logarithm of each curve by the weights, all times at once."""
    rng = np.random.default_rng(0)
    given, rows = weighted(lambda n: rng.uniform(0.2, 5, n))
    found = curves(time, by, given)
    for place, group in enumerate(found.groups):
        own = rows if by is None else rows[rows[by] == group]
        at, died = torch.tensor(own[time].to_numpy()), torch.tensor(own["event"].to_numpy() == 1)
        w, there = torch.tensor(own["w"].to_numpy()), found.survival[place] > 0
        times = found.times[there & (found.at_risk[place] > 0)]
        here = torch.as_tensor(times)[:, None]
        read = (died & (at == here)).to(w), (at >= here).to(w)

        def log_survival(w: torch.Tensor, read: Any = read) -> torch.Tensor:
            dying, there = read
            return (1 - (dying @ w) / (there @ w)).log().cumsum(0)

        n = len(times)
        close(found.survival[place][:n], log_survival(w).exp(), rtol=1e-10)
        slopes: Any = torch.autograd.functional.jacobian(log_survival, w)
        wanted = (w * slopes).square().sum(1)
        close(found.log_variance[place][:n], wanted, rtol=1e-8)
        close(found.error[place][:n], found.survival[place][:n] * wanted.sqrt(), rtol=1e-8)
    assert "robust errors" in str(found)
    assert (found.rows, found.counts.sum()) == (SIZES, sum(SIZES.values()))
    thousand, _ = weighted(lambda n: np.full(n, 1e3))
    plain, scaled = curves(time, by), curves(time, by, thousand)
    close(scaled.survival, plain.survival, atol=1e-12)
    close(scaled.log_variance, plain.log_variance, rtol=1e-9)  # Greenwood's


def test_probability_weights_are_refused_where_a_likelihood_is_needed():
    given, _ = weighted(lambda n: np.linspace(1, 2, n))
    when: Any = {"time": "tied", "event": "event"}
    with pytest.raises(ValueError, match=r"log-rank.*probability weights"):
        bf.stats.logrank(given, **when, by="arm")
    with pytest.raises(ValueError, match=r"piecewise.*probability weights"):
        bf.stats.piecewise(given, **when, cuts=[5.0])


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
    options: Any = {"time": "tied", "event": "event", "exact_times": True}
    more = bf.stats.logrank(sites(), by=bf.stats.levels("kind", ["a", "b", "c", "d"]), **options)
    close(more.statistic, bf.stats.logrank(sites(), by="kind", **options).statistic, rtol=1e-12)
    assert more.said == ("group d is left out: none is at risk at an event",)
    with pytest.raises(ValueError, match="not among its levels"):
        curves("tied", bf.stats.levels("kind", ["a", "b"]))
    with pytest.raises(ValueError, match="'site' has one value only"):
        curves("tied", "site", sites({"east": frames()["east"]}))
    with pytest.raises(ValueError, match="'east' has no column 'ward'"):
        curves("tied", "ward")
    for gap in (None, np.nan, pd.NA):
        for dtype in ("object", "string", "category"):
            kind = pd.Series([gap] * 2 + ["a", "b"] * 44, dtype=dtype)
            gaps = {**frames(), "west": frames()["west"].assign(kind=kind)}
            for by in ("kind", bf.stats.levels("kind", ["a", "b", "c"])):
                with pytest.raises(ValueError, match="'west' has 2 rows without 'kind'"):
                    curves("tied", by, bf.stats.tables(gaps, also=["tied", "event"]))
    for kind in ([1] + ["a"] * 89, range(90)):
        mixed = {**frames(), "west": frames()["west"].assign(kind=kind)}
        with pytest.raises(TypeError, match="'<' not supported"):
            curves("tied", "kind", sites(mixed, terms=()))
    text = {site: frame.assign(kind=frame["count"].astype(str)) for site, frame in frames().items()}
    assert curves("tied", "kind", sites(text, terms=())).groups == ("1", "2", "3")


def test_the_diagram_has_a_curve_for_each_group_and_numbers_at_risk():
    pytest.importorskip("matplotlib")
    found = curves("tied", "kind")
    ax = bf.plots.kaplan_meier(found, title="t").axes[0]
    curve = [line for line in ax.lines if line.get_gid() != "censored"]
    ticks = [line for line in ax.lines if line.get_gid() == "censored"]
    assert [line.get_label() for line in curve] == ["a", "b", "c"]
    times, rows = found.times.numpy(), pooled()
    for place, line in enumerate(curve):
        there = found.at_risk[place] > 0
        np.testing.assert_array_equal(line.get_ydata()[1:], found.survival[place, there])
        left = rows[(rows["kind"] == found.groups[place]) & (rows["event"] == 0)]["tied"]
        after = np.unique(np.searchsorted(times, left, side="right"))
        assert ticks[place].get_xdata().tolist() == times[after[after > 0] - 1].tolist()
        assert len(ticks[place].get_xdata()) > 3
    ax.figure.canvas.draw()
    written = [text.get_text() for text in ax.texts]
    assert {"at risk", "a", "b", "c", *(f"{n:g}" for n in found.at_risk[:, 0].tolist())} <= {
        *written
    }


@pytest.mark.parametrize("visits", [6.0, 183.0])
def test_events_that_are_found_at_visits(visits: float):
    """Those who drop out between two visits are not at risk at the next, on or off the lattice."""
    rng = np.random.default_rng(0)
    found, left = visits * rng.geometric(0.12, 400), rng.exponential(4 * visits, 400)
    rows = pd.DataFrame({"t": np.minimum(found, left), "d": (found <= left).astype(int)})
    tables = bf.stats.tables({"a": rows[::2], "b": rows[1::2]}, also=["t", "d"])
    curves = [
        bf.stats.kaplan_meier(tables, time="t", event="d", exact_times=exact).table()
        for exact in (False, True)
    ]
    ours, exact = (one["survival"].to_numpy() for one in curves)
    np.testing.assert_allclose(np.unique(ours), np.unique(exact), rtol=1e-12)
