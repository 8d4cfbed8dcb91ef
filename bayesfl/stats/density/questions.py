"""The questions to sites about a log density of their own rows."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.func import grad, vmap

from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Tensors
from bayesfl.base.random import Purpose, generator
from bayesfl.base.surveys import NotNegativePerClient, PerClient
from bayesfl.stats.asking import FromState, SiteSurvey, slot
from bayesfl.stats.density.integral import bent
from bayesfl.stats.density.local import Batch, batches
from bayesfl.stats.density.parameters import entries
from bayesfl.stats.policy import LOG_LIKELIHOOD
from bayesfl.stats.tables import Site, Tables

FAR = 1000.0
"""Log integral below all others, in nats, of a draw where a site's integral is NaN."""


class BatchSurvey(SiteSurvey):
    """A question that alike sites answer together."""

    def answer(self, state: Tensors, local: Tables) -> Tensors:
        """Return the answers of all sites of `local`, [J, ...], each batch computed at one rank."""
        models = [site.local for site in local.sites]
        places = batches(models)
        costs = [sum(len(local.sites[k].x) for k in batch) for batch in places]

        def make() -> list[Tensors]:
            return [
                self.of_batch(state, Batch.of([models[k] for k in batch]), local.ids[batch])
                for batch in places[current().dealt(costs)]
            ]

        found = list(chain(*current().every(make)))
        order = np.argsort(list(chain(*places)))
        return {name: torch.cat([one[name] for one in found])[order] for name in found[0]}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's answer; see `SiteSurvey`."""
        found = self.of_batch(state, Batch.of([site.local]), np.array([place]))
        return {name: t[0] for name, t in found.items()}

    @abstractmethod
    def of_batch(self, state: Tensors, batch: Batch, places: np.ndarray) -> Tensors:
        """Return the answers of J alike sites, [J, ...]; see `of_site`."""


@dataclass(frozen=True)
class Begin(SiteSurvey):
    """Ask for the start of the search for the mode, and for the log prior at two points, to find
    sites with different priors.

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
        return {
            "begin": slot(local.begin, place, self.sites),
            "prior": slot(vmap(local.prior)(torch.from_numpy(at)), place, self.sites),
            "rows": slot(len(site.x), place, self.sites),
        }


@dataclass(frozen=True)
class Marginals(FromState, BatchSurvey):
    """Ask for the log marginal likelihood, with an equal share of the log prior, at N shared
    vectors, and for its slopes and Hessians by them.

    Args:
        sites: Number of sites J.
        size: Number of shared parameters q.
        order: 0 for values, by quadrature if possible; 1 for slopes besides these; 2 for Laplace's
            values, slopes and Hessians.
        at: The vectors `phi`, [N, q].
    """

    sites: int
    size: int
    order: int = 0

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        n, q = state["phi"].shape
        slope, second = {"slope": (n, q)}, {"hessian": (n, q, q)}
        return (
            {LOG_LIKELIHOOD: (n,)}
            | (slope if self.order else {})
            | (second if self.order > 1 else {})
        )

    def of_batch(self, state: Tensors, batch: Batch, places: np.ndarray) -> Tensors:
        """Return the sites' shares; see `BatchSurvey`."""
        phi = state["phi"]
        of = (batch.prior, grad(batch.prior), bent(batch.prior))
        shares = [vmap(one)(phi).detach() / self.sites for one in of[: self.order + 1]]
        found = [batch.integral.log_marginals(phi)] if self.order < 2 else []
        if self.order:
            found += batch.integral.derivatives(phi, self.order)[len(found) :]
        value, *slopes = (one + share for one, share in zip(found, shares, strict=True))
        right = value.isfinite()
        least = torch.where(right, value, torch.inf).amin(1, keepdim=True)
        least = torch.where(least.isfinite(), least, 0.0)
        told = [
            torch.where(right, value, least - FAR),
            *(one.nan_to_num(0.0, posinf=0.0, neginf=0.0) for one in slopes),
        ]
        return dict(zip((LOG_LIKELIHOOD, "slope", "hessian"), told, strict=False))


@dataclass(frozen=True)
class OwnDraws(FromState, BatchSurvey):
    """Send sites draws of the shared parameters; a site draws and stores its own for each. Ask for
    the reliability of the integral.

    Args:
        sites: Number of sites J.
        seed: Seed of the draws.
        at: The draws `phi`, [S, q].
    """

    sites: int
    seed: int = 0

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"k_hat": PerClient((self.sites,))}

    def of_batch(self, state: Tensors, batch: Batch, places: np.ndarray) -> Tensors:
        """Return Pareto's k-hat of each site's weights; see `BatchSurvey`."""
        k_hats = zip(batch.k_hats(state["phi"].mean(0), self.seed), places, strict=True)
        return {"k_hat": torch.stack([slot(k_hat, place, self.sites) for k_hat, place in k_hats])}

    def kept(self, state: Tensors, site: Site, place: int) -> Any:
        """Return the draws of the site's own parameters, a row each."""
        import pandas

        (drawn,) = Batch.of([site.local]).drawn(state["phi"], self.seed, [place])
        return pandas.DataFrame({name: t.numpy() for name, t in entries(drawn).items()})
