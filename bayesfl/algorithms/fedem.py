"""FedEM: M components that all clients share and mix with own weights, learned by EM; D-FedEM: the
same between neighbours.

Model: example i of client j comes from component $z_i ~ pi_j$,
$p_j(y | x) = sum_m pi_jm p(y | x, theta_m)$.

E step (client): $q_im = pi_jm p(y_i | x_i, theta_m) / sum_k pi_jk p(y_i | x_i, theta_k)$ and
$pi_j = mean_i q_i$, with the components received.

M step (client): $theta_m$ moves by SGD on a batch's mean of $-q_im log p(y_i | x_i, theta_m)$.

M step (server): $theta_m = sum_j (n_j / n) theta_jm$.

New client: EM on pi alone, with the components fixed.

Without a server: $theta_jm <- sum_k W_jk theta_km$ over neighbours k, W doubly stochastic.

Source: Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a mixture of
distributions", NeurIPS 2021, algorithms 1 and 4; order of steps and hyperparameters from the
authors' code, github.com/omarfoq/FedEM.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Annotated

import torch
from torch import Tensor

from bayesfl.base.protocols import Batch, Reported, Server, Uplink, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Mean,
    Mixed,
    Mixture,
    MomentMatched,
    Normal,
    Once,
    check_mixing,
    erdos_renyi,
    metropolis,
    options,
    server_mean,
)
from bayesfl.likelihoods import Categorical
from bayesfl.models import anew
from bayesfl.optim import SGD
from bayesfl.posteriors import MeanField, Point, mixture

log = logging.getLogger(__name__)
PARTS = ("components",)
DEAD = 1e-3  # a component with a smaller share of the examples counts as dead
Components = Annotated[
    int,
    options.AT_LEAST_1,
    "Number M of components, with new random starts for the model's layers.",
]
Iterations = Annotated[
    int, options.AT_LEAST_1, "Number of EM iterations on pi for a client never seen."
]


@options.method(
    idle={
        ("posterior", Point): ("prior_variance", "draws"),
        ("posterior", MeanField): ("by_responsibility",),
    }
)
def fedem(
    model: options.Model,
    *,
    components: Components = 3,
    epochs: options.Epochs = 1,
    batch_size: options.BatchSize = 128,
    optimiser: options.Optimiser = SGD(0.03, momentum=0.9, weight_decay=5e-4),
    by_responsibility: bool = False,
    posterior: Point | MeanField = Point(),
    prior_variance: options.Positive = 1.0,
    draws: options.Draws = 1,
    adapt_iterations: Iterations = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedEM: all clients train M common components, and each predicts with its
    own mixture of them.

    A component may die: if it explains no client's examples, it is not trained, and recovers only
    by chance. `result.server["usage"]` [M] is each component's share of the examples, computed from
    the clients' last pi. The log names a component that falls below a thousandth, or rises above it
    again. The server therefore receives every client's pi, which the paper does not need.

    Args:
        optimiser: Optimiser of all components; the authors' code uses rates of `multistep`,
            different for each data set.
        by_responsibility: Whether component m is averaged with weights $n_j pi_jm$ instead of
            $n_j$, so that clients that do not use it do not slow it down. With one-hot pi this is
            clustered FedAvg; with weights $n_j$, a component would move only by its cluster's share
            of the examples.
        posterior: Posterior of a component: a point, as in the paper, or
            `MeanField(init_scale=...)`, an extension of this package. The M step then minimises
            $mean_i q_im E[-log p(y_i | x_i, theta_m)] + KL / n_j$ to
            $N(mean received, prior_variance)$, the server matches the moments of the clients'
            posteriors by size, and E step and predictions use the means.
        prior_variance: Prior variance of each weight of a component around the mean received; for
            `MeanField` only.
        draws: Number of posterior draws of a step; for `MeanField` only.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedem(model, components=2)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['components.loc', 'pi']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    uniform = torch.full((components,), 1 / components)

    def adapt(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {
            "pi": mixture.fit_weights(data["losses"], data["weight"], iterations=adapt_iterations)
        }

    def weight(server: Server, uplink: Uplink) -> Tensor:
        return uplink["n"].unsqueeze(-1) * uplink["pi"] if by_responsibility else uplink["n"]

    def start(blocks: Server, clients: int) -> Server:
        return {
            "pi_seen": torch.zeros(clients, components),
            "sizes": torch.zeros(clients),
            "usage": uniform,
        }

    block = Block(copies=components, start=anew(model), pool=Mean(weight))
    if not isinstance(posterior, Point):
        prior = Normal(
            centre=server_mean("components"),
            variance=lambda given, view: torch.full_like(view["n"], prior_variance)[
                ..., None, None
            ],
        )
        block = replace(
            block, posterior=posterior, prior=prior, pool=MomentMatched(posterior=posterior)
        )
    m_step = Descend(
        Energy("components", PARTS, likelihood="mean", weight=responsibility),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
        draws=draws,
    )
    return Algorithm(
        model,
        {"components": block},
        (Once(e_step, data=True, losses=PARTS), m_step),
        parts=PARTS,
        likelihood=likelihood,
        private={"pi": uniform},
        reports={"pi": Reported(uniform, options.NEARLY_SHARE)},
        server=start,
        combine=usage,
        adapt=(Once(adapt, data=True, losses=PARTS),),
        predictor=Mixture("components", "pi"),
    )


def e_step(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Infer each example's component, q [N, M], and pi_j as their mean."""
    q, _ = mixture.responsibilities(view["pi"], data["losses"])
    return {"q": q, "pi": mixture.mean_weights(q, data["weight"])}


