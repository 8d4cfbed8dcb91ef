"""The choice between two models: exact tests on discordant rows, and whose predictions
are taken.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bayesfl.evaluation.calibration import Choice, fit
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from tests.evaluation.calibration.made import CLASSES, local, split


def other(given: LocalPredictions, share: float, seed: int = 1) -> Predictions:
    """Predictions of the same rows, of which such a share is right, and none of client 3's."""
    found = given.predictions
    g = torch.Generator().manual_seed(seed)
    right = torch.rand(found.mask.shape, generator=g) < share
    right[given.clients.owner == 3] = False
    named = torch.where(right, found.labels, (found.labels + 1) % 4)
    probs = 0.1 + 0.6 * torch.nn.functional.one_hot(named, 4).double()
    return replace(found, probs=probs, labels=None)


def test_clients_take_what_is_better_on_discordant_rows():
    """P(wins >= observed | 1/2) by enumeration, of each client alone; without rows a client keeps
    its own.
    """
    given = local((40, 7, 0, 55), seed=2)
    both = replace(given, shared=other(given, 0.95))
    found = fit(Choice(delta=0.05), both, CLASSES)
    for j in range(4):
        own, theirs = (
            split(given, p.argmax(-1) == given.labels)[j]
            for p in (given.predictions.probs, both.shared.probs)
        )
        better, worse = int((theirs & ~own).sum()), int((own & ~theirs).sum())
        n = better + worse
        p = sum(math.comb(n, k) for k in range(better, n + 1)) / 2**n
        assert (int(found.own["better"][j]), int(found.own["worse"][j])) == (better, worse)
        assert bool(found.own["shared"][j]) == (p <= 0.05)
    assert found.own["shared"].tolist() == [True, True, False, False]
    probs = found.apply(both).predictions.probs
    torch.testing.assert_close(probs[:47], both.shared.probs[:47])
    torch.testing.assert_close(probs[47:], given.predictions.probs[47:])
    assert found.state == {}


def test_a_tie_keeps_the_own_model():
    """Equal predictions have no discordant rows; four wins of four are not enough at 5 %,
    five are.
    """
    given = local((4, 5, 0, 5))
    labels = torch.zeros(14, dtype=torch.int64)
    bad = torch.tensor([0.1, 0.7, 0.1, 0.1]).expand(14, 4).double()
    good = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(14, 4).double()
    predictions = replace(given.predictions, probs=bad, labels=labels)
    both = replace(
        given, predictions=predictions, shared=replace(predictions, probs=good, labels=None)
    )
    assert fit(Choice(delta=0.05), both, CLASSES).own["shared"].tolist() == [
        False,
        True,
        False,
        True,
    ]
    same = replace(both, shared=replace(predictions, labels=None))
    assert not fit(Choice(delta=0.5), same, CLASSES).own["shared"].any()


def test_of_numbers_the_nearer_mean_wins():
    mask = torch.ones(2, 8, dtype=torch.bool)
    y, blank = torch.zeros(2, 8), torch.full((2, 8), torch.nan)
    one = torch.ones(2, 8, 1)
    mean = torch.stack([torch.full((8, 1), 0.5), torch.full((8, 1), 2.0)])
    own = Predictions(mask=mask, epistemic=blank, mean=one, variance=one, labels=y)
    theirs = Predictions(mask=mask, epistemic=blank, mean=mean, variance=2 * one)
    given = LocalPredictions(*own.rows(), np.arange(2), shared=theirs.rows()[0])
    found = fit(Choice(), given, Outputs("regression", 1))
    assert found.own["shared"].tolist() == [True, False]
    changed = found.apply(given).predictions
    assert changed.variance[::8, 0].tolist() == [2.0, 1.0]


def test_there_must_be_a_servers_model():
    for call, words in (
        (lambda: fit(Choice(), local(), CLASSES), "without those of the server's model"),
        (lambda: Choice(delta=0.0), r"^delta must lie within"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
