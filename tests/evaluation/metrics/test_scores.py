"""Scores against hand-made numbers, against other packages, and against what must not matter:
padding, order, type.
"""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.evaluation import metrics
from tests.evaluation.metrics.made import CLASSIFICATION, each, federation, one


def test_hand_made_numbers():
    """Four examples of three classes: right, right, wrong, wrong; of the last class is none."""
    case = one([[0.7, 0.2, 0.1], [0.2, 0.6, 0.2], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], [0, 1, 1, 0])
    # class 0: one right, predicted twice, true twice; class 1: one right, predicted once, true
    # twice; class 2: predicted once, never true
    assert_close(metrics.macro_f1(*case).item(), (2 / 4 + 2 / 3 + 0) / 3)
    # class 0: positives .7, .1 against .2, .5: 2 pairs of 4 won. class 1: .6, .25 against .2, .1: 4
    # of 4. class 2 has no positives.
    assert_close(metrics.auroc(*case).item(), (2 / 4 + 4 / 4) / 2)


def test_perfect_and_worst():
    """Certain and right, then certain and wrong; the surprise of the latter is large and finite."""
    probs, labels = torch.eye(3)[None], torch.arange(3)[None]
    mask = torch.ones_like(labels, dtype=torch.bool)
    expected = {"accuracy": 1, "nll": 0, "brier": 0, "ece": 0, "mce": 0, "macro_f1": 1, "auroc": 1}
    assert {
        name: measure(probs, labels, mask).item() for name, measure in CLASSIFICATION.items()
    } == expected
    wrong = labels.roll(1, -1)
    expected = {
        "accuracy": 0,
        "nll": -math.log(torch.finfo(torch.float64).tiny),
        "brier": 2,
        "ece": 1,
        "mce": 1,
        "macro_f1": 0,
    }
    assert {
        name: CLASSIFICATION[name](probs, wrong, mask).item() for name in expected
    } == pytest.approx(expected)
    assert metrics.auroc(*one([[1.0, 0.0], [0.0, 1.0]], [1, 0])).item() == 0


def test_auroc_ties_count_half_and_may_be_undefined():
    """All scores equal is a coin's AUROC; with one class there is none."""
    level = [[0.5, 0.5]] * 4
    assert metrics.auroc(*one(level, [0, 1, 1, 0])).item() == 0.5
    assert metrics.auroc(*one(level, [1, 1, 1, 1])).isnan().all()


