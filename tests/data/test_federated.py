"""Federated data: the two classes, your own arrays, shares, and what is refused."""

import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from bayesfl.data import FederatedData, SourceInfo, Split, from_arrays, from_datasets
from bayesfl.data.partitions import stratified


def arrays(sizes=(7, 4, 9), classes=3, features=5, seed=0):
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(n, features)) for n in sizes]
    ys = [np.resize(np.arange(classes), n) for n in sizes]
    return xs, ys


@pytest.fixture
def split():
    x = torch.arange(20.0).reshape(10, 2)
    return Split(x, torch.arange(10), torch.tensor([9, 8, 7, 0, 1, 5]), np.array([3, 0, 1, 2]))


@pytest.fixture
def data():
    return from_arrays(*arrays(sizes=(20, 30, 25)), validation=0.2, calibration=0.1, seed=3)


def test_split_gives_each_client_its_rows(split):
    x, y = split.client(0)
    assert y.tolist() == [9, 8, 7]
    assert_close(x, split.x[[9, 8, 7]])
    assert split.client(1)[0].shape == (0, 2)
    assert split.offsets.tolist() == [0, 3, 3, 4]
    assert split.clients == 4


def test_select_renumbers_and_shares_storage(split):
    chosen = split.select([3, 0])
    assert chosen.counts.tolist() == [2, 3]
    assert chosen.client(0)[1].tolist() == [1, 5]
    assert chosen.client(1)[1].tolist() == [9, 8, 7]
    assert chosen.x is split.x


def test_padded_labels_mask_what_is_not_there(split):
    y, mask = split.padded_labels()
    assert y.tolist() == [[9, 8, 7], [0, 0, 0], [0, 0, 0], [1, 5, 0]]
    assert mask.tolist() == [[True] * 3, [False] * 3, [True, False, False], [True, True, False]]
    targets = replace(split, y=torch.randn(10, 2)).padded_labels()[0]
    assert targets.shape == (4, 3, 2)


def test_dtype_applies_to_what_floats(split):
    moved = split.to(dtype=torch.float64)
    assert (moved.x.dtype, moved.y.dtype, moved.index.dtype) == (torch.float64, torch.int64, torch.int64)
    assert replace(split, y=split.y.float()).to(dtype=torch.float64).y.dtype == torch.float64
    assert split.to("cpu", torch.float32) is split


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(10, 2, dtype=torch.int64)}, "x must hold floating-point"),
        ({"y": torch.zeros(10, dtype=torch.int32)}, "y must hold int64"),
        ({"y": torch.zeros(9, dtype=torch.int64)}, "as many rows, got 10 and 9"),
        ({"y": torch.zeros(10, 2, dtype=torch.int64)}, "y must be class labels"),
        ({"index": torch.zeros(6)}, "index must be a vector of int64"),
        ({"index": torch.tensor([0, 1, 2, 3, 4, 10])}, r"index must lie within \[0, 10\)"),
        ({"counts": np.array([3, 4])}, "counts must be >= 0 and add up to the 6"),
    ],
)
def test_split_refuses_parts_that_do_not_fit(split, change, message):
    with pytest.raises(ValueError, match=message):
        replace(split, **change)


def test_shares_are_disjoint_and_as_large_as_stated(data):
    rows = [set(split.index.tolist()) for split in data.splits.values()]
    assert sum(map(len, rows)) == len(set.union(*rows)) == 75
    assert data.counts["test"].tolist() == [4, 6, 5]
    assert data.counts["validation"].tolist() == [3, 5, 4]  # a fifth of 16, 24, 20
    assert data.counts["calibration"].tolist() == [2, 2, 2]
    assert data.counts["train"].tolist() == [11, 17, 14]


def test_shares_are_stratified(data):
    for split in (data.train, data.test):
        for j in range(3):
            counts = torch.bincount(split.client(j)[1], minlength=3)
            assert counts.max() - counts.min() <= 1


def test_calibration_does_not_move_validation():
    xs, ys = arrays(sizes=(20, 30))
    alone, both = from_arrays(xs, ys, validation=0.2), from_arrays(xs, ys, validation=0.2, calibration=0.2)
    assert alone.validation.index.tolist() == both.validation.index.tolist()
    assert "calibration" not in alone.splits


def test_stratified_leaves_each_class_its_last_row_where_it_can():
    labels = np.array([0] * 8 + [1])
    for seed in range(20):
        left, taken = stratified(labels, np.arange(9), 5, np.random.default_rng(seed))
        assert 8 in left
        assert len(taken) == 5
        assert sorted([*left, *taken]) == list(range(9))
    left, taken = stratified(labels, np.arange(9), 9, np.random.default_rng(0))
    assert len(left) == 0
    assert len(stratified(None, np.arange(9), 0, np.random.default_rng(0))[1]) == 0


