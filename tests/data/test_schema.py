"""What the rows of a federation look like."""

from collections.abc import Callable
from dataclasses import replace
from json import dumps, loads
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bayesfl as bf
from bayesfl.base.described import described
from bayesfl.data.schema import Schema

PLAIN = Schema(tensors={"x": ("uint8", (4,))}, inputs=(4,), outputs=3, task="classification")
CPU = {"dtype": torch.float64, "device": torch.device("cpu")}


def made(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * scale


def test_what_json_holds_of_a_schema():
    """All fields; of the transform a description, which counts as the function does."""
    tensors = {"x[0]": ("int64", (5,)), "x[1]": ("float32", ())}
    schema = replace(PLAIN, tensors=tensors, inputs=((5,), ()), transform=made(2.0))
    told = loads(dumps(schema.described()))
    assert told["tensors"] == {"x[0]": ["int64", [5]], "x[1]": ["float32", []]}
    assert told["transform"] == described(made(2.0))
    read = Schema.read(told)
    assert replace(read, transform=schema.transform) == schema
    assert not read.differences(schema)
    assert list(read.differences(replace(schema, transform=made(3.0)))) == ["transform.holds.scale"]


def test_a_transform_that_makes_something_else():
    """As one of the same name and another code does: it has other rows."""

    def take(transform: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        schema = replace(PLAIN, transform=transform)
        return schema.read_inputs(x, **CPU).take(torch.arange(len(x)))

    x = torch.tensor([[0, 51, 102, 255]], dtype=torch.uint8)
    found = take(lambda x: x.double() / 255, x)
    assert torch.equal(found, torch.tensor([[0.0, 0.2, 0.4, 1.0]], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"transform\(x\) has shape \[2, 4\] for 1 rows"):
        take(lambda x: x.repeat(2, 1), x)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": (5,)}, r"inputs: saved \(4,\), given \(5,\); pass data of the same problem"),
        ({"outputs": 2}, r"outputs: saved 3, given 2; .*same problem.*from_arrays.*outputs=3"),
        ({"task": "regression"}, "task: saved classification, given regression; pass data"),
        ({"class_names": tuple("bac")}, r"class_names: .*'a', 'b'.*given \('b', .*Categorical"),
        ({"columns": tuple("dcba")}, "columns: saved .*; select the columns of the model"),
        ({"transform": made(2.0)}, r"transform: saved None, given {.*clients\.transformed"),
        ({"tensors": {"x": ("float64", (4,))}}, r"tensors\.x: saved whole numbers, given floats"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_other_rows(change: dict[str, Any], words: str):
    """Each field counts, with its remedy; names where both have them, and the type of whole numbers
    not.
    """
    known = replace(PLAIN, class_names=tuple("abc"), columns=tuple("abcd"))
    for same in (known, PLAIN, replace(PLAIN, tensors={"x": ("int64", (9,))})):
        known.refuse_other("it", same)
        same.refuse_other("it", known)
    with pytest.raises(ValueError, match=rf"^it has other rows .*{words}"):
        known.refuse_other("it", replace(known, **change))


def test_targets_of_new_rows():
    """Of a regression, one a row or several, in the shape of predictions."""
    schema = replace(PLAIN, task="regression", outputs=2)
    assert schema.read_labels([[1, 2], [3, 4]], 2).tolist() == [[1, 2], [3, 4]]
    assert replace(schema, outputs=1).read_labels(np.arange(3.0), 3).shape == (3, 1)
    with pytest.raises(ValueError, match=r"2 targets for each of 2 rows, got shape \[2\]"):
        schema.read_labels([1.0, 2.0], 2)


def test_the_schema_of_an_outline_says_nothing_of_clients():
    """A client's model holds it."""
    data = bf.data.iid("digits", clients=2)
    assert data.outline.schema == data.schema
    assert type(data.outline.schema) is Schema
