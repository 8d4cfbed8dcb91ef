"""Grids of times, and the union of event times."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.stats import Policy
from bayesfl.stats.asking import Questions
from bayesfl.stats.policy import Refusal
from bayesfl.stats.survival import times as module
from bayesfl.stats.survival.curves import Counts
from bayesfl.stats.survival.groups import groups_of


@pytest.mark.parametrize("aggregation", [None, bf.SecureSum(range=2.0**16, step=1.0)])
def test_the_union_of_event_times_is_exact(aggregation: bf.SecureSum | None):
    """To the bit, under sums that round to whole numbers, of times that sites share or not."""
    rng = np.random.default_rng(0)
    frames = {
        site: pd.DataFrame(
            {
                "t": np.append(np.exp(rng.uniform(-12, 12, 20)), [0.1 + 0.2, 1e9]),
                "e": np.append(rng.integers(0, 2, 20), [1, 1]),
            }
        )
        for site in "abc"
    }
    frames["none"] = pd.DataFrame({"t": [5.0], "e": [0]})
    asked = Questions(bf.stats.tables(frames, also=["t", "e"]), aggregation)
    found = asked.conduct(module.EventTimes("t", "e", 4))["times"]
    rows = pd.concat(frames.values())
    wanted = np.unique(rows.loc[rows["e"] == 1, "t"])
    assert torch.equal(found, torch.from_numpy(wanted))


def test_where_rows_are_at_risk_last():
    """Events at their bin's end; who is censored before its middle, at the end before."""
    times = torch.tensor([0.4, 0.5, 1.0, 1.4, 1.5, 2.0, 7.0], dtype=torch.float64)
    (site,) = bf.stats.tables({"a": pd.DataFrame({"x": range(7)})}).sites
    group, none = torch.zeros(7), torch.zeros(7, dtype=torch.bool)
    ends = (1.0, 2.0)

    def last(events: torch.Tensor, **options: Any) -> list[int]:
        return (
            module.Grid(ends, exact_times=False, **options)
            .last(site, times, events, group)
            .tolist()
        )

    assert last(none, middles=ends) == [-1, -1, 0, 0, 0, 1, 1]
    assert last(none) == [-1, 0, 0, 0, 1, 1, 1]
    assert last(none, middles=(0.2, 1.9)) == [0, 0, 0, 0, 0, 1, 1]
    assert last(times < 7, middles=ends) == [0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="site 'a' has 1 events beyond"):
        last(~none)


