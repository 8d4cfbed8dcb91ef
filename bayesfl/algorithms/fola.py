"""FOLA: one Gaussian posterior of the federation, the product of clients' Laplace approximations,
which pulls every client towards its mean in the next round.

With $q(w) = N(m, 1 / L)$ on the server, prior precision $L_0$, J clients and a cohort of C:

    $w_j = argmax_w log p(D_j | w) - sum_r (L_0 w_r^2 + strength L_r (w_r - m_r)^2) / (2 J)$,

    $P_j = F_j + (L_0 + strength L) / J$, $F_j$ the diagonal of the GGN of $D_j$ at $w_j$,

    $m <- sum_j P_j w_j / sum_j P_j$, $L <- L_0 + J / C sum_j F_j$.

With diagonal curvature, q is the posterior of a Gaussian likelihood at the fixed point.

The paper adds each round's curvature to L, so after t rounds the same rows count t times; its code
divides the pull by t. Here L is recomputed in each round, so L and the pull have the right size.
The authors' code estimates $F_j$ from squared gradients of batches, and has no prior.

Source: Liu, Jiang, Zheng, Chen, Qi, Huang, Shao, "A Bayesian federated learning framework with
online Laplace approximation", TPAMI 2023 (arXiv:2102.01936).
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bayesfl.base.protocols import Batch, Server, Tensors, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Normal,
    Once,
    PrecisionWeighted,
    options,
)
from bayesfl.curvature import Curvature
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam
from bayesfl.posteriors import MeanField


@options.method()
def fola(
    model: options.Model,
    *,
    prior_precision: Annotated[float, options.INVERTIBLE] = 1.0,
    strength: options.Positive = 1.0,
    epochs: options.Epochs = 10,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = Adam(1e-2),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FOLA: all clients share one Gaussian posterior of all weights.

    It treats weights as independent; its variances are too small if weights are correlated.

    Args:
        prior_precision: Precision of the prior $N(0, 1 / prior_precision)$ of every weight.
        strength: Strength of the pull towards the federation's posterior; at 1 it counts as much as
            one client's rows.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fola(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc', 'w.rho']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    field = MeanField(init_scale=prior_precision**-0.5)

    def pull(given: Server) -> Tensor:
        return strength * field.natural(given["w"])[0] / given["size"]

    def precision(given: Server) -> Tensor:
        return pull(given) + prior_precision / given["size"]

    def begin(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"v": {"loc": view["w"]["loc"]}}

    def project(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        mode = algorithm.network(view | {"w": algorithm.belief("w", view["v"])})
        curvature = Curvature(mode, algorithm.likelihood, pattern=algorithm.layout("w"))
        found = precision(given) + curvature.diagonal(data).to(view["v"]["loc"])
        return {"w": field.of_natural(found, found * view["v"]["loc"])}

    near = Normal(
        centre=lambda given, view: given["w"]["loc"] * pull(given) / precision(given),
        variance=lambda given, view: 1 / precision(given),
    )
    climb = Descend(
        Energy("v", ("v",), likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
        prox=True,
    )
    product = Product(posterior=field, prior_precision=prior_precision, strength=strength)
    return Algorithm(
        model,
        {"w": Block(posterior=field, pool=product), "v": Block(prior=near, pool=None)},
        (Once(begin), climb, Once(project, data=True, batched=False)),
        parts=("w",),
        likelihood=likelihood,
        server=lambda blocks, clients: {"size": float(clients)},
        broadcast=("size",),
        draws=10,
    )


@dataclass(frozen=True, kw_only=True)
class Product(PrecisionWeighted):
    """Average the clients' Gaussians, with the precision L_0 + J / C sum_j F_j."""

    prior_precision: float
    strength: float

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Return the posterior of a cohort of `count` clients."""
        mean = super().solve(server, name, total)["loc"]
        sent = total["precision"] * server["size"] / total["count"]
        pull = self.strength * self.posterior.natural(server[name])[0].to(sent)
        # Only rounding can bring the difference below the prior's precision.
        precision = (sent - pull).clamp_min(self.prior_precision).to(mean)
        return self.posterior.of_natural(precision, precision * mean)
