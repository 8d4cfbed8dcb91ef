"""The Gaussian posterior with all covariances between weights, as a Cholesky factor."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.numerics import inverse_softplus, log_softplus
from bayesfl.base.options import declared
from bayesfl.base.protocols import Tensors
from bayesfl.curvature.batches import available_memory, require
from bayesfl.posteriors.variational import Family


@dataclass(frozen=True, kw_only=True)
@declared
class FullGaussian(Family):
    """Represent the Gaussian q(w) = N(loc, L L') with L = (I + lower / D^(1/2)) diag(softplus(rho))
    and strictly lower triangular `lower`.

    The entries of $lower / D^(1/2)$ are regression coefficients, whose size does not depend on the
    posterior's width. The factor $D^(1/2)$ compensates for Adam, whose step moves all D
    coefficients of a weight by the same amount: it changes the weight's width no more than a step
    of its own `rho`. One posterior takes $D^2$ numbers, 16 MB for 2,000 weights in float32, and a
    step takes as many; use it for up to some thousands of weights.

    Args:
        init_scale: Standard deviation of every weight at the start, > 0.

    References:
        Kucukelbir, Tran, Ranganath, Gelman, Blei, "Automatic differentiation variational
        inference", JMLR 18, 2017, section 2.4.

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> bf.posteriors.FullGaussian.fit(nn.Linear(2, 3), x, y, precision=1.0, steps=20)
        FullGaussian(9 weights, 30 examples)
    """

    def init(self, loc: Tensor) -> Tensors:
        """Return the posterior with centre `loc` [..., D], which it aliases, standard deviation
        `init_scale` everywhere and no correlations.

        Raises:
            MemoryError: The posterior, its gradient and the optimiser's state exceed the free
                memory; the message has the size.
        """
        require(
            4 * loc.nbytes * loc.shape[-1],
            available_memory(loc),
            f"a FullGaussian of {loc.shape[-1]} weights, with its gradient and Adam's state,",
            "use MeanField, or fewer weights, for example by pattern='head.*'",
        )
        rho = inverse_softplus(torch.tensor(self.init_scale, dtype=torch.float64)).to(loc)
        lower = loc.new_zeros(*loc.shape, loc.shape[-1])
        return {"loc": loc, "rho": rho.expand_as(loc).clone(), "lower": lower}

    def sample(self, q: Tensors, noise: Tensor | None = None) -> Tensor:
        """Return one reparameterised draw [..., D] from standard normal `noise` [..., D]; the mean
        if `noise` is None.
        """
        if noise is None:
            return q["loc"]
        scaled = F.softplus(q["rho"]) * noise
        correlated = (_coefficients(q) @ scaled.unsqueeze(-1)).squeeze(-1)
        return q["loc"] + scaled + correlated

    def cholesky(self, q: Tensors) -> Tensor:
        """Return the Cholesky factor L [..., D, D] of the covariance."""
        one = torch.eye(q["loc"].shape[-1], dtype=q["loc"].dtype, device=q["loc"].device)
        return (one + _coefficients(q)) * F.softplus(q["rho"]).unsqueeze(-2)

    def log_density(self, q: Tensors, w: Tensor) -> Tensor:
        """Compute log q(w) [...] in nats at weights `w` [..., D]."""
        # torch takes the coefficients' diagonal to be 1.
        away = (w - q["loc"]).unsqueeze(-1)
        solved = torch.linalg.solve_triangular(
            _coefficients(q), away, upper=False, unitriangular=True
        ).squeeze(-1)
        squares = (solved / F.softplus(q["rho"])).square()
        return -(0.5 * squares + log_softplus(q["rho"]) + 0.5 * math.log(2 * math.pi)).sum(-1)

    def moments(self, q: Tensors) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each weight, [..., D] each."""
        variance = F.softplus(q["rho"]).square()
        shared = (_coefficients(q).square() @ variance.unsqueeze(-1)).squeeze(-1)
        return q["loc"], variance + shared

    def entropy(self, q: Tensors) -> Tensor:
        """Compute the differential entropy [...] in nats."""
        return (log_softplus(q["rho"]) + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def natural(self, q: Tensors) -> tuple[Tensor, Tensor]:
        """Return the precision [..., D, D], and the precision times the mean [..., D]."""
        precision = torch.cholesky_inverse(self.cholesky(q))
        return precision, (precision @ q["loc"].unsqueeze(-1)).squeeze(-1)

    def of_natural(self, precision: Tensor, weighted: Tensor) -> Tensors:
        """Return the posterior with these natural parameters."""
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        return self.of_moments((covariance @ weighted.unsqueeze(-1)).squeeze(-1), covariance)

    def of_moments(self, mean: Tensor, covariance: Tensor) -> Tensors:
        """Return the posterior with this mean [..., D] and covariance [..., D, D]."""
        root = torch.linalg.cholesky(covariance)
        scale = root.diagonal(dim1=-2, dim2=-1)
        return {
            "loc": mean,
            "rho": inverse_softplus(scale),
            "lower": (root / scale.unsqueeze(-2)).tril(-1) * scale.shape[-1] ** 0.5,
        }


def _coefficients(q: Tensors) -> Tensor:
    """Return the regression coefficients of each weight on the preceding ones, [..., D, D]."""
    return q["lower"].tril(-1) / q["lower"].shape[-1] ** 0.5
