"""BPFed: a shared body and a head of each client, both with Gaussian posteriors, where the
federation's posterior of the last round is the body's prior in the next.

A client fits mean fields q_j(body) and q_j(head) in gradient steps on

    E_q[-log p(D_j | body, head)] + zeta (KL(q_j(body) || q(body)) + KL(q_j(head) || N(0, 1))),

and the server averages the parameters loc and rho, with deviations softplus(rho), of q_j(body).

As the prior of a round already contains the rows that it then sees again, q(body) gets narrower
with each round and is no posterior; at zeta = 1 one round is Bayes' rule. The authors' code takes
the divergence the other way round, KL(q(body) || q_j(body)), of all weights, with a factor of 5e-5
n_j, and draws noise of standard deviation .001 in place of 1; none of these is here. The head's
prior, which the abstract leaves open, is a standard normal.

Source: Chen, Liu, Cao, Zhang, "Bayesian personalized federated learning with shared and
personalized uncertainty representations", arXiv:2309.15499, 2023.
"""

from typing import Annotated

import torch
from torch import Tensor

from bayesfl.base.protocols import Server, View
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
    """Federate `model` by BPFed: a Gaussian posterior of the body that all clients share, and one
    of each client's head.

    Args:
        zeta: Weight of the KL; 1 is Bayes' rule.
        prior_precision: Precision of the prior N(0, 1 / prior_precision) of the head's weights.
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

    def received(given: Server, view: View) -> Tensor:
        return field.moments(given["body"])[1]

    def zero(given: Server, view: View) -> Tensor:
        return torch.zeros_like(view["n"]).unsqueeze(-1)

    def own(given: Server, view: View) -> Tensor:
        return zero(given, view) + 1 / prior_precision

    fit = Descend(
        Energy(("body", "head"), ("body", "head"), likelihood="mean", kl_weight=zeta),
        steps=steps,
        batch_size=batch_size,
        optimiser=optimiser,
        draws=draws,
    )
    body = Block(
        "body.*",
        posterior=field,
        prior=Normal(centre=server_mean("body"), variance=received),
        pool=Mean(equal, sends=("loc", "rho")),
    )
    head = Block(
        "head.*", posterior=field, prior=Normal(centre=zero, variance=own), pool=None, keep=True
    )
    return Algorithm(
        model,
        {"body": body, "head": head},
        (fit,),
        parts=("body", "head"),
        likelihood=likelihood,
        adapt=(fit,),
        draws=10,
    )
