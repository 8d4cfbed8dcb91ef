"""Groups of clients with the same classes: which classes, how many rows of each, whose rows, and
inputs that are centred.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.data import dominant_classes, label_groups, labels_per_client, load
from tests.data.made import fine_labels, source_of
from tests.files import where_present


def check_label_groups(data, source, clients, train, test, labels=5):
    """Every client has the classes that the formula says, exactly so many rows of each, and no row
    is used twice.
    """
    assert data.clients == clients
    for name, amount in (("train", train), ("test", test)):
        for j, mine in enumerate(fine_labels(data, source, name)):
            expected = np.zeros(source.outputs, dtype=int)
            expected[[(labels * j + k) % source.outputs for k in range(labels)]] = amount
            assert np.bincount(mine, minlength=source.outputs).tolist() == expected.tolist()
    used = torch.cat([data.train.index, data.test.index])
    assert len(used.unique()) == len(used) == clients * labels * (train + test)
    for split in (
        data.train,
        data.test,
    ):
        # The pool: each split has rows of both official parts, in proportion but for chance.
        share = source.train / len(source.x)
        found = float((split.index < source.train).float().mean())
        assert abs(found - share) < 5 * (share * (1 - share) / len(split.index)) ** 0.5


def test_label_groups(digits):
    data = label_groups()
    check_label_groups(data, digits, 10, 14, 20)
    held = [tuple(np.unique(mine).tolist()) for mine in fine_labels(data, digits, "train")]
    assert held == [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)] * 5
    assert (data.recipe["pooled"], data.task, data.outputs, data.inputs, data.class_names) == (
        True,
        "classification",
        10,
        (64,),
        digits.class_names,
    )
    assert data.test.x is data.train.x
    assert data.train.y is digits.y


@pytest.mark.parametrize(
    ("clients", "labels", "train", "test"),
    [(7, 3, 30, 10), (4, 10, 1, 42), (3, 1, 174, 3), (1, 4, 1, 1)],
)
def test_label_groups_of_any_number_of_classes(clients, labels, train, test, digits):
    """Groups that overlap, that are everybody's, that nobody else has, and classes that
    nobody has.
    """
    data = label_groups(clients=clients, labels=labels, train=train, test=test)
    used = torch.cat([data.train.index, data.test.index])
    assert len(used.unique()) == len(used)
    for name, amount in (("train", train), ("test", test)):
        for j, mine in enumerate(fine_labels(data, digits, name)):
            classes = sorted((labels * j + k) % 10 for k in range(labels))
            assert sorted(mine) == sorted(classes * amount)


def test_label_groups_takes_every_row_there_is(digits):
    smallest = 174  # examples of class 8
    data = label_groups(clients=2, labels=5, train=smallest - 1, test=1)
    eights = (digits.y == 8).nonzero()[:, 0]
    assert torch.isin(eights, torch.cat([data.train.index, data.test.index])).all()
    for clients, train, test in ((2, smallest, 1), (3, 80, 9)):  # in the last, 8 goes to one
        with pytest.raises(ValueError, match=r"class \d has \d+ rows, and"):
            label_groups(clients=clients, labels=5, train=train, test=test)


def test_label_groups_are_determined_by_their_arguments():
    data = label_groups(seed=5)
    same = label_groups(seed=np.int64(5), clients=np.int64(10), train=np.int64(14))
    assert label_groups(seed=5).hash == same.hash == data.hash
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


def test_label_groups_share_out_their_training_rows(digits):
    whole = label_groups(seed=5, train=20, test=10)
    data = label_groups(seed=5, train=20, test=10, validation=0.2, calibration=0.1)
    assert torch.equal(data.test.index, whole.test.index)
    assert data.hash != whole.hash
    for j in range(10):
        mine = torch.cat(
            [data.splits[name].rows(j) for name in ("train", "validation", "calibration")]
        )
        assert torch.equal(mine.sort()[0], whole.train.rows(j))
    for name, amount in (("train", 14), ("validation", 4), ("calibration", 2)):
        assert all(
            (np.unique(mine, return_counts=True)[1] == amount).all()
            for mine in fine_labels(data, digits, name)
        )


def test_label_groups_are_centred(digits):
    before = digits.x.clone()
    data = label_groups()
    assert torch.equal(data.train.x, (digits.x - 0.5) / 0.5)
    assert torch.equal(digits.x, before)  # other recipes share it
    assert label_groups(centred=False).train.x is digits.x


def test_centred_inputs_are_made_once():
    source = replace(load("digits"), x=load("digits").x.clone())
    data = label_groups(source)
    assert label_groups(source, seed=1, validation=0.1).train.x is data.train.x
    source.x[0] = 0.25  # of a source of one's own, between two calls
    again = label_groups(source)
    assert (again.train.x[0] == -0.5).all()
    assert label_groups(replace(source, x=source.x.clone())).train.x is not again.train.x


def own(x, name="own"):
    """Forty made-up examples of two classes, ten of them the test part."""
    y = torch.arange(40) % 2
    return source_of(x[:30], y[:30], x[30:], y[30:], name=name)


def test_label_groups_stay_what_they_are():
    """The same on every machine and in every version: what was published can be made again."""
    data = label_groups(
        own(torch.arange(40.0)[:, None] / 64),
        clients=4,
        labels=1,
        train=5,
        test=3,
        validation=0.2,
        seed=3,
    )
    assert data.hash == "e9d68fc60ebaad19c12779e785535ab3d774b75c0e8152cc61fd2f658b5a29d7"


@pytest.mark.parametrize("name", ["own", "mnist"])
def test_centring_of_a_source_of_your_own(name):
    """Whatever it is called: the standardisation of a known name is undone for the known
    data only.
    """
    x = torch.linspace(0, 1, 40)[:, None, None, None].expand(40, 1, 2, 2)
    data = label_groups(own(x, name), clients=2, labels=1, train=5, test=5)
    assert_close(data.train.x, 2 * x - 1)
    for wrong, low, high in (
        (x - 0.1, "-0.1", "0.9"),
        (x * 255, "0", "255"),
        (x + float("nan"), "nan", "nan"),
    ):
        with pytest.raises(
            ValueError, match=rf"centred .*'{name}' .*\[{low}, {high}\].*\[0, 1\].*centred=False"
        ):
            label_groups(own(wrong, name), clients=2, labels=1, train=5, test=5)
    data = label_groups(own(x * 255, name), clients=2, labels=1, train=5, test=5, centred=False)
    assert data.train.x.max() == 255


@pytest.mark.parametrize(
    ("name", "shape"), [("mnist", (28, 28)), ("fashion-mnist", (28, 28)), ("cifar10", (32, 32, 3))]
)
def test_centred_images_are_the_bytes_on_disk(tmp_path, name, shape):
    """Made-up images of every byte: what dividing by 255 and standardising by 0.5 and 0.5 makes of
    them, to the last bit.
    """
    images = np.random.default_rng(0).integers(0, 256, (60, *shape), dtype=np.uint8)
    labels = np.arange(60) % 10
    np.savez(
        tmp_path / f"{name}.npz",
        x_train=images[:50],
        y_train=labels[:50],
        x_test=images[50:],
        y_test=labels[50:],
    )
    data = label_groups(name, clients=2, train=3, test=3, root=tmp_path)
    x = torch.from_numpy(images).float().div(255).sub(0.5).div(0.5)
    assert torch.equal(data.train.x, x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2))
    assert torch.equal(
        label_groups(name, clients=2, train=3, test=3, centred=False, root=tmp_path).train.x,
        load(name, root=tmp_path).x,
    )


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
        assert torch.equal(
            torch.cat([data.train.index, data.test.index]).sort()[0], torch.arange(60_000)
        )
        with pytest.raises(ValueError, match=r"class \d has \d+ rows, and"):
            label_groups(name, clients=clients, train=train + 1, test=test)


def test_dominant_classes_are_the_published_groups(hundred, digits):
    """Five groups of three classes that overlap by one; a fifth of a client's rows is spread over
    all classes, the rest over its three.
    """
    data = dominant_classes("digits", clients=7, train=50, test=25)
    held = [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [0, 8, 9]]
    assert data.recipe["groups"] == held
    for part, size in (("train", 50), ("test", 25)):
        for j, mine in enumerate(fine_labels(data, digits, part)):
            share = 0.02 + np.isin(np.arange(10), held[j % 5]) * 0.8 / 3
            assert len(mine) == size
            assert abs(np.bincount(mine, minlength=10) - size * share).max() < 1
    assert data.test.x is data.train.x
    even = dominant_classes("digits", clients=3, uniform=1.0, train=100, test=20)
    assert all((np.bincount(mine) == 10).all() for mine in fine_labels(even, digits, "train"))
    own = dominant_classes(hundred, clients=4, uniform=0.0, groups=[[7], [3, 99]], train=10, test=4)
    assert [set(mine) for mine in fine_labels(own, hundred, "train")] == [{7}, {3, 99}] * 2
    assert dominant_classes(hundred, clients=1, train=100, test=100).recipe["groups"][-1] == [
        0,
        98,
        99,
    ]


def test_dominant_classes_share_rows_only_when_a_class_runs_out(digits):
    """Clients take rows one after another; where a class ends it starts again, so that no row is
    used twice more than another.
    """
    for clients, train in ((10, 60), (20, 200)):
        data = dominant_classes(clients=clients, train=train)
        times = np.bincount(data.train.index.numpy(), minlength=digits.train)
        labels = digits.y[: digits.train].numpy()
        for k in range(10):
            assert times[labels == k].max() - times[labels == k].min() <= 1
        assert data.recipe["shared"][0] == (times > 1).sum()
        assert (times > 1).any() == (train == 200)
        assert all(len(data.train.rows(j).unique()) == train for j in range(clients))
