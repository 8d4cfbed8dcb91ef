"""Your own arrays and data sets: every form they come in, and what is refused."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import Dataset, TensorDataset

from bayesfl.data import from_arrays, from_datasets
from tests.data.made import arrays, environments


def test_lists_pooled_arrays_and_datasets_agree():
    xs, ys = arrays()
    lists = from_arrays(xs, ys)
    tensors = from_arrays([torch.tensor(x) for x in xs], [torch.tensor(y) for y in ys])
    sets = from_datasets(
        [TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in zip(xs, ys, strict=True)]
    )
    ids = np.repeat([10, 20, 30], [len(y) for y in ys])
    pooled = from_arrays(np.concatenate(xs), np.concatenate(ys), client_ids=ids)
    assert lists.hash == tensors.hash == sets.hash == pooled.hash
    assert pooled.client_names == ("10", "20", "30")
    assert (lists.client_names, lists.task, lists.classes, lists.inputs, lists.train.x.dtype) == (
        ("client 0", "client 1", "client 2"),
        "classification",
        3,
        (5,),
        torch.float32,
    )


def test_pooled_clients_are_sorted_whatever_the_order_of_rows():
    x, y = np.arange(12.0)[:, None], np.tile([0, 1], 6)
    ids = ["b", "a", "c"] * 4
    data = from_arrays(x, y, client_ids=ids, test_share=0)
    assert data.client_names == ("a", "b", "c")
    assert data.train.client(0)[0].flatten().tolist() == [1, 4, 7, 10]
    assert from_arrays(x, y, client_ids=["b", 1, 2.5] * 4, test_share=0).clients == 3
    numbered = from_arrays(x, y, client_ids=["H10", "H2", "H²"] * 4, test_share=0)
    assert numbered.client_names == ("H2", "H10", "H²")


@pytest.mark.parametrize(
    "nothing",
    [
        None,
        math.nan,
        np.float64("nan"),
        pd.NA,
        pd.NaT,
        "",
        " ",
        "nan",
        "NaN",
        "None",
        "<NA>",
        "NaT",
    ],
)
def test_rows_of_nobody_are_refused(nothing: Any):
    """A hospital called nan, or a client for each missing number, would be made of them."""
    ids = pd.Series([1, nothing, 2, nothing], dtype=object)
    with pytest.raises(ValueError, match=r"client_ids .*2 of 4 rows.* row 1 "):
        from_arrays(np.ones((4, 1)), [0, 1, 0, 1], client_ids=ids.to_numpy(), test_share=0)


FRAME = pd.DataFrame(np.ones((4, 3)), columns=list("abc"))
OTHER: Any = FRAME[list("acb")]
TARGETS = pd.DataFrame(np.ones((4, 2)), columns=list("uv"))
Y, IDS = [0, 1, 0, 1], [0, 0, 1, 1]
ORDER = r"\['c', 'b'\] .*\['b', 'c'\].*test\[train\.columns\]"


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: from_arrays(FRAME, Y, client_ids=IDS, test=(OTHER, Y, IDS)),
            r"^test x .* of x .*" + ORDER,
        ),
        (lambda: from_arrays([FRAME, OTHER], [Y, Y]), r"^x of client 1 .* x of client 0.*" + ORDER),
        (
            lambda: from_arrays([FRAME], [Y], test=([OTHER], [Y])),
            r"^test x of client 0 .* x of client 0 .*" + ORDER,
        ),
        (
            lambda: from_arrays(
                FRAME, Y, client_ids=IDS, test=(FRAME.rename(columns={"b": "d"}), Y, IDS)
            ),
            r"^test x lacks columns \['b'\] of x and has \['d'\]",
        ),
        (
            lambda: from_arrays(
                FRAME, TARGETS, client_ids=IDS, test=(FRAME, TARGETS[["v", "u"]], IDS)
            ),
            r"^test y .*\['v', 'u'\]",
        ),
        (
            lambda: from_arrays(FRAME.assign(sex=list("fmfm"), ill=True), Y, client_ids=IDS),
            "could not convert string to float",
        ),
        (
            lambda: from_arrays(np.ones((4, 1)), Y, client_ids=[1, "1", 1, "1"], test_share=0),
            r"names .*\['1'\] .*str\(i\)",
        ),
        (lambda: from_arrays(*arrays(), names=["a", "b", "a"]), r"^names .*\['a'\]"),
        (
            lambda: from_arrays(np.ones((8, 2)), np.tile([0.0, 1.0], 4), client_ids=[0] * 8),
            r"^y .*0, 1.*task='classification'.*task='regression'",
        ),
        (
            lambda: from_arrays(np.ones((4, 2)), [0.0, math.nan, 1.0, 1.0], client_ids=IDS),
            r"\(0, 1\) or NaN.*task='classification'",
        ),
        (
            lambda: from_arrays(
                np.ones((4, 2)), [0, math.nan, 1, math.inf], client_ids=IDS, task="classification"
            ),
            r"y holds 2 that are NaN, infinite or fractions",
        ),
    ],
)
def test_what_could_be_misread_is_refused(call, match):
    """Columns in another order, a client under two ids, and floats that may be classes."""
    with pytest.raises(ValueError, match=match):
        call()


def test_floats_that_may_be_classes_are_asked_about():
    """0. and 1. are as likely labels that pandas made floats as targets; with the task said both
    work.
    """
    x, y = np.ones((8, 2)), np.tile([0.0, 1.0], 4)
    assert from_arrays(x, y, client_ids=[0] * 8, task="classification").outputs == 2
    assert from_arrays(x, y, client_ids=[0] * 8, task="regression").outputs == 1
    assert from_arrays(x, y + 0.5, client_ids=[0] * 8).task == "regression"
    assert from_arrays(np.ones((40, 2)), np.arange(40.0), client_ids=[0] * 40).task == "regression"


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
    some = from_datasets([Squares(10), Squares(6)], test=[[], Squares(4)])
    counts = [split.counts.tolist() for split in (data.train, data.test, some.test)]
    assert counts == [[10, 6], [2, 4], [0, 4]]


def test_items_with_several_inputs():
    """By place or by name; a tuple of numbers is a vector, as ever."""
    numbers, tokens = torch.arange(12.0).reshape(6, 2), torch.arange(18).reshape(6, 3)
    by_name: Any = [
        ({"a": numbers[i].numpy(), "b": {"tokens": tokens[i].tolist()}}, i % 2) for i in range(6)
    ]
    by_place: Any = [((numbers[i], tokens[i]), i % 2) for i in range(6)]
    data = from_datasets([by_name, by_name[:3]], test=[by_name, []])
    x: Any = data.train.client(0)[0]
    assert x["a"].equal(numbers)
    assert x["b"]["tokens"].equal(tokens)
    assert data.counts["test"].tolist() == [6, 0]
    placed: Any = from_datasets([by_place], test_share=0).train.client(0)[0]
    assert_close(placed, (numbers, tokens), atol=0, rtol=0)
    vectors: Any = [((1.0, 2.0), 0), ((3.0, 4.0), 1)]
    assert from_datasets([vectors], test_share=0).inputs == (2,)


class Flipping(Dataset):
    """Draws whenever an item is read."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> Any:
        return torch.ones(2) * (1 if torch.rand(()) < 0.5 else -1), i % 2


