"""The point posterior, with all mass on one value of the weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors


@dataclass(frozen=True)
class Point:
    """Represent a posterior with one value of the weights, without uncertainty; trained under a
    prior, it is the maximum a posteriori estimate.

    It is a unit mass $q(w)$ at `loc`.

    Its entropy is 0 by convention, so energy minus entropy is $-log p(w)$, which must not be
    reported as a KL divergence or an ELBO.

    Example:
        >>> q = bf.posteriors.Point()
        >>> mean, variance = q.moments(q.init(torch.tensor([1.0, 2.0])))
        >>> mean.tolist(), variance.tolist()
        ([1.0, 2.0], [0.0, 0.0])
    """

    def init(self, loc: Tensor) -> Tensors:
        """Return the posterior with centre `loc` [..., D], which it aliases."""
        return {"loc": loc}

    def noise_size(self, size: int) -> int:
        """Return 0, because nothing is drawn."""
        return 0

    def sample(self, q: Tensors, noise: Tensor | None = None) -> Tensor:
        """Return the point itself [..., D], whatever the noise."""
        return q["loc"]

    def moments(self, q: Tensors) -> tuple[Tensor, Tensor]:
        """Return the point and zero variance, [..., D] each."""
        return q["loc"], torch.zeros_like(q["loc"])

    def entropy(self, q: Tensors) -> Tensor:
        """Return 0 [...], by convention."""
        return q["loc"].new_zeros(q["loc"].shape[:-1])