def test_absent_splits_name_the_remedy():
    data = from_arrays(*arrays(), test_share=0)
    assert list(data.splits) == ["train"]
    for name, remedy in (("test", "test_share"), ("validation", "validation=0.1"), ("calibration", "calibration=0.1")):
        with pytest.raises(ValueError, match=f"no '{name}' split.*{remedy}"):
            getattr(data, name)


def test_lists_pooled_arrays_and_datasets_agree():
    xs, ys = arrays()
    lists = from_arrays(xs, ys)
    tensors = from_arrays([torch.tensor(x) for x in xs], [torch.tensor(y) for y in ys])
    sets = from_datasets([TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in zip(xs, ys, strict=True)])
    ids = np.repeat([10, 20, 30], [len(y) for y in ys])
    pooled = from_arrays(np.concatenate(xs), np.concatenate(ys), client_ids=ids)
    assert lists.hash == tensors.hash == sets.hash == pooled.hash
    assert pooled.client_names == ("10", "20", "30")
    assert lists.client_names == ("client 0", "client 1", "client 2")
    assert (lists.task, lists.classes, lists.inputs, lists.train.x.dtype) == ("classification", 3, (5,), torch.float32)


def test_pooled_clients_are_sorted_whatever_the_order_of_rows():
    x, y = np.arange(12.0)[:, None], np.tile([0, 1], 6)
    ids = ["b", "a", "c"] * 4
    data = from_arrays(x, y, client_ids=ids, test_share=0)
    assert data.client_names == ("a", "b", "c")
    assert data.train.client(0)[0].flatten().tolist() == [1, 4, 7, 10]
    mixed = from_arrays(x, y, client_ids=["b", 1, None] * 4, test_share=0)
    assert len(mixed.client_names) == 3


def test_any_map_style_dataset():
    class Squares(Dataset):
        def __init__(self, n):
            self.n = n

        def __len__(self):
            return self.n

        def __getitem__(self, i):
            return np.full((1, 2, 2), float(i), dtype=np.float32), i % 2

    data = from_datasets([Squares(10), Squares(6)], test=[Squares(2), Squares(4)])
    assert data.inputs == (1, 2, 2)
    assert data.counts["train"].tolist() == [10, 6]
    assert data.counts["test"].tolist() == [2, 4]
    some = from_datasets([Squares(10), Squares(6)], test=[[], Squares(4)])  # pyright: ignore[reportArgumentType]
    assert some.counts["test"].tolist() == [0, 4]


def numbered(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * n).reshape(n, 2), torch.arange(n) % 2)


@pytest.mark.parametrize(
    ("datasets", "options", "message"),
    [
        ([numbered(3), [("an image", 1)]], {}, r"datasets\[1\] must hold numbers, its item 0 does not.*ToTensor"),
        ([TensorDataset(*numbered(3).tensors, torch.zeros(3))], {}, r"datasets\[0\] must give pairs \(x, y\), got tuple of length 3"),
        ([numbered(3), [{"image": 1, "label": 2}]], {}, r"datasets\[1\] must give pairs \(x, y\), got dict as item 0"),
        ([[(torch.zeros(2), 0), (torch.zeros(3), 0)]], {}, r"datasets\[0\] .*one shape: item 1 has x \[3\] .* item 0 has x \[2\]"),
        ([], {}, "datasets is empty"),
        ([numbered(3), []], {}, r"datasets\[1\] is empty: leave that client out"),
        ([numbered(3)], {"test": [numbered(1), numbered(1)]}, "test has 2 clients, the training data 1"),
        ([numbered(3)], {"test": [[(1, 2, 3)]]}, r"test\[0\] must give pairs"),
    ],
)
def test_datasets_that_do_not_fit_are_named(datasets, options, message):
    with pytest.raises(ValueError, match=message):
        from_datasets(datasets, **options)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2), 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda xs, ys, sets: from_arrays(sets, None),
            "x of client 0 must be an array.* got TensorDataset; .*from_datasets",
        ),
        (lambda xs, ys, sets: from_arrays([DataLoader(s) for s in sets], ys), "x of client 0 .* got DataLoader; .*from_datasets"),
        (lambda xs, ys, sets: from_arrays(sets[0], ys), "x must be a list with one array of inputs per client, got one TensorDataset"),
        (lambda xs, ys, sets: from_arrays(xs, None), "y must be a list with one array of labels or targets per client, got None"),
        (lambda xs, ys, sets: from_arrays(xs, [ys[0], None, ys[2]]), "y of client 1 must be an array.* got None"),
        (lambda xs, ys, sets: from_arrays(dict(enumerate(xs)), ys), "x must be a list .* got dict"),
        (lambda xs, ys, sets: from_arrays(xs[0], None, client_ids=[1] * 7), "y must be an array.* got None"),
        (lambda xs, ys, sets: from_arrays(xs, ys, test=(sets, None)), "test x of client 0 .* got TensorDataset"),
        (lambda xs, ys, sets: from_datasets(sets[0]), "datasets must be a list with one data set per client, got one TensorDataset"),
        (lambda xs, ys, sets: from_datasets([Stream()]), r"datasets\[0\] must be a map-style data set.* got Stream"),
        (
            lambda xs, ys, sets: from_datasets([DataLoader(sets[0])]),
            r"datasets\[0\] .* got DataLoader: .*pass loader.dataset",
        ),
        (lambda xs, ys, sets: from_datasets(sets, test=sets[0]), "test must be a list"),
        (lambda xs, ys, sets: from_datasets(sets, client_ids=[1, 2, 3]), "client_ids is for the pooled arrays"),
    ],
)
def test_what_is_no_array_or_no_data_set_is_named(call, message):
    xs, ys = arrays()
    with pytest.raises(TypeError, match=message):
        call(xs, ys, [TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in zip(xs, ys, strict=True)])


