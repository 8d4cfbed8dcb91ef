"""Distributed IRM: one model trained to be optimal in every environment at once; IRM-L2 and IRM-FT derive personal models from it.

Client j minimises  (R_j(w) + gamma_t sum_e g_e(w)^2 + l2 |w|^2) / max(1, gamma_t),  R_j the mean over its examples, g_e the derivative of
environment e's mean loss with respect to a scale of the outputs (IRMv1), and the server averages by size. gamma_t is min(1, gamma) before
round `anneal` and gamma from then on, when Adam's state starts anew. Together they minimise, divided by max(1, gamma_t),

    R(w) + gamma_t sum_j (n_j / n) sum_e g_je(w)^2 + l2 |w|^2,  R the mean over all examples.

The penalty is thus a mean over clients, where IRM on all data together has a sum: with J clients of equal size, gamma here corresponds to
gamma / J there. With several local steps, or with Adam on each client, a round is not a gradient step on this objective. With `steps=1`,
`batch_size=None`, `optimiser=SGD(1.0)` and the optimiser on the server it is one: with J clients of equal size the gradients, from round
`anneal` on, are those of IRM with gamma / J on all data together, except for the divisors max(1, gamma) and max(1, gamma / J), on which
Adam's steps do not depend.

IRM-L2  theta_j  by steps on  R_j(theta) + lam/2 |theta - w|^2  from the model received;  IRM-FT  has lam = 0.

Source: Arjovsky, Bottou, Gulrajani, Lopez-Paz, "Invariant risk minimization", 2019, arXiv:1907.02893; distributed, and the two personal
forms, as baselines in Tang, Guo, Zhang, arXiv:2211.11243 (see `perinvfl`). The defaults of gamma and the ridge are those of IRM's published
run on coloured MNIST, those of rounds and mini-batches are from PerInvFL's code.

>>> import bayesfl as bf
>>> clients = bf.data.coloured("digits")
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=2)
>>> result = bf.simulate(bf.algorithms.irm(model, anneal=0), clients, rounds=1)
"""

from typing import Any

from torch import nn

from bayesfl.base.checks import whole
from bayesfl.base.protocols import Likelihood
from bayesfl.composition import (
    Algorithm,
    Annealed,
    Block,
    Descend,
    Energy,
    Estimator,
    anew_at,
    irm_energy,
    server_mean,
    tied,
    with_personal,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam, Optimiser


def irm(
    model: nn.Module,
    *,
    gamma: float = 91257.18613115903,
    anneal: int = 12,
    estimator: Estimator = "biased",
    l2: float = 0.00110794568,
    steps: int = 5,
    batch_size: int | None = 200,
    optimiser: Optimiser = Adam(5e-4),
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by distributed IRM: one model is trained to be optimal in every environment at once; the data need environments.

    Args:
        model: Any module.
        gamma: Weight of a client's squared slopes from round `anneal` on; 0 is FedAvg with a ridge. With J clients of equal size it
            corresponds to gamma / J with all data together.
        anneal: Round, counted from 0, at which the penalty's weight goes from min(1, gamma) to gamma; not reached in a run of at most this
            many rounds.
        estimator: Estimator of the squared slopes from mini-batches, see `bayesfl.invariance.squared_slopes`.
        l2: Strength of the ridge l2 |w|^2, which is divided by max(1, gamma_t) as the other terms are.
        steps: Number of mini-batches of a client in a round.
        batch_size: Number of examples of a step; None for all of the client's.
        optimiser: Optimiser of the clients; its state is kept from round to round.
        likelihood: Distribution of y given the model's outputs.

    Raises:
        ValueError: A number lies outside its range, or `estimator` is neither `biased` nor `unbiased`.
    """
    whole("steps", steps, least=1)
    annealed = Annealed(gamma, start=anneal)
    step = Descend(
        irm_energy("w", likelihood, annealed, estimator=estimator),
        steps=steps,
        batch_size=batch_size,
        optimiser=optimiser,
        persist="w_optimiser",
    )
    phases = (*anew_at(annealed, "w_optimiser"), step)
    return Algorithm(model, {"w": Block(prior=tied(annealed, l2=l2))}, phases, parts=("w",), likelihood=likelihood)


def irm_l2(
    model: nn.Module,
    *,
    lam: float = 1.0,
    gamma: float = 91257.18613115903,
    anneal: int = 12,
    estimator: Estimator = "biased",
    l2: float = 0.00110794568,
    steps: int = 5,
    personal_steps: int = 2,
    batch_size: int | None = 200,
    optimiser: Optimiser = Adam(5e-4),
    personal_optimiser: Optimiser = Adam(1e-4),
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by IRM-L2: IRM, and personal models theta by steps on the plain risk with a pull towards the IRM model.

    A client's theta starts each round anew from the model received.

    The authors' code takes SGD with a weight decay of 1e-3 for theta; the default here is that of `perinvfl`, so that the two methods
    differ in their objectives alone.

    Args:
        model: As in `irm`.
        lam: Strength of the pull lam/2 |theta - w|^2 added to the mean loss; 0 is IRM-FT. Steps need lr (curvature + lam) < 2.
        gamma: As in `irm`.
        anneal: As in `irm`.
        estimator: As in `irm`.
        l2: As in `irm`, for w alone.
        steps: As in `irm`.
        personal_steps: Number of steps on theta for each of the `steps`; also of a client that joins later.
        batch_size: As in `irm`, also for theta's steps.
        optimiser: As in `irm`.
        personal_optimiser: Optimiser of theta; its state starts anew each round.
        likelihood: Distribution of y given the model's outputs.

    Raises:
        ValueError: A number lies outside its range, or `estimator` is neither `biased` nor `unbiased`.
    """
    whole("personal_steps", personal_steps, least=1)
    rest = {
        "steps": steps,
        "batch_size": batch_size,
        "optimiser": optimiser,
        "likelihood": likelihood,
    }
    lower = irm(model, gamma=gamma, anneal=anneal, estimator=estimator, l2=l2, **rest)
    plain = Energy("theta", ("theta",), likelihood="mean")
    fit = Descend(plain, steps=personal_steps * steps, batch_size=batch_size, optimiser=personal_optimiser)
    return with_personal(lower, fit, prior=tied(Annealed(0.0), lam=lam, centre=server_mean("w")), restart=True)


def irm_ft(model: nn.Module, **options: Any) -> Algorithm:
    """Federate `model` by IRM-FT: IRM, fine-tuned on each client's plain risk in every round; `irm_l2` without the pull."""
    return irm_l2(model, lam=0.0, **options)
