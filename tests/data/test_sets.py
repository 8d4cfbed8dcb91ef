"""Federations of map-style data sets whose rows have names: columns, lists of different lengths, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.data import from_datasets
from bayesfl.likelihoods import Tokens
from tests.federation.made import run


def rows(n: int, seed: int, longest: int) -> list[dict[str, Any]]:
    """Rows as a tokeniser makes them, of lists of different lengths."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        length = int(rng.integers(2, longest + 1))
        ids = rng.integers(1, 9, length).tolist()
        found.append(
            {"input_ids": ids, "label": int(rng.integers(3)), "tags": [i % 4 for i in ids], "age": rng.normal(), "text": "no number"}
        )
    return found


SETS = [rows(12, 0, 5), rows(20, 1, 7)]


def test_lists_are_filled_up_with_a_mask():
    """To the longest of all clients, 0 behind, in every split; the mask is of the row's own places."""
    data = from_datasets(SETS, inputs="input_ids", target="label", test=[rows(4, 2, 3), []], names=["Bern", "Chur"])
    longest = max(len(row["input_ids"]) for one in SETS for row in one)
    assert data.inputs == {"input_ids": (longest,), "attention_mask": (longest,)}
    x, y = data.train.client(0)
    assert y.tolist() == [row["label"] for row in SETS[0]]
    for row, ids, mask in zip(SETS[0], x["input_ids"], x["attention_mask"], strict=True):
        n = len(row["input_ids"])
        assert ids.tolist() == row["input_ids"] + [0] * (longest - n)
        assert mask.tolist() == [True] * n + [False] * (longest - n)
    assert (x["input_ids"].dtype, x["attention_mask"].dtype) == (torch.int64, torch.bool)
    assert data.test.counts.tolist() == [4, 0]
    named = from_datasets(SETS, inputs=["input_ids"], target="label", mask="known")
    assert set(named.inputs) == {"input_ids", "known"}


def test_a_mask_that_the_rows_have_is_theirs():
    """Filled up with 0, as the tokens are."""
    with_mask = [[{**row, "attention_mask": [1] * len(row["input_ids"])} for row in one] for one in SETS]
    data = from_datasets(with_mask, inputs=["input_ids", "attention_mask"], target="label")
    x, _ = data.train.client(1)
    assert x["attention_mask"].dtype == torch.int64
    assert torch.equal(x["attention_mask"] == 1, x["input_ids"] > 0)


def test_labels_of_places_are_filled_up_with_what_is_not_known():
    """And are trained on and measured without these."""
    data = from_datasets(SETS, inputs="input_ids", target="tags")
    y = data.train.y[data.train.index]
    x = data.train.take(data.train.index)
    assert torch.equal(y == -100, ~x["attention_mask"])  # type: ignore[index]

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.last(self.embed(input_ids) * attention_mask.unsqueeze(-1))

    result = run(bf.algorithms.fedavg(Tagger(), likelihood=Tokens(), epochs=1), data, evaluate_every=None)
    table = result.predict().table(data.test)
    assert table["examples"].sum() == int((data.test.y[data.test.index] >= 0).sum())


def test_columns_of_one_length_need_no_mask():
    """One column is one input, several are named; numbers of any kind."""
    assert from_datasets(SETS, inputs="age", target="label").inputs == ()
    both = [[{**row, "image": np.zeros((2, 2), np.uint8)} for row in one] for one in SETS]
    data = from_datasets(both, inputs=["age", "image"], target="label")
    assert data.inputs == {"age": (), "image": (2, 2)}
    assert data.train.x["image"].dtype == torch.uint8  # type: ignore[index]


class Drawn:
    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.rand(3), "y": i % 2}


@pytest.mark.parametrize(
    ("sets", "options", "words"),
    [
        (
            SETS,
            {"inputs": "ids", "target": "label"},
            r"datasets\[0\] must give rows with the columns \['ids', 'label'\], got \['input_ids'",
        ),
        (SETS, {"inputs": "text", "target": "label"}, r"numbers in column 'text', its item 0 does not: .*tokeniser"),
        (SETS, {"inputs": "age"}, r"inputs= and target= name columns of rows together"),
        (SETS, {}, r"pairs \(x, y\), got dict .*inputs= and target="),
        ([[(1, 2)]], {"inputs": "x", "target": "y"}, r"rows with the columns \['x', 'y'\], got tuple of length 2 as item 0"),
        ([Drawn()], {"inputs": "x", "target": "y"}, r"other numbers when item 0 is read again.*augmented"),
        ([[]], {"inputs": "x", "target": "y"}, r"datasets\[0\] is empty"),
        (
            [[{"x": np.ones((2, k)), "y": 0} for k in (1, 2)]],
            {"inputs": "x", "target": "y"},
            r"'x' has rows of shapes \[\(2, 1\), \(2, 2\)\]",
        ),
        (
            [[{"x": [1] * k, "z": [1] * (3 - k), "y": 0} for k in (1, 2)]],
            {"inputs": ["x", "z"], "target": "y"},
            r"lengths in one row, \[1, 2\]",
        ),
    ],
)
def test_what_is_refused(sets: Any, options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        from_datasets(sets, **options)


def test_rows_of_hugging_face_are_rows():
    """As their library gives them."""
    datasets = pytest.importorskip("datasets")
    sets = [datasets.Dataset.from_list(one) for one in SETS]
    mine, theirs = (from_datasets(one, inputs="input_ids", target="label") for one in (sets, SETS))
    assert mine.hash == theirs.hash
