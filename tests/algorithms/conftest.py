"""Fixtures that several files of tests here share."""

import pytest
import torch
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.models import SplitModel
from tests.algorithms.made import CLASSES, COUNTS, DIM, WIDTH


@pytest.fixture(scope="module")
def regressions() -> FederatedData:
    """Linear regressions whose weights differ between clients."""
    rng = torch.Generator().manual_seed(5)
    xs = [torch.randn(n, DIM, generator=rng) for n in COUNTS]
    ys = [
        x @ torch.randn(DIM, generator=rng) + 0.3 * torch.randn(len(x), generator=rng) for x in xs
    ]
    return bf.data.from_arrays(xs, ys, test=([x + 1.0 for x in xs], [y + 1.0 for y in ys]))


@pytest.fixture(scope="module")
def clusters() -> tuple[FederatedData, Tensor]:
    """Four clients of two linear rules with little noise, two of each, and the rules [2, 3]."""
    rng = torch.Generator().manual_seed(0)
    rules = torch.tensor([[3.0, 2.0, 1.0], [-2.0, -3.0, -2.0]])
    xs = [1 + torch.rand(n, 3, generator=rng) for n in (20, 30, 40, 10)]
    ys = [x @ rules[j // 2] for j, x in enumerate(xs)]
    return bf.data.from_arrays(xs, ys, test=(xs, ys)), rules


@pytest.fixture(scope="module")
def few() -> FederatedData:
    """Four clients of unequal size: class 2 is the last one's alone, class 3 nobody's."""
    rng = torch.Generator().manual_seed(3)
    xs = [torch.randn(n, 6, generator=rng) for n in COUNTS]
    ys = [torch.randint(0, 2, (n,), generator=rng) + (j == 3) for j, n in enumerate(COUNTS)]
    return bf.data.from_arrays(xs, ys, test=(xs, ys), outputs=CLASSES, task="classification")


@pytest.fixture(scope="module")
def network() -> SplitModel:
    """Leaky, so that no feature is cut off."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return SplitModel(
            nn.Sequential(nn.Linear(6, WIDTH), nn.LeakyReLU()), nn.Linear(WIDTH, CLASSES)
        )
