"""Conformal sets: thresholds by hand, their coverage and its law."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesfl.evaluation.calibration.padded import conformal
from tests.evaluation.made import certain, federation


def one(rows: list[list[float]], labels: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A federation of one client without padding."""
    return torch.tensor([rows], dtype=torch.float64), torch.tensor([labels]), torch.ones(1, len(labels), dtype=torch.bool)


def test_conformal_by_hand():
    """Nine true probabilities .1 to .9; alpha = .2: k = ceil(10 * .8) = 8, the eighth smallest score is that of .2."""
    probs, labels, mask = one([[k / 10, 1 - k / 10] for k in range(1, 10)], [0] * 9)
    fit = conformal(probs, labels, mask, alpha=0.2)
    assert fit.threshold.tolist() == pytest.approx([0.2])
    assert (fit.rank.item(), fit.examples.item()) == (8, 9)
    test = torch.tensor([[[0.85, 0.15, 0.0], [0.5, 0.3, 0.2], [0.19, 0.62, 0.19], [math.nan] * 3]]).double()
    assert fit.sets(test).tolist() == [[[True, False, False], [True, True, True], [False, True, False], [False] * 3]]
    found = fit.evaluate(test, torch.tensor([[0, 2, 0, -1]]), torch.tensor([[True, True, True, False]]))
    assert found.share.tolist() == pytest.approx([2 / 3])
    assert found.size.tolist() == pytest.approx([5 / 3])
    assert found.tested.tolist() == [3]
    assert conformal(probs, labels, mask, alpha=0.1).threshold.tolist() == pytest.approx([0.1])  # k = 9 of 9
    assert conformal(probs, labels, mask, alpha=0.0999).threshold.tolist() == [0]  # alpha < 1 / (n + 1): everything
    assert conformal(probs, labels, mask, alpha=0.99).rank.tolist() == [1]


def test_ranks_are_exact():
    """ceil((n + 1)(1 - alpha)) in exact arithmetic, where floats round the product up past an integer."""
    for n in (1, 9, 10, 19, 29, 99, 199, 999):
        probs, labels, mask = certain(n)
        for percent in range(1, 100):
            exact = math.ceil((n + 1) * (1 - Fraction(percent, 100)))
            for alpha in (percent / 100, 1 - (100 - percent) / 100):
                fit = conformal(probs, labels, mask, alpha=alpha)
                assert fit.rank.item() == exact, (n, alpha)
                assert (fit.threshold.item() == 0) == (exact > n)


def test_threshold_is_the_order_statistic():
    """Per client and pooled, against numpy's sorted scores, padding apart."""
    probs, labels, mask = federation(rows=100)
    by_client, pooled = conformal(probs, labels, mask, by="client"), conformal(probs, labels, mask)
    scores = [np.sort(1 - p[m].gather(-1, y[m][:, None])[:, 0].numpy()) for p, y, m in zip(probs, labels, mask, strict=True)]
    for s, t in zip([*scores, np.sort(np.concatenate(scores))], [*by_client.threshold, *pooled.threshold], strict=True):
        assert 1 - float(t) == pytest.approx(s[math.ceil((len(s) + 1) * 0.9) - 1])
    assert by_client.examples.tolist() == mask.sum(-1).tolist()
    mixture = conformal(probs, labels, mask, by="mixture")
    n = int(mask.sum())
    assert mixture.rank.tolist() == [math.ceil((n + 5) * 0.9)]
    assert mixture.threshold <= pooled.threshold
    alone = conformal(probs[:1], labels[:1], mask[:1], by="mixture")
    assert alone.threshold.tolist() == by_client.threshold[:1].tolist()


def test_few_examples_give_everything_and_none_too():
    """8 points at alpha = .1, or no point at all."""
    probs, labels, mask = federation()
    mask[0, 8:], mask[1] = False, False
    fit = conformal(probs, labels, mask, by="client")
    assert fit.threshold[:2].tolist() == [0, 0]
    assert (fit.threshold[2:] > 0).all()
    case = probs[:1], labels[:1], mask[:1]
    found = conformal(*case, by="client").evaluate(*case)
    assert (found.share.tolist(), found.size.tolist()) == ([1], [4])
    assert [float(t) for t in found.chance()] == [1, 1]


