"""Recipes: structure, determinism, shares of test rows, and the published protocols."""

import gc
import string
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.data import (
    Source,
    concept_drift,
    diabetes,
    dirichlet,
    dominant_classes,
    heart_disease,
    iid,
    label_groups,
    labels_per_client,
    load,
    pachinko,
    shakespeare,
    shards,
    swapped_labels,
)
from bayesfl.data.images import FINE_TO_COARSE
from bayesfl.data.readers import speeches
from tests.files import where_present


def fine_labels(data, source, split):
    """Original class of each example of each client."""
    part = data.splits[split]
    return [source.y[part.rows(j)].numpy() for j in range(data.clients)]


@pytest.fixture(scope="module")
def hundred():
    """CIFAR-100 in shape: 100 classes of 500 and 100, the superclasses of the original, one number per image."""
    superclasses = tuple(tuple(k for k in range(100) if FINE_TO_COARSE[k] == c) for c in range(20))
    rng = np.random.default_rng(0)
    train, test = rng.permutation(np.repeat(np.arange(100), 500)), rng.permutation(np.repeat(np.arange(100), 100))
    return Source.from_parts(
        torch.arange(50_000.0)[:, None],
        torch.from_numpy(train),
        torch.arange(10_000.0)[:, None],
        torch.from_numpy(test),
        name="hundred",
        superclasses=superclasses,
    )


def check_concept_drift(data, source, clients):
    fine = fine_labels(data, source, "train")
    held = np.array([[np.unique(mine[np.array(FINE_TO_COARSE)[mine] == c]) for c in range(20)] for mine in fine])
    assert held.shape == (clients, 20, 1)  # one subclass of every superclass
    assert (np.array(FINE_TO_COARSE)[held[:, :, 0]] == np.arange(20)).all()
    for group in held[:, :, 0].reshape(-1, 5, 20):
        assert len(np.unique(group)) == 100  # within a group every subclass is used once
    sizes = np.array([np.bincount(mine, minlength=100) for mine in fine])
    pieces = sizes.max(1)
    assert all(set(mine) == {0, piece} for mine, piece in zip(sizes, pieces, strict=True))  # the same cuts for all classes
    by_group = pieces.reshape(-1, 5)
    assert (by_group == by_group[:, :1]).all()
    assert by_group[:, 0].sum() == 500
    assert by_group.min() >= 1
    used = data.train.index
    assert len(used.unique()) == len(used) == 50_000
    for train, test in zip(fine, fine_labels(data, source, "test"), strict=True):
        assert len(test) == 2000
        assert set(test) == set(train)
    assert torch.equal(data.train.y, torch.tensor(FINE_TO_COARSE)[source.y])
    assert data.classes == 20


@pytest.mark.parametrize("clients", [50, 100, 200])
def test_concept_drift_is_the_published_partition(hundred, clients):
    check_concept_drift(concept_drift(hundred, clients=clients, seed=1), hundred, clients)


@where_present
def test_concept_drift_on_the_images():
    source = load("cifar100")
    data = concept_drift("cifar100", clients=100)
    check_concept_drift(data, source, 100)
    assert data.inputs == (3, 32, 32)


