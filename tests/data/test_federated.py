"""A federation's data: what has to hold of them, their hash, clients chosen and held out,
environments.
"""

import functools
import json
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import SourceInfo, from_arrays
from tests.data.made import arrays, environments


def test_absent_splits_name_the_remedy():
    data = from_arrays(*arrays(), test_share=0)
    assert list(data.splits) == ["train"]
    for name, remedy in (
        ("test", "test_share"),
        ("validation", "validation=0.1"),
        ("calibration", "calibration=0.1"),
    ):
        with pytest.raises(ValueError, match=f"no '{name}' split.*{remedy}"):
            getattr(data, name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("leaf", "row", "words"),
    [
        ("bmi", 12, r"^x\['bmi'\] holds NaN .*client 'client 1'.*fill them in"),
        ("y", 25, r"^y .*NaN .*'client 2'"),
    ],
)
def test_the_first_client_with_bad_numbers_is_named(value, leaf, row, words):
    x, y = {"age": np.ones((30, 2)), "bmi": np.ones((30, 2))}, np.ones(30) / 7
    {**x, "y": y}[leaf][row] = value
    names, ids = ["client 0", "client 1", "client 2"], np.arange(30) // 10
    with pytest.raises(ValueError, match=words):
        from_arrays(x, y, client_ids=ids, names=names)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda d: {"splits": {"train": d.train, "test": d.train}},
            r"'train' and 'test' .*42 examples.*'client 0'",
        ),
        (
            lambda d: {"splits": {"train": d.train, "test": d.test.select([0, 1])}},
            r"'test' .*2 clients, client_names .*3",
        ),
        (lambda d: {"inputs": (4,)}, r"'train' .*\(5,\), inputs .*\(4,\)"),
        (lambda d: {"task": "ranking"}, "task must be 'classification' or 'regression'"),
        (
            lambda d: {"splits": {**d.splits, "test": replace(d.test, y=d.test.y[:, None])}},
            r"'test' has targets of shape \[1\], 'train' of \[\]",
        ),
    ],
)
def test_parts_that_do_not_fit(data, change, match):
    with pytest.raises(ValueError, match=match):
        replace(data, **change(data))


def test_hash_knows_the_data_the_partition_and_nothing_else(data):
    again = from_arrays(*arrays(sizes=(20, 30, 25)), validation=0.2, calibration=0.1, seed=3)
    assert (
        again.hash
        == data.hash
        == data.to(dtype=torch.float64).hash
        == pickle.loads(pickle.dumps(data)).hash
    )
    others = [
        from_arrays(*arrays(sizes=(20, 30, 25)), validation=0.2, calibration=0.1, seed=4),
        from_arrays(*arrays(sizes=(20, 30, 25), seed=1), validation=0.2, calibration=0.1, seed=3),
        replace(data, recipe={**data.recipe, "note": 1}),
        data.select([0, 1, 2]),
    ]
    assert len({data.hash, *(other.hash for other in others)}) == 5
    json.dumps(dict(data.recipe))


def _numbers(n: int) -> np.ndarray:
    """Numbers that every precision holds exactly."""
    return (np.arange(n) * 37 % 101 - 50) / 16


