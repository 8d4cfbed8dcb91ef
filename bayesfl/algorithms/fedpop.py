"""FedPop: a shared body is a fixed effect, and each client's head a random effect. The client keeps
Langevin chains of its head.

Model: $head_j ~ N(mu, v)$, $y ~ p(y | x, body, head_j)$. A client has M chains, and in a round

    $head_jm <- head_jm + rate / n_j grad log p(D_j, head_jm | body) + (2 rate / n_j)^(1/2) e$

for `burn_in` steps, and then for `kept` steps, each followed by a step of the body along the mean
over chains of the gradients of $F_j = -1 / n_j log p(D_j | body, head_jm)$. The server averages
bodies by sizes, and moves mu and v by a share `prior_step` of the way to the mean of all heads and
to their mean squared distance from mu over weights: stochastic expectation maximisation.

The paper averages over the draws of one chain. Here each of M chains has one draw at a time, and
the client also predicts with these draws. In the paper the server makes one step of the body in a
round (`kept` = 1 here); here a client may make more, as in the authors' code. All configurations of
that code replace the chains by steps of Adam without noise, fix v at .998, and predict with the
last head alone. At large rates chains are too wide (`bayesfl.posteriors.sgld`).

Source: Kotelevskii, Vono, Moulines, Durmus, "FedPop: a Bayesian approach for personalised federated
learning", NeurIPS 2022, algorithm 1.
"""

from functools import partial
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
    Mixture,
    Normal,
    Once,
    Relaxed,
    Repeat,
    equal,
    options,
)
from bayesfl.likelihoods import Categorical
from bayesfl.models import anew
from bayesfl.optim import SGD, rate_at


@options.method()
def fedpop(
    model: options.BodyAndHead,
    *,
    chains: options.Count = 5,
    burn_in: options.Count = 5,
    kept: options.Count = 5,
    batch_size: options.BatchSize = None,
    chain_optimiser: options.PlainSGD = SGD(1e-2),
    body_optimiser: options.Optimiser = SGD(1e-1),
    prior_variance: options.Positive = 1.0,
    prior_step: Annotated[float, options.Range(0, 1, "]")] = 0.1,
    adapt_steps: options.Count = 100,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedPop: one body for all clients, and draws of each client's head.

    `result.server["variance"]` is the variance v between clients.

    Args:
        chains: Number M of chains of a client, which predicts with all of them.
        burn_in: Number of steps of the chains in a round before the body moves.
        kept: Number of further steps, each followed by a step of the body.
        batch_size: Number of examples of a step; None, as in the authors' code, for all of the
            client's. Chains on batches are wider.
        chain_optimiser: SGD without momentum; its rate is the chains' rate.
        body_optimiser: Optimiser of the body.
        prior_variance: Variance v at the start.
        prior_step: Step of mu and v in a round, in (0, 1].
        adapt_steps: Number of steps of the chains of a client that joins later.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedpop(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc', 'head.loc', 'spread']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    parts, uniform = ("body", "head"), torch.full((chains,), 1 / chains)

    def weighed(share: float, given: Server, view: View, batch: Batch) -> Tensor:
        return torch.stack([torch.full_like(batch["weight"], share)] * chains, -2)

    def centre(given: Server, view: View) -> Tensor:
        return given["head"]["loc"].mean(-2)

    def measure(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"spread": (view["head"]["loc"] - centre(given, view)).square().mean((-2, -1))}

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        return {"variance": server["variance"].lerp(uplink["spread"].mean(), prior_step)}

    def shake(algorithm: Algorithm, given: Server, view: View, batch: Batch) -> View:
        rate = rate_at(chain_optimiser.rate, given["round"], given["rounds"])
        noise = (2 * rate / view["n"]).sqrt() * batch["normals"]["head"]
        return {"head": {"loc": view["head"]["loc"] + noise}}

    on_head = Energy("head", parts, likelihood="mean", weight=partial(weighed, 1.0))
    langevin = (Descend(on_head, optimiser=chain_optimiser), Once(shake, normals=("head",)))
    step = Descend(
        Energy("body", parts, likelihood="mean", weight=partial(weighed, 1 / chains)),
        optimiser=body_optimiser,
    )
    head = Block(
        "head.*",
        prior=Normal(centre=centre, variance=lambda given, view: given["variance"]),
        pool=Relaxed(Mean(equal), prior_step),
        keep=True,
        start=anew(model, pattern="head.*"),
        copies=chains,
    )
    return Algorithm(
        model,
        {"body": Block("body.*"), "head": head},
        (
            Repeat(langevin, times=burn_in, batch_size=batch_size),
            Repeat((*langevin, step), times=kept, batch_size=batch_size),
            Once(measure),
        ),
        parts=parts,
        likelihood=likelihood,
        server=lambda blocks, clients: {"variance": prior_variance},
        broadcast=("variance",),
        private={"chains": uniform},
        reports={"spread": Reported(0.0, options.AT_LEAST_0)},
        combine=combine,
        adapt=(Repeat(langevin, times=adapt_steps, batch_size=batch_size),),
        predictor=Mixture("head", "chains"),
    )
