"""Partitions against their definitions, on labels alone."""

import numpy as np
import pytest

from bayesfl.data import partitions


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_cut_points_are_every_cut_with_equal_chance(rng):
    """Cutting 6 into 3 pieces: the C(5, 2) = 10 pairs of places, each about as often."""
    seen = [tuple(partitions.cut_points(6, 3, 1, rng)) for _ in range(4000)]
    assert len(set(seen)) == 10
    assert max(seen.count(cut) for cut in set(seen)) < 500
    assert min(seen.count(cut) for cut in set(seen)) > 300


@pytest.mark.parametrize(("size", "pieces", "smallest"), [(500, 20, 1), (500, 20, 10), (60, 6, 10), (7, 1, 7), (5, 5, 1)])
def test_pieces_are_at_least_the_smallest(rng, size, pieces, smallest):
    for _ in range(50):
        ends = np.array([0, *partitions.cut_points(size, pieces, smallest, rng), size])
        assert np.diff(ends).min() >= smallest
        assert len(ends) == pieces + 1


def test_too_many_pieces(rng):
    with pytest.raises(ValueError, match="59 examples cannot make 6 pieces of at least 10"):
        partitions.cut_points(59, 6, 10, rng)


def test_largest_remainder():
    assert partitions.largest_remainder(10, np.array([1, 1, 1])).tolist() == [4, 3, 3]
    assert partitions.largest_remainder(3, np.array([0.0, 2.0, 1.0])).tolist() == [0, 2, 1]
    assert partitions.largest_remainder(0, np.array([1, 2])).tolist() == [0, 0]


def test_equal_classes_are_cut_at_the_very_points(rng):
    """With classes of one size, pieces are those of the shared cut points: nothing is rescaled."""
    labels = np.repeat(np.arange(6), 40)
    rows, held = partitions.drift(labels, [[0, 1, 2], [3, 4, 5]], 12, 1, rng)
    sizes = np.array([[int((labels[r] == k).sum()) for k in mine] for r, mine in zip(rows, held, strict=True)])
    assert (sizes == sizes[:, :1]).all()  # one size for every superclass of a client
    by_group = sizes[:, 0].reshape(4, 3)
    assert (by_group == by_group[:, :1]).all()  # and for every client of a group
    assert by_group[:, 0].sum() == 40


def test_unequal_classes_are_cut_in_the_same_proportions(rng):
    labels = np.repeat(np.arange(4), [50, 100, 73, 51])
    rows, held = partitions.drift(labels, [[0, 1], [2, 3]], 10, 2, rng)
    share = np.array([[(labels[r] == k).sum() / (labels == k).sum() for k in mine] for r, mine in zip(rows, held, strict=True)])
    group = share.reshape(5, 4)
    assert (group.max(1) - group.min(1)).max() <= 1 / 50 + 1e-9
    assert min((labels[r] == k).sum() for r, mine in zip(rows, held, strict=True) for k in mine) >= 2
    assert sorted(np.concatenate(rows)) == list(range(len(labels)))


def test_labels_are_spread_evenly(rng):
    for classes, clients, each in ((10, 20, 2), (10, 7, 3), (3, 5, 3), (10, 1, 1)):
        held = partitions.spread_labels(classes, clients, each, rng)
        used = np.bincount(held.reshape(-1), minlength=classes)
        assert used.max() - used.min() <= 1
        assert all(len(set(mine)) == each for mine in held)


def test_topping_up_keeps_every_row_and_reaches_the_minimum(rng):
    sizes = np.array([144] * 10)
    counts, moved = partitions.dirichlet_counts(sizes, 140, 0.02, 10, rng)
    assert moved > 0
    assert counts.sum(1).tolist() == sizes.tolist()
    assert counts.sum(0).min() >= 10
    assert counts.min() >= 0


def test_exactly_enough_rows(rng):
    counts, _ = partitions.dirichlet_counts(np.array([30, 70]), 10, 0.1, 10, rng)
    assert counts.sum(0).tolist() == [10] * 10


def test_proportions_are_dirichlet(rng):
    """A share of a symmetric Dirichlet has mean 1/J and variance (J - 1) / (J^2 (J alpha + 1))."""
    clients, alpha = 5, 0.7
    counts, _ = partitions.dirichlet_counts(np.full(4000, 10_000), clients, alpha, 1, rng)
    share = counts / 10_000
    assert abs(share.mean() - 1 / clients) < 1e-9
    expected = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert abs(share.var(0).mean() / expected - 1) < 0.05


def test_lent_rows_follow_the_training_labels(rng):
    counts = np.array([[100, 1, 0], [0, 0, 3]])
    test = partitions.follow_counts(np.array([0] * 5 + [1]), counts, rng)
    assert [len(rows) for rows in test] == [5, 1, 1]
    assert test[1][0] < 5
    assert test[2].tolist() == [5]
