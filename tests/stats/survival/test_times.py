"""Grids, horizons and the union of event times."""

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.stats.asking import Questions
from bayesfl.stats.survival import times as module


@pytest.mark.parametrize(
    ("time", "wanted"),
    [(3472.0, 4000), (4000.0, 4000), (0.3, 0.3), (0.301, 0.4), (9.5, 10), (1.0, 1), (96e-5, 1e-3)],
)
def test_a_horizon_is_rounded_up_to_one_digit(time: float, wanted: float):
    found = module._at_step(module._step_above(time))
    assert found == pytest.approx(wanted, rel=1e-12)
    assert found >= time


def test_horizons_are_never_below():
    rng = np.random.default_rng(0)
    for time in np.exp(rng.uniform(-12, 12, 2000)).tolist():
        found = module._at_step(module._step_above(time))
        assert time <= found <= 2.0000001 * time


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
    found = asked.conduct(module.EventTimes(4, "t", "e"))["times"]
    rows = pd.concat(frames.values())
    wanted = np.unique(rows.loc[rows["e"] == 1, "t"])
    assert torch.equal(found, torch.from_numpy(wanted))


def test_where_rows_are_at_risk_last():
    """Those censored between exact times are not at risk at the next; rounded up, they are."""
    times = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    assert module.Grid((1.0, 2.0), exact_times=True).last(times, "a").tolist() == [-1, 0, 0, 1]
    assert module.Grid((1.0, 2.0), exact_times=False).last(times, "a").tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="site 'a' has 2 times beyond"):
        module.Grid((1.0,), exact_times=False).last(times, "a")