def _rows(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels and clients of some rows, the clients' rows mixed."""
    x = _numbers(3 * n).reshape(n, 3)
    return x, np.arange(n) % 3, np.array(["b", "a", "c"])[np.arange(n) * 7 % 10 % 3]


def _pooled(**options) -> bf.data.FederatedData:
    x, y, ids = _rows(60)
    return bf.data.from_arrays(x, y, client_ids=ids, **options)


def _lists(n: int = 20) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [_numbers(8 * (n + j)).reshape(-1, 2, 4) for j in range(3)], [
        np.arange(n + j) % 2 for j in range(3)
    ]


MADE = {
    "pooled": lambda: _pooled(validation=0.2, calibration=0.1, seed=3),
    "pooled, tensors": lambda: bf.data.from_arrays(
        *map(torch.tensor, _rows(60)[:2]), client_ids=_rows(60)[2], test_share=0
    ),
    "pooled, test given": lambda: _pooled(test=_rows(21)),
    "pooled, environments": lambda: _pooled(environments=np.arange(60) % 2),
    "pooled, environments and test": lambda: _pooled(
        environments=np.arange(60) % 2, test=_rows(21), validation=0.2
    ),
    "lists": lambda: bf.data.from_arrays(*_lists(), names=["u", "v", "w"]),
    "lists, test given": lambda: bf.data.from_arrays(*_lists(), test=_lists(5), validation=0.3),
    "lists, environments": lambda: bf.data.from_arrays(
        *_lists(), environments=[np.arange(20 + j) % 2 for j in range(3)]
    ),
    "half precision": lambda: bf.data.from_arrays(
        [x.astype(np.float16) for x in _lists()[0]], _lists()[1]
    ),
    "targets": lambda: bf.data.from_arrays(_lists()[0], [x[:, 0, :2] for x in _lists()[0]]),
    "frame": lambda: bf.data.from_arrays(
        pd.DataFrame(_rows(60)[0], columns=list("xyz")),
        pd.Series(_rows(60)[1]),
        client_ids=_rows(60)[2],
    ),
    "frame of whole numbers": lambda: bf.data.from_arrays(
        pd.DataFrame({"n": np.arange(9), "ill": np.arange(9) > 4}),
        [0, 1, 1] * 3,
        client_ids=[0] * 9,
    ),
    "data sets": lambda: bf.data.from_datasets(
        [
            torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
            for x, y in zip(*_lists(), strict=True)
        ]
    ),
    "recipe": lambda: bf.data.shards("digits", clients=5, validation=0.1),
    "chosen": lambda: _pooled().select(["c", "a"]).as_environments(),
    "a list of one": lambda: bf.data.from_arrays(
        [np.arange(8.0).reshape(4, 2)], [np.array([0, 1, 0, 1])], test_share=0
    ),
}

HASHES = {
    "pooled": "bc49065788c83b614e233fa8f87500beafdfb704b734823ea59c08d9ad743907",
    "pooled, tensors": "413a94a9855fca62ae84f06ded37da4b9b21ff3bffc6f5565286b5f094efd917",
    "pooled, test given": "84690c87074a8b255ab7c90c238c978f1523ed409b207c685636b23e80bf0ee9",
    "pooled, environments": "cd6ca603654fe293dd900b3657f53b4e83107a34f1be2506809a87ccc3b9f497",
    "pooled, environments and "
    "test": "9c2a155cfc35af0f108642e5c34ee680294a51ed02a10f5705d8c6cd1f142cb3",
    "lists": "be47157006179d11774252b572bbc7b63873bf7dff16a573e9d2d0ca4f1099b1",
    "lists, test given": "ef53be2587d5482e0c9d7922a19c1af97c191a0f28b7f9187c2dc97b42d005da",
    "lists, environments": "38733e63269ec4a643f82b26275e7e6e6fdec65ef44152082276721b0726a67e",
    "half precision": "be47157006179d11774252b572bbc7b63873bf7dff16a573e9d2d0ca4f1099b1",
    "targets": "6bf99f8b615b22e4c87206f952909067ad35f9536b300b6805d59a22fe58e5f8",
    "frame": "0ef60c6c240be4912d0c57a947d2f1f001828f0587bb3152a82569a2e342638f",
    "frame of whole numbers": "a6f01061f3e9d277194dd7e60c62129e16118b9831fb6900d592efafa23e3af2",
    "data sets": "be47157006179d11774252b572bbc7b63873bf7dff16a573e9d2d0ca4f1099b1",
    "recipe": "f7d6fbf8b0ae00d6f54a758f9096e3fbd02020386ad1ad9d3ddb1bff799bbd47",
    "chosen": "45e6ee75ddca3aab4de97e2cb76bfc18ae79f2678f0bb031f127c09b4b257e9c",
    "a list of one": "02bb58437a86d498bf345d85da3c903101a70192c6c1cc5fa3a42c590b00a88e",
}
"""What versions before inputs were trees of tensors have made of these data."""


@pytest.mark.parametrize("name", MADE)
def test_old_hashes_stand(name):
    assert MADE[name]().hash == HASHES[name]


def test_moving_keeps_shared_storage_shared(data):
    moved = data.to(dtype=torch.float64)
    assert moved.train.x is moved.test.x
    assert moved.train.dtype == moved.train.client(0)[0].dtype == torch.float64
    assert data.to("cpu") is data


def test_select_and_hold_out(data):
    pair = data.select([2, 0])
    assert pair.client_names == ("client 2", "client 0")
    assert_close(pair.test.client(0)[0], data.test.client(2)[0])
    assert pair.recipe["of"] == data.recipe
    for bad in ([], [0, 0], [3], [-1]):
        with pytest.raises(ValueError, match=r"(ids|client) must be"):
            data.select(bad)
    known, novel = data.hold_out(1, seed=1)
    assert (known.clients, novel.clients) == (2, 1)
    assert sorted((*known.client_names, *novel.client_names)) == sorted(data.client_names)
    assert data.hold_out(0.4, seed=1)[1].client_names == novel.client_names
    assert len({data.hold_out(1, seed=s)[1].client_names for s in range(20)}) == 3


def test_environments_go_with_their_rows():
    """Through lists and pooled arrays, splits, selection and devices; they are part of what a hash
    knows.
    """
    xs, ys = arrays(sizes=(20, 30, 25))
    # Written beside the row, to be known again.
    xs = [np.hstack([x[:, :1], e[:, None]]) for x, e in zip(xs, environments(), strict=True)]
    data = from_arrays(xs, ys, environments=environments(), validation=0.2, seed=3)
    order = np.random.default_rng(0).permutation(75)
    x, y, rooms = (np.concatenate(part)[order] for part in (xs, ys, environments()))
    ids = np.repeat([5, 7, 9], (20, 30, 25))[order]
    pooled = from_arrays(x, y, environments=rooms, client_ids=ids, seed=3)
    for made in (
        data,
        pooled,
        data.select([2, 0]),
        data.to(dtype=torch.float64),
        data.hold_out(1)[0],
    ):
        for split in made.splits.values():
            assert split.environment is not None
            assert split.environment[split.index].tolist() == split.x[split.index, 1].tolist()
    assert (
        data.train.environments,
        data.select([1]).train.environments,
        data.select([0]).train.environments,
    ) == (3, 2, 1)
    plain, turned = from_arrays(xs, ys, validation=0.2, seed=3), data.as_environments()
    assert (plain.train.environment, turned.train.environments) == (None, 1)
    assert len({data.hash, plain.hash, turned.hash}) == 3
    assert torch.equal(turned.train.index, data.train.index)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            [np.zeros(20, int), np.zeros(9, int), np.zeros(25, int)],
            {},
            r"environments of client 1 .*30 .*\[9\]",
        ),
        (
            [np.zeros(20), np.zeros(30), np.zeros(25)],
            {},
            r"environments of client 0 .*got torch\.float",
        ),
        (
            [np.zeros(20, int), np.zeros(30, int) - 1, np.zeros(25, int)],
            {},
            r"environments of client 1 .*0 up.* got .*\[-1\]",
        ),
    ],
)
def test_environments_that_cannot_be_right(given, options, message):
    with pytest.raises(ValueError, match=message):
        from_arrays(*arrays(sizes=(20, 30, 25)), environments=given, **options)


