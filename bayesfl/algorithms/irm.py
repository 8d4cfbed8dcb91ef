"""Distributed IRM: one model for all, trained to be best in every environment at once; IRM-L2 and IRM-FT make personal models of it.

Client j minimises  (R_j(w) + gamma_t sum_e g_e(w)^2 + l2 |w|^2) / max(1, gamma_t),  R_j the mean over its examples, g_e the derivative of
environment e's mean loss by one scale of the outputs (IRMv1), and the server averages by size. gamma_t is 1 at first and gamma from round
`anneal` on, when Adam's state starts anew. Together they minimise, over max(1, gamma_t),

    R(w) + gamma_t sum_j (n_j / n) sum_e g_je(w)^2 + l2 |w|^2,  R the mean over all examples.

So the penalty is a mean over clients, where IRM on all data together has a sum: with J clients of one size gamma here is gamma / J there.
With several local steps, and with Adam on each client, the round is not a step on this. With `steps=1`, `batch_size=None`,
`optimiser=SGD(1.0)` and the optimiser on the server it is: with J clients of one size the gradients, from round `anneal` on, are those of
IRM with gamma / J on all data together, but for the divisors, max(1, gamma) and max(1, gamma / J), which Adam's steps do not see.

IRM-L2  theta_j  by steps on  R_j(theta) + lam/2 |theta - w|^2  from the model received;  IRM-FT  the same with lam = 0.

Source: Arjovsky, Bottou, Gulrajani, Lopez-Paz, "Invariant risk minimization", 2019, arXiv:1907.02893; distributed, and the two personal
forms, as baselines in Tang, Guo, Zhang, arXiv:2211.11243 (see `perinvfl`). Gamma and ridge are those of IRM's published run on coloured
MNIST, rounds and mini-batches those of PerInvFL's code.

>>> import bayesfl as bf
>>> clients = bf.data.coloured("digits")
>>> result = bf.simulate(bf.algorithms.irm(bf.models.mlp(clients.inputs, hidden=8, outputs=2), anneal=0), clients, rounds=1)
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
    with_server_optimiser,
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
    server_optimiser: Optimiser | None = None,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by distributed IRM; the data need environments.

    Args:
        model: Any module.
        gamma: Weight of a client's squared slopes from round `anneal` on; 0 is FedAvg with a ridge. Among J clients of one size it
            counts as gamma / J does with all data on one.
        anneal: Round, counted from 0, at which the penalty's weight goes from 1 to gamma; a run of no more rounds never comes to it.
        estimator: Of the squares from mini-batches, see `bayesfl.invariance.squared_slopes`.
        l2: Of the ridge l2 |w|^2, divided by max(1, gamma_t) with the rest.
        steps: Mini-batches of a client in a round.
        batch_size: Examples of a step; None for all of the client's.
        optimiser: Of the clients; its state is kept from round to round.
        server_optimiser: Takes the mean change of a round as a gradient; None for the mean itself.
        likelihood: What y is.

    Raises:
        ValueError: A number lies outside its range, or the estimator is none.
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
    algorithm = Algorithm(model, {"w": Block(prior=tied(annealed, l2=l2))}, phases, parts=("w",), likelihood=likelihood)
    return algorithm if server_optimiser is None else with_server_optimiser(algorithm, server_optimiser)


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
    server_optimiser: Optimiser | None = None,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """IRM, and personal models theta from it by steps on the plain risk, pulled to it; made anew in every round from the model received.

    The authors' code takes SGD with a weight decay of 1e-3 here; the default is what `perinvfl` takes, so that the two differ in what is
    minimised alone.

    Args:
        model: As in `irm`.
        lam: Strength of the pull lam/2 |theta - w|^2 beside the mean loss; 0 is IRM-FT. Steps need lr (curvature + lam) < 2.
        gamma: As in `irm`.
        anneal: As in `irm`.
        estimator: As in `irm`.
        l2: As in `irm`, of w alone.
        steps: As in `irm`.
        personal_steps: Steps on theta for each of these; also of a client that joins later.
        batch_size: As in `irm`, of theta's steps too.
        optimiser: As in `irm`.
        personal_optimiser: Of theta, starting anew each round.
        server_optimiser: As in `irm`.
        likelihood: What y is.

    Raises:
        ValueError: A number lies outside its range, or the estimator is none.
    """
    whole("personal_steps", personal_steps, least=1)
    rest = {
        "steps": steps,
        "batch_size": batch_size,
        "optimiser": optimiser,
        "server_optimiser": server_optimiser,
        "likelihood": likelihood,
    }
    lower = irm(model, gamma=gamma, anneal=anneal, estimator=estimator, l2=l2, **rest)
    plain = Energy("theta", ("theta",), likelihood="mean")
    fit = Descend(plain, steps=personal_steps * steps, batch_size=batch_size, optimiser=personal_optimiser)
    return with_personal(lower, fit, prior=tied(Annealed(0.0), lam=lam, centre=server_mean("w")), restart=True)


def irm_ft(model: nn.Module, **options: Any) -> Algorithm:
    """IRM, fine-tuned on each client's plain risk in every round: `irm_l2` without the pull, with its other options."""
    return irm_l2(model, lam=0.0, **options)
