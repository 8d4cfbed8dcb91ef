"""Label skew: who gets which classes, and test rows like training rows."""

import time

import numpy as np
import torch

from bayesfl.data import dirichlet, labels_per_client, pachinko, shards
from bayesfl.data.recipes.images import FINE_TO_COARSE
from tests.data.made import fine_labels
from tests.files import where_present


def test_labels_per_client(digits):
    for sizes in ("equal", "random"):
        data = labels_per_client(clients=15, labels=3, sizes=sizes)
        assert len(data.train.index.unique()) == len(data.train.index) == digits.train
        for train, test in zip(
            fine_labels(data, digits, "train"), fine_labels(data, digits, "test"), strict=True
        ):
            assert len(set(train)) == 3
            assert set(test) == set(train)
            assert len(test) == sum(int((digits.y[digits.train :] == k).sum()) for k in set(train))
    equal, random = (
        labels_per_client(clients=15, labels=3, sizes=sizes).train.counts
        for sizes in ("equal", "random")
    )
    # A class has four or five clients: parts of 29 to 36.
    assert equal.max() - equal.min() <= 27
    assert random.std() > equal.std()


def test_dirichlet_deals_test_rows_like_training_rows(digits):
    data = dirichlet(clients=10, alpha=0.3)
    assert len(data.train.index.unique()) == len(data.train.index) == digits.train
    assert data.train.counts.min() >= 10
    assert data.test.counts.min() >= 1
    assert data.recipe["moved"] == 0
    for k in range(10):
        train, test = (
            np.array(
                [int((mine == k).sum()) for mine in fine_labels(data, digits, part)], dtype=float
            )
            for part in ("train", "test")
        )
        assert np.abs(test - train / train.sum() * test.sum()).max() <= 1.5
    skew = [
        np.mean([len(set(m)) for m in fine_labels(dirichlet(clients=10, alpha=a), digits, "train")])
        for a in (0.1, 10.0)
    ]
    assert skew[0] < skew[1]


def test_dirichlet_ends_for_many_clients_and_little_alpha(hundred):
    start = time.perf_counter()
    data = dirichlet(hundred, clients=500, alpha=0.05)
    assert time.perf_counter() - start < 10
    assert data.train.counts.min() >= 10
    assert data.test.counts.min() >= 1
    assert len(data.train.index.unique()) == len(data.train.index) == 50_000
    for train, test in zip(
        fine_labels(data, hundred, "train"), fine_labels(data, hundred, "test"), strict=True
    ):
        assert set(test) <= set(train)


def test_shards_deal_test_rows_like_training_rows(digits):
    """The pathological partition of digits: every row once, two shards a client, test labels those
    of its training rows.
    """
    data = shards(clients=20, shards=2)
    assert torch.equal(data.train.index.sort()[0], torch.arange(digits.train))
    assert data.train.counts.max() - data.train.counts.min() <= 2
    train, test = fine_labels(data, digits, "train"), fine_labels(data, digits, "test")
    assert max(len(set(mine)) for mine in train) <= 4
    assert np.mean([len(set(mine)) for mine in train]) < 3.5
    for k in range(10):
        ours, theirs = (np.array([(mine == k).sum() for mine in part]) for part in (train, test))
        assert (
            np.abs(theirs - ours / ours.sum() * (digits.y[digits.train :] == k).sum().item()).max()
            <= 1.5
        )
    assert (
        len(set(np.concatenate([data.test.rows(j).numpy() for j in range(20)])))
        == len(digits.x) - digits.train
    )


def test_pachinko_of_cifar_100(hundred):
    """Sizes of the paper: 100 clients of 500, all training rows once; few superclasses carry a
    client, and most classes of these.
    """
    start = time.perf_counter()
    data = pachinko(hundred)
    assert time.perf_counter() - start < 20
    assert data.train.counts.tolist() == [500] * 100
    assert torch.equal(data.train.index.sort()[0], torch.arange(50_000))
    assert len(data.test.index) == 10_000
    coarse = np.array(FINE_TO_COARSE)
    first = [
        np.bincount(coarse[mine], minlength=20) for mine in fine_labels(data, hundred, "train")[:50]
    ]
    # The early ones, before anything runs out.
    assert np.mean([np.sort(mine)[-5:].sum() / 500 for mine in first]) > 0.6
    flat = pachinko(hundred, clients=20, size=300, alpha=1e6, beta=1e6)
    assert all(
        np.bincount(coarse[mine], minlength=20).min() >= 2
        for mine in fine_labels(flat, hundred, "train")
    )
    assert flat.train.counts.tolist() == [300] * 20
    assert flat.recipe["superclasses"] == [list(group) for group in hundred.superclasses]
    # Pairs of classes; 1,438 rows leave three.
    assert pachinko("digits", clients=7).train.counts.tolist() == [205] * 7


@where_present
def test_pachinko_of_the_images():
    """The paper's sizes on the real labels."""
    data = pachinko("cifar100")
    assert data.train.counts.tolist() == [500] * 100
    assert torch.equal(data.train.index.sort()[0], torch.arange(50_000))