def test_a_client_without_test_data_does_not_decide_the_task():
    xs, ys = arrays()
    data = from_arrays(xs, ys, test=([xs[0], xs[1][:0], xs[2]], [ys[0], np.array([]), ys[2]]))
    assert (data.task, data.counts["test"].tolist()) == ("classification", [7, 0, 9])


def test_given_test_data_in_both_forms():
    xs, ys = arrays()
    tx, ty = arrays(sizes=(2, 0, 3), seed=1)
    lists = from_arrays(xs, ys, test=(tx, ty))
    pooled = from_arrays(
        np.concatenate(xs),
        np.concatenate(ys),
        client_ids=np.repeat([0, 1, 2], [7, 4, 9]),
        test=(np.concatenate(tx), np.concatenate(ty), [2, 2, 0, 0, 0]),
    )
    assert lists.counts["test"].tolist() == [2, 0, 3]
    assert lists.counts["train"].tolist() == [7, 4, 9]
    assert_close(lists.test.client(2)[0], torch.tensor(tx[2]).float())
    assert pooled.counts["test"].tolist() == [3, 0, 2]


def test_regression_is_read_from_the_targets():
    xs, _ = arrays()
    one = from_arrays(xs, [x[:, 0] for x in xs])
    two = from_arrays(xs, [x[:, :2] for x in xs])
    assert (one.task, one.outputs, two.outputs) == ("regression", 1, 2)
    assert two.test.y.dtype == torch.float32
    with pytest.raises(ValueError, match="regression has no classes"):
        _ = one.classes
    forced = from_arrays(xs, [np.arange(len(x)) for x in xs], task="regression")
    assert forced.train.y.is_floating_point()
    whole = from_arrays(xs, [np.arange(len(x)) % 2.0 for x in xs], task="classification", outputs=4)
    assert (whole.classes, whole.train.y.dtype) == (4, torch.int64)


