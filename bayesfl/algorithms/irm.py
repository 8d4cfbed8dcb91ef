"""Distributed IRM: one model that is optimal in every environment at once; IRM-L2 and IRM-FT derive
personal models from it.

Client j minimises $(R_j(w) + gamma_t sum_e g_e(w)^2 + l2 |w|^2) / max(1, gamma_t)$, $R_j$ the mean
over its examples, $g_e$ the derivative of environment e's mean loss with respect to a scale of the
outputs (IRMv1), and the server averages by size. $gamma_t$ is $min(1, gamma)$ before round `anneal`
and gamma from then on; Adam's state is reset at that round. All clients together minimise, divided
by $max(1, gamma_t)$,

    $R(w) + gamma_t sum_j (n_j / n) sum_e g_je(w)^2 + l2 |w|^2$, R the mean over all examples.

The penalty is a mean over clients; IRM on all data together has a sum. With J clients of equal
size, gamma here corresponds to $gamma / J$ there. With several local steps, or with Adam on each
client, a round is not a gradient step on this objective. With `steps=1`, `batch_size=None`,
`optimiser=SGD(1.0)` and the optimiser on the server it is one. With J clients of equal size, the
gradients from round `anneal` on are those of IRM with $gamma / J$ on all data together, except for
the divisors $max(1, gamma)$ and $max(1, gamma / J)$, which do not change Adam's steps.

IRM-L2: $theta_j$ by steps on $R_j(theta) + lam/2 |theta - w|^2$ from the model received; IRM-FT has
$lam = 0$.

Source: Arjovsky, Bottou, Gulrajani, Lopez-Paz, "Invariant risk minimization", 2019,
arXiv:1907.02893; distributed, and in two personal forms, as baselines in Tang, Guo, Zhang,
arXiv:2211.11243 (see `perinvfl`). The defaults of gamma and the ridge are from IRM's published run
on coloured MNIST, those of rounds and mini-batches from PerInvFL's code.
"""

from typing import Any

from torch import nn

from bayesfl.composition import (
    Algorithm,
    Annealed,
    Block,
    Descend,
    Energy,
    anew_at,
    irm_energy,
    options,
    server_mean,
    tied,
    with_personal,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam


@options.method()
def irm(
    model: options.Model,
    *,
    gamma: options.Gamma = 91257.18613115903,
    anneal: options.Anneal = 12,
    estimator: options.SlopeEstimator = "biased",
    l2: options.Ridge = 0.00110794568,
    steps: options.Steps = 5,
    batch_size: options.BatchSize = 200,
    optimiser: options.KeptOptimiser = Adam(5e-4),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by distributed IRM: one model that is optimal in every environment at once;
    the data need environments.

    Example:
        >>> clients = bf.data.coloured("digits")
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=2)
        >>> method = bf.algorithms.irm(model, anneal=0)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    annealed = Annealed(gamma, start=anneal)
    step = Descend(
        irm_energy("w", likelihood, annealed, estimator=estimator),
        steps=steps,
        batch_size=batch_size,
        optimiser=optimiser,
        persist="w_optimiser",
    )
    return Algorithm(
        model,
        {"w": Block(prior=tied(annealed, l2=l2))},
        (*anew_at(annealed, "w_optimiser"), step),
        parts=("w",),
        likelihood=likelihood,
    )


@options.method()
def irm_l2(
    model: options.Model,
    *,
    lam: options.Strength = 1.0,
    gamma: options.Gamma = 91257.18613115903,
    anneal: options.Anneal = 12,
    estimator: options.SlopeEstimator = "biased",
    l2: options.Ridge = 0.00110794568,
    steps: options.Steps = 5,
    personal_steps: options.Count = 2,
    batch_size: options.BatchSize = 200,
    optimiser: options.KeptOptimiser = Adam(5e-4),
    personal_optimiser: options.Optimiser = Adam(1e-4),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by IRM-L2: IRM, and personal models theta by steps on the plain risk with a
    pull towards the IRM model.

    The authors' code uses SGD with a weight decay of 1e-3 for theta; the default here is that of
    `perinvfl`, so that the two methods differ only in their objectives.

    Args:
        lam: Strength of the pull $lam/2 |theta - w|^2$ added to the mean loss; 0 is IRM-FT. Steps
            need $rate (curvature + lam) < 2$.
        personal_steps: Number of steps on theta for each of the `steps`; also for a client that
            joins later.
        personal_optimiser: Optimiser of theta; its state is reset each round.

    Example:
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.irm_l2(model, lam=0.5)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
    """
    rest = {
        "steps": steps,
        "batch_size": batch_size,
        "optimiser": optimiser,
        "likelihood": likelihood,
    }
    lower = irm(model, gamma=gamma, anneal=anneal, estimator=estimator, l2=l2, **rest)
    fit = Descend(
        Energy("theta", ("theta",), likelihood="mean"),
        steps=personal_steps * steps,
        batch_size=batch_size,
        optimiser=personal_optimiser,
    )
    return with_personal(
        lower, fit, prior=tied(Annealed(0.0), lam=lam, centre=server_mean("w")), restart=True
    )


def irm_ft(model: nn.Module, **others: Any) -> Algorithm:
    """Federate `model` by IRM-FT: IRM, fine-tuned on each client's plain risk in every round;
    `irm_l2` without the pull.

    Example:
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.irm_ft(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
    """
    return irm_l2(model, lam=0.0, **others)


irm_ft.__signature__ = options.without(irm_l2, "lam")  # type: ignore[attr-defined]
