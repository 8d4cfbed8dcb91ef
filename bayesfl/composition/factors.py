"""Factors: the federation's posterior as the product of a prior and one factor for each client. A
client keeps its factor and replaces it.

    $q(w) = N(0, 1 / precision) prod_j t_j(w)$,

with all Gaussians diagonal. A client refines its factor given its cavity $q / t_j$, the prior times
all other clients' factors. The server multiplies q by the changes of the cohort's factors, so q
stays the product. Methods differ in how a client finds $q_j$, its posterior with the cavity as
prior: `bf.algorithms.pvi` by variational inference, `bf.algorithms.fedep` by a Laplace
approximation, as in expectation propagation.

Precisions of factors stay >= 0. Every cavity then has a density, and a round of many clients never
leaves a negative precision.

Source: Bui, Nguyen, Swaroop, Turner, "Partitioned variational inference: a unified framework
encompassing federated and continual learning", 2018.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from bayesfl.base.options import declared
from bayesfl.base.protocols import Server, Tensors, View
from bayesfl.composition.block import Block, standard_normal
from bayesfl.composition.options import INVERTIBLE, Damping
from bayesfl.composition.pools import PrecisionWeighted
from bayesfl.composition.priors import Normal
from bayesfl.posteriors import MeanField


@dataclass(frozen=True)
@declared
class Factors:
    """Declare the posterior `block` of a federation, and the `factor` that each client keeps.

    Args:
        block: Name of the block; its posterior of all weights is q.
        precision: Precision of the prior N(0, 1 / precision) of every weight.

    Example:
        >>> factors = bf.Factors("w", precision=1.0)
        >>> q = {"loc": torch.zeros(2), "rho": factors.posterior.init(torch.zeros(2))["rho"]}
        >>> factor = {"precision": torch.zeros(2), "weighted": torch.zeros(2)}
        >>> view = {"w": q, "factor": factor}  # of a client before its first round
        >>> [t.tolist() for t in factors.cavity(view)]
        [[1.0, 1.0], [0.0, 0.0]]
    """

    block: str
    precision: Annotated[float, INVERTIBLE] = 1.0
    damping: Damping = None

    @property
    def posterior(self) -> MeanField:
        """Return the family of q, which starts at the prior."""
        return MeanField(init_scale=self.precision**-0.5)

    @property
    def shared(self) -> Block:
        """Return the block of q."""
        pool = PrecisionWeighted(posterior=self.posterior, prior=self._received)
        return Block(posterior=self.posterior, start=standard_normal(0.0), pool=pool)

    @property
    def entries(self) -> dict[str, Any]:
        """Return what a method with factors has beside its blocks, for `Algorithm(**entries)`: each
        client keeps its `factor` and receives the number of clients, `size`; only clients whose
        work is gathered train; a run that begins from another takes the product of its clients'
        factors.
        """
        return {
            "server": self._size,
            "broadcast": ("size",),
            "private": {"factor": self._none},
            "tally": True,
            "rebuild": self._product,
        }

    @property
    def prior(self) -> Normal:
        """Return the cavity as the prior of a client's own block."""
        return Normal(centre=self._centre, variance=self._variance)

    def cavity(self, view: View) -> tuple[Tensor, Tensor]:
        """Return the precision of q / t_j, and the precision times its mean, [..., D]."""
        precision, weighted = self.posterior.natural(view[self.block])
        # Only rounding can bring the difference below the prior's precision.
        others = (precision - view["factor"]["precision"]).clamp_min(self.precision)
        return others, weighted - view["factor"]["weighted"]

    def refined(self, given: Server, view: View, precision: Tensor, weighted: Tensor) -> View:
        """Return a client's new factor, and q with this factor, as entries of its view.

        Args:
            given: Entries that every client received.
            view: The view, with the received q and the old factor.
            precision: Precision of $q_j$, the client's posterior under the cavity, [..., D].
            weighted: The precision times the mean of $q_j$, [..., D].
        """
        others, pull = self.cavity(view)
        old, share = view["factor"], self.damping or 1 / given["size"]
        factor = {
            "precision": old["precision"].lerp((precision - others).clamp_min(0), share),
            "weighted": old["weighted"].lerp(weighted - pull, share),
        }
        q = self.posterior.of_natural(others + factor["precision"], pull + factor["weighted"])
        return {self.block: q, "factor": factor}

    def without(self, q: Tensors, factor: Tensors) -> Tensors:
        """Return q without a client's factor: the federation's posterior without this client. The
        others' factors may still depend on its data.

        Args:
            q: The federation's posterior, as `result.server["w"]`.
            factor: The client's factor, its row of `result.private["factor"]`.
        """
        return self.posterior.of_natural(*self.cavity({self.block: q, "factor": factor}))

    def _received(self, server: Server) -> tuple[Tensor, Tensor]:
        return server[self.block]["loc"], self.posterior.natural(server[self.block])[0]

    def _centre(self, given: Server, view: View) -> Tensor:
        return self.posterior.of_natural(*self.cavity(view))["loc"]

    def _variance(self, given: Server, view: View) -> Tensor:
        return 1 / self.cavity(view)[0]

    def _size(self, blocks: Server, clients: int) -> Server:
        return {"size": float(clients)}

    def _product(self, server: Server, private: View) -> Server:
        precision, weighted = (private["factor"][key].sum(0) for key in ("precision", "weighted"))
        return {self.block: self.posterior.of_natural(self.precision + precision, weighted)}

    def _none(self, given: Server) -> Tensors:
        zeros = torch.zeros_like(given[self.block]["loc"])
        return {"precision": zeros, "weighted": zeros}
