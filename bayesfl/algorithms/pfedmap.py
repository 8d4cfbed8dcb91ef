"""pFedMAP: personal heads under a hierarchical Gaussian with one fixed scale, each at the mode of
its posterior.

Model: $w_j | w ~ N(w, rho^2 I)$ for the head of client j, flat prior on w; all clients share a
body.

Client: $w_j$ minimises $-log p(D_j | w_j) + |w_j - w|^2 / (2 rho^2)$.

Server: $w = mean_j w_j$.

Every client trains in each round, and each sends its part with probability `participation`.

Unlike Ditto, the centre is the mean of the personal heads; no separate global model is trained.

Source: Zhu, Ma, Blaschko, "Tackling personalized federated learning with label concept drift via
hierarchical Bayesian modeling", FL-NeurIPS 2022. The paper does not state its rho; tune it and
report it.
"""

from typing import Annotated

import torch

from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Mean,
    Normal,
    equal,
    options,
    server_mean,
    tempering,
)
from bayesfl.engine import stability
from bayesfl.likelihoods import Categorical
from bayesfl.models.cutting import has_body
from bayesfl.optim import SGD


@options.method(idle=options.ALL_HEAD)
def pfedmap(
    model: options.MaybeAllHead,
    *,
    precision: Annotated[float, options.INVERTIBLE, "1 / rho^2 of the prior on a head."] = 1.0,
    head_epochs: options.FullBatchSteps = 20,
    body_epochs: options.BodyEpochs = 5,
    batch_size: options.BatchSize = 50,
    head_optimiser: options.HeadOptimiser = SGD(1e-3, momentum=0.9),
    body_optimiser: options.BodyOptimiser = SGD(1e-2, momentum=0.9),
    likelihood_scale: options.LikelihoodScale = "sum",
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by pFedMAP: a shared body, and personal heads under a Gaussian prior around
    their mean.

    `simulate` warns in round 1 if steps of SGD by `head_optimiser` towards the centre diverge under
    `precision`.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.pfedmap(model, precision=0.1)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc', 'head.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    parts = ("body", "head") if has_body(model) else ("head",)
    prior = Normal(
        centre=server_mean("head"),
        variance=lambda given, view: torch.full_like(view["n"], 1 / precision)[..., None],
    )
    fit_head = Descend(
        Energy("head", parts, likelihood="sum", weight=tempering(likelihood_scale)),
        epochs=head_epochs,
        optimiser=head_optimiser,
    )
    fit_body = Descend(
        Energy("body", parts, likelihood="mean"),
        epochs=body_epochs,
        batch_size=batch_size,
        optimiser=body_optimiser,
    )
    blocks = {
        "body": Block("body.*"),
        "head": Block("head.*", prior=prior, pool=Mean(equal), keep=True),
    }
    return Algorithm(
        model,
        {name: blocks[name] for name in parts},
        (fit_head, fit_body) if "body" in parts else (fit_head,),
        parts=parts,
        likelihood=likelihood,
        adapt=(fit_head,),
        train="all",
        sampling="bernoulli",
        watch=stability.watch,
    )
