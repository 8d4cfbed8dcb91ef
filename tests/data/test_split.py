"""One part of the data: rows of each client, padding, types, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close


def test_split_gives_each_client_its_rows(split):
    x, y = split.client(0)
    assert y.tolist() == [9, 8, 7]
    assert_close(x, split.x[[9, 8, 7]])
    assert split.client(1)[0].shape == (0, 2)
    assert split.offsets.tolist() == [0, 3, 3, 4]
    assert split.clients == 4


def test_what_is_printed_is_short(split):
    """Clients, examples and shapes; no tensor."""
    assert repr(split) == "ClientData(4 clients of 0 to 3 examples; x [2], int64 y [])"
    marked = replace(split, y=torch.randn(10, 2), environment=torch.tensor([0, 1] * 5))
    assert repr(marked) == "ClientData(4 clients of 0 to 3 examples; x [2], float32 y [2]; up to 2 environments each)"
    assert repr(split.select([])) == "ClientData(0 clients of no examples; x [2], int64 y [])"


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
        ({"y": torch.zeros(9, dtype=torch.int64)}, r"x and y .*10 and 9"),
        ({"y": torch.zeros(10, 2, dtype=torch.int64)}, "y must be class labels"),
        ({"index": torch.zeros(6)}, r"index .*int64, got torch\.float32"),
        ({"index": torch.tensor([0, 1, 2, 3, 4, 10])}, r"index must lie within \[0, 10\)"),
        ({"counts": np.array([3, 4])}, r"counts .*6 .*index.* 7"),
    ],
)
def test_split_refuses_parts_that_do_not_fit(split, change, message):
    with pytest.raises(ValueError, match=message):
        replace(split, **change)
