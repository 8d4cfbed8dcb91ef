"""Data sets: what one is, and what is said of those that are known."""

import sys
from typing import Any

import pytest
import torch

from bayesfl.data import Source, SourceInfo, available, coloured, iid, label_groups

SMALL: dict[Any, dict[str, Any]] = {
    coloured: {"agreement": (0.9,)},
    label_groups: {"clients": 1, "labels": 2, "train": 1, "test": 1},
}


def test_every_source_has_terms_and_citation():
    for name, info in available().items():
        assert info.name == name
        assert info.licence
        assert info.citation


def test_source_of_your_own_tensors():
    source = Source.from_parts(
        torch.zeros(4, 2),
        torch.tensor([0, 1, 2, 1]),
        torch.ones(2, 2),
        torch.tensor([3, 0]),
        name="mine",
    )
    assert (source.outputs, source.train, source.task) == (4, 4, "classification")
    assert source.x_test.sum() == 4
    line = Source.from_parts(
        torch.zeros(4, 2), torch.zeros(4, 3), torch.ones(2, 2), torch.zeros(2, 3), name="line"
    )
    assert (line.outputs, line.task) == (3, "regression")
    with pytest.raises(ValueError, match=r"labels .*y .*-1 .*row 5: .*leave out"):
        Source.from_parts(
            torch.zeros(4, 2),
            torch.tensor([0, 1, 2, 1]),
            torch.ones(2, 2),
            torch.tensor([2, -1]),
            name="mine",
        )
    with pytest.raises(ValueError, match=r"labels .*\[0, 2\), y .*2 .*row 2: .*outputs=3"):
        Source.from_parts(
            torch.zeros(3, 2),
            torch.tensor([0, 1, 2]),
            torch.ones(1, 2),
            torch.tensor([0]),
            name="mine",
            outputs=2,
        )
    with pytest.raises(ValueError, match="as many rows"):
        Source(
            x=torch.zeros(3, 1),
            y=torch.zeros(2),
            train=1,
            outputs=1,
            task="regression",
            info=source.info,
        )


def test_whole_numbers_of_a_source_stay_what_they_are():
    """As recipes divide them."""
    x, y = torch.arange(24, dtype=torch.uint8).reshape(12, 2), torch.arange(12) % 2
    source = Source.from_parts(x[:8], y[:8], x[8:], y[8:], name="bytes")
    assert source.x.dtype == iid(source, clients=2).train.client(0)[0].dtype == torch.uint8  # pyright: ignore[reportAttributeAccessIssue]
    assert (
        Source.from_parts(x[:8].double(), y[:8], x[8:].double(), y[8:], name="doubles").x.dtype
        == torch.float32
    )
    for recipe in (coloured, label_groups):
        with pytest.raises(
            ValueError, match=r"\[0, 1\].* 'bytes' are torch\.uint8: .*x\.float\(\) / 255"
        ):
            recipe(
                Source.from_parts(x[:8, :1], y[:8], x[8:, :1], y[8:], name="bytes"), **SMALL[recipe]
            )


def test_recipes_divide_single_tensors():
    x: Any = {"a": torch.zeros(4, 2)}
    y = torch.arange(4) % 2
    with pytest.raises(
        TypeError, match=r"^x_test must be one tensor, got dict; recipes .*from_arrays.*client_ids"
    ):
        Source.from_parts(x["a"], y, x, y, name="several")
    several: Any = (x["a"], x["a"])
    with pytest.raises(TypeError, match=r"^x must be one tensor, got tuple; recipes"):
        Source(
            x=several,
            y=y,
            train=2,
            outputs=2,
            task="classification",
            info=SourceInfo(name="several"),
        )


@pytest.mark.slow
def test_import_brings_torch_and_numpy_only():
    """In a fresh interpreter, importing the data modules loads nothing that is used by
    some only.
    """
    import subprocess

    lazy = ("sklearn", "torchvision", "scipy", "pandas", "PIL")
    code = (
        f"import sys, bayesfl.data, bayesfl.models; print([m for m in {lazy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
