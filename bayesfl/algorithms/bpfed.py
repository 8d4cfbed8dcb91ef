"""BPFed: a shared body and a head of each client, both with Gaussian posteriors. The federation's
posterior of the body is the body's prior in the next round.

A client fits mean fields $q_j(body)$ and $q_j(head)$ in gradient steps on

    $E_q[-log p(D_j | body, head)] + zeta (KL(q_j(body) || q(body)) + KL(q_j(head) || N(0, 1)))$,

and the server averages the parameters loc and rho, with deviations $softplus(rho)$, of $q_j(body)$.

At $zeta = 1$ one round is Bayes' rule. Each further round counts the same rows again, so $q(body)$
becomes narrower and is no posterior. The authors' code uses the reverse divergence,
$KL(q(body) || q_j(body))$, for all weights, with a factor of 5e-5 $n_j$, and draws noise of
standard deviation .001 instead of 1; none of these is implemented here. The abstract does not state
the head's prior; here it is a standard normal.

Source: Chen, Liu, Cao, Zhang, "Bayesian personalized federated learning with shared and
personalized uncertainty representations", arXiv:2309.15499, 2023.
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
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam
from bayesfl.posteriors import MeanField


@options.method()
def bpfed(
    model: options.BodyAndHead,
    *,
    zeta: options.Positive = 1.0,
    prior_precision: Annotated[float, options.INVERTIBLE] = 1.0,
    steps: options.Steps = 100,
    batch_size: options.BatchSize = 100,
    optimiser: options.Optimiser = Adam(1e-3),
    draws: options.Draws = 1,
    init_scale: options.Positive = 0.05,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by BPFed: the clients share a Gaussian posterior of the body, and each has
    one of its own head.

    Args:
        zeta: Weight of the KL; 1 is Bayes' rule.
        prior_precision: Precision of the prior $N(0, 1 / prior_precision)$ of the head's weights.
        init_scale: Standard deviation of all weights at the start, and of the body's first prior.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.bpfed(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc', 'body.rho']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    field = MeanField(init_scale=init_scale)

    last = Normal(
        centre=server_mean("body"), variance=lambda given, view: field.moments(given["body"])[1]
    )
    standard = Normal(
        centre=lambda given, view: torch.zeros_like(view["n"]).unsqueeze(-1),
        variance=lambda given, view: torch.full_like(view["n"], 1 / prior_precision).unsqueeze(-1),
    )
    fit = Descend(
        Energy(("body", "head"), ("body", "head"), likelihood="mean", kl_weight=zeta),
        steps=steps,
        batch_size=batch_size,
        optimiser=optimiser,
        draws=draws,
    )
    shared = Mean(equal, sends=("loc", "rho"))
    body = Block("body.*", posterior=field, prior=last, pool=shared)
    head = Block("head.*", posterior=field, prior=standard, pool=None, keep=True)
    return Algorithm(
        model,
        {"body": body, "head": head},
        (fit,),
        parts=("body", "head"),
        likelihood=likelihood,
        adapt=(fit,),
        draws=10,
    )
