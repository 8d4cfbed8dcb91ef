"""The linear mixture: its published sizes, its rules, its weights, within what chance allows."""

import math
from typing import Any

import numpy as np
import pytest

import bayesfl as bf


def test_the_papers_sizes():
    """300 clients of 50 to 1,000 training examples, 67,758 in all, median 93, 17 at the cap."""
    data = bf.data.linear_mixture(inputs=2, test=1)
    sizes = data.counts["train"]
    assert (len(sizes), sizes.sum(), np.median(sizes), (sizes == 1000).sum(), sizes.min()) == (
        300,
        67758,
        93,
        17,
        50,
    )


def test_labels_follow_the_rules_and_the_weights():
    """Without noise every label is one of its client's rules'; the share of each rule is its
    weight, within four standard errors.
    """
    data = bf.data.linear_mixture(clients=4, inputs=6, components=2, noise=0.0, test=4000, seed=3)
    rules, weights = np.array(data.recipe["rules"]), np.array(data.recipe["weights"])
    assert rules.shape == (2, 6)
    assert np.allclose(weights.sum(1), 1)
    for j in range(4):
        x, y = (t.numpy() for t in data.test.client(j))
        answers = (x @ rules.T > 0).astype(int)
        assert ((answers == y[:, None]).any(1)).all()
        differ = answers[:, 0] != answers[:, 1]
        assert abs((answers[differ, 0] == y[differ]).mean() - weights[j, 0]) < 4 * np.sqrt(
            0.25 / differ.sum()
        )
        assert abs(x).max() <= 1


def test_noise_blurs_what_is_near_the_threshold():
    """Labels of one rule are wrong only where its score is small."""
    data = bf.data.linear_mixture(clients=1, inputs=5, components=1, noise=0.1, test=4000, seed=1)
    x, y = (t.numpy() for t in data.test.client(0))
    score = x @ np.array(data.recipe["rules"])[0]
    wrong = (score > 0) != (y == 1)
    assert 0 < wrong.mean() < 0.1
    assert abs(score[wrong]).max() < 0.5


def test_seeds_and_hashes():
    """Equal seeds make equal data, other seeds others."""
    one, again, other = (
        bf.data.linear_mixture(clients=3, inputs=4, test=5, seed=seed) for seed in (0, 0, 1)
    )
    assert one.hash == again.hash != other.hash


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must be > 0 and finite, got 0.0"),
        ({"alpha": math.inf}, "alpha must be > 0 and finite, got inf"),
        ({"alpha": 1e-300}, "pvals contains NaNs"),
        ({"noise": math.inf}, "noise must be >= 0 and finite, got inf"),
        ({"clients": 0}, r"^clients .*1.* got 0"),
        ({"seed": 2**32}, r"^seed .*got 4294967296; .*below 2\*\*32"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str):
    """Named before anything is drawn."""
    with pytest.raises(ValueError, match=message):
        bf.data.linear_mixture(**options)
