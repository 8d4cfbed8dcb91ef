"""The mean-field Gaussian posterior, with a mean and a standard deviation for each weight."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.numerics import inverse_softplus, log_softplus
from bayesfl.base.options import NotNegative, declared
from bayesfl.base.protocols import Tensors
from bayesfl.posteriors.variational import Family


@dataclass(frozen=True, kw_only=True)
@declared
class MeanField(Family):
    """Represent the mean-field Gaussian q(w) = N(loc, diag(softplus(rho)^2)).

    The parametrisation of Blundell et al., "Weight uncertainty in neural networks", ICML 2015,
    section 3.2.

    Its best fit to a Gaussian posterior has, for each weight, the standard deviation given all
    other weights, $(1 - R^2)^(1/2)$ of the marginal one, with $R^2$ the share of the weight's
    variance that the others explain. That is .82 for two slopes of correlation .57, and .44 for two
    of .9; more steps do not change it. `FullGaussian` has all covariances.

    Args:
        init_scale: Standard deviation of every weight at the start, > 0.
        scale_rate: Factor of the optimiser's rate for gradient steps of rho, >= 0; 0 fixes the
            standard deviations. For Adam only 0 makes a difference, because its steps do not
            depend on the size of gradients.

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> bf.posteriors.MeanField.fit(nn.Linear(2, 3), x, y, precision=1.0, steps=20)
        MeanField(9 weights, 30 examples)
    """

    scale_rate: NotNegative = 1.0

    def init(self, loc: Tensor) -> Tensors:
        """Return the posterior with centre `loc` [..., D], which it aliases, and standard deviation
        `init_scale` everywhere.
        """
        rho = inverse_softplus(torch.tensor(self.init_scale, dtype=torch.float64)).to(loc)
        return {"loc": loc, "rho": rho.expand_as(loc).clone()}

    def sample(self, q: Tensors, noise: Tensor | None = None) -> Tensor:
        """Return one reparameterised draw [..., D] from standard normal `noise` [..., D]; the mean
        if `noise` is None.
        """
        if noise is None:
            return q["loc"]
        return q["loc"] + F.softplus(self._slowed(q["rho"])) * noise

    def log_density(self, q: Tensors, w: Tensor) -> Tensor:
        """Compute log q(w) [...] in nats at weights `w` [..., D]."""
        rho = self._slowed(q["rho"])
        squares = ((w - q["loc"]) / F.softplus(rho)).square()
        return -(0.5 * squares + log_softplus(rho) + 0.5 * math.log(2 * math.pi)).sum(-1)

    def moments(self, q: Tensors) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each weight, [..., D] each."""
        return q["loc"], F.softplus(self._slowed(q["rho"])).square()

    def entropy(self, q: Tensors) -> Tensor:
        """Compute the differential entropy [...] in nats."""
        return (log_softplus(self._slowed(q["rho"])) + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def natural(self, q: Tensors) -> tuple[Tensor, Tensor]:
        """Return the precisions of the weights, and these times their means, [..., D] each."""
        loc, variance = self.moments(q)
        precision = 1 / variance
        return precision, precision * loc

    def of_natural(self, precision: Tensor, weighted: Tensor) -> Tensors:
        """Return the posterior with these natural parameters."""
        return {"loc": weighted / precision, "rho": inverse_softplus((1 / precision).sqrt())}

    def _slowed(self, rho: Tensor) -> Tensor:
        """Return rho itself, with its gradient multiplied by `scale_rate`."""
        return (
            rho if self.scale_rate == 1 else rho.detach() + self.scale_rate * (rho - rho.detach())
        )
