"""Priors $p(w_j | w)$, which link a client's posterior of a block to the federation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from bayesfl.base.options import NotNegative, declared
from bayesfl.base.protocols import Prior, Server, View

Parameter: TypeAlias = Callable[[Server, View], Tensor]
"""Function that reads a prior's parameter from the received entries and from the client's view at
the start of a phase: (given, view) -> tensor that broadcasts against [..., D].
"""


@dataclass(frozen=True)
class Flat:
    """Use no prior: an improper constant density, of energy 0. Only posteriors without draws, such
    as `Point`, can have it.

    Example:
        >>> bf.priors.Flat().energy(torch.ones(3), torch.zeros(3), {}, {}).item()
        0.0
    """

    def energy(self, loc: Tensor, var: Tensor, given: Server, view: View) -> Tensor:
        """Return 0 [...]."""
        return loc.new_zeros(loc.shape[:-1])


@dataclass(frozen=True, kw_only=True)
@declared
class Normal:
    """Use the Gaussian prior p(w_j | w) = N(centre, diag(variance)).

    It is constant during a phase: centre and variance read the view at the start of the phase.

    Args:
        centre: (given, view) -> tensor that broadcasts against [..., D].
        variance: (given, view) -> tensor that broadcasts against [..., D]; one number per client is
            [..., 1]. If the energy's likelihood is a mean over n examples, a pull of
            $lambda / 2 |w_j - w|^2$ is the variance $1 / (lambda n)$.

    Example:
        >>> centre = bf.priors.server_mean("w")
        >>> tied = bf.priors.Normal(centre=centre, variance=lambda given, view: torch.ones(1))
        >>> w, given = torch.tensor([2.0]), {"w": {"loc": torch.tensor([0.0])}}
        >>> round(tied.energy(w, torch.zeros(1), given, {}).item(), 3)  # 2 + log(2 pi) / 2
        2.919
    """

    centre: Parameter
    variance: Parameter

    def energy(self, loc: Tensor, var: Tensor, given: Server, view: View) -> Tensor:
        """Compute the expected negative log density [...] in nats under a posterior with moments
        `loc` and `var` [..., D].
        """
        variance = self.variance(given, view)
        squares = ((loc - self.centre(given, view)).square() + var) / variance
        return 0.5 * (squares + (2 * math.pi * variance).log()).sum(-1)


@dataclass(frozen=True)
class Tilt:
    """Use the improper prior p(w_j | w) proportional to exp(-slope . w_j), an exponential tilt: the
    slope is added to the gradient of every step, like SCAFFOLD's control variates.

    It is constant during a phase. Posteriors with draws need another prior, because this one does
    not bound their width.

    Args:
        slope: (given, view) -> tensor that broadcasts against [..., D]. If the energy's likelihood
            is a mean over n examples, a term $c . w_j$ is the slope n c.

    Example:
        >>> prior = bf.priors.Tilt(slope=lambda given, view: torch.tensor([1.0, 2.0]))
        >>> prior.energy(torch.tensor([3.0, 1.0]), torch.zeros(2), {}, {}).item()
        5.0
    """

    slope: Parameter

    def energy(self, loc: Tensor, var: Tensor, given: Server, view: View) -> Tensor:
        """Compute slope . loc [...] in nats under a posterior of mean `loc` [..., D]."""
        return (self.slope(given, view) * loc).sum(-1)


def is_normal(prior: Prior) -> TypeGuard[Normal]:
    """Return whether a prior is a `Normal` with the energy of its class, whose slope is (w -
    centre) / variance.

    Example:
        >>> bf.priors.is_normal(bf.priors.Flat())
        False
    """
    return isinstance(prior, Normal) and type(prior).energy is Normal.energy


def server_mean(block: str) -> Parameter:
    """Return a parameter that reads the centre of `block` as the server sent it to everyone, [D].

    Entries that the server addresses to a client are in that client's view, where `own_mean` reads
    them.

    Example:
        >>> bf.priors.server_mean("w")({"w": {"loc": torch.tensor([1.0, 2.0])}}, {}).tolist()
        [1.0, 2.0]
    """
    return partial(_sent_mean, block)


def _sent_mean(block: str, given: Server, view: View) -> Tensor:
    return given[block]["loc"]


def own_mean(block: str) -> Parameter:
    """Return a parameter that reads the client's own centre of `block`, [..., D].

    Example:
        >>> bf.priors.own_mean("w")({}, {"w": {"loc": torch.tensor([1.0, 2.0])}}).tolist()
        [1.0, 2.0]
    """
    return partial(_own_mean, block)


def _own_mean(block: str, given: Server, view: View) -> Tensor:
    return view[block]["loc"]


def closest_variance(
    moments: tuple[Tensor, Tensor], centre: Tensor, *, shape: float = 0.0, scale: float = 0.0
) -> Tensor:
    """Compute by empirical Bayes the variance v [...] of the isotropic prior N(centre, v I) with
    the smallest divergence from a posterior.

    Without a hyperprior it minimises $KL(q || N(centre, v I))$:
    $v = mean_d(var_d + (loc_d - centre_d)^2)$. Under an inverse-gamma hyperprior on v it is the
    posterior's mode, $(2 scale + D v) / (D + 2 shape + 2)$, which stays above 0 for a client whose
    posterior collapses onto the centre.

    Args:
        moments: Mean and variance of the posterior, [..., D] each.
        centre: Centre of the prior, which broadcasts against [..., D].
        shape: Shape a of the inverse-gamma hyperprior; with `shape` and `scale` 0 there is none.
        scale: Scale b of the inverse-gamma hyperprior, a variance.

    References:
        Zhu, Ma, Blaschko, "Tackling personalized federated learning with label concept drift via
        hierarchical Bayesian modeling", FL-NeurIPS 2022, the update of $rho_j$.

    Example:
        >>> mean, variance = torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5])
        >>> bf.priors.closest_variance((mean, variance), torch.zeros(2)).item()
        1.5
    """
    loc, var = moments
    total = (var + (loc - centre).square()).sum(-1)
    if shape == 0.0 and scale == 0.0:
        return total / loc.shape[-1]
    return (total + 2 * scale) / (loc.shape[-1] + 2 * shape + 2)


@declared
def inverse_size(strength: NotNegative) -> Parameter:
    """Return a parameter that is the variance 1 / (strength n) [..., 1]: under a mean over n
    examples, a pull strength / 2 |w_j - w|^2.

    Example:
        >>> bf.priors.inverse_size(0.5)({}, {"n": torch.tensor(100.0)})
        tensor([0.0200])
    """
    return partial(_inverse_size, strength)


def _inverse_size(strength: float, given: Server, view: View) -> Tensor:
    return 1 / (strength * torch.as_tensor(view["n"]))[..., None]
