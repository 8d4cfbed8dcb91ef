"""pFedMAP: personal heads under a hierarchical Gaussian of one fixed scale, each at its posterior's mode.

Model.  w_j | w ~ N(w, rho^2 I) for the head of client j, flat prior on w; a body shared by all.
Client  w_j  minimises  -log p(D_j | w_j) + |w_j - w|^2 / (2 rho^2).
Server  w = mean of the w_j.

Unlike Ditto, the centre is the mean of the personal heads; no separate global model is trained.

Source: Zhu, Ma, Blaschko, "Tackling personalized federated learning with label concept drift via hierarchical Bayesian modeling",
FL-NeurIPS 2022. The paper does not state its rho; tune it and report it.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.pfedmap(model, precision=0.1), clients, rounds=1)
"""

from typing import Literal

import torch
from torch import nn

from bayesfl.base.checks import number, refuse_idle
from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Descend, Energy, Mean, Normal, equal, server_mean, tempering
from bayesfl.likelihoods import Categorical
from bayesfl.models.cutting import has_body
from bayesfl.optim import SGD, Rate, refuse_divergence


def pfedmap(
    model: nn.Module,
    *,
    precision: float = 1.0,
    head_epochs: int = 20,
    body_epochs: int = 5,
    batch_size: int | None = 50,
    head_lr: Rate = 1e-3,
    body_lr: Rate = 1e-2,
    momentum: float = 0.9,
    likelihood_scale: Literal["sum", "mean"] = "sum",
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by pFedMAP: a shared body, and personal heads that a Gaussian prior pulls towards their mean.

    Args:
        model: A `bf.models.SplitModel`, or any module whose parameters are named `body.*` and `head.*`. It may be all head, as
            `bf.models.mlp(inputs, outputs=2, hidden=())` is: then nothing of the body is done, and its options are
            refused.
        precision: 1 / rho^2 of the prior on a head.
        head_epochs: Number of full-batch steps on the head each round; also of a client that joins later.
        body_epochs: Number of passes over a client's data for the body after that.
        batch_size: Number of examples of a step on the body; None for all of the client's.
        head_lr: Learning rate of the head, or a schedule, which is judged in each round that is looked at, and not beforehand.
        body_lr: Learning rate of the body, or a schedule.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew in each phase.
        likelihood_scale: Whether the head's likelihood is the `sum` over the client's data, or their `mean` with the whole penalty, as in
            the paper's energy, which is a likelihood tempered by 1 / n_j.
        likelihood: Distribution of y given the model's outputs.

    Raises:
        ValueError: `precision` lies outside (1e-30, 1e30), or steps of rate `head_lr` towards the centre diverge under it; or
            `likelihood_scale` is neither `sum` nor `mean`; or an option of the body is given for a model that has none.
    """
    if not has_body(model):
        refuse_idle(pfedmap, locals(), ("body_epochs", "body_lr", "batch_size"), "for a model that trains no parameter named body.*")
    if not 1e-30 < number("precision", precision) < 1e30:
        raise ValueError(
            f"precision is 1 / rho^2 and must lie within (1e-30, 1e30), so that its inverse is a number in float32, got {precision}; "
            "fedrep(...) has heads without a tie"
        )
    head_optimiser, body_optimiser = SGD(head_lr, momentum), SGD(body_lr, momentum)
    refuse_divergence(head_optimiser, precision, "precision", precision, lambda tie: tie)
    both = ("body", "head") if has_body(model) else ("head",)
    prior = Normal(centre=server_mean("head"), variance=lambda given, view: torch.full_like(view["n"], 1 / precision)[..., None])
    energy = Energy("head", both, likelihood="sum", weight=tempering(likelihood_scale))
    fit_head = Descend(energy, epochs=head_epochs, optimiser=head_optimiser)
    fit_body = Descend(Energy("body", both, likelihood="mean"), epochs=body_epochs, batch_size=batch_size, optimiser=body_optimiser)
    blocks = {"body": Block("body.*"), "head": Block("head.*", prior=prior, pool=Mean(equal), keep=True)}
    return Algorithm(
        model,
        {name: blocks[name] for name in both},
        (fit_head, fit_body) if "body" in both else (fit_head,),
        parts=both,
        likelihood=likelihood,
        adapt=(fit_head,),
        train="all",
        sampling="bernoulli",
    )
