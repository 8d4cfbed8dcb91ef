"""What all tests share."""

import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from tests.cases import federation

torch.set_num_threads(1)  # torch's own threads stall beside any other busy process


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    """Seven clients of unequal size, eight inputs, three classes."""
    return federation()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A network for `clients`."""
    return bf.models.mlp(8, hidden=16, outputs=3)