def test_concept_drift_of_digits_pairs_classes():
    data, source = concept_drift("digits", clients=20), load("digits")
    assert data.class_names == ("0/1", "2/3", "4/5", "6/7", "8/9")
    assert data.test.x is data.train.x
    for train, test in zip(fine_labels(data, source, "train"), fine_labels(data, source, "test"), strict=True):
        assert sorted(set(train // 2)) == [0, 1, 2, 3, 4]
        assert len(set(train)) == 5
        assert set(test) == set(train)
    assert data.train.counts.sum() == source.train
    assert data.train.counts.max() > 3 * data.train.counts.min()


@pytest.mark.parametrize(("size", "clients"), [(2, 60), (5, 200)])
def test_concepts_are_shuffled_for_every_group_and_superclass(hundred, size, clients):
    """Each superclass on its own, each group anew, each seed otherwise: no two superclasses go together more than chance has it."""
    source = load("digits") if size == 2 else hundred
    superclasses = source.superclasses or [(k, k + 1) for k in range(0, 10, 2)]
    rank = {k: place for group in superclasses for place, k in enumerate(group)}
    place = {k: c for c, group in enumerate(superclasses) for k in group}

    def concepts(seed: int) -> np.ndarray:
        """Which subclass of each superclass [J, K]."""
        held = np.full((clients, len(superclasses)), -1)
        for j, mine in enumerate(fine_labels(concept_drift(source, clients=clients, seed=seed), source, "train")):
            for k in np.unique(mine):
                held[j, place[k]] = rank[k]
        return held

    held = concepts(0)
    groups = clients // size
    first = held[::size]  # one client of each group
    assert all(set(column) == set(range(size)) for column in first.T)
    alike = (first[:, :, None] == first[:, None, :]).mean(0)[np.triu_indices(len(superclasses), 1)]
    assert (abs(alike - 1 / size) < 5 * np.sqrt((1 / size) * (1 - 1 / size) / groups)).all()
    assert len({concepts(seed).tobytes() for seed in range(4)}) == 4


def test_concept_drift_with_superclasses_of_your_own():
    groups = [[0, 6, 8], [1, 4, 7]]
    data, source = concept_drift("digits", clients=9, superclasses=groups, min_piece=20), load("digits")
    assert data.classes == 2
    assert data.train.counts.min() >= 40
    assert set(np.concatenate(fine_labels(data, source, "train"))) == {0, 1, 4, 6, 7, 8}
    assert data.class_names == ("0/6/8", "1/4/7")


def test_labels_per_client():
    source = load("digits")
    for sizes in ("equal", "random"):
        data = labels_per_client(clients=15, labels=3, sizes=sizes)
        assert len(data.train.index.unique()) == len(data.train.index) == source.train
        for train, test in zip(fine_labels(data, source, "train"), fine_labels(data, source, "test"), strict=True):
            assert len(set(train)) == 3
            assert set(test) == set(train)
            assert len(test) == sum(int((source.y_test == k).sum()) for k in set(train))
    equal = labels_per_client(clients=15, labels=3)
    assert equal.train.counts.max() - equal.train.counts.min() <= 27  # a class has four or five clients: parts of 29 to 36
    assert labels_per_client(clients=15, labels=3, sizes="random").train.counts.std() > equal.train.counts.std()


def check_label_groups(data, source, clients, train, test, labels=5):
    """Every client has the classes that the formula says, exactly so many rows of each, and no row is used twice."""
    assert data.clients == clients
    for name, amount in (("train", train), ("test", test)):
        for j, mine in enumerate(fine_labels(data, source, name)):
            expected = np.zeros(source.outputs, dtype=int)
            expected[[(labels * j + k) % source.outputs for k in range(labels)]] = amount
            assert np.bincount(mine, minlength=source.outputs).tolist() == expected.tolist()
    used = torch.cat([data.train.index, data.test.index])
    assert len(used.unique()) == len(used) == clients * labels * (train + test)
    for split in (data.train, data.test):  # the pool: each split has rows of both official parts, in proportion but for chance
        share = source.train / len(source.x)
        found = float((split.index < source.train).float().mean())
        assert abs(found - share) < 5 * (share * (1 - share) / len(split.index)) ** 0.5


def test_label_groups():
    source = load("digits")
    data = label_groups()
    check_label_groups(data, source, 10, 14, 20)
    held = [tuple(np.unique(mine).tolist()) for mine in fine_labels(data, source, "train")]
    assert held == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)] * 5
    assert data.recipe["pooled"] is True
    assert (data.task, data.outputs, data.inputs) == ("classification", 10, (64,))
    assert data.class_names == source.class_names
    assert data.test.x is data.train.x
    assert data.train.y is source.y


@pytest.mark.parametrize(("clients", "labels", "train", "test"), [(7, 3, 30, 10), (4, 10, 1, 42), (3, 1, 174, 3), (1, 4, 1, 1)])
def test_label_groups_of_any_number_of_classes(clients, labels, train, test):
    """Groups that overlap, that are everybody's, that nobody else has, and classes that nobody has."""
    source = load("digits")
    data = label_groups(clients=clients, labels=labels, train=train, test=test)
    assert data.counts["train"].tolist() == [labels * train] * clients
    used = torch.cat([data.train.index, data.test.index])
    assert len(used.unique()) == len(used)
    for name, amount in (("train", train), ("test", test)):
        for j, mine in enumerate(fine_labels(data, source, name)):
            classes, counts = np.unique(mine, return_counts=True)
            assert classes.tolist() == sorted((labels * j + k) % 10 for k in range(labels))
            assert set(counts) == {amount}


def test_label_groups_takes_every_row_there_is():
    source = load("digits")
    smallest = 174  # examples of class 8
    data = label_groups(clients=2, labels=5, train=smallest - 1, test=1)
    used = torch.cat([data.train.index, data.test.index])
    eights = (source.y == 8).nonzero()[:, 0]
    assert torch.isin(eights, used).all()
    with pytest.raises(ValueError, match=r"class 8 has 174 examples, too few for 174 \+ 1 for each client with it \(1\): at most 174 fit"):
        label_groups(clients=2, labels=5, train=smallest, test=1)
    with pytest.raises(ValueError, match=r"class 2 has 177 examples, .* for each client with it \(2\): at most 88 fit"):  # 8 goes to one
        label_groups(clients=3, labels=5, train=80, test=9)


def test_label_groups_are_determined_by_their_arguments():
    data = label_groups(seed=5)
    assert label_groups(seed=5).hash == data.hash
    assert label_groups(seed=np.int64(5), clients=np.int64(10), train=np.int64(14)).hash == data.hash  # pyright: ignore[reportArgumentType]
    others = [
        label_groups(seed=6),
        label_groups(seed=5, centred=False),
        label_groups(seed=5, train=13),
        label_groups(seed=5, test=19),
        label_groups(seed=5, clients=9),
        label_groups(seed=5, labels=4),
        labels_per_client(clients=10, labels=5, seed=5),
    ]
    assert len({data.hash, *(other.hash for other in others)}) == 8
    assert not torch.equal(others[0].train.index, data.train.index)
    assert not torch.equal(others[0].test.index, data.test.index)
    assert torch.equal(others[1].train.index, data.train.index)  # the scale is no part of the draw


