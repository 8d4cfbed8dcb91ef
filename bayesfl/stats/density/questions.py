"""The questions that are put to sites about a log density of their own rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.func import grad, hessian, vmap

from bayesfl.base.protocols import Tensors
from bayesfl.base.random import Purpose, generator
from bayesfl.base.surveys import NotNegativePerClient, PerClient
from bayesfl.stats.asking import SiteSurvey
from bayesfl.stats.density.parameters import entries
from bayesfl.stats.policy import LOG_LIKELIHOOD
from bayesfl.stats.tables import Site

FAR = 1000.0
"""A draw where a site's integral is not a number is so many nats less likely than all others."""


@dataclass(frozen=True)
class Begin(SiteSurvey):
    """Ask where the search for the mode begins, and for the log prior at two points, by which sites
    with different priors are found.

    Args:
        sites: Number of sites J.
        size: Number of shared parameters q.
    """

    sites: int
    size: int

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        j = self.sites
        return {
            "begin": PerClient((j, self.size)),
            "prior": PerClient((j, 2)),
            "rows": NotNegativePerClient((j,)),
        }

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's; see `SiteSurvey`."""
        local = site.local
        at = generator(0, Purpose.POSTERIOR).standard_normal((2, self.size))
        told = {
            "begin": local.begin,
            "prior": vmap(local.prior)(torch.from_numpy(at)),
            "rows": torch.tensor(float(len(site.x))),
        }
        found = {name: t.new_zeros(self.sites, *t.shape) for name, t in told.items()}
        for name, t in told.items():
            found[name][place] = t
        return found


@dataclass(frozen=True)
class Marginals(SiteSurvey):
    """Ask for the log marginal likelihood, with an equal share of the log prior, at N shared
    vectors, and for its slopes and Hessians by them.

    Args:
        sites: Number of sites J.
        size: Number of shared parameters q.
        order: 0 for values, which are by quadrature where that is possible; 1 for slopes beside
            these; 2 for Laplace's values, slopes and Hessians.
        at: The vectors `phi`, [N, q].
    """

    sites: int
    size: int
    order: int = 0
    at: Tensors = field(default_factory=dict, compare=False, repr=False)

    def start(self, about: Any, /) -> Tensors:
        """Return the vectors."""
        return dict(self.at)

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        n, q = state["phi"].shape
        slope, second = {"slope": (n, q)}, {"hessian": (n, q, q)}
        return (
            {LOG_LIKELIHOOD: (n,)}
            | (slope if self.order else {})
            | (second if self.order > 1 else {})
        )

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        local, phi = site.local, state["phi"]
        of = (local.prior, grad(local.prior), hessian(local.prior))
        shares = [vmap(one)(phi).detach() / self.sites for one in of[: self.order + 1]]
        found = [local.integral.log_marginals(phi)] if self.order < 2 else []
        if self.order:
            found += local.integral.derivatives(phi, self.order)[len(found) :]
        told = [one + share for one, share in zip(found, shares, strict=True)]
        right = told[0].isfinite()
        least = told[0][right].min() if right.any() else told[0].new_zeros(())
        told[0] = torch.where(right, told[0], least - FAR)
        for place, one in enumerate(told[1:], 1):
            told[place] = one.nan_to_num(0.0, posinf=0.0, neginf=0.0)
        return dict(zip((LOG_LIKELIHOOD, "slope", "hessian"), told, strict=False))


@dataclass(frozen=True)
class OwnDraws(SiteSurvey):
    """Send sites draws of the shared parameters, for each of which a site draws its own and keeps
    them; ask how far the integral can be relied on.

    Args:
        sites: Number of sites J.
        seed: Seed of the draws.
        at: The draws `phi`, [S, q].
    """

    sites: int
    seed: int = 0
    at: Tensors = field(default_factory=dict, compare=False, repr=False)

    def start(self, about: Any, /) -> Tensors:
        """Return the draws."""
        return dict(self.at)

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"k_hat": PerClient((self.sites,))}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return Pareto's k-hat of the site's weights; see `SiteSurvey`."""
        found = torch.zeros(self.sites, dtype=torch.float64)
        found[place] = site.local.k_hat(state["phi"].mean(0), self.seed)
        return {"k_hat": found}

    def kept(self, state: Tensors, site: Site, place: int) -> Any:
        """Return the draws of the site's own parameters, a row each."""
        import pandas

        draws = entries(site.local.drawn(state["phi"], self.seed, place))
        return pandas.DataFrame({name: t.numpy() for name, t in draws.items()})
