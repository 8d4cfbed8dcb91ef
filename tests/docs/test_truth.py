"""The truth test tests itself: an exact posterior passes, others fail, and all that the library
believes is tried.
"""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import bayesfl as bf

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
beliefs, truth = (importlib.import_module(name) for name in ("beliefs", "truth"))
sys.path.pop(0)
Belief, Way = beliefs.Belief, beliefs.Way


def judged(problem: str, name: str, federations: int, widths: Any = 1.0) -> dict[str, Any]:
    """Judge a way, whose standard deviations may be made wrong, beside the reference."""
    ways, scores, references = beliefs.WAYS[problem], [], []
    for seed in range(federations):
        fed = beliefs.PROBLEMS[problem](seed)
        found, reference = (way.believe(fed) for way in (ways[name], next(iter(ways.values()))))
        found = replace(found, sd=widths * found.sd)
        scores.append(truth.score(found, fed.truth) | {"seconds": 0.0})
        references.append(truth.score(reference, fed.truth))
    return truth.summary(scores, references)


@pytest.mark.parametrize("problem", ["linear", "shared"])
def test_an_exact_posterior_is_true(problem: str):
    """In closed form, whose prior is the law that drew the truth."""
    found = judged(problem, "exact posterior", 200)
    assert found["true"]
    assert found["even"] > 0.01
    assert found["ratio"] == 1
    assert found["rms"] == found["least_rms"]


def test_half_the_variances_are_not():
    """Neither in coverage nor in ranks, which are known of a normal belief."""
    found = judged("linear", "half the variances", 60)
    assert not found["true"]
    assert found["even"] < 1e-6
    for name, level in truth.LEVELS.items():
        reach = stats.norm.ppf((1 + level) / 2) / np.sqrt(2)
        share, error = found["coverage"][name]
        assert abs(share - (2 * stats.norm.cdf(reach) - 1)) < 3 * error
    np.testing.assert_allclose(found["ratios"], 0.5**0.5)


def test_a_way_that_is_true_on_average_alone_is_not():
    """Too wide at the four small clients, and too narrow at the large ones."""
    widths = np.array([1.18] * 4 + [0.84] * 4 + [1.0])[:, None]
    found = judged("linear", "exact posterior", 200, widths)
    share, error = found["coverage"]["90"]
    assert abs(share - 0.9) < 3 * error
    assert found["true"] is False


@pytest.mark.parametrize("widths", [0.9, 1.12])
def test_a_tenth_of_the_width_is_seen(widths: float):
    assert not judged("linear", "exact posterior", 200, widths)["true"]


def test_evenness_holds_for_ranks_that_depend_on_each_other():
    """Eight of a federation alike: the plain chi-squared test would call most of them uneven."""
    rng = np.random.default_rng(0)
    chances = []
    for _ in range(400):
        ranks = np.repeat(rng.integers(truth.BINS, size=(60, 4)), 8, axis=1)
        counts = np.stack([np.bincount(row, minlength=truth.BINS) for row in ranks])
        chances.append(truth.evenness(counts))
    assert stats.kstest(chances, "uniform").pvalue > 0.01