def test_label_groups_share_out_their_training_rows():
    source, whole = load("digits"), label_groups(seed=5, train=20, test=10)
    data = label_groups(seed=5, train=20, test=10, validation=0.2, calibration=0.1)
    assert torch.equal(data.test.index, whole.test.index)
    assert data.hash != whole.hash
    for j in range(10):
        mine = torch.cat([data.splits[name].rows(j) for name in ("train", "validation", "calibration")])
        assert torch.equal(mine.sort()[0], whole.train.rows(j))
    for name, amount in (("train", 14), ("validation", 4), ("calibration", 2)):
        assert all((np.unique(mine, return_counts=True)[1] == amount).all() for mine in fine_labels(data, source, name))


def test_label_groups_are_centred():
    source = load("digits")
    before = source.x.clone()
    data = label_groups()
    assert torch.equal(data.train.x, (source.x - 0.5) / 0.5)
    assert (data.train.x.min(), data.train.x.max()) == (-1, 1)
    assert torch.equal(source.x, before)  # other recipes share it
    assert label_groups(centred=False).train.x is source.x


def test_centred_inputs_are_made_once_and_let_go():
    source = replace(load("digits"), x=load("digits").x.clone())
    data = label_groups(source)
    assert label_groups(source, seed=1, validation=0.1).train.x is data.train.x
    assert label_groups(replace(source, x=source.x.clone())).train.x is not data.train.x
    source.x[0] = 0.25  # of a source of one's own, between two calls
    again = label_groups(source)
    assert again.train.x is not data.train.x
    assert (again.train.x[0] == -0.5).all()
    gone = weakref.ref(again.train.x)
    del again
    gc.collect()
    assert gone() is None


def own(x, name="own"):
    """Forty made-up examples of two classes, ten of them the test part."""
    y = torch.arange(40) % 2
    return Source.from_parts(x[:30], y[:30], x[30:], y[30:], name=name)


def test_label_groups_stay_what_they_are():
    """The same on every machine and in every version: what was published can be made again."""
    data = label_groups(own(torch.arange(40.0)[:, None] / 64), clients=4, labels=1, train=5, test=3, validation=0.2, seed=3)
    assert data.train.rows(0).tolist() == [6, 12, 18, 28]
    assert data.validation.index.tolist() == [14, 27, 2, 7]
    assert data.hash == "e9d68fc60ebaad19c12779e785535ab3d774b75c0e8152cc61fd2f658b5a29d7"


@pytest.mark.parametrize("name", ["own", "mnist"])
def test_centring_of_a_source_of_your_own(name):
    """Whatever it is called: the standardisation of a known name is undone for the known data only."""
    x = torch.linspace(0, 1, 40)[:, None, None, None].expand(40, 1, 2, 2)
    data = label_groups(own(x, name), clients=2, labels=1, train=5, test=5)
    assert_close(data.train.x, 2 * x - 1)
    for wrong, low, high in ((x - 0.1, "-0.1", "0.9"), (x * 255, "0", "255"), (x + float("nan"), "nan", "nan")):
        with pytest.raises(ValueError, match=rf"those of '{name}' lie within \[{low}, {high}\]: scale them to \[0, 1\], or pass cent"):
            label_groups(own(wrong, name), clients=2, labels=1, train=5, test=5)
    data = label_groups(own(x * 255, name), clients=2, labels=1, train=5, test=5, centred=False)
    assert data.train.x.max() == 255


@pytest.mark.parametrize(("name", "shape"), [("mnist", (28, 28)), ("fashion-mnist", (28, 28)), ("cifar10", (32, 32, 3))])
def test_centred_images_are_the_bytes_on_disk(tmp_path, name, shape):
    """Made-up images of every byte: what dividing by 255 and standardising by 0.5 and 0.5 makes of them, to the last bit."""
    images = np.random.default_rng(0).integers(0, 256, (60, *shape), dtype=np.uint8)
    images[:, 0, 0] = 0  # a corner that is always black
    labels = np.arange(60) % 10
    np.savez(tmp_path / f"{name}.npz", x_train=images[:50], y_train=labels[:50], x_test=images[50:], y_test=labels[50:])
    data = label_groups(name, clients=2, train=3, test=3, root=tmp_path)
    x = torch.from_numpy(images).float().div(255).sub(0.5).div(0.5)
    assert torch.equal(data.train.x, x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2))
    assert (data.train.x[..., 0, 0] == -1).all()
    assert torch.equal(label_groups(name, clients=2, train=3, test=3, centred=False, root=tmp_path).train.x, load(name, root=tmp_path).x)


