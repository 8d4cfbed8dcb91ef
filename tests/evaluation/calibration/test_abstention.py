"""Abstention: the threshold against tests in a loop, its promise over many draws, and what is
answered.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import beta

from bayesfl.evaluation.calibration import Abstention, fit
from bayesfl.evaluation.calibration.abstention import THRESHOLDS
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from tests.evaluation.calibration.made import CLASSES, alone, local, part


def sure(rows: int, seed: int, *, wrong_at: float = 1.0) -> tuple[LocalPredictions, np.ndarray]:
    """One client of two classes, whose doubt d is uniform within (0, .5) squared, and that is wrong
    with probability `wrong_at` d.
    """
    rng = np.random.default_rng(seed)
    doubt = rng.uniform(0, 0.5**0.5, rows) ** 2
    wrong = rng.uniform(size=rows) < wrong_at * doubt
    probs = torch.from_numpy(np.stack([1 - doubt, doubt], -1))[None]
    found = Predictions(
        mask=torch.ones(1, rows, dtype=torch.bool),
        epistemic=torch.full((1, rows), torch.nan),
        probs=probs,
    )
    found = replace(found, labels=torch.from_numpy(wrong.astype(np.int64))[None])
    return LocalPredictions(*found.rows(), np.zeros(1, np.int64)), doubt


@pytest.mark.parametrize("risk", [0.25, 0.3])
def test_the_threshold_is_that_of_tests_one_by_one(risk: float):
    """Over all clients' rows: bounds by the beta distribution, until the first that is too high."""
    given = local((120, 7, 0, 300), seed=3, heat=1.0)
    step = Abstention(risk=risk, delta=0.1)
    found = fit(step, given, CLASSES)
    z = torch.cat([z for z, _ in alone(given)])
    y = torch.cat([y for _, y in alone(given)])
    doubt, wrong = 1 - z.softmax(-1).amax(-1), z.argmax(-1) != y
    best = -math.inf
    for t in np.linspace(risk, 1.0, THRESHOLDS):
        below = doubt <= t
        n, k = int(below.sum()), int((wrong & below).sum())
        if k == n or beta.ppf(0.9, k + 1, n - k) > risk:
            break
        best = t
    assert best > risk
    assert float(found.state["threshold"]) == pytest.approx(best)
    state = step.start(CLASSES)
    for j in range(4):
        assert torch.equal(
            step.answer(state, part(given, j))["n_wrong"][0],
            step.answer(state, given)["n_wrong"][j],
        )
    answered = found.apply(given).predictions.answered
    assert torch.equal(answered, doubt <= best)
    assert 0 < int(answered.sum()) < len(y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no answer is given")
def test_the_promise_holds_over_draws():
    """True risk above 5 % in at most 5 % of 600 federations; the largest threshold whose observed
    risk is small fails more often.
    """
    broken = naive = 0
    answered = []
    for seed in range(600):
        given, doubt = sure(1500, seed)
        threshold = float(
            fit(Abstention(split="test"), given, Outputs("classification", 2)).state["threshold"]
        )
        # E[d | d <= t] of d = u^2, u uniform, is t / 3, up to the largest doubt
        broken += threshold > 0 and min(threshold, 0.5) / 3 > 0.05
        order = np.argsort(doubt)
        observed = given.labels.numpy()[order].cumsum() / np.arange(1, 1501)
        largest = doubt[order][np.flatnonzero(observed <= 0.05).max()]
        naive += largest / 3 > 0.05
        answered.append((doubt <= threshold).mean())
    assert broken / 600 <= 0.05
    assert naive / 600 > 0.1
    assert np.mean(answered) > 0.3


def test_too_little_to_show_a_small_risk():
    """Nothing is answered, and a warning says why."""
    given, _ = sure(40, 0)
    with pytest.warns(
        UserWarning,
        match=r"no answer is given: of \d+ rows in 'calibration' of a doubt of at most 0.05",
    ):
        found = fit(Abstention(), given, Outputs("classification", 2))
    assert not found.apply(given).predictions.answered.any()


def test_the_first_failure_ends_the_sequence():
    """Also where a larger threshold would pass again: with fresh rows that are all right."""
    step = Abstention(risk=0.1, delta=0.1)
    state = step.start(CLASSES)
    rows = torch.zeros(THRESHOLDS).double()
    wrong = torch.zeros(THRESHOLDS).double()
    rows[[0, 10, 20]], wrong[10] = torch.tensor([100.0, 20.0, 1000.0]).double(), 15
    found, done = step.solve(state, {"n_rows": rows, "n_wrong": wrong})
    assert done
    assert float(found["threshold"]) == float(state["thresholds"][9])


def test_bad_options():
    for call, words in (
        (lambda: Abstention(risk=0.0), "^risk must lie within"),
        (lambda: Abstention(delta=1.0), "^delta must lie within"),
        (lambda: Abstention().start(Outputs("regression", 1)), "this is a regression"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_labels_of_one_row_are_not_counted_as_rows():
    """Ten labels of a row that fail together are no ten trials."""
    probs = torch.rand(1, 20, 10, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    labels = torch.zeros(1, 20, 10, dtype=torch.int64)
    found = Predictions(
        mask=torch.ones(1, 20, dtype=torch.bool),
        epistemic=torch.full((1, 20, 10), torch.nan),
        probs=probs,
        labels=labels,
    )
    with pytest.raises(
        ValueError, match="counts rows as independent, and the several labels of one row are not"
    ):
        fit(
            Abstention(),
            LocalPredictions(*found.rows(), np.zeros(1, np.int64)),
            Outputs("classification", 3),
        )
