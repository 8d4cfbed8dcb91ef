"""`Block`: one part of a model, with its posterior, the prior that links it to the federation, and
the rules by which it is sent and kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.layout import Pattern
from bayesfl.base.options import Count, declared
from bayesfl.base.protocols import AdditivePool, Posterior, Prior, StackedPool
from bayesfl.composition.pools import Mean
from bayesfl.composition.priors import Flat
from bayesfl.posteriors import Point

Start: TypeAlias = Callable[[np.random.Generator, int], Tensor]
"""Initial weights of a block: (generator, D) -> [D], float32."""


def standard_normal(scale: float = 1.0) -> Start:
    """Return a start that draws a block's initial weights from N(0, scale^2)."""
    return partial(_drawn, scale)


def _drawn(scale: float, rng: np.random.Generator, size: int) -> Tensor:
    return scale * torch.from_numpy(rng.standard_normal(size, dtype=np.float32))


@dataclass(frozen=True)
@declared
class Block:
    """Describe one part of the model, and how clients and server treat its parameters.

    | each round starts from | `pool` is a rule (sent) | `pool=None` (never sent) |
    |---|---|---|
    | the server (`keep=False`) | *shared*: FedAvg's w | *frozen*: FedBABU's head |
    | the client's own (`keep=True`) | *hierarchical*: pFedVEM's head | *private*: FedRep's |

    Args:
        pattern: Shell-style pattern over the model's parameter names, such as `head.*`; a tuple
            joins several, and `!*.bias` takes out. Frozen parameters (`requires_grad=False`) are in
            no block.
        posterior: Family of a client's posterior of these parameters.
        prior: Prior that links the posterior to the federation; by default none.
        pool: Rule by which the server aggregates the block; None if it never leaves the client.
        keep: Whether the client keeps its own state between rounds.
        start: Initial weights: `module` for the model's own, or a function (generator, D) -> [D]
            that draws them.
        copies: M if every client has M copies of the block, such as the components of a mixture.
            Tensors are then [..., M, D], each copy has its own start, and an energy's weight is a
            factor of each example for each copy, [..., M, B].

    Raises:
        ValueError: Several copies would have the same start.

    Example:
        >>> shared, frozen = bf.Block("body.*"), bf.Block("head.*", pool=None)
        >>> private = bf.Block("head.*", pool=None, keep=True)
        >>> [block.private for block in (shared, frozen, private)]
        [False, False, True]
    """

    pattern: Pattern = "*"
    posterior: Posterior = field(default_factory=Point)
    prior: Prior = field(default_factory=Flat)
    pool: AdditivePool | StackedPool | None = field(default_factory=Mean)
    keep: bool = False
    start: Literal["module"] | Start = "module"
    copies: Count | None = None

    def __post_init__(self) -> None:
        if self.copies is not None and self.copies > 1 and self.start == "module":
            raise ValueError(
                f"block {self.pattern!r}: copies that start alike stay alike; draw their start, as "
                "by start=bf.models.anew(model)"
            )

    @property
    def stochastic(self) -> bool:
        """Return whether the block's posterior draws."""
        return self.posterior.noise_size(1) > 0

    @property
    def private(self) -> bool:
        """Return whether the block stays on the client."""
        return self.keep and self.pool is None