@pytest.mark.parametrize("outputs", [2, 4])
def test_scores_agree_with_sklearn(outputs):
    """AUROC (ties included), F1, accuracy, log loss and Brier score of each client."""
    sklearn = pytest.importorskip("sklearn.metrics")
    probs, labels, mask = federation(outputs=outputs)
    probs = (probs * 20).round()  # ties
    probs /= probs.sum(-1, keepdim=True)
    case = probs, labels, mask
    clients = [(p.numpy(), y.numpy()) for p, y in each(*case)]

    def area(p: np.ndarray, y: np.ndarray) -> float:
        return float(
            np.mean(
                [
                    sklearn.roc_auc_score(y == k, p[:, k])
                    for k in ((1,) if outputs == 2 else range(outputs))
                ]
            )
        )

    assert_close(metrics.auroc(*case).tolist(), [area(p, y) for p, y in clients])
    assert_close(
        metrics.macro_f1(*case).tolist(),
        [sklearn.f1_score(y, p.argmax(-1), average="macro") for p, y in clients],
    )
    assert_close(
        metrics.accuracy(*case).tolist(),
        [sklearn.accuracy_score(y, p.argmax(-1)) for p, y in clients],
    )
    exact = federation(outputs=outputs)
    clients = [(p.numpy(), y.numpy()) for p, y in each(*exact)]
    assert_close(
        metrics.nll(*exact).tolist(),
        [sklearn.log_loss(y, p, labels=range(outputs)) for p, y in clients],
    )
    assert_close(
        metrics.brier(*exact).tolist(),
        [float(((p - np.eye(outputs)[y]) ** 2).sum(-1).mean()) for p, y in clients],
    )
    if outputs == 2:
        assert_close(
            metrics.brier(*exact).tolist(),
            [2 * sklearn.brier_score_loss(y, p[:, 1], scale_by_half=True) for p, y in clients],
        )


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_padding_is_never_read(name):
    """Each client alone, unpadded, has the same value as among padded others, whatever stands in
    the padding.
    """
    probs, labels, mask = federation()
    measure = CLASSIFICATION[name]
    alone = torch.cat(
        [
            measure(p[None], y[None], torch.ones(1, len(y), dtype=torch.bool))
            for p, y in each(probs, labels, mask)
        ]
    )
    assert_close(measure(probs, labels, mask), alone)
    garbage = torch.where(mask[..., None], probs, 7.0), torch.where(mask, labels, 99), mask
    assert_close(measure(*garbage), alone, rtol=0, atol=0)


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_order_does_not_matter(name):
    """Permuting examples changes nothing, permuting clients permutes, permuting classes changes
    nothing.
    """
    probs, labels, mask = federation()
    measure, rng = CLASSIFICATION[name], torch.Generator().manual_seed(1)
    base = measure(probs, labels, mask)
    rows, clients, classes = (
        torch.randperm(n, generator=rng) for n in probs.shape[1::-1] + probs.shape[2:]
    )
    assert_close(measure(probs[:, rows], labels[:, rows], mask[:, rows]), base)
    assert_close(measure(probs[clients], labels[clients], mask[clients]), base[clients])
    moved = classes.argsort()[labels.clamp_min(0)]
    assert_close(measure(probs[..., classes], moved, mask), base)


def test_float32_and_numpy_are_taken_and_nothing_is_changed():
    """Inputs of other types give float64 results and stay as they were."""
    probs, labels, mask = federation()
    before = probs.clone()
    assert metrics.nll(probs.float(), labels.int(), mask).dtype == torch.float64
    assert_close(
        metrics.nll(probs.numpy(), labels.numpy(), mask.numpy()), metrics.nll(probs, labels, mask)
    )
    assert_close(probs, before, equal_nan=True, rtol=0, atol=0)


def test_votes_and_log_probabilities():
    """Exact zeros and ones by hand, in every type; log probabilities are refused, -inf too."""
    votes = torch.tensor([[1, 0, 0], [0.25, 0.75, 0], [0, 0, 1], [0.25, 0.75, 0], [0, 1, 0]])
    y = torch.tensor([0, 1, 2, 0, 2])
    worst = -math.log(torch.finfo(torch.float64).tiny)
    wanted = {
        metrics.accuracy: 3 / 5,
        metrics.nll: (math.log(4 / 3) + math.log(4) + worst) / 5,
        metrics.brier: (0.125 + 0.75**2 + 0.75**2 + 2) / 5,
        metrics.ece: (3 * abs(2 / 3 - 1) + 2 * abs(1 / 2 - 3 / 4)) / 5,
        metrics.macro_f1: (2 / 3 + 2 / 4 + 2 / 3) / 3,
        metrics.auroc: (5.5 / 6 + 2.5 / 4 + 4.5 / 6) / 3,
    }
    for measure, value in wanted.items():
        for kind in (torch.float32, torch.float64, torch.bfloat16):
            assert float(measure(votes.to(kind), y)) == pytest.approx(value, rel=1e-12), measure
        for logs in (votes.log(), (votes + 0.1).log()):
            with pytest.raises(ValueError, match=r"log probabilities exp\(\)"):
                measure(logs, y)
    ones = torch.eye(3, dtype=torch.int64)[y]
    assert float(metrics.nll(ones, y)) == float(metrics.ece(ones, y)) == 0
