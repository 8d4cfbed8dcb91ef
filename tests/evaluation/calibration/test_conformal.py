"""Conformal sets by the shrunk threshold: against its definition, its coverage, scores by hand,
intervals.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.evaluation.calibration import Conformal, fit
from bayesfl.evaluation.calibration.conformal import (
    HISTOGRAM_BINS,
    thresholds,
)
from bayesfl.evaluation.calibration.scores import class_scores
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from bayesfl.likelihoods import Quantiles
from tests.evaluation.calibration.made import CLASSES, alone, local, part, split

EDGES = torch.arange(1, HISTOGRAM_BINS + 1, dtype=torch.float64) / HISTOGRAM_BINS


def counted(scores: torch.Tensor, edges: torch.Tensor = EDGES) -> torch.Tensor:
    return torch.bincount(torch.bucketize(scores, edges), minlength=len(edges) + 1).double()


def by_definition(own: torch.Tensor, everyone: torch.Tensor, level: float, shrink: float) -> float:
    """The smallest s that could be it at which own scores and n0 of everyone's, at their bins'
    upper ends, reach the level.
    """
    rounded = torch.cat([EDGES, torch.tensor([math.inf]).double()])[
        torch.bucketize(everyone, EDGES)
    ]
    for s in sorted({*own.tolist(), *EDGES.tolist()}):
        if (
            float((own <= s).sum() + shrink * (rounded <= s).double().mean())
            >= level * (len(own) + 1 + shrink * (1 + 1 / len(everyone))) - 1e-9
        ):
            return s
    return math.inf


@pytest.mark.parametrize("shrink", [0.0, 2.5, 20.0, 300.0])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_the_threshold_is_as_defined(shrink: float, level: float):
    """For clients of any size, with scores beyond the histogram; everything where no score
    suffices.
    """
    g = torch.Generator().manual_seed(0)
    sizes = (0, 1, 8, 9, 40)
    own = [torch.rand(n, generator=g, dtype=torch.float64) * 1.05 for n in sizes]
    # At the ends of bins, some twice.
    own[1:4] = [(16 * scores).round() / 16 for scores in own[1:4]]
    everyone = torch.cat([*own, torch.rand(100, generator=g, dtype=torch.float64)])
    clients = Segments(torch.tensor(sizes))
    found = thresholds(
        torch.cat(own), clients, EDGES, counted(everyone), level=level, shrink=shrink
    )
    assert found.tolist() == [by_definition(local, everyone, level, shrink) for local in own]


def test_pooled_and_own_scores_are_split_conformal():
    """The k-th smallest score, k = ceil((n + 1) level), which is everything beyond n; the pooled
    one at most a bin above.
    """
    given = local((30, 7, 0, 55), seed=4)
    scores = [(1 - z.exp().gather(-1, y[:, None])[:, 0]).sort().values for z, y in alone(given)]

    def smallest(of: torch.Tensor) -> float:
        k = math.ceil((len(of) + 1) * 0.9)
        return float(of[k - 1]) if k <= len(of) else math.inf

    own = fit(Conformal(shrink=0), given, CLASSES).own["threshold"][:, 0]
    assert own[[1, 2]].tolist() == [math.inf, math.inf]  # 7 scores and none are too few for 90 %
    assert own[[0, 3]].tolist() == pytest.approx([smallest(scores[0]), smallest(scores[3])])
    pooled = fit(Conformal(shrink=math.inf), given, CLASSES).own["threshold"][:, 0]
    exact = smallest(torch.cat(scores).sort().values)
    assert pooled.unique().numel() == 1
    assert 0 <= float(pooled[0]) - exact <= 1 / HISTOGRAM_BINS


@pytest.mark.parametrize(("n", "others"), [(2, 3), (10, 0), (9, 9), (19, 0), (28, 0), (5, 40)])
def test_coverage_however_few_scores_there_are(n: int, others: int):
    """With fewer scores in all than n0, too: of scores in any order, a new one is covered as often
    as is promised, which is counted over all its ranks among them.
    """
    g, total = torch.Generator().manual_seed(n), n + others
    covered = []
    for _ in range(200):
        # Of equal spacing, so that a new score is as likely within each of the gaps.
        order = (torch.randperm(total, generator=g) + 1).double() / (total + 1)
        edges = torch.arange(1, total + 1, dtype=torch.float64) / (total + 1)
        t = float(
            thresholds(
                order[:n],
                Segments(torch.tensor([n])),
                edges,
                counted(order, edges),
                level=0.9,
                shrink=20.0,
            )
        )
        covered.append(1.0 if t == math.inf else float((order <= t).sum()) / (total + 1))
    assert np.mean(covered) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("n", "wanted"), [(5, 0.933), (10, 0.926), (30, 0.914), (100, 0.905)])
def test_coverage_where_clients_are_alike(n: int, wanted: float):
    """Uniform scores, 400 of others; never below the level."""
    g, covered = torch.Generator().manual_seed(n), []
    for _ in range(4000):
        scores = torch.rand(400 + n, generator=g, dtype=torch.float64)
        t = thresholds(
            scores[:n],
            Segments(torch.tensor([n])),
            EDGES,
            counted(scores),
            level=0.9,
            shrink=20,
        )
        covered.append(min(float(t), 1.0))
    assert np.mean(covered) == pytest.approx(wanted, abs=0.003)


def test_scores_by_hand():
    probs = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    u = torch.tensor(0.25, dtype=torch.float64)
    assert class_scores("lac", probs, u).tolist() == [0.8, 0.5, 0.7]
    assert_close(
        class_scores("aps", probs, u), torch.tensor([0.8 + 0.05, 0.125, 0.5 + 0.075]).double()
    )


def test_scores_end_at_the_largest():
    """Of probabilities whose sum rounds above 1, too: beyond the last bin a score would count as
    endless.
    """
    probs = torch.rand(500, 200, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    found = class_scores("aps", probs, torch.ones(500, dtype=torch.float64) * (1 - 1e-16))
    assert float(found.max()) <= 1


def test_a_fitted_step_shows_no_rows():
    fitted = fit(Conformal(), local(), CLASSES)
    assert "tensor(" not in repr(fitted)


@pytest.mark.parametrize(
    "options",
    [{}, {"score": "aps"}, {"by": "label"}, {"never_empty": True, "level": 0.1}],
)
def test_sets_hold_what_scores_at_most_the_threshold(options: dict[str, Any]):
    """Of every client, as its node computes them; rows that pad have none."""
    given = local(seed=2)
    step = Conformal(**options)
    fitted = fit(step, given, CLASSES)
    made = fitted.apply(given).predictions
    assert made.level == step.level
    for j, (z, _) in enumerate(alone(given)):
        if not len(z):
            continue
        own = fitted.of(torch.tensor([j]))
        assert_close(step.settle(fitted.state, part(given, j))["threshold"], own.own["threshold"])
        sets = own.apply(part(given, j)).predictions.sets
        assert torch.equal(sets, split(given, made.sets)[j])
        scores = class_scores(step.score, z.softmax(-1), split(given, given.uniform(1))[j])
        wanted = scores <= fitted.own["threshold"][j]
        if step.never_empty:
            assert bool((~wanted).all(-1).any())
            wanted |= z == z.amax(-1, keepdim=True)
        assert torch.equal(sets, wanted)


def test_thresholds_by_label_are_of_that_label_alone():
    given = local((200, 150), seed=3)
    fitted = fit(Conformal(by="label", shrink=0), given, CLASSES)
    for j, (z, y) in enumerate(alone(given)):
        for label in range(4):
            scores = 1 - z.softmax(-1)[y == label, label]
            k = math.ceil(0.9 * (len(scores) + 1) - 1e-9)
            wanted = float(scores.sort().values[k - 1]) if k <= len(scores) else math.inf
            assert float(fitted.own["threshold"][j, label]) == pytest.approx(wanted)


def numbers(kind: str) -> tuple[LocalPredictions, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    mask = torch.arange(60) < torch.tensor([60, 25, 0])[:, None]
    mean, spread = torch.randn(3, 60, 2, generator=g), torch.rand(3, 60, 2, generator=g) + 0.2
    y = mean + 300 * spread * torch.randn(3, 60, 2, generator=g)
    about: dict[str, Any] = {"mean": mean, "variance": spread.square()}
    if kind == "intervals":
        about = {
            "mean": mean,
            "lower": mean - 1000 * spread,
            "upper": mean + 1000 * spread,
            "likelihood": Quantiles(),
        }
    found = Predictions(mask=mask, epistemic=torch.zeros(3, 60), labels=y, **about)
    return LocalPredictions(*found.rows(), np.arange(3)), y[mask]


@pytest.mark.parametrize("kind", ["deviations", "intervals"])
def test_intervals_of_numbers(kind: str):
    """Hold the targets that score at most the threshold, all of an example's together; also
    narrower ones than were predicted.
    """
    given, y = numbers(kind)
    fitted = fit(Conformal(level=0.8), given, Outputs("regression", 2))
    made = fitted.apply(given).predictions
    inside = ((made.lower <= y) & (y <= made.upper)).all(-1)
    assert 0.8 <= float(inside.double().mean()) < 0.9
    t = fitted.own["threshold"][0, 0]
    low, high = float(fitted.state["edges"][0]), float(fitted.state["edges"][-1])
    if kind == "deviations":
        scores = ((y - given.predictions.mean) / given.predictions.variance.sqrt()).abs().amax(-1)  # type: ignore[operator, union-attr]
        assert 0 < low < float(t) < high
    else:
        scores = torch.maximum(given.predictions.lower - y, y - given.predictions.upper).amax(-1)  # type: ignore[operator]
        assert low < float(t) < 0  # the predicted ends are too wide
    own = scores[:60].double()
    exact = own.sort().values
    assert float(exact[int(0.7 * 60)]) < float(t) < float(exact[-1])
    assert float(fitted.state["counts"].sum()) == 85
    assert float(fitted.state["counts"][0, -1]) <= 0.1 * 0.2 * 85  # few beyond the range
    assert fitted.own["threshold"].isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"level": 1.0}, r"^level must lie within \(0, 1\), got 1\.0"),
        ({"shrink": -1}, "^shrink must be >= 0, got -1"),
        ({"score": "thr"}, "score must be 'lac' or 'aps', got 'thr'"),
        ({"by": "group"}, "by must be 'client' or 'label', got 'group'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        Conformal(**options)


def test_what_does_not_fit_is_refused():
    given, _ = numbers("deviations")
    with pytest.raises(TypeError, match="never_empty"):
        Conformal(never_empty="no")  # pyright: ignore[reportArgumentType] (what is no bool is the point)
    with pytest.raises(ValueError, match="labels of these predictions are not known"):
        fit(
            Conformal(),
            replace(given, predictions=replace(given.predictions, labels=None)),
            Outputs("regression", 2),
        )
    with pytest.raises(ValueError, match="no client has an example in the split 'calibration'"):
        fit(
            Conformal(),
            local((0, 0, 2)),
            CLASSES,
            lambda state, shapes: {name: torch.zeros(shape) for name, shape in shapes.items()},
        )


def test_outliers_do_not_widen_the_others():
    """A few scores that are a million times the others: pooled and shrunk thresholds stay within a
    bin of the exact ones.
    """
    g = torch.Generator().manual_seed(0)
    y = torch.randn(6, 35, 1, generator=g).double()
    y[0, :2], y[3, :2] = 1e6, 1e5
    mask, blank = torch.ones(6, 35, dtype=torch.bool), torch.zeros(6, 35)
    found = Predictions(
        mask=mask, epistemic=blank, mean=torch.zeros_like(y), variance=torch.ones_like(y), labels=y
    )
    given, numbers = LocalPredictions(*found.rows(), np.arange(6)), Outputs("regression", 1)
    exact = y.abs().flatten().sort().values[math.ceil(211 * 0.9) - 1]
    pooled = fit(Conformal(shrink=math.inf), given, numbers)
    width = float(pooled.state["edges"][0])
    assert width < 0.02
    assert 0 <= float(pooled.own["threshold"][0, 0]) - float(exact) <= width
    assert float(fit(Conformal(), given, numbers).own["threshold"].max()) < 10


def test_ranks_are_exact():
    """k = (n + 1) level where that is whole, in float64: of 24 rows at level .6 the 15th score, not
    the 16th.
    """
    for n in range(4, 400, 5):
        scores = torch.arange(1, n + 1, dtype=torch.float64) / n
        found = thresholds(
            scores,
            Segments(torch.tensor([n])),
            EDGES,
            counted(scores),
            level=0.6,
            shrink=0,
        )
        assert round(float(found) * n) == (n + 1) * 6 // 10


@pytest.mark.parametrize("score", ["lac", "aps"])
@pytest.mark.parametrize("shrink", [0.0, 20.0, math.inf])
def test_sets_do_not_depend_on_last_bits(score: Any, shrink: float):
    """Votes of eight, of which many rows have the same, with and without rounding in float32; equal
    probabilities of two classes, too.
    """
    given = local((40, 25, 60), seed=2)
    votes = given.predictions.probs.mul(8).round() + 1e-3
    votes = votes / votes.sum(-1, keepdim=True)
    noise = 1 + 2.0**-23 * (
        torch.rand(votes.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    )

    def sets(probs: torch.Tensor) -> torch.Tensor:
        own = replace(given, predictions=replace(given.predictions, probs=probs))
        found = fit(Conformal(score=score, shrink=shrink), own, CLASSES).apply(own).predictions.sets
        assert found is not None
        return found

    assert sets(votes).equal(sets(votes * noise))