def numbered(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * n).reshape(n, 2), torch.arange(n) % 2)


@pytest.mark.parametrize(
    ("datasets", "options", "message"),
    [
        (
            [TensorDataset(*numbered(3).tensors, torch.zeros(3))],
            {},
            r"\(x, y\), got a tuple.*(?s:.*)in item 0 of datasets\[0\]",
        ),
        (
            [numbered(3), [{"image": 1, "label": 2}]],
            {},
            r"\(x, y\), got a dict.*inputs=(?s:.*)item 0 of datasets\[1\]",
        ),
        (
            [[({"a": torch.zeros(k)}, 0) for k in (2, 3)]],
            {},
            r"'a'.* has rows of shapes \[\(2,\), \(3,\)\]",
        ),
        (
            [numbered(3)],
            {"test": [numbered(1), numbered(1)]},
            r"test must have one data set for each of 1 clients, got 2",
        ),
        ([numbered(3), Flipping()], {}, r"^datasets\[1\] gives other numbers when item \d is read"),
    ],
)
def test_datasets_that_do_not_fit_are_named(datasets, options, message):
    with pytest.raises(ValueError, match=message):
        from_datasets(datasets, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda xs, ys, sets: from_datasets([[("an image", 1)]]),
            r"'str'(?s:.*)in item 0 of datasets\[0\]",
        ),
        (
            lambda xs, ys, sets: from_datasets(sets, client_ids=[1, 2, 3]),
            r"multiple values for keyword argument 'client_ids'",
        ),
    ],
)
def test_what_is_no_array_or_no_data_set_is_named(call, message):
    xs, ys = arrays()
    with pytest.raises(TypeError, match=message):
        call(
            xs,
            ys,
            [TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in zip(xs, ys, strict=True)],
        )


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
    counts = [split.counts.tolist() for split in (lists.train, lists.test, pooled.test)]
    assert counts == [[7, 4, 9], [2, 0, 3], [3, 0, 2]]
    assert_close(lists.test.client(2)[0], torch.tensor(tx[2]).float())


