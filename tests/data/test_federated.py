"""A federation's data: what has to hold of them, their hash, clients chosen and held out, environments."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.data import FederatedData, SourceInfo, from_arrays
from tests.data.made import arrays, environments


def test_absent_splits_name_the_remedy():
    data = from_arrays(*arrays(), test_share=0)
    assert list(data.splits) == ["train"]
    for name, remedy in (("test", "test_share"), ("validation", "validation=0.1"), ("calibration", "calibration=0.1")):
        with pytest.raises(ValueError, match=f"no '{name}' split.*{remedy}"):
            getattr(data, name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_client_with_bad_numbers_is_named(value):
    xs, ys = arrays()
    xs[1][2, 3] = value
    with pytest.raises(ValueError, match=r"^x .*NaN .*'client 1'"):
        from_arrays(xs, ys)
    targets = [x[:, 0].copy() for x in arrays()[0]]
    targets[2][:] = value
    with pytest.raises(ValueError, match=r"^y .*NaN .*'client 2'"):
        from_arrays(arrays()[0], targets)


def test_overlap_of_training_and_test_is_refused(data):
    with pytest.raises(ValueError, match=r"'train' and 'test' .*42 examples.*'client 0'"):
        replace(data, splits={"train": data.train, "test": data.train})


def test_federated_data_refuses_parts_that_do_not_fit(data):
    with pytest.raises(ValueError, match="must hold 'train'"):
        replace(data, splits={"test": data.test})
    with pytest.raises(ValueError, match=r"'test' .*2 clients, client_names .*3"):
        replace(data, splits={"train": data.train, "test": data.test.select([0, 1])})
    with pytest.raises(ValueError, match=r"'train' .*\(5,\), inputs .*\(4,\)"):
        replace(data, inputs=(4,))
    with pytest.raises(ValueError, match=r"recipe .*JSON .*int64"):
        replace(data, recipe={"seed": np.int64(3)})
    with pytest.raises(ValueError, match=r"'regression' .*'train' .*torch\.int64"):
        replace(data, task="regression")
    with pytest.raises(ValueError, match="'classification' needs integer labels"):
        replace(data, splits={"train": replace(data.train, y=data.train.y.float())})


def test_hash_knows_the_data_the_partition_and_nothing_else(data):
    again = from_arrays(*arrays(sizes=(20, 30, 25)), validation=0.2, calibration=0.1, seed=3)
    assert again.hash == data.hash == data.to(dtype=torch.float64).hash == pickle.loads(pickle.dumps(data)).hash
    others = [
        from_arrays(*arrays(sizes=(20, 30, 25)), validation=0.2, calibration=0.1, seed=4),
        from_arrays(*arrays(sizes=(20, 30, 25), seed=1), validation=0.2, calibration=0.1, seed=3),
        replace(data, recipe={**data.recipe, "note": 1}),
        data.select([0, 1, 2]),
    ]
    assert len({data.hash, *(other.hash for other in others)}) == 5
    assert len(data.hash) == 64
    json.dumps(dict(data.recipe))


def test_hash_is_the_same_on_every_platform():
    data = from_arrays([np.arange(8.0).reshape(4, 2)], [np.array([0, 1, 0, 1])], test_share=0)
    assert data.hash == "02bb58437a86d498bf345d85da3c903101a70192c6c1cc5fa3a42c590b00a88e"


def test_moving_keeps_shared_storage_shared(data):
    moved = data.to(dtype=torch.float64)
    assert moved.train.x is moved.test.x
    assert moved.train.x.dtype == torch.float64
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
    assert set(known.client_names) | set(novel.client_names) == set(data.client_names)
    assert data.hold_out(0.4, seed=1)[1].client_names == novel.client_names
    assert len({data.hold_out(1, seed=s)[1].client_names for s in range(20)}) == 3
    for bad in (0, 3, 1.5, 0.0, True, -1):
        with pytest.raises(ValueError, match="clients to hold out"):
            data.hold_out(bad)


def test_environments_go_with_their_rows():
    """Through lists and pooled arrays, splits, selection and devices; they are part of what a hash knows."""
    xs, ys = arrays(sizes=(20, 30, 25))
    xs = [np.hstack([x[:, :1], e[:, None]]) for x, e in zip(xs, environments(), strict=True)]  # written beside the row, to be known again
    data = from_arrays(xs, ys, environments=environments(), validation=0.2, seed=3)
    ids = np.repeat([5, 7, 9], (20, 30, 25))
    order = np.random.default_rng(0).permutation(75)
    columns = [np.concatenate(part)[order] for part in (xs, ys, environments())]
    pooled = from_arrays(columns[0], columns[1], environments=columns[2], client_ids=ids[order], seed=3)
    for made in (data, pooled, data.select([2, 0]), data.to(dtype=torch.float64), data.hold_out(1)[0]):
        for split in made.splits.values():
            assert split.environment is not None
            assert torch.equal(split.environment[split.index].double(), split.x[split.index, 1].double())
    assert (data.train.environments, data.select([1]).train.environments, data.select([0]).train.environments) == (3, 2, 1)
    assert "up to 3 environments each" in repr(data)
    assert "one environment each" in repr(data.as_environments())
    plain = from_arrays(xs, ys, validation=0.2, seed=3)
    assert plain.train.environment is None
    assert "environment" not in repr(plain)
    assert len({data.hash, plain.hash, data.as_environments().hash}) == 3
    assert data.as_environments().train.environments == 1
    assert torch.equal(data.as_environments().train.index, data.train.index)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([np.zeros(20, int), np.zeros(30, int)], {}, r"environments .*3 clients, got 2"),
        (
            [np.zeros(20, int), np.zeros(9, int), np.zeros(25, int)],
            {},
            r"environments of client 1 .*30 .*\[9\]",
        ),
        ([np.zeros(20), np.zeros(30), np.zeros(25)], {}, r"environments of client 0 .*got torch\.float"),
        ([np.zeros(20, int), np.zeros(30, int) - 1, np.zeros(25, int)], {}, r"environment .*0.* got -1"),
        (
            [np.zeros(20, int), np.ones(30, int), np.zeros(25, int)],
            {},
            r"'client 1' .*environment 0, of 2",
        ),
        (
            [np.zeros(20, int), np.arange(30) % 2 * 2, np.zeros(25, int)],
            {},
            r"'client 1' .*environment 1, of 3",
        ),
        ([np.zeros(20, int), np.eye(30)[0].astype(int), np.zeros(25, int)], {"validation": 0.9, "test_share": 0}, "use smaller shares"),
    ],
)
def test_environments_that_cannot_be_right(given, options, message):
    with pytest.raises(ValueError, match=message):
        from_arrays(*arrays(sizes=(20, 30, 25)), environments=given, **options)


def test_splits_have_environments_alike(split):
    with pytest.raises(ValueError, match=r"environment .*int64 .*\[10\], got .*\[9\]"):
        replace(split, environment=torch.zeros(9, dtype=torch.int64))
    data = from_arrays(*arrays(), seed=1)
    splits = {**data.splits, "test": data.as_environments().test}
    with pytest.raises(ValueError, match=r"environments .*'train'"):
        replace(data, splits=splits)


def test_table_has_a_row_per_client_and_the_hash(data):
    lines = data.table().splitlines()
    assert lines[0].split() == ["client", "train", "test", "validation", "calibration", "0", "1", "2"]
    assert len(lines) == 5
    assert [sum(map(int, line.split()[-3:])) for line in lines[1:-1]] == [11, 17, 14]
    assert lines[-1].endswith(data.hash[:12])
    assert "0" not in from_arrays(*[arrays()[0], [x[:, 0] for x in arrays()[0]]]).table().splitlines()[0]


def test_source_is_kept():
    info = SourceInfo(name="ward", licence="ours", citation="us")
    data = from_arrays(*arrays(), source=info)
    assert isinstance(data, FederatedData)
    assert data.source is info