@pytest.mark.parametrize(
    ("name", "clients", "train", "test"),
    [
        ("mnist", 10, 50, 950),
        ("mnist", 10, 900, 300),
        ("fashion-mnist", 10, 50, 950),
        ("fashion-mnist", 10, 900, 300),
        ("cifar10", 20, 25, 475),
        ("cifar10", 20, 450, 150),
    ],
)
@where_present
def test_label_groups_of_the_paper(name, clients, train, test):
    source = load(name)
    data = label_groups(name, clients=clients, train=train, test=test)
    check_label_groups(data, source, clients, train, test)
    assert tuple(data.train.x.aminmax()) == (-1, 1)
    if (name, train) == ("cifar10", 450):
        assert torch.equal(torch.cat([data.train.index, data.test.index]).sort()[0], torch.arange(60_000))
        with pytest.raises(ValueError, match=r"class 0 has 6000 examples, .* 451 \+ 150 for each client with it \(10\): at most 600 fit"):
            label_groups(name, clients=clients, train=train + 1, test=test)


def test_dominant_classes_are_the_published_groups(hundred):
    """Five groups of three classes that overlap by one; a fifth of a client's rows is spread over all classes, the rest over its three."""
    data, source = dominant_classes("digits", clients=7, train=50, test=25), load("digits")
    held = [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [0, 8, 9]]
    assert data.recipe["groups"] == held
    for part, size in (("train", 50), ("test", 25)):
        for j, mine in enumerate(fine_labels(data, source, part)):
            share = np.full(10, 0.02)
            share[held[j % 5]] += 0.8 / 3
            counts = np.bincount(mine, minlength=10)
            assert counts.sum() == size
            assert abs(counts - size * share).max() < 1
    assert data.test.x is data.train.x
    even = dominant_classes("digits", clients=3, uniform=1.0, train=100, test=20)
    assert all((np.bincount(mine) == 10).all() for mine in fine_labels(even, source, "train"))
    own = dominant_classes(hundred, clients=4, uniform=0.0, groups=[[7], [3, 99]], train=10, test=4)
    expected = [{7}, {3, 99}, {7}, {3, 99}]
    assert [set(mine) for mine in fine_labels(own, hundred, "train")] == expected
    assert dominant_classes(hundred, clients=1, train=100, test=100).recipe["groups"][-1] == [0, 98, 99]


def test_dominant_classes_share_rows_only_when_a_class_runs_out():
    """Clients take rows one after another; where a class ends it starts again, so that no row is used twice more than another."""
    source = load("digits")
    for clients, train in ((10, 60), (20, 200)):
        data = dominant_classes(clients=clients, train=train)
        times = np.bincount(data.train.index.numpy(), minlength=source.train)
        labels = source.y_train.numpy()
        for k in range(10):
            assert times[labels == k].max() - times[labels == k].min() <= 1
        assert data.recipe["shared"][0] == (times > 1).sum()
        assert (times > 1).any() == (train == 200)
        assert all(len(data.train.rows(j).unique()) == train for j in range(clients))


def test_swapped_labels_change_names_by_group():
    """Every group's names are a permutation of disjoint pairs, no two alike, the first the classes' own; rows are dealt as by `iid`."""
    source = load("digits")
    data = swapped_labels(clients=7, groups=3, swaps=2, seed=4)
    names, plain = np.array(data.recipe["names"]), iid(clients=7, seed=4)
    assert torch.equal(data.train.index, plain.train.index)
    assert torch.equal(data.test.index, plain.test.index)
    assert names[0].tolist() == list(range(10))
    assert len({row.tobytes() for row in names}) == 3
    for row in names:
        assert (row[row] == np.arange(10)).all()
    assert [(row != np.arange(10)).sum() for row in names] == [0, 4, 4]
    for part in ("train", "test"):
        for j, mine in enumerate(fine_labels(data, source, part)):
            assert data.splits[part].client(j)[1].tolist() == names[j % 3][mine].tolist()
    assert torch.equal(load("digits").y, source.y)
    every = swapped_labels(small(3), clients=4, groups=4, swaps=1)  # as many as there are
    assert sorted(every.recipe["names"]) == [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0]]


def small(classes: int) -> Source:
    """Four training and two test rows of each class."""
    y = torch.arange(classes)
    return Source.from_parts(torch.zeros(4 * classes, 1), y.repeat(4), torch.zeros(2 * classes, 1), y.repeat(2), name="small")


def test_dirichlet_deals_test_rows_like_training_rows():
    source = load("digits")
    data = dirichlet(clients=10, alpha=0.3)
    assert len(data.train.index.unique()) == len(data.train.index) == source.train
    assert data.train.counts.min() >= 10
    assert data.test.counts.min() >= 1
    assert data.recipe["moved"] == 0
    for k in range(10):
        train, test = (
            np.array([int((mine == k).sum()) for mine in fine_labels(data, source, part)], dtype=float) for part in ("train", "test")
        )
        assert np.abs(test - train / train.sum() * test.sum()).max() <= 1.5
    skew = [np.mean([len(set(m)) for m in fine_labels(dirichlet(clients=10, alpha=a), source, "train")]) for a in (0.1, 10.0)]
    assert skew[0] < skew[1]


def test_dirichlet_ends_for_many_clients_and_little_alpha(hundred):
    start = time.perf_counter()
    data = dirichlet(hundred, clients=500, alpha=0.05)
    assert time.perf_counter() - start < 10
    assert data.train.counts.min() >= 10
    assert data.test.counts.min() >= 1
    assert len(data.train.index.unique()) == len(data.train.index) == 50_000
    for train, test in zip(fine_labels(data, hundred, "train"), fine_labels(data, hundred, "test"), strict=True):
        assert set(test) <= set(train)