def test_your_arrays_are_copied_once():
    x = np.ones((6, 2), dtype=np.float32)
    data = from_arrays([x], [np.zeros(6, dtype=int)])
    x[:] = 7
    assert data.train.x.max() == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda xs, ys: from_arrays(xs, ys[:2]), "x has 3 clients, y has 2"),
        (lambda xs, ys: from_arrays([], []), "x is empty: pass one array"),
        (lambda xs, ys: from_arrays([], [], client_ids=[]), "x is empty: pass one row"),
        (lambda xs, ys: from_arrays(np.concatenate(xs), np.concatenate(ys)), "pass client_ids"),
        (lambda xs, ys: from_arrays([xs[0], xs[1][:2], xs[2]], ys), "client 1 has x of shape"),
        (
            lambda xs, ys: from_arrays([xs[0], xs[1][:, :2], xs[2]], ys),
            r"x must have rows .*: client 1 has \[2\], client 0 \[5\]",
        ),
        (
            lambda xs, ys: from_arrays(xs, [ys[0], ys[1][:, None], ys[2]]),
            r"y must have rows .*: client 1 has \[1\], client 0 \[\]",
        ),
        (lambda xs, ys: from_arrays(xs, [ys[0], ys[1] * 1.0, ys[2]]), "got 1 arrays of floats among 3 .*task='regression'"),
        (
            lambda xs, ys: from_arrays(xs[0], ys[0][:3], client_ids=[1] * 7),
            r"x and y must have as many rows, got shapes \[7, 5\]",
        ),
        (
            lambda xs, ys: from_arrays(xs[0], ys[0], client_ids=np.ones((7, 1))),
            r"client_ids must be .* got shape \[7, 1\]",
        ),
        (lambda xs, ys: from_arrays(xs[0], ys[0], client_ids=3), "client_ids must be a list or a vector .* got int"),  # pyright: ignore[reportArgumentType]
        (lambda xs, ys: from_arrays([["a"]], [[0]]), "array of numbers"),
        (lambda xs, ys: from_arrays([xs[0] * 1j], ys[:1]), "array of numbers"),
        (lambda xs, ys: from_arrays([torch.tensor(xs[0]) * 1j], ys[:1]), "real numbers"),
        (lambda xs, ys: from_arrays(xs[0], ys[0], client_ids=[1, 2]), "a client for each of the 7 rows, got 2"),
        (lambda xs, ys: from_arrays(xs, ys, names=["a"]), "names must name each of the 3"),
        (lambda xs, ys: from_arrays(xs, ys, class_names=["a"]), "class_names must name each of the 3 classes"),
        (lambda xs, ys: from_arrays(xs, ys, test_share=1.0), r"test_share is a share .* got 1.0"),
        (lambda xs, ys: from_arrays(xs, ys, validation=-0.1), r"validation is a share"),
        (lambda xs, ys: from_arrays(xs, ys, validation=0.5, calibration=0.5), "must leave something to train on"),
        (lambda xs, ys: from_arrays([xs[0], xs[1][:1]], [ys[0], ys[1][:1]]), "client 'client 1' has 1 example, too few"),
        (lambda xs, ys: from_arrays([xs[0], xs[1][:0]], [ys[0], ys[1][:0]]), "client 'client 1' has no training example"),
        (lambda xs, ys: from_arrays([xs[0], xs[1][:2]], [ys[0], ys[1][:2]], validation=0.1), "would leave none to train on"),
        (lambda xs, ys: from_arrays([x[:, 0] for x in xs], [y > 5 for y in ys], outputs=0), "outputs must be at least 1, got 0"),
        (lambda xs, ys: from_arrays(xs, ys, outputs=3.0), "outputs must be a whole number, got 3.0"),  # pyright: ignore[reportArgumentType]
        (
            lambda xs, ys: from_arrays(xs, [ys[0], ys[1], ys[2] - 1]),
            r"labels .* client 'client 2' has -1 .*leave out examples without",
        ),
        (
            lambda xs, ys: from_arrays(xs, [0 * y - 100 for y in ys]),
            r"labels .* client 'client 0' has -100 .*leave out examples",
        ),
        (lambda xs, ys: from_arrays(xs, ys, outputs=2), r"labels must lie within \[0, 2\).*outputs=3"),
        (lambda xs, ys: from_arrays(xs, [y + 0.5 for y in ys], task="classification"), "holds fractions"),
        (lambda xs, ys: from_arrays(xs, [np.eye(3, dtype=int)[y] for y in ys]), "argmax"),
        (lambda xs, ys: from_arrays(xs, ys, task="ranking"), "task must be"),  # pyright: ignore[reportArgumentType]
        (lambda xs, ys: from_arrays(xs, [y * 1.0 for y in ys], outputs=3), "outputs is 3, but split 'train' has 1 targets"),
        (lambda xs, ys: from_arrays(xs, ys, test=(xs,)), r"test must be \(xs, ys\)"),
        (lambda xs, ys: from_arrays(xs, ys, test=(xs[:1], ys[:1])), "test has 1 clients"),
        (lambda xs, ys: from_arrays(xs, ys, test=([x[:, :1] for x in xs], ys)), r"test x must have rows of .* shape \[5\], got \[1\]"),
        (lambda xs, ys: from_arrays(xs, ys, test=(xs, [y[:, None] for y in ys])), r"test y must have rows of .* shape \[\], got \[1\]"),
        (lambda xs, ys: from_arrays(xs, ys, test=3), r"test must be \(xs, ys\).* got int"),  # pyright: ignore[reportArgumentType]
        (lambda xs, ys: from_arrays(xs, ys, test=([], [])), "test x is empty"),
        (
            lambda xs, ys: from_arrays(xs[0], ys[0], client_ids=[1] * 7, test=(xs[0], ys[0], [2] * 7)),
            "test client_ids name client 2, who has no training data",
        ),
    ],
)
def test_errors_say_what_and_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call(*arrays())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_client_with_bad_numbers_is_named(value):
    xs, ys = arrays()
    xs[1][2, 3] = value
    with pytest.raises(ValueError, match="x holds NaN or infinite numbers: first in client 'client 1'"):
        from_arrays(xs, ys)
    targets = [x[:, 0].copy() for x in arrays()[0]]
    targets[2][:] = value
    with pytest.raises(ValueError, match="y holds NaN or infinite numbers: first in client 'client 2'"):
        from_arrays(arrays()[0], targets)


