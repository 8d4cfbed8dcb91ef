"""Partitions against their definitions, on labels alone."""

from collections import Counter

import numpy as np
import pytest

from bayesfl.data import partitions


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_cut_points_are_every_cut_with_equal_chance(rng):
    """Cutting 6 into 3 pieces: the C(5, 2) = 10 pairs of places, each about as often."""
    seen = Counter(tuple(partitions.cut_points(6, 3, 1, rng)) for _ in range(4000))
    assert len(seen) == 10
    assert 300 < min(seen.values()) <= max(seen.values()) < 500


@pytest.mark.parametrize(
    ("size", "pieces", "smallest"), [(500, 20, 1), (500, 20, 10), (60, 6, 10), (7, 1, 7), (5, 5, 1)]
)
def test_pieces_are_at_least_the_smallest(rng, size, pieces, smallest):
    for _ in range(50):
        ends = np.array([0, *partitions.cut_points(size, pieces, smallest, rng), size])
        assert np.diff(ends).min() >= smallest
        assert len(ends) == pieces + 1


def test_largest_remainder():
    for total, weights, parts in (
        (10, [1, 1, 1], [4, 3, 3]),
        (3, [0, 2, 1], [0, 2, 1]),
        (0, [1, 2], [0, 0]),
    ):
        assert partitions.largest_remainder(total, np.array(weights)).tolist() == parts


def test_equal_classes_are_cut_at_the_very_points(rng):
    """With classes of one size, pieces are those of the shared cut points: nothing is rescaled."""
    labels = np.repeat(np.arange(6), 40)
    rows, held = partitions.drift(labels, [[0, 1, 2], [3, 4, 5]], 12, 1, rng)
    sizes = np.array(
        [[int((labels[r] == k).sum()) for k in mine] for r, mine in zip(rows, held, strict=True)]
    )
    assert (sizes == sizes[:, :1]).all()  # one size for every superclass of a client
    by_group = sizes[:, 0].reshape(4, 3)
    assert (by_group == by_group[:, :1]).all()  # and for every client of a group
    assert by_group[:, 0].sum() == 40


def test_unequal_classes_are_cut_in_the_same_proportions(rng):
    labels = np.repeat(np.arange(4), [50, 100, 73, 51])
    rows, held = partitions.drift(labels, [[0, 1], [2, 3]], 10, 2, rng)
    sizes = np.array(
        [[(labels[r] == k).sum() for k in mine] for r, mine in zip(rows, held, strict=True)]
    )
    group = (sizes / np.bincount(labels)[np.array(held)]).reshape(5, 4)
    assert (group.max(1) - group.min(1)).max() <= 1 / 50 + 1e-9
    assert sizes.min() >= 2
    assert sorted(np.concatenate(rows)) == list(range(len(labels)))


def test_shards_are_runs_of_sorted_labels(rng):
    """Of one size, every row in one of them; a client has no more classes than its shards can
    touch.
    """
    labels = rng.permutation(np.repeat(np.arange(4), (30, 50, 7, 13)))
    for clients, each in ((10, 2), (5, 1), (7, 3), (100, 1), (1, 4)):
        dealt = partitions.shards(labels, clients, each, np.random.default_rng(1))
        assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(100))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= each
        # Cut points of the sorted labels: every client's labels are those of some of the runs.
        runs = [
            np.bincount(run, minlength=4) for run in np.array_split(np.sort(labels), clients * each)
        ]
        held = [np.bincount(labels[rows], minlength=4) for rows in dealt]
        assert np.array_equal(sum(held), sum(runs))
        if each == 1:
            assert sorted(map(tuple, held)) == sorted(map(tuple, runs))
    alike = np.repeat(np.arange(5), 20)
    for rows in partitions.shards(alike, 10, 1, rng):
        assert (len(rows), len({*alike[rows]})) == (10, 1)


