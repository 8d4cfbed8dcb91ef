"""FedIVON: one Gaussian posterior of the federation, the product of clients' posteriors, which they
find by IVON's natural gradients.

With $q(w) = N(m, 1 / P)$ on the server, p the prior's precision, and J clients of whom C take part,
client j starts at m and $P / J$, a J-th of the posterior, and takes `steps` of IVON's on its bound

    $E[log p(D_j | w)] - KL(q_j || N(0, J / p))$.

It sends $m_j$ and $P_j$, and

    $m <- sum_j P_j m_j / sum_j P_j$, $P <- J / C sum_j P_j$.

So each client has a J-th of the prior, which counts once in P. All clients take the same number of
steps: $P_j$ goes a fixed part of the way from $P / J$ to the client's own precision, and P to the
sum of these. With passes over the data, clients with more rows would go further and count more.

By summaries of the paper, whose text was not at hand, client j has n_j of the N rows' share,
$n_j / N$, of posterior and prior, and the server weighs by curvatures $n_j h_j$ alone. Its personal
form, with the server's posterior as the clients' prior, is not here.

Source: Pal, Gupta, Sarwar, Rai, "Federated learning with uncertainty and personalization via
efficient second-order optimization", TMLR 2025 (arXiv:2411.18385).
"""

from typing import Annotated

import torch

from bayesfl.base.options import typed
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
from bayesfl.likelihoods import Categorical
from bayesfl.optim import IVON
from bayesfl.posteriors import MeanField


@options.method()
def fedivon(
    model: options.Model,
    *,
    prior_precision: Annotated[float, options.INVERTIBLE] = 1.0,
    steps: options.Steps = 50,
    batch_size: options.BatchSize = 50,
    optimiser: Annotated[IVON, typed(IVON, "as bf.optim.IVON(0.1)")] = IVON(0.1),
    draws: options.Draws = 1,
    init_scale: options.Positive = 0.05,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedIVON: all clients share one Gaussian posterior about all weights.

    It treats weights as independent; its variances are too small where they are not.

    Args:
        prior_precision: Precision of the prior N(0, 1 / prior_precision) of every weight.
        optimiser: The clients' IVON; its running mean of slopes starts anew each round.
        init_scale: Standard deviation of q before the first round, which starts the curvature.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedivon(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc', 'w.rho']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    field = MeanField(init_scale=init_scale)

    def begin(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"w": field.of_natural(*(t / given["size"] for t in field.natural(view["w"])))}

    prior = Normal(
        centre=lambda given, view: torch.zeros_like(view["w"]["loc"]),
        variance=lambda given, view: given["size"].view(1) / prior_precision,
    )
    fit = Descend(
        Energy("w", ("w",), likelihood="sum"),
        steps=steps,
        batch_size=batch_size,
        optimiser=optimiser,
        draws=draws,
    )
    return Algorithm(
        model,
        {"w": Block(posterior=field, prior=prior, pool=Product(posterior=field))},
        (Once(begin), fit),
        parts=("w",),
        likelihood=likelihood,
        server=lambda blocks, clients: {"size": float(clients)},
        broadcast=("size",),
        draws=10,
    )


class Product(PrecisionWeighted):
    """The mean of the clients' Gaussians by their precisions, with the sum of these times J / C."""

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Return the posterior of a cohort of `count` clients."""
        scale = server["size"] / total["count"]
        each = {key: total[key] * scale for key in ("precision", "weighted")}
        return super().solve(server, name, {**total, **each})
