"""Numbers of a run: cohorts as the settings draw them, and what is refused."""

import math

import numpy as np
import pytest
import torch

import bayesfl as bf
from bayesfl.federation.settings import Settings

SETTINGS = {
    "rounds": 100,
    "participation": 0.29,
    "sampling": "fixed",
    "train": "cohort",
    "seed": 0,
    "evaluate_every": None,
}


def test_fixed_cohorts():
    """max(1, floor(J p)) different clients, whatever 0.29 * 100 is in binary; every client gets its
    turn.
    """
    settings = Settings(**SETTINGS)
    cohorts = [settings.cohort(100, r) for r in range(100)]
    assert {(len(c), len(set(c.tolist()))) for c in cohorts} == {(29, 29)}
    counts = np.bincount(np.concatenate(cohorts), minlength=100)
    assert abs(counts - 29).max() < 5 * math.sqrt(29 * 0.71)
    assert len(Settings(**{**SETTINGS, "participation": 0.001}).cohort(100, 0)) == 1


def test_bernoulli_cohorts_have_two_at_least():
    """Independent coins, given that min(2, J) are in: sizes have that distribution, members are
    alike, however rare a client is.
    """
    settings = Settings(**{**SETTINGS, "sampling": "bernoulli", "participation": 0.1})
    cohorts = [settings.cohort(100, r) for r in range(400)]
    sizes = np.array([len(c) for c in cohorts])
    assert abs(sizes.mean() - 10) < 5 * math.sqrt(9 / 400)
    assert abs(sizes.var() - 9) < 4
    assert all(np.array_equal(c, np.unique(c)) for c in cohorts)
    assert abs(np.bincount(np.concatenate(cohorts), minlength=100) - 40).max() < 5 * math.sqrt(
        400 * 0.09
    )


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_sizes_of_bernoulli_cohorts(share):
    """Of 6 clients: the binomial distribution without 0 and 1, by its own formula."""
    settings = Settings(**{**SETTINGS, "sampling": "bernoulli", "participation": share})
    drawn = np.bincount([len(settings.cohort(6, r)) for r in range(4000)], minlength=7)
    expected = np.array(
        [math.comb(6, k) * share**k * (1 - share) ** (6 - k) if k >= 2 else 0.0 for k in range(7)]
    )
    expected *= 4000 / expected.sum()
    assert drawn[:2].sum() == 0
    assert (abs(drawn - expected) < 5 * np.sqrt(expected) + 1).all()


@pytest.mark.parametrize("share", [1e-300, 1e-9, 1 - 1e-12, 1.0])
def test_bernoulli_cohorts_need_no_second_draw(share):
    """At the ends of the range the size is the only one that is likely, and it comes at once."""
    settings = Settings(**{**SETTINGS, "sampling": "bernoulli", "participation": share})
    sizes = [len(settings.cohort(clients, 0)) for clients in (1, 2, 10, 100_000)]
    assert sizes == ([1, 2, 2, 2] if share < 0.5 else [1, 2, 10, 100_000])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"participation": 0.0}, "participation"),
        ({"participation": 1.2}, r"participation .* \(0, 1\], got 1.2"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": 1.5}, r"rounds .*got 1\.5"),
        ({"seed": 0.5}, r"seed .*got 0\.5"),
        ({"device": "nonsense"}, "device 'nonsense' is absent"),
        ({"sampling": "poisson"}, "sampling"),
        ({"train": "some"}, "train"),
        ({"sampling": ""}, "sampling"),
        ({"evaluate_every": 0}, "evaluate_every .*at least 1, got 0"),
        ({"evaluate_every": 1.0}, "evaluate_every .*whole number, got 1.0"),
        ({"rounds": "5"}, r"rounds .*got '5'"),
        ({"rounds": True}, r"rounds .*got True"),
        ({"seed": -1}, r"seed .*0.* got -1"),
        ({"participation": "a"}, r"participation .*got 'a'"),
        ({"participation": None}, r"participation .*got None"),
        ({"participation": math.nan}, "participation .* got nan"),
        ({"dtype": "float32"}, r"dtype .*torch\.float32 .*got 'float32'"),
        ({"dtype": torch.int64}, r"dtype .*torch\.float32 .*got torch\.int64"),
        ({"dtype": torch.bfloat16}, r"dtype .*torch\.float32 .*got torch\.bfloat16.*float32"),
        ({"dtype": torch.float16}, r"dtype .*torch\.float32 .*got torch\.float16.*float32"),
    ],
)
def test_settings_are_checked(clients, model, change, words):
    """Before anything starts, with the argument and its value in the message."""
    with pytest.raises(ValueError, match=words):
        bf.simulate(
            bf.algorithms.fedavg(model), clients, **{"rounds": 2, "progress": False, **change}
        )


def test_an_absent_device_is_named(clients, model):
    """A machine without CUDA says so and names what works."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match=r"'cuda' is absent.*device='cpu'"):
        bf.simulate(bf.algorithms.fedavg(model), clients, rounds=1, device="cuda")