def drawn(sites: int, n: int, seed: int, by: bool = False) -> dict[str, pd.DataFrame]:
    """Rows of sites of several sizes, with skewed times."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    rows = pd.DataFrame({"x": x, "g": rng.integers(0, 2, n) * by})
    event, censored = 90 * np.exp(-0.5 * x) * rng.weibull(0.6, n), rng.exponential(200, n)
    rows["t"], rows["d"] = np.minimum(event, censored) + 1e-3, (event <= censored).astype(int)
    share = np.arange(sites, 0, -1) / (sites * (sites + 1) / 2)
    return {f"s{k}": part for k, part in rows.groupby(rng.choice(sites, n, p=share))}


def made(frames: Any, by: Any = None, grid: int = 100, **options: Any) -> tuple[Any, Any]:
    """The bins of some rows, and the questions."""
    tables = bf.stats.tables(frames, terms=["x"], also=["t", "d", "g"], **options)
    asked = Questions(tables)
    known = module.follow(asked, "t", "d")
    return module.grid_of(asked, "t", "d", known, grid, False, by), asked


def test_bins_hold_equal_shares_of_the_events():
    """However long one row was followed, and in any unit; the last ones are without events."""
    frames = drawn(4, 3000, 0)
    rows = pd.concat(frames.values())
    grid, _ = made(frames)
    died = rows["t"][rows["d"] == 1]
    counts = np.histogram(died, [0, *grid.ends])[0]
    bins = int((counts > 0).sum())
    assert 60 < bins <= 100  # of a lattice of two digits
    assert counts[:bins].min() > 0
    assert grid.share == pytest.approx(len(died) / bins)
    assert counts.max() < 3 * len(died) / bins
    assert grid.ends[bins - 1] >= died.max() > grid.ends[bins - 2]
    slipped = {site: frame.copy() for site, frame in frames.items()}
    censored = slipped["s1"].index[slipped["s1"]["d"] == 0][0]
    slipped["s1"].loc[censored, "t"] = 1e7
    found, _ = made(slipped)
    assert found.ends[:bins] == grid.ends[:bins]
    assert made({s: f.assign(t=f["t"] * 1e4) for s, f in frames.items()})[0].ends[:bins] == tuple(
        float(f"{end * 1e4:.1e}") for end in grid.ends[:bins]
    )
    few, _ = made(frames, grid=20)
    assert (np.histogram(died, [0, *few.ends])[0] > 0).sum() <= 20


@pytest.mark.parametrize("by", [None, bf.stats.levels("g", [0, 1])], ids=["all", "groups"])
@pytest.mark.parametrize("seed", range(3))
def test_under_a_policy_no_cell_holds_one_or_two(seed: int, by: Any):
    """Of events, and of those who leave between two times, at each site and of each group."""
    frames = drawn(3, 3000, seed, by is not None)
    policy = Policy(min_level=4)
    grid, asked = made(frames, by, policy=policy)
    assert all(float(f"{end:.1e}") == end for end in grid.ends)
    counts = Counts("t", "d", grid, groups_of(asked.sites, by))
    for site in asked.sites.sites:
        cells, _ = counts.cells({}, site)
        assert cells.unique(return_counts=True)[1].min() >= 4
    rows = pd.concat(frames.values())
    events = np.histogram(rows["t"][rows["d"] == 1], [0, *grid.ends])[0]
    assert events[events > 0].min() >= 10
    assert (events > 0).sum() >= 15


@pytest.mark.filterwarnings("ignore:.* events share a bin")
def test_a_site_with_few_events_is_named():
    """And the ways on go on."""
    frames = drawn(5, 600, 0)
    tables = bf.stats.tables(frames, terms=["x"], also=["t", "d"], policy=Policy())
    when: Any = {"time": "t", "event": "d"}
    with pytest.raises(ValueError, match=r"9 bins .* fewest events, 's4' \d+, .*per_site"):
        bf.stats.cox(tables, **when)
    assert "s4" in bf.stats.cox(tables, **when, baseline="per_site").rows
    assert len(bf.stats.cox(tables.only(["s0", "s1", "s2", "s3"]), **when).rows) == 4
    assert len(made(frames)[0].ends) > 60  # without a policy nothing is joined
    for grid in ({"exact_times": True}, {"grid": [1.0, 1e4]}):
        with pytest.raises(Refusal, match="rule exact_times"):
            bf.stats.cox(tables, **when, **grid)


@pytest.mark.filterwarnings("ignore:.* bins? of times")
def test_other_bins_do_not_tell_who_is_between():
    """A grid whose ends part three events from another's is refused; one that the library makes for
    groups, or for fewer sites, is not.
    """
    frames = drawn(3, 3000, 0, True)
    policy = Policy()
    tables = bf.stats.tables(frames, terms=["x"], also=["t", "d", "g"], policy=policy)
    when: Any = {"time": "t", "event": "d"}
    first = bf.stats.kaplan_meier(tables, **when)
    for sites in (tables, tables.only(["s0", "s1"])):
        bf.stats.kaplan_meier(sites, **when, by=bf.stats.levels("g", [0, 1]))
        bf.stats.cox(sites, **when)
    ends = policy.ledger.ends["s0"]["t, d"]
    times = frames["s0"]["t"][frames["s0"]["d"] == 1]
    counts = np.histogram(times, [0, *ends])[0]
    assert counts[counts > 0].min() >= 3
    assert {*first.times.tolist()} <= {*ends}
    few = next(
        (k, beside)
        for k, (low, high) in enumerate(itertools.pairwise(ends))
        for beside in {float(f"{end:.1e}") for end in np.linspace(low, high, 50)}
        if 0 < times.between(low, beside, inclusive="right").sum() < 3
    )
    grid = module.Grid((*ends[: few[0]], few[1], *ends[few[0] + 1 :]), exact_times=False)
    with pytest.raises(Refusal, match="min_level of a cell, as an earlier analysis had other bins"):
        bf.stats.kaplan_meier(tables, **when, grid=grid)
    fresh = bf.stats.tables(frames, terms=["x"], also=["t", "d", "g"], policy=Policy())
    assert few[1] in bf.stats.kaplan_meier(fresh, **when, grid=grid).times


def test_the_cheapest_cuts():
    """Beside all ways to cut."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 7):
        cost = torch.from_numpy(rng.exponential(size=(1 + size, 1 + size)))
        cost[torch.from_numpy(rng.random(cost.shape) < 0.2)] = torch.inf
        ways = [
            [*cuts, size] for k in range(size) for cuts in itertools.combinations(range(1, size), k)
        ]
        totals = [sum(float(cost[a, b]) for a, b in itertools.pairwise([0, *way])) for way in ways]
        found = module.cheapest(cost)
        assert found == (ways[int(np.argmin(totals))] if min(totals) < np.inf else [])


@pytest.mark.filterwarnings("ignore:survival may be off")
@pytest.mark.parametrize("policy", [None, Policy()], ids=["none", "default"])
def test_secure_sums_make_the_same_bins(policy: Any):
    when: Any = {"time": "t", "event": "d"}
    tables = bf.stats.tables(drawn(3, 900, 0), terms=["x"], also=["t", "d"], policy=policy)
    plain = bf.stats.kaplan_meier(tables, **when)
    hidden = bf.stats.kaplan_meier(tables, **when, aggregation=bf.SecureSum(range=2.0**20))
    assert torch.equal(plain.times, hidden.times)
    assert torch.equal(plain.survival, hidden.survival)
