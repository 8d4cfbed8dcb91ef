"""Alarms: p-values and evidence against their definition, false alarms against Ville's bound, and
what is kept.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayesfl.evaluation.alarm import POWERS, STAKES, Alarm


def by_definition(
    reference: Any, scores: Any, uniforms: Any, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """p-values and evidence one row at a time, products and all."""
    past, p = list(reference), []
    for s, u in zip(scores, uniforms, strict=True):
        past.append(s)
        p.append((sum(one > s for one in past) + u * sum(one == s for one in past)) / len(past))
    wealth = []
    for t in range(1, len(p) + 1):
        misses = [
            math.prod(1 + stake / alpha * ((one <= alpha) - alpha) for one in p[:t])
            for stake in STAKES
        ]
        small = [math.prod(eps * one ** (eps - 1) for one in p[:t]) for eps in POWERS]
        wealth.append(np.mean(misses) / 2 + np.mean(small) / 2)
    return np.array(p), np.array(wealth)


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
def test_evidence_is_its_definition(rounded: bool):
    """Also where scores are equal among each other and to the reference."""
    rng = np.random.default_rng(0)
    reference, scores = rng.normal(size=30), rng.normal(size=70) + 0.3
    if rounded:
        reference, scores = reference.round(1), scores.round(1)
    watch = Alarm(reference, alpha=0.2, seed=3, client=5).see(scores)
    p, wealth = by_definition(reference, scores, watch.uniforms, 0.2)
    np.testing.assert_allclose(watch.p, p, rtol=1e-13)
    np.testing.assert_allclose(watch.history, wealth, rtol=1e-10)
    assert watch.evidence == watch.history[-1]
    assert watch.raised == (watch.history >= 20).any()


def test_pieces_change_nothing(tmp_path: Path):
    """One row at a time, all at once, or saved and loaded between: the same bits; draws are the
    client's.
    """
    rng = np.random.default_rng(1)
    reference, scores = rng.normal(size=20), rng.normal(size=1300).round(1)
    whole = Alarm(reference, seed=1, client=2).see(scores)
    single = Alarm(reference, seed=1, client=2)
    for s in scores[:40]:
        single.see(s)
    single.see(scores[40:700]).save(tmp_path / "alarm.npz")
    loaded = Alarm.load(tmp_path / "alarm.npz")
    assert repr(loaded) == repr(single)
    loaded.see(scores[700:])
    for name in ("p", "uniforms", "history"):
        assert np.array_equal(getattr(loaded, name), getattr(whole, name))
    assert loaded.raised_after == whole.raised_after
    other = Alarm(reference, seed=1, client=3).see(scores)
    assert not np.array_equal(other.uniforms, whole.uniforms)
    assert 0 < whole.uniforms.min() < whole.uniforms.max() < 1
    assert len(np.unique(whole.uniforms)) == len(scores)


def test_bets_are_fair():
    """Under a uniform p-value every bet returns its stake on average: their integral over (0, 1) is
    1.
    """
    alpha = 0.1
    np.testing.assert_allclose(
        alpha * (1 + STAKES / alpha * (1 - alpha)) + (1 - alpha) * (1 - STAKES), 1, rtol=1e-12
    )
    grid = (np.arange(200_000) + 0.5) / 200_000
    np.testing.assert_allclose(
        [(grid * 0 + eps * grid ** (eps - 1)).mean() for eps in POWERS[4:]], 1, atol=5e-3
    )


def test_a_change_raises_soon():
    """A shift by 1.5 standard deviations, and twice as many misses; not a change for the better."""
    rng = np.random.default_rng(3)
    after = [
        Alarm(rng.normal(size=100), client=j).see(rng.normal(size=300) + 1.5).raised_after
        for j in range(50)
    ]
    assert np.median([one for one in after if one]) <= 10
    assert all(after)
    assert not any(
        Alarm(rng.normal(size=100), client=j).see(rng.normal(size=300) - 1.0).raised
        for j in range(50)
    )


def test_it_stays_raised():
    watch = Alarm(np.arange(50.0)).see(np.full(20, 100.0))
    first = watch.raised_after
    assert watch.raised
    assert watch.see(np.zeros(500)).evidence < 1
    assert watch.raised_after == first
    assert f"raised after {first} rows" in repr(watch)


def test_bad_input():
    for make, words in (
        (lambda: Alarm([1.0, math.nan]), r"reference must be .*finite.* 1 of them"),
        (lambda: Alarm([1.0], alpha=1.0), r"^alpha must lie within .*got 1\.0"),
        (lambda: Alarm([1.0], delta=0.0), r"^delta must lie within .*got 0\.0"),
        (lambda: Alarm([1.0]).see([[1.0]]), r"scores must be one .* for each row, .*\[1, 1\]"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
