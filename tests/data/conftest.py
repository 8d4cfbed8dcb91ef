"""Data that several files of tests look at."""

import numpy as np
import pytest
import torch

from bayesfl.data import ClientData, Source, from_arrays, load
from bayesfl.data.recipes.images import FINE_TO_COARSE
from tests.data.made import arrays, source_of


@pytest.fixture
def split():
    x = torch.arange(20.0).reshape(10, 2)
    return ClientData(x, torch.arange(10), torch.tensor([9, 8, 7, 0, 1, 5]), np.array([3, 0, 1, 2]))


@pytest.fixture
def data():
    return from_arrays(*arrays(sizes=(20, 30, 25)), validation=0.2, calibration=0.1, seed=3)


@pytest.fixture(scope="module")
def digits() -> Source:
    """Scikit-learn's digits."""
    return load("digits")


@pytest.fixture(scope="module")
def hundred():
    """CIFAR-100 in shape: 100 classes of 500 and 100, the superclasses of the original, one number
    per image.
    """
    superclasses = tuple(tuple(k for k in range(100) if FINE_TO_COARSE[k] == c) for c in range(20))
    rng = np.random.default_rng(0)
    train = rng.permutation(np.repeat(np.arange(100), 500))
    test = rng.permutation(np.repeat(np.arange(100), 100))
    return source_of(
        torch.arange(50_000.0)[:, None],
        torch.from_numpy(train),
        torch.arange(10_000.0)[:, None],
        torch.from_numpy(test),
        name="hundred",
        superclasses=superclasses,
    )
