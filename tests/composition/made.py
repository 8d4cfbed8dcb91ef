"""What several files of tests here share."""

from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData, from_arrays
from tests.cases import numbers

KERNELS = ["reference", "live", "layers", "vmap"]


def algorithm(
    model: nn.Module, blocks: dict[str, bf.Block], parts: tuple[str, ...] | None = None, **rest
) -> bf.Algorithm:
    """Blocks without phases."""
    return bf.Algorithm(model, blocks, (), parts=tuple(blocks) if parts is None else parts, **rest)


def data(clients: int = 3, features: int = 4, rows: int = 6) -> FederatedData:
    """Clients of 6, 8, 10, ... examples of two classes."""
    xs = [numbers(rows + 2 * j, features, seed=j).float() for j in range(clients)]
    return from_arrays(xs, [(x[:, 0] > 0).long() for x in xs], test_share=0.0)
