"""Detection and selective prediction against scikit-learn, hand-made numbers, brute force and
limits.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bayesfl.evaluation import detection, metrics


def pair(
    clients: int = 4, own: int = 50, others: int = 70, levels: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of own examples and of outsiders, who score higher; padded rows are NaN; `levels`
    makes ties.
    """
    rng = torch.Generator().manual_seed(0)
    inside = torch.randn(clients, own, generator=rng).double()
    outside = 0.8 + torch.randn(clients, others, generator=rng).double()
    if levels:
        inside, outside = ((t * levels).round() / levels for t in (inside, outside))
    masks = [
        torch.arange(n) < torch.linspace(n // 3, n, clients).long()[:, None] for n in (own, others)
    ]
    return (
        inside.masked_fill(~masks[0], math.nan),
        outside.masked_fill(~masks[1], math.nan),
        masks[0],
        masks[1],
    )


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def full(t: Tensor) -> Tensor:
    return torch.ones(t.shape, dtype=torch.bool)


# Scores


def test_scores_by_hand():
    """1 - max p, and the entropy in nats; certain examples keep their order."""
    probs = torch.tensor(
        [[[0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0]]], dtype=torch.float64
    )
    assert_close(detection.doubt(probs), row(0.3, 2 / 3, 0))
    h = -(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1))
    assert_close(detection.entropy(probs), row(h, math.log(3), 0))
    tiny = torch.tensor([[1.0, 1e-20], [1.0, 1e-30]], dtype=torch.float64)
    assert detection.doubt(tiny).tolist() == pytest.approx([1e-20, 1e-30], rel=1e-12)
    assert detection.doubt(torch.tensor([[math.nan, math.nan]])).isnan().all()


# Detection


@pytest.mark.parametrize("levels", [None, 2, 1])
def test_detection_agrees_with_sklearn(levels):
    """AUROC, ties included."""
    sklearn = pytest.importorskip("sklearn.metrics")
    inside, outside, inside_mask, outside_mask = case = pair(levels=levels)
    areas = []
    for j in range(len(inside)):
        own, other = inside[j][inside_mask[j]].numpy(), outside[j][outside_mask[j]].numpy()
        score, is_own = -np.concatenate([own, other]), np.arange(len(own) + len(other)) < len(own)
        areas.append(sklearn.roc_auc_score(is_own, score))
    assert_close(detection.auroc(*case).tolist(), areas)


def test_only_ranks_matter():
    """An increasing transformation of the scores, and garbage in the padding, change nothing."""
    inside, outside, inside_mask, outside_mask = case = pair(levels=2)
    garbage = torch.where(inside_mask, inside, 99.0), torch.where(outside_mask, outside, -99.0)
    found = detection.auroc(inside.exp(), outside.exp(), inside_mask, outside_mask)
    assert_close(found, detection.auroc(*case))
    assert_close(detection.auroc(*garbage, inside_mask, outside_mask), detection.auroc(*case))


def test_clients_without_a_value():
    """A client without outsiders, or with a score that is NaN, has none."""
    inside, outside, inside_mask, outside_mask = case = pair()
    wanted = detection.auroc(*case)
    outside_mask[1], inside[2, 0] = False, math.nan
    found = detection.auroc(inside, outside, inside_mask, outside_mask)
    assert found.isnan().tolist() == [False, True, True, False]
    assert_close(found[[0, 3]], wanted[[0, 3]])


# Selective prediction


