"""One part of the data: rows of each client, padding, types, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close


def test_split_gives_each_client_its_rows(split):
    rows = torch.tensor([9, 8, 7])
    assert_close(split.client(0), (split.x[rows], rows))
    assert split.client(1)[0].shape == (0, 2)
    assert (split.clients, split.offsets.tolist()) == (4, [0, 3, 3, 4])


def test_select_renumbers_and_shares_storage(split):
    chosen = split.select([3, 0])
    assert chosen.counts.tolist() == [2, 3]
    assert [chosen.client(j)[1].tolist() for j in range(2)] == [[1, 5], [9, 8, 7]]
    assert chosen.x is split.x


def test_only_keeps_numbers_and_shares_storage(split):
    some = split.only(np.array([0, 3]))
    assert some.counts.tolist() == [3, 0, 0, 2]
    assert [some.client(j)[1].tolist() for j in range(4)] == [[9, 8, 7], [], [], [1, 5]]
    assert some.x is split.x


def test_padded_labels_mask_what_is_not_there(split):
    y, mask = (t.tolist() for t in split.padded_labels())
    assert y == [[9, 8, 7], [0, 0, 0], [0, 0, 0], [1, 5, 0]]
    assert mask == [[True] * 3, [False] * 3, [True, False, False], [True, True, False]]
    assert replace(split, y=torch.randn(10, 2)).padded_labels()[0].shape == (4, 3, 2)


def test_dtype_applies_to_what_floats(split):
    moved = split.to(dtype=torch.float64)
    assert (moved.client(0)[0].dtype, moved.y.dtype, moved.index.dtype) == (
        torch.float64,
        torch.int64,
        torch.int64,
    )
    assert moved.x is split.x  # converted where it is read
    assert replace(split, y=split.y.float()).to(dtype=torch.float64).y.dtype == torch.float64
    assert split.to("cpu", torch.float32) is split


def test_inputs_are_read_as_trees_in_their_own_types(split):
    """Floats in the precision asked for, whole numbers and bools as they are, but for types that
    torch hardly computes with.
    """
    tokens, mask = torch.arange(20).reshape(10, 2), torch.arange(10) > 4
    some = replace(
        split,
        x={"tokens": tokens, "rest": (mask, split.x.double(), tokens.to(torch.uint16))},
        dtype=torch.float32,
    )
    x, _ = some.client(3)
    assert x["tokens"].tolist() == [[2, 3], [10, 11]]
    assert [t.dtype for t in (x["tokens"], *x["rest"])] == [
        torch.int64,
        torch.bool,
        torch.float32,
        torch.int64,
    ]
    assert some.inputs == {"tokens": (2,), "rest": ((), (2,), (2,))}
    assert some.to(dtype=torch.float64).client(3)[0]["rest"][1].dtype == torch.float64
    assert some.alone(3).client(3)[0]["rest"][2].equal(x["rest"][2])


def test_a_transform_is_given_rows(split):
    """Never none, of which `view(len(x), -1)` for instance makes nothing."""
    flat = replace(
        split, x=torch.arange(40.0).reshape(10, 2, 2), transform=lambda x: x.view(len(x), -1) * 2
    )
    assert (flat.inputs, flat.client(1)[0].shape) == ((4,), (0, 4))
    assert flat.client(0)[0].equal(flat.x[[9, 8, 7]].reshape(3, 4) * 2)
    with pytest.raises(
        ValueError,
        match=r"transform\(x\) holds NaN or infinite numbers for rows that hold none: guard "
        r"divisions",
    ):
        replace(flat, transform=lambda x: 1 / (x.flatten(1) - 4)).take(torch.tensor([1]))  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(ValueError, match=r"transform\(x\) has shape \[2\] for 3 rows"):
        replace(split, transform=lambda x: x.sum(0)).client(0)


def test_mapped_inputs_stay_where_they_are(split, tmp_path):
    """Moved are the rows that are read."""
    torch.arange(20, dtype=torch.uint8).numpy().tofile(tmp_path / "x")
    lies = torch.from_file(str(tmp_path / "x"), shared=True, size=20, dtype=torch.uint8).view(10, 2)
    some = replace(split, x=(lies, split.x))
    moved = some.moved(lambda t, dtype: t.clone(), torch.float64)
    assert [moved.x[0] is lies, moved.x[1] is split.x, moved.dtype] == [True, False, torch.float64]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (torch.zeros(10, 2), {"a": torch.zeros(9)})}, r"x\[1\]\['a'\] and y .*9 and 10"),
        ({"x": ()}, "x must hold at least one input.* a tuple of 0"),
        ({"x": {3: torch.zeros(10)}}, r"x .* must name each by text.* a mapping of \[3\]"),
        ({"y": torch.zeros(9, dtype=torch.int64)}, r"x and y .*10 and 9"),
        ({"counts": np.array([3, 4])}, r"counts .*6 .*index.* 7"),
    ],
)
def test_split_refuses_parts_that_do_not_fit(split, change, message):
    with pytest.raises(ValueError, match=message):
        replace(split, **change)