def test_overlap_of_training_and_test_is_refused(data):
    with pytest.raises(ValueError, match="splits 'train' and 'test' share 42 examples, first in client 'client 0'"):
        replace(data, splits={"train": data.train, "test": data.train})


def test_federated_data_refuses_parts_that_do_not_fit(data):
    with pytest.raises(ValueError, match="must hold 'train'"):
        replace(data, splits={"test": data.test})
    with pytest.raises(ValueError, match="split 'test' has 2 clients, client_names has 3"):
        replace(data, splits={"train": data.train, "test": data.test.select([0, 1])})
    with pytest.raises(ValueError, match=re.escape("examples of shape (5,), inputs says (4,)")):
        replace(data, inputs=(4,))
    with pytest.raises(ValueError, match="only what JSON can write"):
        replace(data, recipe={"seed": np.int64(3)})
    with pytest.raises(ValueError, match="'regression' needs floating-point targets"):
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


def test_hash_notices_a_change_in_place():
    data = from_arrays(*arrays())
    before = data.hash
    data.train.x[0, 0] += 1
    assert replace(data).hash != before


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
        with pytest.raises(ValueError, match="ids must be"):
            data.select(bad)
    known, novel = data.hold_out(1, seed=1)
    assert (known.clients, novel.clients) == (2, 1)
    assert set(known.client_names) | set(novel.client_names) == set(data.client_names)
    assert data.hold_out(0.4, seed=1)[1].client_names == novel.client_names
    assert len({data.hold_out(1, seed=s)[1].client_names for s in range(20)}) == 3
    for bad in (0, 3, 1.5, 0.0, True, -1):
        with pytest.raises(ValueError, match="clients to hold out"):
            data.hold_out(bad)


def environments(sizes=(20, 30, 25)):
    return [np.arange(n) % (j + 1) for j, n in enumerate(sizes)]


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


def test_given_test_data_have_no_environment_of_their_own():
    xs, ys = arrays(sizes=(20, 30, 25))
    data = from_arrays(xs, ys, test=arrays(sizes=(3, 4, 5)), environments=environments())
    assert data.train.environments == 3
    assert data.test.environments == 1


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([np.zeros(20, int), np.zeros(30, int)], {}, "environments must be one array for each of the 3 clients, got 2"),
        (
            [np.zeros(20, int), np.zeros(9, int), np.zeros(25, int)],
            {},
            "environments of client 1 must be whole numbers, one for each of its 30",
        ),
        ([np.zeros(20), np.zeros(30), np.zeros(25)], {}, "environments of client 0 must be whole numbers"),
        ([np.zeros(20, int), np.zeros(30, int) - 1, np.zeros(25, int)], {}, "environment must hold whole numbers from 0 up, got -1"),
        (
            [np.zeros(20, int), np.ones(30, int), np.zeros(25, int)],
            {},
            "client 'client 1' has no training example of its environment 0, of 2",
        ),
        (
            [np.zeros(20, int), np.arange(30) % 2 * 2, np.zeros(25, int)],
            {},
            "'client 1' has no training example of its environment 1, of 3",
        ),
        ([np.zeros(20, int), np.eye(30)[0].astype(int), np.zeros(25, int)], {"validation": 0.9, "test_share": 0}, "use smaller shares"),
    ],
)
def test_environments_that_cannot_be_right(given, options, message):
    with pytest.raises(ValueError, match=message):
        from_arrays(*arrays(sizes=(20, 30, 25)), environments=given, **options)


def test_splits_have_environments_alike(split):
    with pytest.raises(ValueError, match=r"environment must be int64 of shape \[10\]"):
        replace(split, environment=torch.zeros(9, dtype=torch.int64))
    data = from_arrays(*arrays(), seed=1)
    splits = {**data.splits, "test": data.as_environments().test}
    with pytest.raises(ValueError, match="splits have environments but 'train' has none"):
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
