"""Rules that choose a subnetwork."""

import warnings
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bayesfl.posteriors import selection
from bayesfl.posteriors.selection import Evidence, select, uncurved_share


def evidence(size: int = 8, *, flat: int = 0, seed: int = 0) -> Evidence:
    """Random weights, curvatures and prior variances in float64; the last `flat` weights have no
    curvature.
    """
    rng = torch.Generator().manual_seed(seed)
    loc = torch.randn(size, generator=rng, dtype=torch.float64)
    curvature = (
        torch.rand(size, generator=rng, dtype=torch.float64)
        .mul(5)
        .index_fill(0, torch.arange(size - flat, size), 0.0)
    )
    return Evidence(loc, curvature, torch.rand(size, generator=rng, dtype=torch.float64) + 0.5)


def test_posterior_variance_is_one_over_the_sum_of_precisions():
    """Where there is no curvature it is the prior's."""
    e = evidence(flat=2)
    assert_close(e.posterior_variance, 1 / (e.curvature + 1 / e.variance))
    assert_close(e.posterior_variance[-2:], e.variance[-2:], rtol=0, atol=0)


@pytest.mark.parametrize("count", range(1, 8))
def test_wasserstein_is_the_best_of_all_subnetworks(count):
    """Of all subsets of 8 weights, the one whose posterior N(loc_S, .) x Dirac is closest in W2 to
    the diagonal posterior.
    """
    e = evidence(seed=count)
    deviation = e.posterior_variance.sqrt()

    def distance(
        kept: tuple[int, ...],
    ) -> float:
        # Squared W2 of diagonal Gaussians with equal means: sum (s_r - t_r)^2.
        other = torch.zeros_like(deviation)
        other[list(kept)] = deviation[list(kept)]
        return float((deviation - other).square().sum())

    best = min(combinations(range(8), count), key=distance)
    assert select("wasserstein", e, count).tolist() == list(best)


def test_wasserstein_takes_what_the_data_say_nothing_about_first():
    """Under one prior variance all weights without curvature; the restricted rule none, and then it
    may find too few.
    """
    e = evidence(flat=3)
    e = Evidence(e.loc, e.curvature, torch.ones(8, dtype=torch.float64))
    with pytest.warns(UserWarning, match=r"selected weights .*curvature .*selection='random'"):
        chosen = select("wasserstein", e, 3)
    assert chosen.tolist() == [5, 6, 7]
    assert uncurved_share(e, chosen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(select("curved_wasserstein", e, 7)) == 5
        order = e.posterior_variance[:5].argsort(descending=True)[:2].sort().values
        assert_close(select("curved_wasserstein", e, 2), order)


def test_curvature_is_measured_against_the_prior():
    """A weight counts as curved from GGN times prior variance 1e-12 on, whatever the scale
    of both.
    """
    tiny = torch.tensor([2e-12, 0.5e-12], dtype=torch.float64)
    for scale in (1e-6, 1.0, 1e6):
        assert Evidence(
            tiny, tiny * scale, torch.full((2,), 1 / scale, dtype=torch.float64)
        ).curved.tolist() == [True, False]


def test_magnitude_and_predictive_variance():
    """The largest |w|; the largest GGN_rr s_r^2 = 1 - s_r^2 / g_r, the share of the prior variance
    that the data have removed.
    """
    e = evidence()
    assert_close(select("magnitude", e, 3), e.loc.abs().topk(3).indices.sort().values)
    removed = 1 - e.posterior_variance / e.variance
    assert_close(selection.predictive_variance(e), removed)
    assert_close(select("predictive_variance", e, 3), removed.topk(3).indices.sort().values)


def test_random_is_a_function_of_the_seed():
    """Equal seeds choose equally whatever the weights, and every weight about as often."""
    e, other = evidence(20), evidence(20, seed=1)
    counts = torch.zeros(20)
    for seed in range(400):
        chosen = select("random", Evidence(e.loc, e.curvature, e.variance, seed), 5)
        assert_close(
            chosen, select("random", Evidence(other.loc, other.curvature, other.variance, seed), 5)
        )
        counts[chosen] += 1
    assert (counts - 100).abs().max() < 5 * (400 * 0.25 * 0.75) ** 0.5


def test_ties_go_to_the_smaller_index():
    """And a rule of one's own will do."""
    e = evidence()
    assert select(lambda e: torch.ones_like(e.loc), e, 3).tolist() == [0, 1, 2]
    many = evidence(20000)
    assert select(lambda e: (torch.arange(20000) % 3).double(), many, 100).tolist() == list(
        range(2, 302, 3)
    )
    assert select(lambda e: -e.loc, e, 8).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("rule", "count", "message"),
    [
        ("largest", 3, r"selection .*'wasserstein'.* got 'largest'"),
        (lambda e: e.loc.log(), 3, r"selection .*\[8\], [1-8] of them NaN"),
        (lambda e: torch.zeros(3), 2, r"selection .*8 weights.* got \[3\]"),
        (lambda e: torch.full((8,), -torch.inf), 2, r"selection .*-inf"),
    ],
)
def test_what_is_refused(rule: Any, count: int, message: str):
    """Unknown rules, scores that order nothing."""
    with pytest.raises(ValueError, match=message):
        select(rule, evidence(), count)


def test_rules_that_choose_alike():
    """They choose the same weights under any variance that all have in common; another does not."""
    curvature = torch.logspace(-9, 3, 40, dtype=torch.float64).flip(0)
    loc = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    for name in selection.RULES:
        found = {
            tuple(
                select(name, Evidence(loc, curvature, torch.full_like(loc, variance)), 5).tolist()
            )
            for variance in (1e4, 1.0, 1e-4)
        }
        assert (len(found) == 1) == (name in selection.ALIKE)


def test_of_several_networks_each_as_alone():
    """Also where weights tie."""
    each = [evidence(12, seed=seed, flat=flat) for seed, flat in ((0, 0), (1, 7), (2, 3))]
    loc, curvature, variance = (
        torch.stack([getattr(e, name) for e in each]) for name in ("loc", "curvature", "variance")
    )
    every = Evidence(loc, curvature, variance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in selection.ALIKE:
            alone = [
                select(name, e, 5) for e in (Evidence(e.loc, e.curvature, e.variance) for e in each)
            ]
            assert torch.equal(select(name, every, 5), torch.stack(alone))
    with pytest.warns(UserWarning, match="no curvature"):
        select("wasserstein", every, 5)
