"""What a forward may not do beside giving each example its outputs, and that a look leaves
everything as it was.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesfl.models.forwards import looked_at, looked_at_training, one_row_each


class After(nn.Module):
    """A layer, and what follows."""

    def __init__(self, after: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.after, self.calls = nn.Linear(4, 3), after, 0

    def forward(self, x: Tensor) -> Any:
        return self.after(self, self.layer(x))


def counting(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    return x


def rescaling(module: Any, x: Tensor) -> Tensor:
    return (
        x
        + F.embedding(
            torch.zeros(len(x), dtype=torch.int64), module.layer.weight.T, max_norm=1e-3
        ).sum()
        * 0
    )


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (lambda module, x: x + random.random(), "same examples again"),
        (lambda module, x: x + np.random.rand(), "same examples again"),  # noqa: NPY002 (what is refused)
        (lambda module, x: x + torch.rand(()) * 0, "draws random"),
        (
            lambda module, x: x + torch.as_tensor(np.random.default_rng().normal()),
            "same examples again",
        ),
        (lambda module, x: x * 2 if torch.is_grad_enabled() else x, "is_grad_enabled"),
        (lambda module, x: x * 2 if x.requires_grad else x, "is_grad_enabled"),
        (counting, "the numbers ['calls']"),
        (rescaling, "the parameters ['layer.weight']"),
        (lambda module, x: x / len(x), "beside other examples"),
        (lambda module, x: x - x.mean(0), "beside other examples"),
        (lambda module, x: x.squeeze(0), "an example alone"),
        (lambda module, x: x * 0 if len(x) == 1 else x, "an example alone"),
        (lambda module, x: x, ""),
        (lambda module, x: x * module.layer.weight.norm(), ""),
    ],
)
def test_what_a_forward_does_is_named(after: Callable[[nn.Module, Tensor], Any], words: str):
    """The first thing only; torch's own generator is as before."""
    module, x = After(after).requires_grad_(False), torch.randn(8, 4)
    state = torch.get_rng_state()
    outputs, fault = looked_at(module, x)
    assert (words in fault) if words else not fault
    assert one_row_each(outputs, x)
    assert torch.equal(torch.get_rng_state(), state)


def test_outputs_of_another_kind_are_returned_as_they_are():
    """What they should be is for the caller to say."""
    x = torch.randn(8, 4)
    for after in (
        lambda module, x: {"logits": x},
        lambda module, x: x[:, 0],
        lambda module, x: x.long(),
    ):
        outputs, fault = looked_at(After(after), x)
        assert (bool(fault), one_row_each(outputs, x)) == (False, False)


def test_training_without_gradients_is_named():
    """Outputs that lead back to no weight; weights that are frozen, of whole numbers even, need
    none.
    """
    x = torch.randn(8, 4)
    detached = After(lambda module, x: x.detach() if module.training else x).requires_grad_(False)
    names = [name for name, _ in detached.named_parameters()]
    assert (
        "gives outputs without gradients"
        in looked_at_training(detached, x, looked_at(detached, x)[0], names).fault
    )
    frozen = After(lambda module, x: x + module.table.sum()).requires_grad_(False)
    frozen.table = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
    assert not looked_at_training(frozen, x, looked_at(frozen, x)[0], names).fault