def test_shards_deal_test_rows_like_training_rows():
    """The pathological partition of digits: every row once, two shards a client, test labels those of its training rows."""
    source = load("digits")
    data = shards(clients=20, shards=2)
    assert torch.equal(data.train.index.sort()[0], torch.arange(source.train))
    assert data.train.counts.max() - data.train.counts.min() <= 2
    train, test = fine_labels(data, source, "train"), fine_labels(data, source, "test")
    assert max(len(set(mine)) for mine in train) <= 4
    assert np.mean([len(set(mine)) for mine in train]) < 3.5
    for k in range(10):
        ours = np.array([int((mine == k).sum()) for mine in train], dtype=float)
        theirs = np.array([int((mine == k).sum()) for mine in test], dtype=float)
        assert np.abs(theirs - ours / ours.sum() * (source.y_test == k).sum().item()).max() <= 1.5
    assert len(set(np.concatenate([data.test.rows(j).numpy() for j in range(20)]))) == len(source.x) - source.train


def test_label_clusters_are_dealt_as_one_class():
    """FedEM's CIFAR-10 recipe, on digits: a client has one share of all classes of a group; groups are of one size."""
    source = load("digits")
    data = dirichlet(clients=8, alpha=0.4, label_clusters=3, seed=1)
    groups = data.recipe["label_clusters"]
    assert sorted(map(len, groups)) == [3, 3, 4]
    assert sorted(k for group in groups for k in group) == list(range(10))
    assert dirichlet(clients=8, alpha=0.4, label_clusters=3, seed=2).recipe["label_clusters"] != groups
    assert torch.equal(data.train.index.sort()[0], torch.arange(source.train))
    train, test = fine_labels(data, source, "train"), fine_labels(data, source, "test")
    for group in groups:
        ours = np.array([[(mine == k).sum() for k in group] for mine in train])
        total = ours.sum(1) / ours.sum()
        # Given its share of a group a client's rows are drawn at random: within five standard deviations of the class's.
        for at in range(len(group)):
            n = ours[:, at].sum()
            assert np.abs(ours[:, at] - n * total).max() <= 5 * np.sqrt(n * total * (1 - total)).max() + 1
        theirs = np.array([np.isin(mine, group).sum() for mine in test])
        assert np.abs(theirs - total * theirs.sum()).max() <= 1.5
    assert "label_clusters" not in dirichlet(clients=8).recipe
    # As many groups as classes deal each class by itself; one group leaves labels in the same shares everywhere.
    one = dirichlet(clients=4, alpha=0.4, label_clusters=1)
    shares = np.array([np.bincount(mine, minlength=10) / len(mine) for mine in fine_labels(one, source, "train") if len(mine) > 200])
    assert np.abs(shares - 0.1).max() < 0.08


def test_pachinko_of_cifar_100(hundred):
    """Sizes of the paper: 100 clients of 500, all training rows once; few superclasses carry a client, and most classes of these."""
    start = time.perf_counter()
    data = pachinko(hundred)
    assert time.perf_counter() - start < 20
    assert data.train.counts.tolist() == [500] * 100
    assert torch.equal(data.train.index.sort()[0], torch.arange(50_000))
    assert len(data.test.index) == 10_000
    coarse = np.array(FINE_TO_COARSE)
    first = [np.bincount(coarse[mine], minlength=20) for mine in fine_labels(data, hundred, "train")[:50]]
    assert np.mean([np.sort(mine)[-5:].sum() / 500 for mine in first]) > 0.6  # the early ones, before anything runs out
    flat = pachinko(hundred, clients=20, size=300, alpha=1e6, beta=1e6)
    assert all(np.bincount(coarse[mine], minlength=20).min() >= 2 for mine in fine_labels(flat, hundred, "train"))
    assert flat.train.counts.tolist() == [300] * 20
    assert flat.recipe["superclasses"] == [list(group) for group in hundred.superclasses]
    assert pachinko("digits", clients=7).train.counts.tolist() == [205] * 7  # pairs of classes; 1,438 rows leave three


PLAYS = """@@PLAY first

DRAMATIS PERSONAE

KING\tof nothing, who must not be anybody's {long}

ACT I

SCENE I\tA hall, which nobody says. {long}

[Enter KING and
FOOL]

KING\t{long} the first

FOOL\tToo short.

KING\tAnd   more
[Aside, which {long} nobody says]
  on two lines.

ACT II

FOOL:\t{long}

@@PLAY second

PROLOGUE

KING\t{long}{long}

QUEEN\t{exact}
"""


