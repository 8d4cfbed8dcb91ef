"""Data sets: what one is, and what is said of those that are known."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from bayesfl.data import available, coloured, iid, label_groups
from tests.data.made import source_of

SMALL: dict[Any, dict[str, Any]] = {
    coloured: {"agreement": (0.9,)},
    label_groups: {"clients": 1, "labels": 2, "train": 1, "test": 1},
}


def test_every_source_has_terms_and_citation():
    for name, info in available().items():
        assert info.name == name
        assert all((info.licence, info.citation)), name


@pytest.mark.parametrize(
    ("train", "test", "options", "match"),
    [
        ([0, 1, 2, 1], [2, -1], {}, r"labels .*y .*-1 .*row 5: .*leave out"),
        ([0, 1, 2], [0], {"outputs": 2}, r"labels .*\[0, 2\), y .*2 .*row 2: .*outputs="),
    ],
)
def test_labels_that_are_no_classes(train, test, options, match):
    with pytest.raises(ValueError, match=match):
        source_of(
            torch.zeros(min(len(train), 4), 2),
            torch.tensor(train),
            torch.ones(len(test), 2),
            torch.tensor(test),
            name="mine",
            **options,
        )


def test_whole_numbers_of_a_source_stay_what_they_are():
    """As recipes divide them."""
    x, y = torch.arange(24, dtype=torch.uint8).reshape(12, 2), torch.arange(12) % 2
    source = source_of(x[:8], y[:8], x[8:], y[8:], name="bytes")
    assert source.x.dtype == iid(source, clients=2).train.client(0)[0].dtype == torch.uint8  # pyright: ignore[reportAttributeAccessIssue]
    for recipe in (coloured, label_groups):
        with pytest.raises(
            ValueError, match=r"\[0, 1\].* 'bytes' are torch\.uint8 .*x\.float\(\) / 255"
        ):
            recipe(source_of(x[:8, :1], y[:8], x[8:, :1], y[8:], name="bytes"), **SMALL[recipe])


@pytest.mark.slow
def test_import_brings_torch_and_numpy_only():
    """In a fresh interpreter, importing the package loads nothing that is used by some only."""
    lazy = (
        *("sklearn", "torchvision", "scipy", "pandas", "PIL", "matplotlib"),
        *("arviz", "xarray", "pyro", "laplace", "backpack", "flwr"),
    )
    code = f"import sys, bayesfl; print([m for m in {lazy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
