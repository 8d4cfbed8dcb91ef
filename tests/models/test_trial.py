"""What a forward may not do beside giving each example its outputs, and that a look leaves
everything as it was.
"""

import contextlib
import copy
import random
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from bayesfl.base.layout import Layout
from bayesfl.curvature import Curvature
from bayesfl.likelihoods import Gaussian
from bayesfl.models.modes import own_copy
from bayesfl.models.trial import draws_in_training, lively, trials, tried


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


def scaled(module: Any, x: Tensor) -> Tensor:
    """A stack's outputs, times tensors that the stack holds and does not name."""
    out = nn.Sequential.forward(module, x)
    for factor in module.extra:
        out = out * factor
    return out


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
        (counting, r"the numbers \['calls'\]"),
        (rescaling, r"the parameters \['layer.weight'\]"),
        (lambda module, x: x / len(x), "beside other examples"),
        (lambda module, x: x - x.mean(0), "beside other examples"),
        (lambda module, x: x.squeeze(0), "an example alone"),
        (lambda module, x: x * 0 if len(x) == 1 else x, "an example alone"),
        (lambda module, x: x, ""),
        (lambda module, x: x * module.layer.weight.norm(), ""),
    ],
)
def test_what_a_forward_does_is_named(after: Callable[[nn.Module, Tensor], Any], words: str):
    """The first thing only; torch's own generator is as before, and so is the module."""
    module, x = After(after), torch.randn(8, 4)
    state, weights = torch.get_rng_state(), copy.deepcopy(module.state_dict())
    expected = (
        pytest.raises(ValueError, match=rf"^the model After is refused: its forward .*{words}")
        if words
        else contextlib.nullcontext()
    )
    for _ in range(2):
        with expected:
            assert tried(module, x, x).outputs.shape == (8, 3)
    assert len(trials(module)) == (not words)
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(module.state_dict(), weights, rtol=0, atol=0)


def test_outputs_of_another_kind_are_returned_as_they_are():
    """What they should be is for the caller to say."""
    x = torch.randn(8, 4)
    for after in (
        lambda module, x: {"logits": x},
        lambda module, x: x[:, 0],
        lambda module, x: x.long(),
    ):
        module = After(after)
        assert type(tried(module, x, x).outputs) is type(module(x))


def test_training_without_gradients_is_named():
    """Outputs that lead back to no weight; weights that are frozen, of whole numbers even, need
    none.
    """
    x = torch.randn(8, 4)
    detached = After(lambda module, x: x.detach() if module.training else x)
    with pytest.raises(ValueError, match="gives outputs without gradients"):
        tried(detached, x, x)
    frozen = After(lambda module, x: x + module.get_parameter("table").sum())
    frozen.table = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
    assert not tried(frozen, x, x).other


def test_a_thread_takes_over_the_copy_that_another_left():
    """Two at once have copies of their own, and so has each mode and precision."""
    module, like = nn.Linear(4, 3), torch.zeros(())

    def copies() -> tuple[nn.Module, ...]:
        double = own_copy(module, like.double())
        return own_copy(module, like), own_copy(module, like, train=True), double

    mine = copies()
    assert len({*mine}) == 3
    assert [part.training for part in mine] == [False, True, False]
    assert copies() == mine
    both = threading.Barrier(2)

    def at_once() -> tuple[nn.Module, ...]:
        both.wait()
        found = copies()
        both.wait()
        return found

    seen: list[set[nn.Module]] = []
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            one, other = (pool.submit(at_once) for _ in range(2))
            seen.append({*one.result(), *other.result()})
    assert len(seen[0]) == 6
    assert not seen[0] & {*mine}
    assert seen[0] == seen[1]


def test_a_network_is_tried_once_for_examples_of_one_form():
    """In whatever precision; what it does in training is then known, and probabilities are seen."""
    called: list[int] = []

    def after(module: nn.Module, x: Tensor) -> Tensor:
        called.append(len(x))
        return F.dropout(x, 0.5, module.training).softmax(-1)

    module, x = After(after), torch.randn(8, 4)
    assert not trials(module)
    assert not draws_in_training(module)
    first = tried(module, x, x)
    assert first[1:] == (True, True, True, True)
    assert draws_in_training(module)
    assert lively(module.eval())
    count = len(called)
    assert tried(module, x.double() + 1, x.double()) is first
    assert len(called) == count
    assert tried(module, x[:, None], x).outputs.shape == (8, 1, 3)
    count = len(called)
    assert tried(module, x[:5], x) is not first
    assert called[count:].count(1) == 1  # an example alone


def test_curvature_reads_the_trial():
    """A method's network that depends on its own parameters alone is not looked at again."""
    x = torch.randn(8, 4)
    extra = [torch.ones(2, requires_grad=True)]
    for more, closed in (((), True), (extra, False)):
        module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        vars(module)["extra"] = [*more]
        module.forward = types.MethodType(scaled, module)
        own, layout = own_copy(module, x), Layout(module, "*")
        assert not Curvature(own, Gaussian(1.0), pattern=layout)._seen
        assert tried(module, x, x).closed == closed
        assert Curvature(own, Gaussian(1.0), pattern=layout)._seen == closed
