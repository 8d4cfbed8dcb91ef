"""The form of inputs as their owners have them."""

import pytest
import torch
from torch import Tensor

from bayesfl.base.described import described
from bayesfl.data.split import Change
from bayesfl.federation.clients.form import Form


def made(scale: float) -> Change:
    return lambda x: x * scale


def test_what_json_holds_of_a_form():
    """Types and shapes by name, and a description of the transform."""
    form = Form({"x[0]": (torch.int64, (5,)), "x[1]": (torch.float32, ())}, made(2.0))
    told = form.described()
    assert told == {
        "tensors": {"x[0]": ["int64", [5]], "x[1]": ["float32", []]},
        "transform": described(made(2.0)),
    }
    assert told["transform"]["holds"] == {"scale": 2.0}
    assert Form.read(told, form.transform).tensors == form.tensors


def test_a_transform_that_makes_something_else():
    """As one of the same name and another code does: its inputs have another shape than the
    model's.
    """

    def take(transform: object, x: Tensor) -> object:
        form = Form({"x": (torch.uint8, (4,))}, transform)  # type: ignore[arg-type]
        return form.split(x, (4,), dtype=torch.float64, device=torch.device("cpu")).take(
            torch.arange(len(x))
        )

    x = torch.tensor([[0, 51, 102, 255]], dtype=torch.uint8)
    found = take(lambda x: x.double() / 255, x)
    assert torch.equal(found, torch.tensor([[0.0, 0.2, 0.4, 1.0]], dtype=torch.float64))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"the transform makes inputs of shape \(2,\) of x, the model was trained on \(4,\)",
    ):
        take(lambda x: x[:, :2] / 255, x)
    with pytest.raises(ValueError, match=r"transform\(x\) has shape \[2, 4\] for 1 rows"):
        take(lambda x: x.repeat(2, 1), x)