def test_roles_speak_for_themselves(tmp_path):
    """Who says what, in which order; a chunk of 80 characters and the one after it; first ones train, last ones test."""
    long = "abcdefgh " * 30
    text = PLAYS.format(long=long.strip(), exact=240 * "x")  # the last chunk of so many has nothing after it
    said = speeches(text)
    assert list(said) == ["first, KING", "first, FOOL", "second, KING", "second, QUEEN"]
    assert said["first, KING"] == f"{long.strip()} the first\nAnd more\non two lines."
    assert said["first, FOOL"] == f"Too short.\n{long.strip()}"
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "moby_plays.txt").write_text(text)
    data = shakespeare(min_size=2, root=tmp_path)
    assert data.client_names == ("first, KING", "first, FOOL", "second, KING", "second, QUEEN")
    assert data.inputs == (80,)
    assert data.classes == 100
    characters = data.class_names
    assert characters == tuple(string.printable)
    for j, role in enumerate(data.client_names):
        x, y = (torch.cat(pair) for pair in zip(data.train.client(j), data.test.client(j), strict=True))
        chunks = ["".join(characters[int(c)] for c in row) for row in x]
        assert chunks == [said[role][80 * i : 80 * i + 80] for i in range(len(chunks))]
        assert [characters[int(c)] for c in y] == [said[role][80 * i + 80] for i in range(len(chunks))]
        assert len(chunks) == (len(said[role]) - 1) // 80
        assert data.train.counts[j] == int(0.8 * len(chunks))
    assert shakespeare(min_size=4, root=tmp_path).client_names == ("second, KING",)
    with pytest.raises(ValueError, match="no role has min_size=9 examples, the largest has 6"):
        shakespeare(min_size=9, root=tmp_path)
    with pytest.raises(ValueError, match="min_size must be at least 2"):
        shakespeare(min_size=1, root=tmp_path)
    with pytest.raises(ValueError, match=r"belongs to its own clients .* use shakespeare\(\)"):
        iid(load("shakespeare", root=tmp_path))


@where_present
def test_the_plays():
    """37 plays; every role's letters are its own."""
    data = shakespeare()
    assert len({name.split(", ")[0] for name in data.client_names}) == 37
    assert "hamlet, HAMLET" in data.client_names
    assert data.train.counts.min() >= 8
    assert data.test.counts.min() >= 2
    hamlet = data.client_names.index("hamlet, HAMLET")
    assert data.train.counts[hamlet] + data.test.counts[hamlet] > 500
    assert data.hash == shakespeare().hash


@where_present
def test_pachinko_of_the_images():
    """The paper's sizes on the real labels."""
    data = pachinko("cifar100")
    assert data.train.counts.tolist() == [500] * 100
    assert torch.equal(data.train.index.sort()[0], torch.arange(50_000))


def test_iid_deals_everything():
    data, source = iid(clients=7), load("digits")
    for split, size in ((data.train, source.train), (data.test, len(source.x) - source.train)):
        assert len(split.index.unique()) == size
        assert split.counts.max() - split.counts.min() <= 1


