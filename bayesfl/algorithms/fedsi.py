"""FedSI: a shared body of which every client keeps a subnetwork uncertain, under one frozen head that it fine-tunes to predict.

Model.  body w_j | mu, g ~ N(mu, diag g);  head: one common random one, constant in training.
MAP        (client)  w_j = argmax log p(D_j | w) - 1/2 sum_r (w_r - mu_r)^2 / g_r, from mu.
Selection  (client)  S: the share of the weights of largest s_r^2 = 1 / (GGN_rr + 1 / g_r).
Laplace    (client)  H_S = GGN_S + diag(1 / g_S); sends w_j and sigma_j = diag(H_S^-1)^(1/2) on S, 0 elsewhere (a Dirac).
Server               mu = mean_j w_j,  sigma = mean_j sigma_j;  g_r = sigma_r^2, or alpha where nobody selected r.
Predict    (client)  fine-tune the head, then Laplace at mu: softmax(kappa f), kappa = (1 + pi/8 Sigma)^(-1/2), Sigma = J_S H_S^-1 J_S'.

FedSI-Fac keeps every weight of the body uncertain, on its own. With the whole body uncertain, covariances and all, training needs no
curvature: the prior stays isotropic and the Laplace approximation is made to predict only.

Source: Chen, Liu, Wu, Fan, Cao, "FedSI: federated subnetwork inference for efficient uncertainty quantification", arXiv:2404.15657, 2024,
equations 10 to 15 and algorithm 1. Where the text and the authors' code (github.com/hyLiu1994/BPFedMePD) differ, docs/derivations/fedsi.md
says what is done.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bayesfl.base.checks import instance, number, whole
from bayesfl.base.protocols import AdditivePool, Batch, Likelihood, Server, StackedPool, Tensors, Uplink, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    LinearisedLaplace,
    Mean,
    Normal,
    Once,
    Parameter,
    equal,
    server_mean,
    size_of,
)
from bayesfl.curvature import Curvature, invert
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam, Optimiser
from bayesfl.posteriors.selection import Evidence, Rule, select, uncurved_share

Aggregation = Literal["mean_std", "mean_var", "mean_over_selecting", "moment_match", "product"]
AGGREGATIONS = get_args(Aggregation)
BOTH = ("body", "head")


def fedsi(
    model: nn.Module,
    *,
    share: float = 0.05,
    selection: str | Rule = "wasserstein",
    seed: int = 0,
    epochs: int = 10,
    steps: int | None = None,
    batch_size: int | None = 50,
    optimiser: Optimiser = Adam(1e-2),
    prior_precision: float = 1e-4,
    aggregation: Aggregation = "mean_std",
    variance_floor: float = 1e-8,
    curvature_every: int = 1,
    train_head: bool = False,
    predictive_precision: float | None = None,
    centre: bool = True,
    finetune_steps: int = 100,
    finetune_lr: float = 1e-2,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` (its parts named `body` and `head`) by FedSI.

    The paper's literal reading is prior_precision=1e4 (its alpha = 1e-4 a variance), predictive_precision=1e4 and centre=False.

    Args:
        model: A `bf.models.Split`, or any module whose parameters are named `body.*` and `head.*`; its head is the common one.
        share: Of the body's weights that stay uncertain; the paper takes 0.05 for its MLP and 0.07 for its CNN.
        selection: Which these are, a rule of `bayesfl.selection`; the paper's takes weights without curvature first.
        seed: Of rules that draw: one subnetwork for all clients and rounds, so that its indices need not be sent (the declared uplink is a
            vector over the whole body all the same, whatever the rule).
        epochs: Passes over a client's data each round.
        steps: Mini-batches a round instead; the authors' code takes 20.
        batch_size: Examples of a step, also of fine-tuning; None for all of the client's.
        optimiser: Of the body; the authors' code takes `SGD(0.1)` on MNIST.
        prior_precision: 1 / alpha, of weights that nobody selected, in the units of a sum over the data; for training only.
        aggregation: How the clients' sigma make the next prior's g: `mean_std` (the paper's, zeros included), `mean_var`,
            `mean_over_selecting` (the mean std of those that selected the weight), `moment_match` (the mean variance plus the spread of
            the means), `product` (precisions of those that selected it add, the means weigh by them; the prior counts once for each).
        variance_floor: Least g; the largest is alpha.
        curvature_every: Rounds between fits; between them g stays.
        train_head: Whether every client trains a head of its own together with the body, as in the authors' code, instead of the common one
            that stands still.
        predictive_precision: Of the prior that predictions take; None chooses one for all clients on their validation data.
        centre: Whether predictions leave out what is common to all logits.
        finetune_steps: Mini-batches on the head before a client predicts.
        finetune_lr: Adam's learning rate in them.
        likelihood: What y is.

    Raises:
        ValueError: A number lies outside its range, or `aggregation` is no rule.
    """
    rule = (share, selection, seed)
    return _composed(
        model,
        _descent(epochs, steps, batch_size, optimiser, train_head),
        _Fit(curvature_every, *rule),
        _Prior(aggregation, _alpha(prior_precision), variance_floor),
        LinearisedLaplace("body", "subnetwork", predictive_precision, *rule, centre=centre),
        finetune=_finetuning(finetune_steps, batch_size, finetune_lr),
        likelihood=likelihood,
    )


