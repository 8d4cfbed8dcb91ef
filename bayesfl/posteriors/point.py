"""A point: all belief on one value of the weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors


@dataclass(frozen=True)
class Point:
    """q(w) is a unit mass at `loc`; under a prior, training it is maximum a posteriori.

    Its entropy is 0 by convention, so energy minus entropy is -log p(w): never to be reported as a KL divergence or an ELBO.
    """

    def init(self, loc: Tensor) -> Tensors:
        """Start at `loc` [..., D], which it aliases."""
        return {"loc": loc}

    def noise_size(self, size: int) -> int:
        """Nothing is drawn."""
        return 0

    def sample(self, q: Tensors, noise: Tensor | None = None) -> Tensor:
        """The point itself [..., D], whatever the noise."""
        return q["loc"]

    def moments(self, q: Tensors) -> tuple[Tensor, Tensor]:
        """The point and zero variance, [..., D] each."""
        return q["loc"], torch.zeros_like(q["loc"])

    def entropy(self, q: Tensors) -> Tensor:
        """0 [...], by convention."""
        return q["loc"].new_zeros(q["loc"].shape[:-1])
