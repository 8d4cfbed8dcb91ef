"""The form of inputs as their owners have them."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from bayesfl.base.function_code import function_identity
from bayesfl.data.split import Change
from bayesfl.federation.errors import CheckpointError
from bayesfl.federation.form import Form, check_function


def made(scale: float) -> Change:
    return lambda x: x * scale


def test_what_json_holds_of_a_form():
    """Types and shapes by name, and the identity of the transform."""
    form = Form({"x[0]": (torch.int64, (5,)), "x[1]": (torch.float32, ())}, made(2.0))
    told = form.described()
    assert told == {"tensors": {"x[0]": ["int64", [5]], "x[1]": ["float32", []]}, "transform": function_identity(made(2.0))}
    assert told["transform"]["function"] == ["made.<locals>.<lambda>", 2.0]
    assert Form.read(told, form.transform).tensors == form.tensors
    with pytest.raises(ValueError, match="'load' is no type of torch"):
        Form.read({"tensors": {"x": ["load", [5]]}}, None)
    with pytest.raises(ValueError, match=r"several tensors, \(\(3,\), \(2,\)\), whose types are not known"):
        Form.of_floats(((3,), (2,)))


def told(function: Change) -> dict[str, Any]:
    """What a file holds of a function."""
    return json.loads(json.dumps(function_identity(function)))


def test_functions_are_compared_by_their_code():
    """And by what they close over, not by their names; the message tells what differs."""
    check_function("it", "transform", told(made(2.0)), made(2.0))
    check_function("it", "transform", told(lambda x: x + 1), lambda x: x + 1)
    check_function("it", "augment", None, None)
    with pytest.raises(CheckpointError, match=r"^it was made with the transform .*lambda>', 2\.0\], got .*lambda>', 3\.0\]; give that"):
        check_function("it", "transform", told(made(2.0)), made(3.0))
    with pytest.raises(CheckpointError, match=r"^it was made with the augment .*got .*, which reads other code or other values; give that"):
        check_function("it", "augment", told(lambda x: x + 1), lambda x: x + 2)
    with pytest.raises(CheckpointError, match=r"the transform .*lambda>', 2\.0\], got none; give the same, a file holds no code"):
        check_function("it", "transform", told(made(2.0)), None)
    with pytest.raises(CheckpointError, match=r"without transform=, got .*lambda>', 2\.0\]; leave it out"):
        check_function("it", "transform", None, made(2.0))
    with pytest.raises(CheckpointError, match=r"does not say by code which transform .*\['made'\]; make it again"):
        check_function("it", "transform", ["made"], made(2.0))


def test_another_python_compares_names_and_numbers():
    """Bytecode differs between versions, so that the same file may be read, with a warning."""
    older = told(made(2.0)) | {"under": "Python 3.10", "code": "0" * 16}
    with pytest.warns(UserWarning, match=r"it was made under Python 3\.10, and this is .*: whether the transform \['made.*cannot be seen"):
        check_function("it", "transform", older, made(2.0))
    check_function("it", "transform", told(made(2.0)) | {"under": "Python 3.10"}, made(2.0))
    with pytest.raises(CheckpointError, match=r"lambda>', 2\.0\], got .*3\.0\]; give that one"):
        check_function("it", "transform", older, made(3.0))


def test_a_transform_that_makes_something_else():
    """As one of the same name and another code does: its inputs have another shape than the model's."""

    def take(transform: object, x: Tensor) -> object:
        form = Form({"x": (torch.uint8, (4,))}, transform)  # type: ignore[arg-type]
        return form.split(x, (4,), dtype=torch.float64, device=torch.device("cpu")).take(torch.arange(len(x)))

    x = torch.tensor([[0, 51, 102, 255]], dtype=torch.uint8)
    found = take(lambda x: x.double() / 255, x)
    assert torch.equal(found, torch.tensor([[0.0, 0.2, 0.4, 1.0]], dtype=torch.float64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the transform makes inputs of shape \(2,\) of x, the model was trained on \(4,\)"):
        take(lambda x: x[:, :2] / 255, x)
    with pytest.raises(ValueError, match=r"transform\(x\) has shape \[2, 4\] for 1 rows"):
        take(lambda x: x.repeat(2, 1), x)
