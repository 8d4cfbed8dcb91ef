"""A small curvature, and data for it."""

import pytest
import torch
from torch import nn

from bayesfl.curvature import Curvature


@pytest.fixture
def curvature() -> Curvature:
    torch.manual_seed(0)
    return Curvature(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
