"""A user's own measures, client by client."""

import math

import numpy as np
import pytest
import torch

from bayesfl.data import ClientData
from bayesfl.evaluation.own_measures import check_measures, means, measured
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions

SPLIT = ClientData(
    torch.zeros(5, 1),
    torch.tensor([0, 1, 1, 0, 1]),
    torch.tensor([0, 1, 2, 3, 4]),
    np.array([2, 0, 3]),
)
MASK = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
PREDICTIONS = Predictions(mask=MASK, epistemic=torch.zeros(3, 3), probs=torch.full((3, 3, 2), 0.5))


def test_a_measure_is_a_mean_over_the_clients_that_have_one():
    """Each is given one client's rows without padding, with its own labels; a client without rows
    has none, and NaN is left out of the mean.
    """
    seen: list[tuple[int, list[int]]] = []

    def ones(predictions: Predictions, labels: torch.Tensor) -> float:
        seen.append((len(predictions.mask), labels.tolist()))
        return float(labels.sum())

    found = measured(
        {
            "ones": ones,
            "none": lambda p, y: math.nan,
            "first": lambda p, y: y[0] if len(y) == 2 else math.nan,
        },
        LocalPredictions(*PREDICTIONS.of_split(SPLIT), np.arange(3)),
    )
    assert seen == [(2, [0, 1]), (3, [1, 0, 1])]
    np.testing.assert_array_equal(found["ones"], [1.0, math.nan, 2.0])
    np.testing.assert_array_equal(found["first"], [0.0, math.nan, math.nan])
    mean = means(found)
    assert mean["ones"] == 1.5
    assert math.isnan(mean["none"])
    assert mean["first"] == 0.0


def test_names_are_names():
    check_measures("measures", {"f2": max, "top_5": max})
    for name in ("", "2f", "a b", "a.b", "x" * 41):
        with pytest.raises(ValueError, match="measures"):
            check_measures("measures", {name: max})
