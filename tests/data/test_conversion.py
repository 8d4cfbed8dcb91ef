"""Arrays of every kind as tensors: types, trees, files, and what is no input."""

import warnings
from collections import UserDict
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bayesfl.data.conversion import to_inputs, to_tensor
from bayesfl.data.mapped import mapped


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("float64", torch.float32),
        ("longdouble", torch.float32),
        ("float32", torch.float32),
        ("float16", torch.float16),
        (">f8", torch.float32),
        (">i4", torch.int32),
        ("int64", torch.int64),
        ("int32", torch.int32),
        ("int16", torch.int16),
        ("int8", torch.int8),
        ("uint8", torch.uint8),
        ("bool", torch.bool),
        ("uint16", torch.int64),
        ("uint32", torch.int64),
        ("uint64", torch.int64),
    ],
)
def test_numbers_stay_what_they_are(given, kept):
    array = np.array([[0, 1], [1, 0]]).astype(given)
    made: Any = to_inputs(array)
    assert (made.dtype, made.tolist()) == (kept, array.tolist())
    assert to_tensor(array, "y").dtype == (torch.float32 if kept.is_floating_point else torch.int64)


def test_what_float32_loses_is_told():
    """Seconds since 1970, hours apart; not a year of them, standardised ones or a constant."""
    second = 1.7e9 + np.arange(100.0)[:, None] * [1, 2]
    with pytest.warns(UserWarning, match="column 0 of x differs .* hardly more than float32"):
        to_inputs(second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fine in (
            1.7e9 + 3e5 * np.arange(100.0)[:, None],
            second - second.mean(),
            0 * second + 0.1,
        ):
            to_inputs(fine)


def test_tensors_and_lists():
    given = (torch.zeros(2).bfloat16(), torch.zeros(2).double(), [[1, 2]], [[1, 2], [3, 4.5]])
    made: list[Any] = [to_inputs(one) for one in given]
    assert [t.dtype for t in made] == [torch.bfloat16, torch.float32, torch.int64, torch.float32]


def test_columns_of_frames_are_quantities():
    frame = pd.DataFrame({"a": [1, 2], "b": [3, 4]})
    assert to_inputs(frame).dtype == torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    tree: Any = to_inputs({"table": frame, "tokens": pd.Series([1, 2])})
    assert (tree["table"].dtype, tree["tokens"].dtype) == (torch.float32, torch.int64)


def test_trees_are_tuples_and_plain_dicts():
    """So is what a tokeniser returns, which is a mapping of its own kind."""
    made: Any = to_inputs(
        UserDict(input_ids=[[1, 2]], rest=(np.ones((1, 3)), UserDict(mask=[[True]])))
    )
    assert type(made) is type(made["rest"][1]) is dict
    assert (made["input_ids"].dtype, made["rest"][1]["mask"].dtype) == (torch.int64, torch.bool)
    assert isinstance(to_inputs((np.ones(2),)), tuple)
    assert list(to_inputs({"two words": np.ones(2)})) == ["two words"]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ((), r"^x must hold at least one input"),
        (([1.0], ()), r"^x\[1\] must hold at least one input"),
        ({"a": {"b": {}}}, r"^x\['a'\]\['b'\] must hold at least one input"),
        (
            {"a": [1.0, 2.0], "b": ([1.0, 2.0], [1.0])},
            r"^x\['a'\] of client 3 has 2 rows and x\['b'\]\[1\] of client 3 has 1",
        ),
        (
            {"a": np.array([1j])},
            r"^x\['a'\] of client 3 must be an array of numbers, got complex128",
        ),
        (
            {"a": np.array([object()])},
            r"^x\['a'\] of client 3 must be an array of numbers, got object",
        ),
        ({"a": ["b"]}, r"^x\['a'\] of client 3 must be an array of numbers, got <U1"),
        ({"a": [[1, 2], [3]]}, "inhomogeneous"),
        ({"a": np.ma.masked_array([1.0], mask=[True])}, r"^x\['a'\] of client 3 has masked values"),
    ],
)
def test_what_is_no_input_is_named(x, message):
    with pytest.raises((ValueError, TypeError), match=message):
        to_inputs(x, "x", " of client 3")


@pytest.fixture
def always_warned():
    """Else torch warns once in a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("always_warned")
def test_mapped_arrays_stay_in_their_files(tmp_path):
    """Slices and views too, without a warning that they cannot be written; those in an order torch
    has no name for are read.
    """
    path = tmp_path / "x.npy"
    np.save(path, np.arange(12.0).reshape(6, 2))
    array = np.load(path, mmap_mode="r")
    for stays in (array, array[2:], array[:, 1], array.T, np.asarray(array)[::2]):
        made: Any = to_inputs(stays)
        assert mapped(made)
        # Converted where it is read.
        assert (made.dtype, made.data_ptr()) == (torch.float64, stays.ctypes.data)
        assert made.tolist() == stays.tolist()
    for read in (array[::-1], array + 1, np.array(array)):
        made = to_inputs(read)
        assert (mapped(made), made.tolist()) == (False, read.tolist())
    np.arange(5).astype(">i4").tofile(tmp_path / "other")
    other = to_inputs(np.memmap(tmp_path / "other", dtype=">i4", mode="r"))
    assert other.tolist() == [0, 1, 2, 3, 4]  # pyright: ignore[reportAttributeAccessIssue]
