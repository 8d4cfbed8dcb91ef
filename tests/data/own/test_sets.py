"""Federations of map-style data sets whose rows have names: columns, lists of different lengths,
and what is refused.
"""

import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.base.inputs import named
from bayesfl.data import from_datasets
from bayesfl.likelihoods import Tokens
from tests.federation.made import run


def rows(n: int, seed: int, longest: int) -> list[dict[str, Any]]:
    """Rows as a tokeniser makes them, of lists of different lengths."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        ids = rng.integers(1, 9, int(rng.integers(2, longest + 1))).tolist()
        found.append(
            {
                "input_ids": ids,
                "label": int(rng.integers(3)),
                "tags": [i % 4 for i in ids],
                "age": rng.normal(),
                "text": "no number",
            }
        )
    return found


SETS = [rows(12, 0, 5), rows(20, 1, 7)]


def test_lists_are_filled_up_with_a_mask():
    """To the longest of all clients, 0 behind, in every split; the mask is of the row's own
    places.
    """
    data = from_datasets(
        SETS, inputs="input_ids", target="label", test=[rows(4, 2, 3), []], names=["Bern", "Chur"]
    )
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
    called = from_datasets(SETS, inputs=["input_ids"], target="label", mask="known")
    assert set(called.inputs) == {"input_ids", "known"}


def test_a_mask_that_the_rows_have_is_theirs():
    """Filled up with 0, as the tokens are."""
    with_mask = [
        [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in one] for one in SETS
    ]
    data = from_datasets(with_mask, inputs=["input_ids", "attention_mask"], target="label")
    x, _ = data.train.client(1)
    assert torch.equal(x["attention_mask"], (x["input_ids"] > 0).long())


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

    result = run(
        bf.algorithms.fedavg(Tagger(), likelihood=Tokens(), epochs=1), data, evaluate_every=None
    )
    table = result.known_of(data.test).measured().table()
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
        (SETS, {"inputs": "ids", "target": "label"}, r"'ids'(?s:.*)item 0 of datasets\[0\]"),
        (SETS, {"inputs": "text", "target": "label"}, r"'str'(?s:.*)item 0 of datasets\[0\]"),
        (SETS, {"inputs": ["age", "label"], "target": "label"}, r"target 'label' is among inputs="),
        (SETS, {}, r"pair \(x, y\), got a dict.*inputs= and target="),
        (
            [Drawn()],
            {"inputs": "x", "target": "y"},
            r"other numbers when item 0 is read again.*augmented",
        ),
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
    with pytest.raises((ValueError, KeyError, TypeError), match=words):
        from_datasets(sets, **options)


def test_rows_of_hugging_face_are_rows():
    """As their library gives them; classes have the names that it knows."""
    datasets = pytest.importorskip("datasets")
    sets = [datasets.Dataset.from_list(one) for one in SETS]
    mine, theirs = (from_datasets(one, inputs="input_ids", target="label") for one in (sets, SETS))
    assert mine.hash == theirs.hash
    classes = datasets.ClassLabel(names=list("abcd"))
    for column, kind in (("label", classes), ("tags", datasets.Sequence(classes))):
        known = [one.cast_column(column, kind) for one in sets]
        made = from_datasets(known, inputs="input_ids", target=column)
        assert made.class_names == tuple("abcd")


def test_an_empty_list_has_no_type():
    """Tokens stay whole numbers beside it."""
    texts: Any = [[{"ids": [], "y": 1}, {"ids": [1, 2, 3], "y": 0}, {"ids": [4], "y": 1}] * 2] * 2
    data = from_datasets(texts, inputs=["ids"], target="y", test_share=0)
    train: Any = data.train
    assert train.x["ids"].dtype == torch.int64
    assert train.take(train.index[:2])["ids"].tolist() == [[0, 0, 0], [1, 2, 3]]


class Labelled(list):
    """Rows with features, as Hugging Face's have."""

    def __init__(self, rows: list[Any], names: list[str]) -> None:
        super().__init__(rows)
        self.features = {"label": types.SimpleNamespace(names=names)}


def test_other_names_of_classes_are_refused():
    same, other, held = (Labelled(SETS[0], [*names]) for names in ("abc", "cba", ""))
    held.features = torch.ones(3)  # type: ignore[assignment]
    roles: dict[str, Any] = {"inputs": "age", "target": "label"}
    cases: tuple[tuple[list[Any], dict[str, Any], Any], ...] = (
        ([same, same], {}, ("a", "b", "c")),
        ([same, other], {"class_names": ["x", "y", "z"]}, ("x", "y", "z")),
        ([same, other], {"inputs": "label", "target": "age", "task": "regression"}, None),
        ([same], {"outputs": 5}, None),
        ([held], {}, None),
    )
    for sets, options, names in cases:
        assert from_datasets(sets, **{**roles, **options}).class_names == names
    told = r"datasets\[1\] has the classes \['c', 'b', 'a'\], datasets\[0\] has \['a', 'b', 'c'\]"
    for sets, test, words in (
        ([same, other], None, told),
        ([same], [other], r"test\[0\] has the classes \['c'"),
    ):
        with pytest.raises(ValueError, match=words):
            from_datasets(sets, test=test, **roles)


def test_partitions_of_flower_are_rows():
    """As their partitioners make them."""
    datasets = pytest.importorskip("datasets")
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    rng = np.random.default_rng(0)
    drawn = {
        "image": rng.integers(0, 256, (60, 4, 4), dtype=np.uint8),
        "label": rng.integers(0, 3, 60),
    }
    partitioner = partitioners.IidPartitioner(num_partitions=3)
    partitioner.dataset = datasets.Dataset.from_dict(
        {key: list(values) for key, values in drawn.items()}
    ).with_format("numpy")
    data = from_datasets(
        [partitioner.load_partition(j) for j in range(3)], inputs="image", target="label"
    )
    assert (data.inputs, data.counts["train"].tolist()) == ((4, 4), [16, 16, 16])


def taken(data: Any) -> dict[str, Any]:
    """Every split's counts, targets, and inputs by name."""
    return {
        name: (split.counts.tolist(), split.y[split.index], dict(named(split.take(split.index))))
        for name, split in data.splits.items()
    }


def test_rows_that_do_not_fit_each_other():
    shapes: Any = [[(np.ones(2), 0)], [(np.ones(3), 0)]]
    for bad, options, words in (
        (
            [[*SETS[0], {"input_ids": [1], "label": "?"}]],
            {"inputs": "input_ids", "target": "label"},
            "item 12 of",
        ),
        (
            [[{"x": 1, "y": 0}, {"x": 1.5, "y": 1}]],
            {"inputs": "x", "target": "y"},
            "column 'x' must hold numbers of one type, got torch.float32 after torch.int64",
        ),
        (shapes, {}, r"column 'x' has rows of shapes \[\(2,\), \(3,\)\]"),
        ([shapes[0], [((np.ones(2),), 0)]], {}, "'x'"),
    ):
        with pytest.raises((ValueError, TypeError, KeyError), match=words):
            from_datasets(bad, **options)
