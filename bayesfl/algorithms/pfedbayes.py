"""pFedBayes: a Gaussian posterior of all weights for each client, with a federated Gaussian as
prior, which follows the clients' posteriors.

Both are mean fields, $q_j$ of the client and $w_j$ its copy of the server's w. Each batch makes
`inner_steps` steps on $q_j$ and one on $w_j$. Both follow gradients of the same bound:

    $F_j(q, w) = E_q[-log p(D_j | .)] + zeta KL(q || w)$,

    $q_j <- q_j - step(grad_q F_j(q_j, w_j) / n_j)$,

    $w_j <- w_j - step(grad_w zeta KL(q_j || w_j) / n_j)$.

The server averages the parameters loc and rho, with deviations $softplus(rho)$, of the cohort's
$w_j$, and goes `beta` of the way to their plain mean. The minimum of $sum_j KL(q_j || w)$ over w
alone matches the moments of the mixture of the $q_j$, and is wider than such an average.

A zeta other than 1 tempers: at 10 the prior counts ten times, and $q_j$ is not a posterior.

A public version, not by the authors, draws noise of standard deviation .001 instead of 1, weights
clients by size, and divides the KL by a number of batches; none of these is implemented here. The
client keeps $q_j$ from round to round; the optimisers of $w_j$ and $q_j$ are reset in each round.

Source: Zhang, Li, Li, Guo, Shi, "Personalized federated learning via variational Bayesian
inference", ICML 2022, algorithm 1.
"""

import torch
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Batch, Server, Tensors, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Mean,
    Normal,
    Once,
    Relaxed,
    Repeat,
    equal,
    options,
    own_mean,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam, rate_at
from bayesfl.posteriors import MeanField


@options.method()
def pfedbayes(
    model: options.Model,
    *,
    zeta: options.Positive = 10.0,
    batches: options.Count = 20,
    inner_steps: options.Count = 5,
    batch_size: options.BatchSize = 100,
    optimiser: options.Optimiser = Adam(1e-3),
    draws: options.Draws = 1,
    init_scale: options.Positive = 0.05,
    beta: options.Positive = 1.0,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by pFedBayes: each client has a Gaussian posterior of all weights, and a
    federated Gaussian is its prior.

    Args:
        zeta: Weight of the KL; 1 is Bayes' rule, the paper's best is 10.
        batches: Number of batches of a round.
        inner_steps: Number of steps on $q_j$ on each batch, before one step on $w_j$.
        optimiser: Optimiser of $q_j$, and of $w_j$.
        init_scale: Standard deviation of $q_j$ and of w at the start.
        beta: The server's step size, > 0; 1 is the mean.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.pfedbayes(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc', 'w.rho']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    field = MeanField(init_scale=init_scale)
    tied = Normal(centre=own_mean("w"), variance=lambda given, view: field.moments(view["w"])[1])

    def begin(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"state": tree_map(torch.as_tensor, optimiser.init(view["w"]) or {})}

    def follow(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        def apart(w: Tensors) -> torch.Tensor:  # the KL, but for the entropy of q
            return tied.energy(*field.moments(view["q"]), given, view | {"w": w})

        slope = tree_map(lambda g: zeta / view["n"] * g, torch.func.grad(apart)(view["w"]))
        rate = rate_at(optimiser.rate, given["round"], given["rounds"])
        w, state = optimiser.update(view["w"], slope, view["state"], rate)
        return {"w": w, "state": state}

    fit = Descend(
        Energy("q", ("q",), likelihood="mean", kl_weight=zeta),
        epochs=inner_steps,
        optimiser=optimiser,
        draws=draws,
    )
    phases = (
        Once(begin),
        Repeat((fit, Once(follow)), times=batches, batch_size=batch_size),
    )
    gathered = Relaxed(Mean(equal, sends=("loc", "rho")), beta)
    return Algorithm(
        model,
        {
            "w": Block(posterior=field, pool=gathered),
            "q": Block(posterior=field, prior=tied, pool=None, keep=True),
        },
        phases,
        parts=("q",),
        likelihood=likelihood,
        adapt=(Once(join), *phases),
        draws=10,
    )


def join(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Start a new client's posterior at the federated one."""
    return {"q": view["w"]}
