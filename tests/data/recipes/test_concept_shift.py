"""Concept shift: the published partition, and groups that give classes other names."""

import numpy as np
import pytest
import torch

from bayesfl.data import concept_drift, iid, load, swapped_labels
from bayesfl.data.recipes.images import FINE_TO_COARSE
from tests.data.made import fine_labels, small
from tests.files import where_present


def check_concept_drift(data, source, clients):
    fine = fine_labels(data, source, "train")
    held = np.array(
        [[np.unique(mine[np.array(FINE_TO_COARSE)[mine] == c]) for c in range(20)] for mine in fine]
    )
    assert held.shape == (clients, 20, 1)  # one subclass of every superclass
    assert (np.array(FINE_TO_COARSE)[held[:, :, 0]] == np.arange(20)).all()
    for group in held[:, :, 0].reshape(-1, 5, 20):
        assert len(np.unique(group)) == 100  # within a group every subclass is used once
    sizes = np.array([np.bincount(mine, minlength=100) for mine in fine])
    pieces = sizes.max(1)
    # The same cuts for all classes.
    assert all(set(mine) == {0, piece} for mine, piece in zip(sizes, pieces, strict=True))
    by_group = pieces.reshape(-1, 5)
    assert (by_group == by_group[:, :1]).all()
    assert (by_group[:, 0].sum(), by_group.min() >= 1) == (500, True)
    assert len(data.train.index.unique()) == len(data.train.index) == 50_000
    for train, test in zip(fine, fine_labels(data, source, "test"), strict=True):
        assert (len(test), set(test)) == (2000, set(train))
    assert torch.equal(data.train.y, torch.tensor(FINE_TO_COARSE)[source.y])
    assert data.classes == 20


@pytest.mark.parametrize("clients", [50, 100, 200])
def test_concept_drift_is_the_published_partition(hundred, clients):
    check_concept_drift(concept_drift(hundred, clients=clients, seed=1), hundred, clients)


@where_present
def test_concept_drift_on_the_images():
    data = concept_drift("cifar100", clients=100)
    check_concept_drift(data, load("cifar100"), 100)
    assert data.inputs == (3, 32, 32)


def test_concept_drift_of_digits_pairs_classes(digits):
    data = concept_drift("digits", clients=20)
    assert data.class_names == ("0/1", "2/3", "4/5", "6/7", "8/9")
    assert data.test.x is data.train.x
    for train, test in zip(
        fine_labels(data, digits, "train"), fine_labels(data, digits, "test"), strict=True
    ):
        assert sorted(k // 2 for k in set(train)) == [0, 1, 2, 3, 4]
        assert set(test) == set(train)
    assert data.train.counts.sum() == digits.train
    assert data.train.counts.max() > 3 * data.train.counts.min()


@pytest.mark.parametrize(("size", "clients"), [(2, 60), (5, 200)])
def test_concepts_are_shuffled_for_every_group_and_superclass(hundred, size, clients):
    """Each superclass on its own, each group anew, each seed otherwise: no two superclasses go
    together more than chance has it.
    """
    source = load("digits") if size == 2 else hundred
    superclasses = source.superclasses or [(k, k + 1) for k in range(0, 10, 2)]
    rank = {k: place for group in superclasses for place, k in enumerate(group)}
    place = {k: c for c, group in enumerate(superclasses) for k in group}

    def concepts(seed: int) -> np.ndarray:
        """Which subclass of each superclass [J, K]."""
        held = np.full((clients, len(superclasses)), -1)
        for j, mine in enumerate(
            fine_labels(concept_drift(source, clients=clients, seed=seed), source, "train")
        ):
            for k in np.unique(mine):
                held[j, place[k]] = rank[k]
        return held

    held = concepts(0)
    first = held[::size]  # one client of each group
    assert all(set(column) == set(range(size)) for column in first.T)
    alike = (first[:, :, None] == first[:, None, :]).mean(0)[np.triu_indices(len(superclasses), 1)]
    assert (abs(alike - 1 / size) < 5 * np.sqrt((1 / size) * (1 - 1 / size) / len(first))).all()
    assert len({concepts(seed).tobytes() for seed in range(4)}) == 4


def test_concept_drift_with_superclasses_of_your_own(digits):
    groups = [[0, 6, 8], [1, 4, 7]]
    data = concept_drift("digits", clients=9, superclasses=groups, min_piece=20)
    assert (data.classes, data.class_names) == (2, ("0/6/8", "1/4/7"))
    assert data.train.counts.min() >= 40
    assert set(np.concatenate(fine_labels(data, digits, "train"))) == {0, 1, 4, 6, 7, 8}


def test_swapped_labels_change_names_by_group(digits):
    """Every group's names are a permutation of disjoint pairs, no two alike, the first the classes'
    own; rows are dealt as by `iid`.
    """
    data = swapped_labels(clients=7, groups=3, swaps=2, seed=4)
    names, plain = np.array(data.recipe["names"]), iid(clients=7, seed=4)
    assert torch.equal(data.train.index, plain.train.index)
    assert torch.equal(data.test.index, plain.test.index)
    assert names[0].tolist() == list(range(10))
    assert len({row.tobytes() for row in names}) == 3
    assert (np.take_along_axis(names, names, 1) == np.arange(10)).all()
    assert [(row != np.arange(10)).sum() for row in names] == [0, 4, 4]
    for part in ("train", "test"):
        for j, mine in enumerate(fine_labels(data, digits, part)):
            assert data.splits[part].client(j)[1].tolist() == names[j % 3][mine].tolist()
    assert torch.equal(load("digits").y, digits.y)
    every = swapped_labels(small(3), clients=4, groups=4, swaps=1)  # as many as there are
    assert sorted(every.recipe["names"]) == [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0]]