def responsibility(given: Server, view: View, batch: Batch) -> Tensor:
    """Weight a batch's examples for each component, [M, B]."""
    return torch.take_along_dim(view["q"], batch["index"].unsqueeze(-1), -2).mT


def usage(server: Server, ids: Tensor, uplink: Uplink) -> Server:
    """Update each component's share of all examples so far, and log components that have died or
    are back.
    """
    pi = server["pi_seen"].index_copy(0, ids, uplink["pi"])
    sizes = server["sizes"].index_copy(0, ids, uplink["n"])
    before = server["usage"]
    now = (sizes @ pi / sizes.sum()).to(before)
    dead = now < DEAD
    for m in (dead != (before < DEAD)).nonzero().flatten().tolist():
        log.warning(
            "component %d of %d %s: it makes a share of %.1g of all examples seen",
            m,
            len(now),
            "has died" if dead[m] else "is back",
            float(now[m]),
        )
    return {"pi_seen": pi, "sizes": sizes, "usage": now}


@options.method()
def d_fedem(
    model: options.Model,
    *,
    mixing: Tensor | Callable[[int], Tensor] | None = None,
    components: Components = 3,
    epochs: options.Epochs = 1,
    batch_size: options.BatchSize = 128,
    optimiser: options.Optimiser = SGD(0.03, momentum=0.9, weight_decay=5e-4),
    adapt_iterations: Iterations = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by D-FedEM without a server: after its local work every client averages its
    components with its neighbours'.

    The simulation's server has every client's components, [J, M, D], and averages them; over a
    network the server is a relay, which sees the messages between neighbours. For a neighbour
    outside the round's cohort a client uses its own components, which keeps the mean over clients
    if W is symmetric. A new client starts from that mean.

    Args:
        mixing: Averaging weights W [J, J], doubly stochastic, or a function J -> W; by default
            Metropolis weights on a random graph with edge probability 1/2, computed only for the
            rows of a round's cohort. See `bayesfl.topology`.

    Raises:
        ValueError: The matrix is not doubly stochastic, its graph is not connected, or repeated
            mixing does not converge. In a round: the matrix is for another number of clients, or is
            not symmetric while a client is absent.

    Example:
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.d_fedem(model, components=2)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['components.loc', 'pi']
    """
    rest = {
        "epochs": epochs,
        "batch_size": batch_size,
        "optimiser": optimiser,
        "likelihood": likelihood,
    }
    central = fedem(model, components=components, adapt_iterations=adapt_iterations, **rest)
    given = None if mixing is None or callable(mixing) else check_mixing(mixing)

    @cache
    def graph(clients: int) -> Tensor:
        """Return W, [J, J]; by default the edges, as only the cohort's rows are computed."""
        if callable(mixing):
            return check_mixing(mixing(clients), clients)
        return erdos_renyi(clients) if given is None else check_mixing(given, clients)

    def among(server: Server, ids: Tensor, uplink: Uplink) -> Tensor:
        clients, cohort = len(server["components"]["each"]), ids.cpu()
        known = graph(clients)
        if mixing is None:
            rows = metropolis(known, cohort)
        else:
            rows, columns = known[cohort], known[:, cohort]
            if len(ids) < clients and not torch.allclose(rows, columns.T, rtol=0, atol=1e-6):
                raise ValueError(
                    f"mixing is not symmetric and {len(ids)} of {clients} clients took part, so "
                    "the mean over clients would move: pass a symmetric matrix such as "
                    "topology.metropolis(edges), or let all clients take part"
                )
        weights = rows[:, cohort].to(ids.device)
        # A client adds the weights of absent neighbours to its own.
        return weights + torch.diag(1 - weights.sum(1))

    return replace(
        central, blocks={"components": replace(central.blocks["components"], pool=Mixed(among))}
    )