def fedsi_fac(
    model: nn.Module,
    *,
    epochs: int = 10,
    steps: int | None = None,
    batch_size: int | None = 50,
    optimiser: Optimiser = Adam(1e-2),
    prior_precision: float = 1e-4,
    aggregation: Aggregation = "mean_std",
    variance_floor: float = 1e-8,
    curvature_every: int = 1,
    train_head: bool = False,
    predictive_precision: float | None = None,
    centre: bool = True,
    finetune_steps: int = 100,
    finetune_lr: float = 1e-2,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedSI-Fac: every weight of the body uncertain on its own, sigma_r^2 = 1 / (GGN_rr + 1 / g_r), no selection.

    Args:
        model: As in `fedsi`, like all that follows.
        epochs: See `fedsi`.
        steps: See `fedsi`.
        batch_size: See `fedsi`.
        optimiser: See `fedsi`.
        prior_precision: See `fedsi`.
        aggregation: See `fedsi`.
        variance_floor: See `fedsi`.
        curvature_every: See `fedsi`.
        train_head: See `fedsi`.
        predictive_precision: See `fedsi`.
        centre: See `fedsi`.
        finetune_steps: See `fedsi`.
        finetune_lr: See `fedsi`.
        likelihood: See `fedsi`.

    Raises:
        ValueError: As `fedsi`.
    """
    return _composed(
        model,
        _descent(epochs, steps, batch_size, optimiser, train_head),
        _Fit(curvature_every),
        _Prior(aggregation, _alpha(prior_precision), variance_floor),
        LinearisedLaplace("body", "diagonal", predictive_precision, centre=centre),
        finetune=_finetuning(finetune_steps, batch_size, finetune_lr),
        likelihood=likelihood,
    )


def fedsi_full(
    model: nn.Module,
    *,
    epochs: int = 10,
    steps: int | None = None,
    batch_size: int | None = 50,
    optimiser: Optimiser = Adam(1e-2),
    prior_precision: float = 1e-4,
    train_head: bool = False,
    predictive_precision: float | None = None,
    centre: bool = True,
    finetune_steps: int = 100,
    finetune_lr: float = 1e-2,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedSI with the whole body uncertain: trained under an isotropic prior, all covariances where it predicts.

    Args:
        model: As in `fedsi`, like all that follows.
        epochs: See `fedsi`.
        steps: See `fedsi`.
        batch_size: See `fedsi`.
        optimiser: See `fedsi`.
        prior_precision: See `fedsi`; of all weights, throughout.
        train_head: See `fedsi`.
        predictive_precision: See `fedsi`.
        centre: See `fedsi`.
        finetune_steps: See `fedsi`.
        finetune_lr: See `fedsi`.
        likelihood: See `fedsi`.

    Raises:
        ValueError: A number lies outside its range.
    """
    alpha = _alpha(prior_precision)
    body = _body(lambda given, view: torch.full_like(given["body"]["loc"][:1], alpha))
    return Algorithm(
        model,
        {"body": body, "head": Block("head.*", pool=None, keep=train_head)},
        (_descent(epochs, steps, batch_size, optimiser, train_head),),
        parts=BOTH,
        likelihood=likelihood,
        finetune=(_finetuning(finetune_steps, batch_size, finetune_lr),),
        predictor=LinearisedLaplace("body", "full", predictive_precision, centre=centre),
    )


def _alpha(prior_precision: float) -> float:
    if not 1e-30 < number("prior_precision", prior_precision) < 1e30:
        raise ValueError(
            f"prior_precision must lie within (1e-30, 1e30), so that its inverse is a number in float32, got {prior_precision}"
        )
    return 1 / prior_precision


def _body(variance: Parameter, pool: AdditivePool | StackedPool = Mean(equal)) -> Block:
    return Block("body.*", prior=Normal(centre=server_mean("body"), variance=variance), pool=pool)


def _descent(epochs: int, steps: int | None, batch_size: int | None, optimiser: Optimiser, train_head: bool) -> Descend:
    """To the MAP; the prior, which averaging may make stiff, is solved after each step."""
    instance("train_head", train_head, bool, "pass True or False")
    trained = BOTH if train_head else ("body",)
    energy = Energy(trained, BOTH, likelihood="mean")
    return Descend(trained, energy, epochs=epochs, steps=steps, batch_size=batch_size, optimiser=optimiser, prox=True)


def _finetuning(steps: int, batch_size: int | None, lr: float) -> Descend:
    whole("finetune_steps", steps, least=1)
    if not 0 <= number("finetune_lr", lr) < math.inf:
        raise ValueError(f"finetune_lr must be >= 0 and finite, got {lr}")
    return Descend("head", Energy("head", BOTH, likelihood="mean"), steps=steps, batch_size=batch_size, optimiser=Adam(lr))


@dataclass(frozen=True)
class _Fit:
    """The client's Laplace approximation around its MAP: the standard deviations that it sends.

    Args:
        every: Rounds between fits.
        share: Of the weights in the subnetwork; None for all, each on its own.
        selection: Which they are.
        seed: Of rules that draw.
    """

    every: int
    share: float | None = None
    selection: str | Rule = "wasserstein"
    seed: int = 0

    def __post_init__(self) -> None:
        whole("curvature_every", self.every, least=1)

    def __call__(self, algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        if given["round"] % self.every:
            return view
        curvature = Curvature(algorithm.network(view), algorithm.likelihood, parameters=algorithm.layout("body"))
        g = given["g"].double()
        evidence = Evidence(view["body"]["loc"].double(), curvature.diagonal(data["x"]), g, self.seed, curvature.layout)
        if self.share is None:
            std, chosen = evidence.posterior_variance.sqrt(), torch.arange(len(g), device=g.device)
        else:
            chosen = select(self.selection, evidence, size_of(self.share, len(g)))
            inverse = invert(curvature, data["x"], 1 / g, indices=chosen, diagonal=evidence.curvature)
            std = torch.zeros_like(g).index_copy_(0, chosen, inverse.marginals().sqrt())
        uncurved = torch.full_like(view["uncurved"], uncurved_share(evidence, chosen))
        return view | {"std": std.to(view["std"]), "uncurved": uncurved}


@dataclass(frozen=True)
class _Prior:
    """The server's next prior variances g from the clients' standard deviations.

    Args:
        rule: One of `AGGREGATIONS`.
        alpha: Of weights that nobody selected, and at most.
        floor: At least.
    """

    rule: Aggregation
    alpha: float
    floor: float

    def __post_init__(self) -> None:
        if self.rule not in AGGREGATIONS:
            raise ValueError(f"aggregation must be one of {AGGREGATIONS}, got {self.rule!r}")
        if not 0 < number("variance_floor", self.floor) <= self.alpha:
            raise ValueError(f"variance_floor must be > 0 and at most alpha = 1 / prior_precision = {self.alpha:g}, got {self.floor}")

    def __call__(self, uplink: Uplink) -> Tensor:
        std = uplink["std"].double()
        selecting = (std > 0).sum(0)
        if self.rule == "mean_std":
            g = std.mean(0).square()
        elif self.rule == "mean_over_selecting":
            g = (std.sum(0) / selecting).square()
        elif self.rule == "product":
            g = 1 / _precision(std).sum(0)
        else:
            g = std.square().mean(0)
            if self.rule == "moment_match":
                g = g + uplink["body"]["loc"].double().var(0, correction=0)
        return torch.where(selecting > 0, g.clamp(self.floor, self.alpha), self.alpha)


@dataclass(frozen=True)
class _Means:
    """The clients' means, all at once: plain, or in a round of fits weighted by precision among those that selected a weight."""

    weighted: bool
    every: int
    sends = ("loc",)

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """See `StackedPool`."""
        loc = uplink[name]["loc"].double()
        mean = loc.mean(0)
        if self.weighted and int(server["rounds_done"]) % self.every == 0:  # what was sent in an earlier round weighs nothing now
            precision = _precision(uplink["std"].double())
            total = precision.sum(0)
            mean = torch.where(total > 0, (precision * loc).sum(0) / total, mean)
        return {"loc": mean.to(server[name]["loc"])}


def _precision(std: Tensor) -> Tensor:
    """1 / std^2, 0 where nothing was selected."""
    return torch.where(std > 0, std.square().reciprocal(), 0.0)


def _composed(
    model: nn.Module,
    descent: Descend,
    fit: _Fit,
    prior: _Prior,
    predictor: LinearisedLaplace,
    *,
    finetune: Descend,
    likelihood: Likelihood,
) -> Algorithm:
    """What FedSI and FedSI-Fac have in common."""
    pool = _Means(prior.rule == "product", fit.every) if prior.rule in ("moment_match", "product") else Mean(equal)

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        fresh = int(server["rounds_done"]) % fit.every == 0
        news = {"g": prior(uplink), "uncurved_share": uplink["uncurved"].mean()} if fresh else {}
        return {key: value.to(server[key]) for key, value in news.items()} | {"rounds_done": server["rounds_done"] + 1}

    return Algorithm(
        model,
        {"body": _body(lambda given, view: given["g"], pool), "head": Block("head.*", pool=None, keep="head" in descent.blocks)},
        (descent, Once(fit, data=True, batched=False)),
        parts=BOTH,
        likelihood=likelihood,
        server=lambda blocks, clients: {
            "g": torch.full_like(blocks["body"]["loc"], prior.alpha),
            "uncurved_share": torch.tensor(0.0),
            "rounds_done": torch.tensor(0),
        },
        # What is not sent is for people to look at on the server, and its count of rounds.
        share=lambda server, ids: ({key: entry for key, entry in server.items() if key not in ("uncurved_share", "rounds_done")}, {}),
        private=lambda given: {"std": torch.zeros_like(given["body"]["loc"]), "uncurved": torch.tensor(0.0)},
        report=lambda given, view: {"std": view["std"], "uncurved": view["uncurved"]},
        combine=combine,
        finetune=(finetune,),
        predictor=predictor,
    )
