"""Baseline hazards and predicted survival of Cox's regression: beside lifelines', and by their
definition in a loop, with derivatives by autograd.
"""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from tests.stats.survival.made import COLUMNS, TERMS, TIMES, frames, pooled, sites

lifelines = pytest.importorskip("lifelines", reason="lifelines is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:Starting with pandas")  # within lifelines
close = np.testing.assert_allclose
WHEN: dict[str, Any] = {"event": "event", "exact_times": True}


def entered() -> dict[str, pd.DataFrame]:
    """The sites' rows, half of whom come under observation late."""
    return {
        site: frame.assign(entry=np.floor(frame["tied"] / 2) * (np.arange(len(frame)) % 2))
        for site, frame in frames().items()
    }


@pytest.mark.parametrize("strata", [None, "arm"])
def test_lifelines_predictions(strata: str | None):
    """Where no times tie, Breslow's estimate, to which lifelines' own is equal."""
    rows, terms = pooled(), [term for term in TERMS if term != strata]
    columns = [column for column in COLUMNS if column != strata]
    by = [] if strata is None else [strata]
    wanted = lifelines.CoxPHFitter().fit(
        rows[[*columns, "untied", "event", *by]],
        "untied",
        "event",
        strata=by or None,
        fit_options={"precision": 1e-14, "r_precision": 1e-15},
    )
    fit = bf.stats.cox(sites(terms=terms), time="untied", strata=strata, **WHEN)
    some = rows.iloc[::60]
    found = fit.survival(some)["survival"].unstack()
    theirs = wanted.predict_survival_function(some, times=found.columns.to_numpy())
    followed = found.notna().to_numpy()
    assert followed.mean() > 0.9
    close(
        found.to_numpy()[followed], theirs[found.index].T.to_numpy()[followed], rtol=0, atol=1e-10
    )
    known = wanted.baseline_cumulative_hazard_
    for name, line in fit.survival()["hazard"].groupby(level="row"):
        own = known.iloc[:, 0] if strata is None else known[name]
        close(line, own[line.index.get_level_values("time")], rtol=0, atol=1e-10)
    assert fit.survival().index.levels[0].tolist() == (["all"] if strata is None else [0, 1])


def by_definition(rows: pd.DataFrame, theta: torch.Tensor, x: np.ndarray, until: float) -> Any:
    """Efron's cumulative hazard at columns x, event by event, and the sum of 1 / phi^2."""
    design = torch.tensor(rows[COLUMNS].to_numpy(float) - x)
    relative = (design @ theta).exp()
    time, entry, died = (torch.tensor(rows[c].to_numpy(float)) for c in ("tied", "entry", "event"))
    hazard, spread = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for at in time[(died == 1) & (time <= until)].unique():
        tied, there = (died == 1) & (time == at), (time >= at) & (entry < at)
        for number in range(d := int(tied.sum())):
            phi = relative[there].sum() - number / d * relative[tied].sum()
            hazard, spread = hazard + 1 / phi, spread + phi**-2
    return hazard, spread


@pytest.mark.parametrize("strata", [None, "site"])
def test_hazards_and_their_errors_under_ties(strata: str | None):
    """The variance is that of the hazard's steps, and of the coefficients by the delta method."""
    rows = entered()
    fit = bf.stats.cox(sites(rows), time="tied", strata=strata, entry="entry", **WHEN)
    chosen = pooled(rows).iloc[[3, 100, 200]]
    found = fit.survival(chosen, level=0.8)
    assert list(found.columns) == ["hazard", "se(hazard)", "survival", "10 %", "90 %"]
    for name, row in chosen.iterrows():
        mine = rows if strata is None else {row["site"]: rows[row["site"]]}
        x = row[COLUMNS].to_numpy(float)
        lines = found.loc[name]
        for at in (0, 10, len(lines) - 1):
            until, line = lines.index[at], lines.iloc[at]

            def hazard(
                theta: torch.Tensor, mine: Any = mine, x: Any = x, until: Any = until
            ) -> Any:
                return by_definition(pooled(mine), theta, x, until)

            wanted, spread = hazard(fit.estimate)
            slope: Any = torch.autograd.functional.jacobian(lambda t: hazard(t)[0], fit.estimate)
            error = float(spread + slope @ fit.covariance @ slope) ** 0.5
            close(line["hazard"], wanted, rtol=1e-10)
            close(line["se(hazard)"], error, rtol=1e-9)
            reach = 1.2815515655446004 * error / float(wanted)
            ends = np.exp(-float(wanted) * np.exp([reach, -reach]))
            close(line[["10 %", "90 %"]].to_numpy(float), ends, rtol=1e-8)


@pytest.mark.parametrize("time", TIMES)
def test_without_terms_it_is_nelsons_and_aalens(time: str):
    """Under ties that of Fleming and Harrington."""
    given = bf.stats.tables(frames(), also=[time, "event"])
    found = bf.stats.cox(given, time=time, **WHEN).survival().loc["all"]
    rows = pooled()
    wanted = lifelines.NelsonAalenFitter(nelson_aalen_smoothing=True)
    wanted.fit(rows[time], rows["event"])
    close(found["hazard"], wanted.cumulative_hazard_.loc[found.index].iloc[:, 0], rtol=1e-10)
    close(found["se(hazard)"] ** 2, wanted._cumulative_sq.loc[found.index], rtol=1e-10)


def test_offsets_and_grids():
    """An offset is a column whose coefficient is 1; a grid's curve ends at its last rows."""
    rows = {site: frame.assign(known=0.01 * frame["age"]) for site, frame in frames().items()}
    fit = bf.stats.cox(sites(rows, offset="known"), time="tied", **WHEN)
    chosen = pooled(rows).iloc[:5]
    wanted = bf.stats.cox(sites(), time="tied", **WHEN).survival(chosen)
    close(fit.survival(chosen), wanted, rtol=1e-8)
    with pytest.warns(UserWarning, match="events share a bin"):
        binned = bf.stats.cox(sites(), time="tied", event="event", grid=[1.0, 10.0, 40.0, 50.0])
    assert binned.survival(chosen).loc[0].index.tolist() == [1, 10, 40]
    with pytest.raises(ValueError, match="there is no survival of this fit"):
        bf.stats.cox(sites(), time="tied", event="event", baseline="per_site").survival()