def test_regression_is_read_from_the_targets():
    xs, _ = arrays()
    one = from_arrays(xs, [x[:, 0] for x in xs])
    two = from_arrays(xs, [x[:, :2] for x in xs])
    assert (one.task, one.outputs, two.outputs, two.test.y.dtype) == (
        "regression",
        1,
        2,
        torch.float32,
    )
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
        (lambda xs, ys: from_arrays(xs, ys[:2]), "argument 2 is shorter"),
        (lambda xs, ys: from_arrays(np.concatenate(xs), np.concatenate(ys)), "pass client_ids"),
        (lambda xs, ys: from_arrays([xs[0], xs[1][:2], xs[2]], ys), "client 1 has x of shape"),
        (
            lambda xs, ys: from_arrays(xs, [ys[0], ys[1] * 1.0, ys[2]]),
            r"^y .*got 1 .*floats .*3 .*task='regression'",
        ),
        (
            lambda xs, ys: from_arrays(xs[0], ys[0][:3], client_ids=[1] * 7),
            r"^x, y and client_ids .*got shapes \[7, 5\], \[3\] and \[7\]",
        ),
        (
            lambda xs, ys: from_arrays(xs[0], ys[0], client_ids=[1, 2]),
            r"client_ids .*\[7\] and \[2\]",
        ),
        (
            lambda xs, ys: from_arrays([["a"]], [[0]]),
            "x of client 0 must be an array of numbers, got <U1",
        ),
        (lambda xs, ys: from_arrays([xs[0] * 1j], ys[:1]), "array of numbers, got complex128"),
        (lambda xs, ys: from_arrays(xs, ys, names=["a"]), r"^names .*3 clients, got 1"),
        (lambda xs, ys: from_arrays(xs, ys, class_names=["a"]), r"class_names .*3 classes, got 1"),
        (lambda xs, ys: from_arrays(xs, ys, test_share=1.0), r"test_share is a share .* got 1.0"),
        (lambda xs, ys: from_arrays(xs, ys, validation=-0.1), r"validation is a share"),
        (
            lambda xs, ys: from_arrays(xs, ys, validation=0.5, calibration=0.5),
            r"'client 0' has no training .*smaller shares",
        ),
        (
            lambda xs, ys: from_arrays([xs[0], xs[1][:1]], [ys[0], ys[1][:1]]),
            r"'client 1' .* test, 1: .*test_share=0",
        ),
        (
            lambda xs, ys: from_arrays([xs[0], xs[1][:0]], [ys[0], ys[1][:0]]),
            r"'client 1' .* test, 0: ",
        ),
        (
            lambda xs, ys: from_arrays([xs[0], xs[1][:2]], [ys[0], ys[1][:2]], validation=0.1),
            r"'client 1' has no training example \(1 of 2.*smaller shares",
        ),
        (
            lambda xs, ys: from_arrays([x[:, 0] for x in xs], [y > 5 for y in ys], outputs=0),
            r"outputs .*1.* got 0",
        ),
        (lambda xs, ys: from_arrays(xs, ys, outputs=3.0), r"outputs .*got 3\.0"),  # pyright: ignore[reportArgumentType]
        (
            lambda xs, ys: from_arrays(xs, [ys[0], ys[1], ys[2] - 1]),
            r"labels .*'client 2' .*-1 .*leave out",
        ),
        (
            lambda xs, ys: from_arrays(xs, [0 * y - 100 for y in ys]),
            r"labels .*'client 0' .*-100 .*leave out",
        ),
        (lambda xs, ys: from_arrays(xs, ys, outputs=2), r"labels .*\[0, 2\).*outputs="),
        (
            lambda xs, ys: from_arrays(xs, [y + 0.5 for y in ys], task="classification"),
            "y holds 20 that .*fractions",
        ),
        (lambda xs, ys: from_arrays(xs, ys, task="ranking"), "task must be"),  # pyright: ignore[reportArgumentType]
        (
            lambda xs, ys: from_arrays(xs, [y * 1.0 for y in ys], outputs=3, task="regression"),
            r"outputs is 3, but split 'train' .*\[\]",
        ),
        (lambda xs, ys: from_arrays(xs, ys, test=(xs[:1], ys[:1])), "'test' has 1 clients"),
        (
            lambda xs, ys: from_arrays([np.ma.masked_array(xs[0], mask=xs[0] > 1)], ys[:1]),
            "x of client 0 has masked values.*filled",
        ),
        (
            lambda xs, ys: from_arrays(xs, [np.ma.masked_array(y, mask=y == 1) for y in ys]),
            "y of client 0 has masked values.*filled",
        ),
        (
            lambda xs, ys: from_arrays(
                xs[0], ys[0], client_ids=[1] * 7, test=(xs[0], ys[0], [2] * 7)
            ),
            r"test client_ids .*client 2\b.*\[1\]",
        ),
    ],
)
def test_errors_say_what_and_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call(*arrays())


def test_given_test_data_have_no_environment_of_their_own():
    xs, ys = arrays(sizes=(20, 30, 25))
    data = from_arrays(xs, ys, test=arrays(sizes=(3, 4, 5)), environments=environments())
    assert (data.train.environments, data.test.environments) == (3, 1)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        ([1, 2, 1, 2], r"smallest label is 1.*outputs="),
        (["ill", "well", "ill", "well"], r"^y .* got <U4.*factorize"),
        (pd.Series(["ill", None, "ill", "well"]), r"^y .* got object.*factorize"),
    ],
)
def test_labels_that_are_no_classes_from_0(y: Any, words: str):
    """Else a class without examples would be made of 0, and text would be numbers of type
    object.
    """
    with pytest.raises(ValueError, match=words):
        from_arrays(np.ones((4, 2)), y, client_ids=[0, 0, 1, 1])
    assert (
        from_arrays(np.ones((4, 2)), [1, 2, 1, 2], client_ids=[0, 0, 1, 1], outputs=3).outputs == 3
    )


def test_a_mask_of_nothing_is_none():
    x = np.ma.masked_array(np.ones((6, 2)), mask=False)
    assert from_arrays([x], [np.arange(6) % 2], test_share=0).train.counts.sum() == 6