def test_table_has_a_row_per_client_and_the_hash(data):
    lines = data.table().splitlines()
    assert lines[0].split() == [
        "client",
        "train",
        "test",
        "validation",
        "calibration",
        *("label", "0"),
        *("label", "1"),
        *("label", "2"),
    ]
    assert [sum(map(int, line.split()[-3:])) for line in lines[2:-1]] == [11, 17, 14]
    assert lines[-1].endswith(data.hash[:12])
    assert (
        "label"
        not in from_arrays(*[arrays()[0], [x[:, 0] for x in arrays()[0]]]).table().splitlines()[0]
    )


def test_source_is_kept():
    info = SourceInfo(name="ward", licence="ours", citation="us")
    assert from_arrays(*arrays(), source=info).source is info


def images(**options) -> bf.data.FederatedData:
    """Two clients with bytes."""
    x = (np.arange(240).reshape(20, 3, 4) % 251).astype(np.uint8)
    return bf.data.from_arrays(x, np.arange(20) % 2, client_ids=[0, 1] * 10, **options)


def test_a_transform_is_done_whenever_inputs_are_read():
    data = images(validation=0.2)
    unit = data.transformed(lambda x: x.flatten(1).float() / 255)
    assert (data.inputs, unit.inputs, unit.outline.inputs) == ((3, 4), (12,), (12,))
    for name, split in unit.splits.items():
        assert split.x is data.train.x
        raw = data.splits[name].client(1)[0]
        assert raw.dtype == torch.uint8
        assert split.client(1)[0].equal(raw.flatten(1).float() / 255)
    for chosen in (
        unit.select([1]),
        unit.as_environments(),
        unit.to(dtype=torch.float64),
        *unit.hold_out(1),
    ):
        assert (chosen.inputs, chosen.test.transform) == ((12,), unit.test.transform)
    assert unit.to(dtype=torch.float64).train.client(0)[0].dtype == torch.float64