def selective(
    clients: int = 4, rows: int = 40, levels: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, right or wrong, mask; the doubtful are more often wrong."""
    rng = torch.Generator().manual_seed(1)
    score = torch.rand(clients, rows, generator=rng).double()
    right = torch.rand(clients, rows, generator=rng) > 0.6 * score
    mask = torch.arange(rows) < torch.linspace(rows // 3, rows, clients).long()[:, None]
    score = (score * levels).round() / levels if levels else score
    return score.masked_fill(~mask, math.nan), right, mask


def test_risk_coverage_by_hand():
    """Right, wrong, right, wrong by rising doubt: risks 0, 1/2, 1/3, 2/4."""
    score, right = row(0.1, 0.2, 0.3, 0.4), torch.tensor([[True, False, True, False]])
    curve = detection.risk_coverage(score, right, full(score))
    assert detection.risk_coverage(score, right.int(), full(score)).aurc == curve.aurc
    np.testing.assert_allclose(curve.coverage, [0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(curve.risk, [0, 1 / 2, 1 / 3, 2 / 4])
    assert curve.aurc == pytest.approx((1 / 2 + 1 / 3 + 2 / 4) / 4)


def test_ties_are_the_average_over_orders():
    """Against every order of the examples that tie."""
    score, right = row(1, 1, 1, 2, 2, 0), torch.tensor([[True, False, False, False, True, True]])
    risks = []
    for order in itertools.permutations(range(6)):
        values = score[0][list(order)]
        if (values[1:] >= values[:-1]).all():
            wrong = ~right[0][list(order)]
            risks.append((wrong.cumsum(0) / torch.arange(1, 7)).tolist())
    assert len(risks) == 6 * 2
    np.testing.assert_allclose(
        detection.risk_coverage(score, right, full(score)).risk, np.mean(risks, 0)
    )


def test_selective_limits():
    """A constant score gives the error rate everywhere; the perfect order answers the right ones
    first; no error 0; padding and order do not matter; nobody's curve is empty.
    """
    score, right, mask = case = selective()
    same = torch.zeros(right.shape)
    of_all = float((~right & mask).sum() / mask.sum())
    assert detection.risk_coverage(same, right, mask).risk == pytest.approx(of_all)
    assert detection.risk_coverage(same, full(right), mask).aurc == 0
    n = 20000
    wrong = torch.arange(n)[None] >= 0.7 * n
    curve = detection.risk_coverage(torch.arange(n)[None].double(), ~wrong, full(wrong))
    # R + (1 - r) log(1 - r), the limit of many examples.
    assert curve.aurc == pytest.approx(0.3 + 0.7 * math.log(0.7), abs=1e-4)
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    moved = [t[:, rows] for t in case]
    assert detection.risk_coverage(*moved).aurc == pytest.approx(
        detection.risk_coverage(score[mask][None], right[mask][None], mask[mask][None]).aurc
    )
    nobody = detection.risk_coverage(torch.zeros(2, 3), mask[:2, :3], torch.zeros(2, 3).bool())
    assert (len(nobody.risk), math.isnan(nobody.aurc)) == (0, True)


def test_errors_name_the_remedy():
    """Shapes, kinds and shares, at the boundary."""
    inside, outside, inside_mask, outside_mask = pair()
    score, right, mask = selective()
    for call, message in (
        (lambda: detection.auroc(inside[0], outside, inside_mask, outside_mask), r"mask must be"),
        (
            lambda: detection.auroc(inside, outside, outside_mask, outside_mask),
            r"mask must be .*\[4, 50\].*got shape \[4, 70\]",
        ),
        (
            lambda: detection.auroc(inside, outside, inside_mask.int(), outside_mask),
            "mask must be bool",
        ),
        (
            lambda: detection.risk_coverage(score, right[1:], mask),
            r"right must be .*\[4, 40\].*got shape \[3, 40\]",
        ),
        (lambda: detection.risk_coverage(score, right, full(mask)), "score is NaN.*plug-in"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_equal_inputs_tie_in_batches_of_any_size(dtype: torch.dtype, seed: int):
    """A blocked product of matrices gives equal rows other last bits; areas, curves and thresholds
    are those of the twelve different rows, whatever their order.
    """
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(50, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)
    rows, which, y = torch.randn(12, 50).to(dtype), *torch.randint(12, (2, 301))
    y = y % 3
    order, everyone = torch.randperm(301), torch.ones(1, 301, dtype=torch.bool)
    with torch.no_grad():
        exact = net(rows).softmax(-1)[which]
        batched = net(rows[which]).softmax(-1)
        alone = torch.stack([net(x[None])[0] for x in rows[which[order]]]).softmax(-1)
    right = exact.argmax(-1) == y

    def found(probs: Tensor, own: Tensor, other: Tensor) -> list[float]:
        """`probs` in their order [N], and of the rows as given those inside and outside."""
        places = order if probs is alone else torch.arange(301)
        values = [float(metrics.auroc(probs, y[places]))]
        for score in (detection.doubt, detection.entropy):
            by = score(probs)[None]
            values.append(detection.risk_coverage(by, right[places][None], everyone).aurc)
            pair = score(own)[None], score(other)[None], everyone[:, :150], everyone[:, 150:]
            values.append(float(detection.auroc(*pair)))
        return values

    back = alone[order.argsort()]
    wanted = found(exact, exact[:150], exact[150:])
    for one in (
        found(batched, batched[:150], batched[150:]),
        found(alone, back[:150], batched[150:]),
    ):
        assert one == pytest.approx(wanted, rel=1e-12)


def test_doubt_of_votes_and_of_log_probabilities():
    """Zeros and ones have no entropy; what is no probability is refused."""
    votes = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [0, 1, 0]])
    assert detection.doubt(votes).tolist() == [0, 0.25, 0]
    two = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert detection.entropy(votes.double()).tolist() == pytest.approx([0, two, 0], rel=1e-15)
    assert detection.entropy(torch.eye(3, dtype=torch.int64)).tolist() == [0, 0, 0]
    for score in (detection.doubt, detection.entropy):
        for wrong in (votes.log(), votes[1:2].log(), torch.tensor([[2.0, -1.0]]), 9 * votes):
            with pytest.raises(ValueError, match=r"in \[0, 1\], got .*log probabilities exp"):
                score(wrong)