def uniform_scores(n: int, trials: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """True-class probabilities uniform on (0, 1): `trials` clients of one source."""
    p = torch.rand(trials, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.stack([p, 1 - p], -1), torch.zeros(trials, n, dtype=torch.long), torch.ones(trials, n, dtype=torch.bool)


@pytest.mark.parametrize(("n", "alpha"), [(19, 0.1), (25, 0.1), (40, 0.3)])
def test_coverage_follows_its_law(n, alpha):
    """Of each client Beta(k, n + 1 - k): with uniform scores the coverage is 1 - threshold. Its mean is at least 1 - alpha."""
    trials = 20000
    fit = conformal(*uniform_scores(n, trials, 0), alpha=alpha, by="client")
    covered, k = 1 - fit.threshold, math.ceil((n + 1) * (1 - Fraction(str(alpha))))
    mean = k / (n + 1)
    variance = mean * (1 - mean) / (n + 2)
    assert mean >= 1 - alpha
    assert covered.mean().item() == pytest.approx(mean, abs=4 * math.sqrt(variance / trials))
    assert covered.var().item() == pytest.approx(variance, rel=0.05)


def test_measured_coverage_stays_within_chance():
    """Beta-binomial intervals hold what they promise, neither more nor less than discreteness allows."""
    fit = conformal(*uniform_scores(29, 4000, 1), by="client")
    found = fit.evaluate(*uniform_scores(200, 4000, 2))
    low, high = found.chance(0.9)
    inside = ((low <= found.share) & (found.share <= high)).double().mean().item()
    assert 0.89 < inside < 0.93
    assert (found.share < low).double().mean().item() == pytest.approx(0.05, abs=0.012)
    wide, narrow = found.chance(0.99), found.chance(0.5)
    assert (wide[0] <= low).all()
    assert (narrow[1] <= high).all()


@pytest.mark.slow
def test_mixture_covers_clients_that_differ():
    """Client 0 of 60 easy examples, client 1 of 9 hard ones: promised is the mean over clients counted n_j + 1."""
    rng = torch.Generator().manual_seed(4)
    trials, share = 3000, {"mixture": 0.0, "pooled": 0.0}
    sizes = torch.tensor([60, 9])
    mask = torch.arange(60) < sizes[:, None]
    for _ in range(trials):
        hardness = torch.tensor([[0.2], [1.0]])
        p = 1 - hardness * torch.rand(2, 60, generator=rng)
        probs = torch.stack([p, 1 - p], -1)
        for by in ("mixture", "pooled"):
            reach = 1 - conformal(probs, torch.zeros(2, 60).long(), mask, alpha=0.1, by=by).threshold  # scores up to this
            covered = (reach / hardness[:, 0].double()).clamp(max=1)
            share[by] += float((covered * (sizes + 1)).sum() / (sizes + 1).sum()) / trials
    assert 0.9 <= share["mixture"] <= 0.9 + 2 / 71 + 0.003
    assert share["pooled"] < share["mixture"]


def test_sets_of_one_pot_serve_newcomers():
    """Thresholds of pooled scores fit any number of clients; those of clients only their own."""
    probs, labels, mask = federation()
    assert conformal(probs, labels, mask).sets(probs[:2]).shape == (2, 60, 4)
    with pytest.raises(ValueError, match="serves any clients"):
        conformal(probs, labels, mask, by="client").sets(probs[:2])


def test_summary_and_table():
    """Means over clients, the decile, pooled shares; the same numbers as columns."""
    probs, labels, mask = federation(clients=12)
    fit = conformal(probs, labels, mask)
    mask[3] = False
    found = fit.evaluate(probs, labels, mask)
    some = [j for j in range(12) if j != 3]
    assert found.share[3].isnan()
    sets = probs >= fit.threshold[0]
    inside = [float(sets[j][mask[j]].gather(-1, labels[j][mask[j]][:, None]).double().mean()) for j in some]
    sizes = [float(sets[j][mask[j]].sum(-1).double().mean()) for j in some]
    summary = found.summary()
    assert summary["coverage"] == pytest.approx(np.mean(inside))
    assert summary["coverage_decile"] == pytest.approx(sorted(inside)[1])
    assert summary["set_size"] == pytest.approx(np.mean(sizes))
    weights = mask.sum(-1)[some].numpy()
    assert summary["pooled_coverage"] == pytest.approx(np.average(inside, weights=weights))
    assert summary["pooled_set_size"] == pytest.approx(np.average(sizes, weights=weights))
    table = found.table()
    assert list(table) == ["client", "examples", "calibrated", "coverage", "set_size"]
    assert {len(column) for column in table.values()} == {12}
    assert math.isnan(fit.evaluate(probs, labels, torch.zeros_like(mask)).summary()["pooled_coverage"])


def test_float32_scores_compare_exactly():
    """The threshold is one of the probabilities: the example that it comes from is inside its own set."""
    probs, labels, mask = federation()
    case = probs.float(), labels, mask
    found = conformal(*case, by="client").evaluate(*case)
    k = torch.tensor([math.ceil((int(n) + 1) * 0.9) for n in mask.sum(-1)])
    assert_close(found.share, k / mask.sum(-1).double())


@pytest.mark.parametrize(
    ("alpha", "by", "message"), [(0, "pooled", "10% is 0.1"), (10, "pooled", "10% is 0.1"), (0.1, "all", "by must be")]
)
def test_conformal_option_errors(alpha, by, message):
    with pytest.raises(ValueError, match=message):
        conformal(*federation(), alpha=alpha, by=by)


def test_conformal_input_errors():
    """A diverged client is named; levels are probabilities."""
    probs, labels, mask = federation()
    broken = probs.clone()
    broken[1, 0, 2] = math.inf
    fit = conformal(probs, labels, mask)
    for call in (conformal, fit.evaluate):
        with pytest.raises(ValueError, match=r"clients \[1\] have predictions"):
            call(broken, labels, mask)
    with pytest.raises(ValueError, match=r"\[J, N, O\]"):
        fit.sets(probs[0])
    with pytest.raises(ValueError, match=r"90% is 0\.9"):
        fit.evaluate(probs, labels, mask).chance(90)