def test_an_augmentation_is_for_training():
    data = images().transformed(lambda x: x / 255)
    flipped = data.augmented(lambda x: x.flip(-1))
    assert (flipped.train.augment is None, flipped.test.augment is None) == (False, True)
    assert flipped.train.client(0)[0].equal(data.train.client(0)[0])
    for call, match in (
        (
            lambda: images().augmented(lambda x: x.flip(-1)).transformed(lambda x: x),
            "^transform comes",
        ),
        (lambda: data.transformed(lambda x: x), r"^transform comes once.*second\(first\(x\)\)"),
        (lambda: flipped.augmented(lambda x: x), "^augment is given a second time"),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def _scaled(x, by=255.0):
    return x / by


def test_the_hash_knows_what_is_done_to_inputs():
    """By name, source and what it holds; whether it is done in training alone; and the rows' hash
    does not know it.
    """
    data = images()

    def over(by):
        return lambda x: x / by

    def turned(x):
        return x.flip(-1)

    def flipped(x):
        return x.flip(-1)

    halves = functools.partial(_scaled, by=2.0)
    layer = torch.nn.Linear(4, 4).eval()
    made = [
        data,
        *(
            data.transformed(f)
            for f in (_scaled, halves, over(2.0), over(3.0), lambda x: layer(x.float()))
        ),
    ]
    made += [
        data.augmented(turned),
        data.transformed(_scaled).augmented(turned),
        data.transformed(lambda x: x / 255),
    ]
    made.append(data.transformed(lambda x: x / 254))  # on a line of its own
    assert len({one.hash for one in made}) == len(made)
    alone = images(test_share=0)
    assert alone.transformed(turned).hash != alone.augmented(turned).hash
    assert data.transformed(over(2.0)).hash == images().transformed(over(2.0)).hash
    assert data.augmented(turned).hash != data.augmented(flipped).hash
    assert {one.rows_hash for one in made} == {made[-1].outline.rows} == {data.hash}
    assert (data.outline.transform, data.outline.augment) == (None, None)
    assert made[6].outline.augment["name"].endswith("turned")


def test_always_answering_the_most_frequent_class():
    """Of a client's training rows; a client without test rows has no accuracy."""
    y = [[0, 1, 1, 1, 0], [2, 2, 0], [0, 1]]
    test = [[1, 1, 0], [0, 2], []]
    xs, tests = ([np.zeros((len(own), 1)) for own in part] for part in (y, test))
    labels = [np.array(own, dtype=np.int64) for own in test]
    data = from_arrays(xs, [np.array(own) for own in y], test=(tests, labels))
    np.testing.assert_array_equal(data.most_frequent("test"), [2 / 3, 1 / 2, np.nan])
    assert bf.data.diabetes(clients=2).most_frequent("test") is None
