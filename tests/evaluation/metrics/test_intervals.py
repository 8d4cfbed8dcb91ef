"""Measures of intervals: by hand, against the loss of the likelihood, and for clients of different
size.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.metrics.intervals import measured_intervals
from bayesfl.evaluation.metrics.measured import Measured
from bayesfl.likelihoods import Quantiles
from tests.cases import numbers


def intervals() -> tuple[torch.Tensor, ...]:
    """Two clients of three and two examples, and two targets."""
    lower = numbers(2, 3, 2)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    return lower, lower + numbers(2, 3, 2, seed=1).abs(), lower + numbers(2, 3, 2, seed=2), mask


def measured(
    lower: torch.Tensor,
    upper: torch.Tensor,
    y: torch.Tensor,
    middle: torch.Tensor | None = None,
    *,
    mask: torch.Tensor,
    level: float = 0.9,
) -> Measured:
    """The measures of lower and upper ends, targets, and middles where these are not between."""
    middle = (lower + upper) / 2 if middle is None else middle
    rows = [t[mask] for t in (lower, upper, y, middle)]
    return measured_intervals(Segments(mask.sum(1)), *rows, level=level)


def by_client(*padded: torch.Tensor, **options: Any) -> dict[str, np.ndarray]:
    """The measures of each client."""
    return measured(*padded, **options).table()


def test_intervals_by_hand():
    """One inside, one 2 above; at level 0.8 what lies outside counts ten times."""
    lower, upper, y = torch.zeros(1, 2, 1), torch.ones(1, 2, 1), torch.tensor([[[0.5], [3.0]]])
    found = measured(lower, upper, y, mask=torch.ones(1, 2).bool(), level=0.8).summary()
    wanted = {
        "coverage": 0.5,
        "width": 1,
        "interval_score": (1 + (1 + 10 * 2)) / 2,
        "rmse": math.sqrt(2.5**2 / 2),
        "pooled_coverage": 0.5,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_the_loss_is_the_likelihoods():
    """Summed over targets, as `Quantiles` trains it; each client counts once, and all examples
    pooled.
    """
    lower, upper, y, mask = intervals()
    outputs = torch.cat([lower, torch.expm1(upper - lower).log()], -1)
    losses = Quantiles(0.8).nll(outputs, y)
    found = measured(lower, upper, y, mask=mask, level=0.8).summary()
    own = [float(losses[0].mean()), float(losses[1, :2].mean())]
    assert found["pinball"] == pytest.approx(sum(own) / 2)
    assert found["pooled_pinball"] == pytest.approx(float(losses[mask].mean()))
    table = by_client(lower, upper, y, mask=mask, level=0.8)
    assert (*table["client"], *table["examples"]) == (0, 1, 3, 2)
    assert table["pinball"].tolist() == pytest.approx(own)
    assert set(found) == {*list(table)[2:], *(f"pooled_{name}" for name in list(table)[2:])}


def test_padding_is_not_read_and_broken_clients_are_nan():
    lower, upper, y, mask = intervals()
    before = by_client(lower, upper, y, mask=mask)
    for t in (lower, upper, y):
        t[1, 2] = math.nan
    after = by_client(lower, upper, y, mask=mask)
    assert all((before[name] == after[name]).all() for name in before)
    upper[0, 1, 0] = math.nan
    assert by_client(lower, upper, y, mask=mask)["width"].tolist() == pytest.approx(
        [math.nan, before["width"][1]], nan_ok=True
    )
    assert all(math.isnan(of) for of in measured(lower, upper, y, mask=mask).summary().values())


def test_endless_intervals_are_infinitely_wide():
    """They hold their targets; the middle of one is not known, and a lower end of +inf is no
    interval.
    """
    lower, upper, y, mask = intervals()
    before = by_client(lower, upper, y, mask=mask)
    lower[0, 1], upper[0, 1] = -math.inf, math.inf
    found = by_client(lower, upper, y, mask=mask)
    inside = ((lower <= y) & (y <= upper)).double().mean(-1)
    assert found["coverage"].tolist() == pytest.approx(
        [float(inside[0].mean()), before["coverage"][1]]
    )
    for name in ("width", "pinball", "interval_score"):
        assert found[name].tolist() == [math.inf, before[name][1]]
    assert math.isnan(found["rmse"][0])
    middle = y + 0.5  # of a mean that is known apart
    assert by_client(lower, upper, y, middle, mask=mask)["rmse"].tolist() == pytest.approx(
        [0.5, 0.5]
    )
    found_apart = measured(lower, upper, y, middle, mask=mask).summary()
    assert found_apart["pooled_rmse"] == pytest.approx(0.5)
    summary = measured(lower, upper, y, mask=mask).summary()
    assert math.isnan(summary["rmse"])  # and not that of the clients whose intervals end
    assert summary["width"] == summary["pooled_interval_score"] == math.inf
    assert summary["coverage"] == pytest.approx(found["coverage"].mean())
    lower[0, 1] = math.inf
    assert math.isnan(by_client(lower, upper, y, mask=mask)["width"][0])