def test_diabetes():
    for data in (diabetes(), diabetes(by="age")):
        assert (data.task, data.outputs, data.inputs) == ("regression", 1, (10,))
        assert data.train.counts.sum() == 354
        x, y = data.train.x[data.train.index], data.train.y[data.train.index]
        assert_close(x.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
        assert_close(y.std(correction=0), torch.tensor(1.0), atol=1e-5, rtol=0)
        assert 100 < data.recipe["target_mean"] < 200
    by_age = diabetes(by="age")
    youngest, oldest = by_age.train.client(0)[0][:, 0], by_age.train.client(9)[0][:, 0]
    assert youngest.max() < oldest.min()
    assert by_age.test.client(0)[0][:, 0].mean() < by_age.test.client(9)[0][:, 0].mean()


def write_hearts(root, patients=40):
    """A table of made-up patients in the layout of the real one, some incomplete."""
    rng = np.random.default_rng(0)
    lines = ["centre,age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"]
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        for i in range(patients):
            chol = 0 if hospital == "switzerland" else rng.integers(150, 300)
            fbs = "" if i % 10 == 0 else i % 2
            lines.append(f"{hospital},{40 + i},{i % 2},{1 + i % 4},120,{chol},{fbs},{i % 3},{100 + i},0,{i / 10},,,,{i % 5}")
    (root / "heart_disease").mkdir()
    (root / "heart_disease" / "heart.csv").write_text("\n".join(lines))


def test_heart_disease_protocol_on_made_up_patients(tmp_path):
    write_hearts(tmp_path)
    data = heart_disease(root=tmp_path, seed=1)
    assert data.client_names == ("cleveland", "hungarian", "switzerland", "va")
    assert data.inputs == (13,)
    assert data.counts["test"].tolist() == [13] * 4  # of 36 complete patients, rounded up
    for j in range(4):
        x, y = data.train.client(j)
        assert_close(x.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
        spread = x.std(0, correction=0)
        assert_close(spread, (spread > 0.5).float(), atol=1e-5, rtol=0)  # a constant attribute stays at 0
        assert abs(y.float().mean() - data.test.client(j)[1].float().mean()) < 0.06
    assert data.train.client(2)[0][:, 3].abs().max() == 0
    assert heart_disease(root=tmp_path, seed=2).hash != data.hash


@where_present
def test_heart_disease_has_the_published_counts():
    data = heart_disease()
    assert data.counts["train"].tolist() == [199, 172, 30, 85]
    assert data.counts["test"].tolist() == [104, 89, 16, 45]
    assert data.hash == heart_disease().hash


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: concept_drift(clients=10, **options),
        lambda **options: labels_per_client(clients=10, **options),
        lambda **options: labels_per_client(clients=10, sizes="random", **options),
        lambda **options: dirichlet(clients=10, **options),
        lambda **options: dominant_classes(clients=10, **options),
        lambda **options: swapped_labels(clients=10, **options),
        lambda **options: dirichlet(clients=10, label_clusters=3, **options),
        lambda **options: shards(clients=10, **options),
        lambda **options: pachinko("digits", clients=10, **options),
        lambda **options: iid(clients=10, **options),
        lambda **options: diabetes(clients=10, **options),
        lambda **options: diabetes(clients=10, by="bmi", **options),
    ],
    ids=[
        "concept_drift",
        "labels",
        "labels-random",
        "dirichlet",
        "dominant",
        "swapped",
        "label-clusters",
        "shards",
        "pachinko",
        "iid",
        "diabetes",
        "diabetes-by",
    ],
)
def test_every_recipe_is_determined_by_its_arguments(make):
    data = make(seed=5)
    assert make(seed=5).hash == data.hash
    assert make(seed=6).hash != data.hash
    assert not torch.equal(make(seed=6).train.index, data.train.index)
    shared = make(seed=5, validation=0.1, calibration=0.1)
    assert shared.hash != data.hash
    assert shared.train.x is data.train.x  # one copy of the data, whatever is made of it
    together = torch.cat([split.index for name, split in shared.splits.items() if name != "test"])
    assert torch.equal(together.sort()[0], data.train.index.sort()[0])
    assert torch.equal(shared.test.index, data.test.index)
    source = load(str(data.source.name))
    assert (data.train.index < source.train).all()
    assert (data.test.index >= source.train).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: concept_drift(clients=5), "multiple of 2"),
        (lambda: concept_drift(clients=0), "clients must be at least 1, got 0"),
        (lambda: concept_drift(clients=20.0), "clients must be a whole number, got 20.0"),  # pyright: ignore[reportArgumentType]
        (lambda: concept_drift(clients=2000), "at most 278"),
        (lambda: concept_drift(clients=60, min_piece=10), "at most 26"),
        (lambda: concept_drift(min_piece=0), "min_piece must be at least 1"),
        (lambda: concept_drift(min_piece=1.5), "min_piece must be a whole number, got 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: concept_drift(min_piece="2"), "min_piece must be a whole number, got '2'"),  # pyright: ignore[reportArgumentType]
        (lambda: concept_drift(superclasses=[[0, 1], [2]]), "groups of one size"),
        (lambda: concept_drift(superclasses=[[0, 1], [1, 2]]), "different classes"),
        (lambda: concept_drift(superclasses=[[0, 10]]), "different classes within"),
        (lambda: concept_drift("diabetes"), "is a regression"),
        (lambda: concept_drift(seed=-1), "^seed must be at least 0, got -1$"),
        (lambda: labels_per_client(seed=-1), "^seed must be at least 0, got -1$"),
        (lambda: dirichlet(seed=-1), "^seed must be at least 0, got -1$"),
        (lambda: iid(seed=-1), "^seed must be at least 0, got -1$"),
        (lambda: diabetes(seed=0.5), "^seed must be a whole number, got 0.5$"),  # pyright: ignore[reportArgumentType]
        (lambda: labels_per_client(labels=11), r"labels must lie within \[1, 10\]"),
        (lambda: labels_per_client(labels=0), "labels must be at least 1, got 0"),
        (lambda: labels_per_client(labels=2.5), "labels must be a whole number, got 2.5"),  # pyright: ignore[reportArgumentType]
        (lambda: label_groups(seed=-1), "^seed must be at least 0, got -1$"),
        (lambda: label_groups(labels=11), r"labels must lie within \[1, 10\], the number of classes of 'digits', got 11"),
        (lambda: label_groups(labels=0), "labels must be at least 1, got 0"),
        (lambda: label_groups(labels=2.5), "labels must be a whole number, got 2.5"),  # pyright: ignore[reportArgumentType]
        (lambda: label_groups(train=0), "train must be at least 1, got 0"),
        (lambda: label_groups(train=1.5), "train must be a whole number, got 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: label_groups(test=0), "test must be at least 1, got 0"),
        (lambda: label_groups(test=True), "test must be a whole number, got True"),
        (lambda: label_groups(clients=0), "clients must be at least 1, got 0"),
        (lambda: label_groups(clients=2.5), "clients must be a whole number"),  # pyright: ignore[reportArgumentType]
        (
            lambda: label_groups(test=21),
            r"^class 8 has 174 examples, too few for 14 \+ 21 for each client with it \(5\): at most 34 fit, so take less per class or",
        ),
        (lambda: label_groups(clients=1000), r"^class 8 has 174 examples, .* for each client with it \(500\): use fewer clients$"),
        (lambda: label_groups("diabetes"), "label_groups shares data out by class, 'diabetes' is a regression"),
        (lambda: label_groups(validation=1.0), "validation is a share"),
        (lambda: labels_per_client(sizes="some"), "sizes must be"),  # pyright: ignore[reportArgumentType]
        (lambda: labels_per_client(clients=1400, labels=9), "use fewer clients or fewer labels"),
        (lambda: dominant_classes(uniform=1.5), r"uniform is a share .* within \[0, 1\], got 1.5"),
        (lambda: dominant_classes(uniform=float("nan")), "uniform is a share"),
        (lambda: dominant_classes(train=0), "train must be at least 1, got 0"),
        (lambda: dominant_classes(test=1.5), "test must be a whole number, got 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: dominant_classes(train=60, validation=0.2), "training examples belong to several clients, .*: take a smaller `train`"),
        (lambda: dominant_classes(train=60, calibration=0.2), "training examples belong to several clients"),
        (lambda: dominant_classes(train=600), "class 8 has 139 examples, and a client wants 172: take fewer per client"),
        (lambda: dominant_classes(groups=[[0, 10]]), r"groups must each hold classes within \[0, 10\)"),
        (lambda: dominant_classes(groups=[[0], []]), "groups must each hold classes"),
        (lambda: dominant_classes(groups=[]), "groups must each hold classes"),
        (lambda: dominant_classes("diabetes"), "is a regression"),
        (
            lambda: dominant_classes(small(3), clients=2),
            "3 classes, too few for groups of three: pass groups=",
        ),
        (lambda: dominant_classes(clients=0), "clients must be at least 1, got 0"),
        (lambda: swapped_labels(groups=21), r"groups must lie within \[1, 20\], the number of clients, got 21"),
        (lambda: swapped_labels(groups=0), "groups must be at least 1"),
        (lambda: swapped_labels(swaps=6), r"swaps must lie within \[1, 5\]"),
        (lambda: swapped_labels(swaps=0), "swaps must be at least 1"),
        (
            lambda: swapped_labels(small(3), clients=5, groups=5, swaps=1),
            "in 3 ways: use at most 4 groups",
        ),
        (lambda: swapped_labels(small(4), clients=5, groups=5, swaps=2), "in 3 ways: use at most 4 groups"),
        (lambda: swapped_labels("diabetes"), "is a regression"),
        (lambda: dirichlet(alpha=0), "alpha is a concentration"),
        (lambda: dirichlet(alpha=float("inf")), "alpha is a concentration"),
        (lambda: dirichlet(alpha="a"), "alpha must be a number, got 'a'"),  # pyright: ignore[reportArgumentType]
        (lambda: dirichlet(min_size=0), "min_size must be at least 1"),
        (lambda: dirichlet(min_size=10.5), "min_size must be a whole number, got 10.5"),  # pyright: ignore[reportArgumentType]
        (lambda: dirichlet(clients=500), "500 clients of at least 10 examples need 5000, 'digits' has 1438"),
        (lambda: dirichlet(label_clusters=0), "label_clusters must be at least 1, got 0"),
        (lambda: dirichlet(label_clusters=11), r"label_clusters must lie within \[1, 10\], the number of classes, got 11"),
        (lambda: shards(shards=0), "shards must be at least 1, got 0"),
        (lambda: shards(clients=720), "clients must be at most 719, as many as there are sets of 2 training examples"),
        (lambda: shards("diabetes"), "shards shares data out by class, 'diabetes' is a regression"),
        (lambda: pachinko("digits", alpha=0), "alpha is a concentration and must be a finite number > 0, got 0"),
        (lambda: pachinko("digits", beta=-1.0), "beta is a concentration and must be a finite number > 0, got -1"),
        (lambda: pachinko("digits", clients=10, size=144), "10 clients of 144 training examples need 1440, there are 1438"),
        (lambda: pachinko("digits", superclasses=[[0, 1], [1, 2]]), "different classes"),
        (lambda: pachinko("diabetes"), "pachinko shares data out by class"),
        (lambda: iid(clients=0), "clients must be at least 1, got 0"),
        (lambda: iid(clients=2.5), "clients must be a whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: iid(clients=360), "clients must be at most 359, as many as there are test examples"),
        (lambda: diabetes(by="height"), "by must be one of age"),  # pyright: ignore[reportArgumentType]
        (lambda: dirichlet(min_size=1, alpha=0.01, validation=0.5, calibration=0.4), "a larger min_size"),
    ],
)
def test_errors_say_what_and_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_of_numpy_are_numbers():
    data = concept_drift(clients=np.int64(10), seed=np.int64(3))  # pyright: ignore[reportArgumentType]
    assert data.hash == concept_drift(clients=10, seed=3).hash
    data = dirichlet(clients=5, alpha=np.float64(1), min_size=np.int64(8))  # pyright: ignore[reportArgumentType]
    assert data.hash == dirichlet(clients=5, alpha=1, min_size=8).hash == dirichlet(clients=5, alpha=1.0, min_size=8).hash


def test_odd_classes_have_no_pairs(hundred):
    source = Source.from_parts(torch.zeros(6, 1), torch.tensor([0, 1, 2] * 2), torch.zeros(3, 1), torch.tensor([0, 1, 2]), name="three")
    with pytest.raises(ValueError, match="don't make pairs: pass superclasses="):
        concept_drift(source, clients=2)