def test_shards_go_to_clients_at_random(rng):
    """Not the first to the first; and ties of a class are not in the order of rows."""
    labels = np.repeat(np.arange(20), 5)
    one, other = (partitions.shards(labels, 10, 2, np.random.default_rng(s)) for s in range(2))
    assert not np.array_equal(one[0], other[0])
    assert any(len({*labels[rows]}) == 2 and np.diff(np.unique(labels[rows])) > 1 for rows in one)
    whole = partitions.shards(np.zeros(100, int), 2, 1, rng)
    assert not np.array_equal(whole[0], np.arange(50))


def test_pachinko_exhausts_the_leaves(rng):
    """As many rows as asked for; nothing twice; all taken where clients want all there is, whatever
    their weights.
    """
    sizes, groups = np.array([3, 40, 20, 0, 17, 9]), [[0, 4, 3], [5, 2, 1]]
    for alpha, beta in ((0.01, 0.01), (0.4, 10.0), (100.0, 100.0), (1e-9, 1e-9)):
        counts = partitions.pachinko_counts(sizes, groups, 8, 11, alpha, beta, rng)
        assert counts.sum(0).tolist() == [11] * 8
        assert (counts.sum(1) <= sizes).all()
        full = partitions.pachinko_counts(sizes, groups, 1, 89, alpha, beta, rng)
        assert full[:, 0].tolist() == sizes.tolist()


@pytest.mark.slow
def test_pachinko_draws_down_the_tree():
    """Without running out, a client's shares of superclasses have the moments of their Dirichlet,
    and so have those of classes in one.
    """
    alpha, beta, groups = 0.7, 3.0, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    counts = partitions.pachinko_counts(
        np.full(12, 10**9), groups, 800, 150, alpha, beta, np.random.default_rng(0)
    )
    coarse = counts.reshape(4, 3, -1).sum(1) / 150
    assert abs(coarse.mean(1) - 1 / 4).max() < 0.03
    # A share drawn 150 times: the Dirichlet's variance, and the multinomial's given it.
    var = 3 / (16 * (4 * alpha + 1))
    assert abs(coarse.var(1).mean() / (var + (3 / 16 - var) / 150) - 1) < 0.1
    many = counts[:3, counts[:3].sum(0) > 40]
    fine = many[0] / many.sum(0)
    var = 2 / (9 * (3 * beta + 1))
    expected = var + (1 / 3 - 1 / 9 - var) * (1 / many.sum(0)).mean()
    assert abs(fine.mean() - 1 / 3) < 0.02
    both = counts[:, (counts[:3].sum(0) > 20) & (counts[3:6].sum(0) > 20)]
    # Each superclass has weights of its own.
    assert abs(np.corrcoef(both[0] / both[:3].sum(0), both[3] / both[3:6].sum(0))[0, 1]) < 0.2
    assert abs(fine.var() / expected - 1) < 0.15


def test_labels_are_spread_evenly(rng):
    for classes, clients, each in ((10, 20, 2), (10, 7, 3), (3, 5, 3), (10, 1, 1)):
        held = partitions.spread_labels(classes, clients, each, rng)
        used = np.bincount(held.reshape(-1), minlength=classes)
        assert used.max() - used.min() <= 1
        assert all(len(set(mine)) == each for mine in held)


def test_topping_up_keeps_every_row_and_reaches_the_minimum(rng):
    """Also where there are exactly enough."""
    counts, moved = partitions.dirichlet_counts(np.array([144] * 10), 140, 0.02, 10, rng)
    assert counts.sum(1).tolist() == [144] * 10
    assert (moved > 0, counts.sum(0).min() >= 10, counts.min() >= 0) == (True, True, True)
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
    assert (test[1][0] < 5, test[2].tolist()) == (True, [5])


def test_stratified_leaves_each_class_its_last_row_where_it_can():
    labels = np.array([0] * 8 + [1])
    for seed in range(20):
        left, taken = partitions.stratified(labels, np.arange(9), 5, np.random.default_rng(seed))
        assert (8 in left, len(taken)) == (True, 5)
        assert sorted([*left, *taken]) == list(range(9))
    assert len(partitions.stratified(labels, np.arange(9), 9, np.random.default_rng(0))[0]) == 0
    assert len(partitions.stratified(None, np.arange(9), 0, np.random.default_rng(0))[1]) == 0
