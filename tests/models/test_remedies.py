"""Errors of a model's forward name what to do, wherever the forward runs."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.base.inputs import call
from bayesfl.models.remedies import remedy

ONCE: dict[str, Any] = {"rounds": 1, "evaluate_every": None, "progress": False}
BEYOND = r"whole numbers choose an embedding's rows.*x 0 to 9: build"


class Table(nn.Module):
    """Texts of three tokens by an embedding that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Parameter(torch.ones(9, 2)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.embedding(x, self.table).flatten(1))


def layer() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 2))


def texts() -> np.ndarray:
    return np.arange(300 * 3).reshape(300, 3) % 9


def of(x: np.ndarray) -> bf.data.FederatedData:
    return bf.data.from_arrays(x, np.arange(300) % 2, client_ids=np.arange(300) % 2)


def test_a_token_that_no_layer_looks_up():
    """It is found before training, in whatever row it stands."""
    x = texts()
    bf.simulate(bf.algorithms.fedavg(Table()), of(x), **ONCE)
    x[217, 1] = 9
    with pytest.raises(ValueError, match=BEYOND):
        bf.simulate(bf.algorithms.fedavg(Table()), of(x), **ONCE)


@pytest.mark.parametrize("make", [Table, layer])
@pytest.mark.parametrize("laplace", [False, True])
def test_a_token_that_is_new_to_a_trained_model(make: type[nn.Module], laplace: bool):
    """By the client's own model, and by the federation's."""
    method = bf.algorithms.fedavg(make())
    if laplace:
        method = replace(method, predictor=bf.predictors.LinearisedLaplace(precision=1.0))
    result, new = bf.simulate(method, of(texts()), **ONCE), texts()[:20]
    result.client(0).predict(new)
    new[7, 1] = 9
    with pytest.raises(ValueError, match=BEYOND):
        result.client(0).predict(new)
    changed = result.data.test.x.clone()  # pyright: ignore[reportAttributeAccessIssue] (one tensor)
    changed[result.data.test.rows(1)[0], 0] = 9
    with pytest.raises(ValueError, match=BEYOND):
        result.predict(replace(result.data.test, x=changed))


def test_a_split_without_the_transform():
    """Also of the same numbers and shape; with it the predictions are those of before."""
    rng = np.random.default_rng(0)
    data = bf.data.from_arrays(
        rng.integers(0, 256, (40, 2, 3), dtype=np.uint8),
        np.arange(40) % 2,
        client_ids=np.arange(40) % 4,
    )
    for transform in (lambda x: x / 255, lambda x: x.flatten(1), lambda x: x // 2):
        result = bf.simulate(bf.algorithms.fedavg(Floats()), data.transformed(transform), **ONCE)
        other = replace(result.data.test, transform=lambda x, first=transform: first(x) * 2)
        for split, words in (
            (other, r"transform\..*: saved .*, given .*transform=clients"),
            (data.test, r"transform: saved {.*}, given None; "),
        ):
            with pytest.raises(ValueError, match=f"^split has other rows .*{words}"):
                result.predict(split)
        assert torch.equal(
            result.predict(replace(data.test, transform=transform)).probs, result.predict().probs
        )


class Floats(nn.Module):
    """A linear layer over any numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1).to(self.last.weight.dtype))


class Using(nn.Module):
    """A function of inputs, as of a mask that is used in one of torch's ways."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.use = use

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        return self.use(*given, **named)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, mask: x.masked_fill(mask, 0),
        lambda x, mask: torch.where(mask, x, x),
        lambda x, mask: x.masked_select(mask),
        lambda x, mask: nn.MultiheadAttention(3, 1, batch_first=True)(
            *3 * (x[None],), key_padding_mask=mask[:, 0][None]
        ),
        lambda x, mask: F.scaled_dot_product_attention(*3 * (x[None],), attn_mask=mask[None]),
    ],
)
def test_a_mask_of_whole_numbers(use: Any):
    """It stays one of whole numbers, which torch takes for no mask."""
    x = {"x": torch.ones(3, 3), "mask": torch.ones(3, 3, dtype=torch.int64)}
    with pytest.raises((RuntimeError, AssertionError)) as raised:
        call(Using(use), x)
    assert remedy(raised.value, x) == (
        "a mask holds truth values, and whole numbers stay such: pass x['mask'].astype(bool)"
    )


@pytest.mark.parametrize(
    ("module", "x", "words"),
    [
        (
            nn.Linear(3, 2),
            torch.ones(4, 3, dtype=torch.int64),
            r"x holds torch\.int64.*x\.astype\('float32'\)",
        ),
        (
            nn.Linear(3, 2),
            torch.ones(4, 3, dtype=torch.uint8),
            r"x holds torch\.uint8.*clients\.transformed",
        ),
        (nn.Conv2d(1, 2, 1), torch.ones(4, 1, 3, 3, dtype=torch.uint8), r"x holds torch\.uint8"),
        (nn.BatchNorm1d(3), torch.ones(4, 3, dtype=torch.int64), r"x holds torch\.int64"),
        (nn.LayerNorm(3), torch.ones(4, 3, dtype=torch.int64), r"x holds torch\.int64"),
        (nn.LSTM(3, 2), torch.ones(4, 2, 3, dtype=torch.int64), r"x holds torch\.int64"),
        (
            nn.Embedding(3, 2),
            torch.ones(4, 3),
            r"an embedding takes whole numbers.*astype\('int64'\)",
        ),
        (nn.Linear(3, 2), torch.ones(4, 5), r"build it for inputs of this shape"),
        (
            nn.Linear(3, 2),
            torch.ones(4, 5, dtype=torch.int64),
            r"x holds torch\.int64|for inputs of this shape",
        ),
        (nn.Embedding(3, 2), torch.full((4, 3), 7), r"x 7 to 7: build it with more rows"),
        (nn.Embedding(3, 2), torch.full((4, 3), True), r"an embedding takes whole numbers"),
        (
            Using(lambda x: torch.ones(3, 2)[x]),
            torch.full((4, 1), 9),
            r"x 9 to 9: build it with more rows",
        ),
        (
            Using(lambda x: x.sum(5)),
            torch.ones(4, 3, dtype=torch.int64),
            r"for inputs of this shape",
        ),
        (nn.Linear(3, 2), {"a": torch.ones(4, 3)}, r"mapping as model\(\*\*x\)"),
        (
            nn.Linear(3, 2),
            (torch.ones(4, 3), torch.ones(4, 3)),
            r"a tuple of arrays as model\(\*x\)",
        ),
    ],
)
def test_what_torch_says(module: nn.Module, x: Any, words: str):
    """Of each kind of error that layers of torch raise."""
    with pytest.raises((RuntimeError, TypeError, IndexError, ValueError)) as raised:
        call(module, x)
    assert re.search(words, remedy(raised.value, x))
