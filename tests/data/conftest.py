"""Data that several files of tests look at."""

import numpy as np
import pytest
import torch

from bayesfl.data import Split, from_arrays
from tests.data.made import arrays


@pytest.fixture
def split():
    x = torch.arange(20.0).reshape(10, 2)
    return Split(x, torch.arange(10), torch.tensor([9, 8, 7, 0, 1, 5]), np.array([3, 0, 1, 2]))


@pytest.fixture
def data():
    return from_arrays(*arrays(sizes=(20, 30, 25)), validation=0.2, calibration=0.1, seed=3)