def test_a_score_by_hand():
    """Ranks, and a belief that is certain of what is false; none where nothing is told."""
    zeros = np.zeros((len(beliefs.SIZES), 2))
    mean, sd = zeros + 1, zeros + 1
    sd[0], sd[1, 0], mean[1, 1] = 0, np.nan, 0
    kept = truth.score(Belief(mean, sd), zeros) | {"seconds": 2.0}
    bins, at = np.array(kept["bins"]), int(stats.norm.cdf(-1) * truth.BINS)
    assert kept["bins"][0] == [2] + [0] * (truth.BINS - 1)
    assert kept["bins"][1] == [int(k == truth.BINS // 2) for k in range(truth.BINS)]
    assert kept["bins"][2] == [2 * (k == at) for k in range(truth.BINS)]
    assert truth.covered(bins, 0.9).tolist()[:3] == [0, 1, 2]
    assert truth.covered(bins, 0.5).tolist()[:3] == [0, 1, 0]
    found = truth.summary([kept] * 2, [truth.score(Belief(zeros + 0.5, zeros + 2), zeros)])
    assert (found["intervals"], found["federations"], found["seconds"]) == (30, 2, 2)
    assert found["coverage"]["90"][0] == 13 / 15
    assert found["by_client"]["50"] == [0, 1] + [0] * 6
    assert (found["ratio"], found["ratios"][:3]) == (0.5, [0, 0.5, 0.5])
    assert (found["rms"], found["least_rms"]) == (pytest.approx((15 / 16) ** 0.5), 0.5)
    assert (found["error"], found["true"]) == (1, False)
    draws = np.arange(8.0)[:, None, None] - 1.5 + zeros
    assert (Belief.drawn(draws).below(zeros) == 0.25).all()


def test_the_exact_posterior_is_that_of_all_rows():
    """Beside one regression of all rows on beta and the clients' deviations, of a normal prior."""
    fed = beliefs.PROBLEMS["linear"](3)
    j, tau, parts = len(fed.x), beliefs.TAU, []
    for place, rows in enumerate(fed.x):
        x = np.column_stack([np.ones(len(rows)), rows])
        beside = np.zeros((len(x), 4 * j))
        beside[:, 4 * place : 4 * place + 4] = x * tau
        parts.append(np.column_stack([x, beside]))
    x, y = np.concatenate(parts), np.concatenate(fed.y)
    covariance = np.linalg.inv(x.T @ x + np.eye(x.shape[1]))
    to_own = np.kron(np.ones((j + 1, 1)), np.eye(4))
    to_own = np.hstack([to_own, np.kron(np.eye(j + 1, j), np.diag(tau))])
    found = beliefs.exact_hierarchy(fed)
    np.testing.assert_allclose(found.mean.ravel(), to_own @ covariance @ x.T @ y)
    np.testing.assert_allclose(
        found.sd.ravel(), np.sqrt(np.diag(to_own @ covariance @ to_own.T)), rtol=1e-9
    )


def test_laplace_of_a_linear_model_has_the_exact_widths():
    fed = replace(beliefs.PROBLEMS["shared"](0), quick=True)
    found = beliefs.WAYS["shared"]["fedavg, Laplace of all rows"].believe(fed)
    np.testing.assert_allclose(found.sd, beliefs.exact_shared(fed).sd, rtol=1e-6)


def test_two_quadratures_of_the_eight_schools_agree():
    """In closed form given tau, and by the formulas of mixed models at a grid."""
    fed = beliefs.PROBLEMS["schools"](0)
    one, other = beliefs.by_quadrature(fed), beliefs.by_hierarchy(fed)
    np.testing.assert_allclose(one.mean, other.mean, atol=2e-3)
    np.testing.assert_allclose(one.sd, other.sd, rtol=2e-3)


def test_a_sampled_hierarchy_has_the_coefficients_of_its_parts():
    """The module that the sampler sees, beside sums by hand."""
    module = beliefs.Hierarchy(2, 3, beliefs.TAU[:3])
    with torch.no_grad():
        module.beta.copy_(torch.tensor([1.0, 2, 3]))
        module.u.copy_(torch.tensor([[0.0, 0, 0], [1, -1, 2]]))
    x = torch.tensor([[1.0, 2, 0.5, 1], [1, 1, 1, 0]]).double()
    own = 1 + 0.8 + 2 * (2 - 0.5) + 0.5 * (3 + 0.6)
    torch.testing.assert_close(module.double()(x).flatten().tolist(), [own, 6.0])


def test_everything_that_believes_is_tried():
    """Read from the library: methods whose beliefs are wider than points, predictors, posteriors.

    A new one gets a line in `WAYS` of benchmarks/beliefs.py.
    """
    methods = {
        entry.name
        for entry in bf.algorithms.available()
        if any(part.split(": ")[-1] != "Point" for part in entry.posterior.split(", "))
        and "Mixture" not in entry.posterior  # of points
        and "Neighbours" not in entry.posterior  # of rows
    }
    predictors = {"LinearisedBelief", "LinearisedLaplace", "PooledLaplace"}
    wanted = methods | predictors | {"mixed"} | {*bf.posteriors.__all__} - {"Point", "Samples"}
    tried = {name for ways in beliefs.WAYS.values() for way in ways.values() for name in way.tries}
    assert wanted <= tried


def test_what_is_finished_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a way that was stopped the rest is run, and all of it where the code has changed."""
    asked = []

    def believe(fed: Any) -> Any:
        asked.append(fed.seed)
        if fed.seed == 1:
            raise ValueError("no fit")
        return beliefs.exact_shared(fed)

    ways = {"exact": Way(believe, 7)}
    monkeypatch.setitem(beliefs.WAYS, "shared", ways)
    for wanted, commit, seen in ((2, "a", 2), (7, "a", 5), (7, "b", 0), (9, "b", 9)):
        monkeypatch.setattr(truth.report, "environment", lambda commit=commit: {"commit": commit})
        asked.clear()
        kept = truth.way(tmp_path, "shared", "exact", wanted=wanted, quick=False, jobs=1)
        assert len(asked) == seen
    scores = json.loads((tmp_path / "shared" / "exact.json").read_text())["scores"]
    assert scores == kept["scores"]
    assert truth.summary(scores, scores)["refused"] == 1
