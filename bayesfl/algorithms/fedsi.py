"""FedSI: each client has a posterior over a subnetwork of the shared body, under one frozen head
that clients fine-tune to predict.

Model: body $w_j | mu, g ~ N(mu, diag g)$; head: one common random head, constant in training.

MAP (client): $w_j = argmax_w log p(D_j | w) - 1/2 sum_r (w_r - mu_r)^2 / g_r$, from mu.

Selection (client): P, the share of the weights with the largest $s_r^2 = 1 / (GGN_rr + 1 / g_r)$.

Laplace (client): $H_P = GGN_P + diag(1 / g_P)$; sends $w_j$, and $sigma_j = diag(H_P^-1)^(1/2)$ on
P and 0 elsewhere (a Dirac).

Server: $mu = mean_j w_j$, $sigma = mean_j sigma_j$; $g_r = sigma_r^2$, or alpha if no client
selected r.

Predict (client): fine-tune the head, then Laplace at mu: $softmax(kappa f)$,
$kappa = (1 + pi/8 Sigma)^(-1/2)$, $Sigma = J_P H_P^-1 J_P'$.

Source: Chen, Liu, Wu, Fan, Cao, "FedSI: federated subnetwork inference for efficient uncertainty
quantification", arXiv:2404.15657, 2024, equations 10 to 15 and algorithm 1.
docs/derivations/fedsi.md lists the differences between the text and the authors' code
(github.com/hyLiu1994/BPFedMePD), and the choices made here.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from bayesfl.base.protocols import AdditivePool, Batch, Reported, Server, StackedPool, Uplink, View
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
    Stack,
    equal,
    options,
    server_mean,
)
from bayesfl.curvature import Curvature, invert
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.optim import Adam
from bayesfl.posteriors.linearised import Link
from bayesfl.posteriors.selection import Evidence, Rule, select, size_of, uncurved_share

AggregationRule = Literal["mean_std", "mean_var", "mean_over_selecting", "moment_match", "product"]
IDLE: options.Idle = {
    ("structure", "diagonal"): ("share", "selection", "seed"),
    ("structure", "full"): (
        "share",
        "selection",
        "seed",
        "prior",
        "aggregation",
        "variance_floor",
        "curvature_every",
    ),
    ("prior", "global"): ("predictive_precision",),
    ("likelihood", Gaussian): ("link", "centre"),
}
BOTH = ("body", "head")


@options.method(idle=IDLE)
def fedsi(
    model: options.BodyAndHead,
    *,
    structure: Literal["subnetwork", "diagonal", "full"] = "subnetwork",
    share: Annotated[float, options.Range(0, 1, "]")] = 0.05,
    selection: str | Rule = "wasserstein",
    seed: int = 0,
    epochs: options.Epochs = 10,
    steps: options.Count | None = None,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = Adam(1e-2),
    prior_precision: Annotated[float, options.INVERTIBLE] = 1e-4,
    aggregation: AggregationRule = "mean_std",
    variance_floor: options.Positive = 1e-8,
    curvature_every: options.Count = 1,
    train_head: bool = False,
    prior: Literal["isotropic", "global"] = "isotropic",
    predictive_precision: Annotated[float | Parameter | None, options.Range(0)] = None,
    link: Link | Literal["draws"] = "per_class",
    centre: bool = True,
    finetune_steps: options.Count = 100,
    finetune_optimiser: options.HeadOptimiser = Adam(1e-2),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedSI: the body is averaged, and each client has a posterior over a
    subnetwork of it.

    The paper's text, read literally, is prior_precision=1e4 (its alpha = 1e-4 as a variance),
    prior="global", link="per_class" and centre=False: predictions then use
    $H_P = GGN_P + diag(1 / g_P)$ with the server's learnt variances g. By default g is used only in
    training, and predictions have one precision for all weights, chosen on validation data.

    Its intervals do not have nominal coverage: the curvature is computed from one client's rows at
    weights that all clients determine, which makes them two to three times too wide for a shared
    linear model, and weights outside the subnetwork have no uncertainty (docs/studies/truth.md).

    Args:
        structure: The part of the body with a posterior: a `subnetwork` (FedSI); every weight
            without covariances, `diagonal` (FedSI-Fac); or the whole body, `full`. With `full`,
            training keeps the isotropic prior, and `aggregation`, `variance_floor` and
            `curvature_every` are not used.
        share: Share of the body's weights in the subnetwork, in (0, 1]; the paper uses 0.05 for its
            MLP and 0.07 for its CNN.
        selection: Rule that chooses the subnetwork, one of `bayesfl.selection`; the paper's rule
            selects weights without curvature first.
        seed: Seed of rules that draw: one subnetwork for all clients and rounds, so its indices
            need not be sent. The uplink is a vector over the whole body under every rule.
        steps: Number of mini-batches of a round; if given, it replaces `epochs`. The authors' code
            uses 20.
        optimiser: Optimiser of the body; the authors' code uses `SGD(0.1)` on MNIST.
        prior_precision: Prior precision $1 / alpha$ of weights that no client selected, for a
            likelihood that is a sum over the data; only in training.
        aggregation: Rule for the next prior's g from the clients' sigma: `mean_std` (the paper's,
            zeros included), `mean_var`, `mean_over_selecting` (the mean std of clients that
            selected the weight), `moment_match` (the mean variance plus the spread of the means),
            `product` (the sum of the precisions of clients that selected the weight; these
            precisions also weight the means, and the prior counts once for each of these clients).
        variance_floor: Smallest g; the largest is alpha.
        curvature_every: Number of rounds from one Laplace approximation to the next; between them g
            does not change, and aggregation="product" takes a plain mean of the body. With the
            paper's 1 it takes most of the time if subnetworks have curvature; docs/studies/speed.md
            has the cost of 20 in NLL.
        train_head: Whether every client trains its own head with the body, as in the authors' code,
            instead of the frozen common head.
        prior: Prior of the weights in predictions: `isotropic`, one precision for all, or `global`,
            the server's $1 / g$ (step 4 of the paper's algorithm 1), which needs no validation
            data.
        predictive_precision: Prior precision for predictions under an isotropic prior; None chooses
            one for all clients on their validation data.
        link: How predictions convert the Gaussian over the logits to probabilities: `per_class`,
            the paper's; `contrasts`, which keeps the most probable class; or 100 `draws`. See
            `bf.predictors.LinearisedLaplace`.
        centre: Whether predictions remove the part of the logits that all classes share, see
            `bayesfl.posteriors.Laplace.linearised`; link="per_class" alone depends on it.
        finetune_steps: Number of mini-batches of the head's fine-tuning before a client predicts.
        finetune_optimiser: Optimiser of the head in fine-tuning.

    Raises:
        ValueError: `variance_floor` is larger than alpha, or the likelihood's curvature is not
            known.

    Example:
        >>> clients = bf.data.label_groups("digits", clients=4, validation=0.1)
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.fedsi(model, selection="predictive_variance")
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc', 'std', 'uncurved']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    alpha = 1 / prior_precision
    rule: dict[str, Any] = (
        {"share": share, "selection": selection, "seed": seed} if structure == "subnetwork" else {}
    )
    how: dict[str, Any] = (
        {} if isinstance(likelihood, Gaussian) else {"link": link, "centre": centre}
    )
    trained = Energy(BOTH if train_head else ("body",), BOTH, likelihood="mean")
    # The prior, which averaging may make stiff, is solved after each step.
    train = Descend(
        trained, epochs=epochs, steps=steps, batch_size=batch_size, optimiser=optimiser, prox=True
    )
    finetune = Descend(
        Energy("head", BOTH, likelihood="mean"),
        steps=finetune_steps,
        batch_size=batch_size,
        optimiser=finetune_optimiser,
    )
    stacked = aggregation in ("moment_match", "product")

    def fit(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        """Add the standard deviations of the client's Laplace approximation around its MAP to the
        view.
        """
        if (given["round"] - 1) % curvature_every:
            return view
        curvature = Curvature(
            algorithm.network(view), algorithm.likelihood, pattern=algorithm.layout("body")
        )
        g = given["g"].double()
        evidence = Evidence(view["body"]["loc"].double(), curvature.diagonal(data), g, seed)
        if structure == "diagonal":
            std, chosen = evidence.posterior_variance.sqrt(), torch.arange(len(g), device=g.device)
        else:
            chosen = select(selection, evidence, size_of(share, len(g)))
            inverse = invert(curvature, data, 1 / g, indices=chosen, diagonal=evidence.curvature)
            std = torch.zeros_like(g).index_copy_(0, chosen, inverse.marginals().sqrt())
        uncurved = torch.full_like(view["uncurved"], uncurved_share(evidence, chosen))
        return {"std": std.to(view["std"]), "uncurved": uncurved}

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        body = (
            {
                "body": {
                    "loc": pooled_mean(uplink, weighted=aggregation == "product").to(server["g"])
                }
            }
            if stacked
            else {}
        )
        if (uplink["round"] - 1) % curvature_every:
            return body
        g = pooled_variance(uplink, aggregation).clamp(variance_floor, alpha)
        g = torch.where((uplink["std"] > 0).any(0), g, alpha)
        return body | {
            "g": g.to(server["g"]),
            "uncurved_share": uplink["uncurved"].mean().to(server["uncurved_share"]),
        }

    isotropic = Algorithm(
        model,
        {
            "body": _body(lambda given, view: torch.full_like(given["body"]["loc"][:1], alpha)),
            "head": Block("head.*", pool=None, keep=train_head),
        },
        (train,),
        parts=BOTH,
        likelihood=likelihood,
        finetune=(finetune,),
        predictor=LinearisedLaplace(
            "body", structure, _learnt if prior == "global" else predictive_precision, **how, **rule
        ),
        draws=100 if link == "draws" else 0,
    )
    if structure == "full":
        return isotropic
    return replace(
        isotropic,
        blocks={
            **isotropic.blocks,
            "body": _body(lambda given, view: given["g"], Stack() if stacked else Mean(equal)),
        },
        phases=(train, Once(fit, data=True, batched=False)),
        server=lambda blocks, clients: {
            "g": torch.full_like(blocks["body"]["loc"], alpha),
            "uncurved_share": torch.tensor(0.0),
        },
        broadcast=("g",),  # `uncurved_share` stays on the server, for people to read
        reports={
            "std": Reported(
                lambda given: torch.zeros_like(given["body"]["loc"]), options.AT_LEAST_0
            ),
            "uncurved": Reported(0.0, options.NEARLY_SHARE),
        },
        combine=combine,
    )


def fedsi_fac(model: nn.Module, **others: Any) -> Algorithm:
    """Federate `model` by FedSI-Fac: an independent posterior for every weight of the body,
    sigma_r^2 = 1 / (GGN_rr + 1 / g_r), no selection.

    Example:
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.fedsi_fac(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc', 'std', 'uncurved']
    """
    return fedsi(model, structure="diagonal", **others)


def fedsi_full(model: nn.Module, **others: Any) -> Algorithm:
    """Federate `model` by FedSI with a posterior over the whole body: isotropic prior in training,
    all covariances in predictions.

    Example:
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.fedsi_full(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc']
    """
    return fedsi(model, structure="full", **others)


for _variant in (fedsi_fac, fedsi_full):
    _variant.__signature__ = options.without(fedsi, "structure")  # type: ignore[attr-defined]


def _learnt(given: Server, view: View) -> Tensor:
    """Return the prior precisions 1 / g of the body's weights, [D], that the server has learnt."""
    return 1 / given["g"]


def _body(variance: Parameter, pool: AdditivePool | StackedPool = Mean(equal)) -> Block:
    return Block("body.*", prior=Normal(centre=server_mean("body"), variance=variance), pool=pool)


def pooled_variance(uplink: Uplink, aggregation: AggregationRule) -> Tensor:
    """Return the next prior variances g [D] from the clients' standard deviations; arbitrary for
    weights that no client selected.
    """
    std = uplink["std"].double()
    if aggregation == "mean_std":
        return std.mean(0).square()
    if aggregation == "mean_over_selecting":
        return (std.sum(0) / (std > 0).sum(0)).square()
    if aggregation == "product":
        return 1 / _precision(std).sum(0)
    spread = (
        uplink["body"]["loc"].double().var(0, correction=0)
        if aggregation == "moment_match"
        else 0.0
    )
    return std.square().mean(0) + spread


def pooled_mean(uplink: Uplink, *, weighted: bool) -> Tensor:
    """Return the mean of the clients' means [D]: plain, or weighted by precision among those that
    selected a weight in this round.
    """
    loc, precision = uplink["body"]["loc"].double(), _precision(uplink["std"].double())
    total = precision.sum(0)
    return torch.where((total > 0) & weighted, (precision * loc).sum(0) / total, loc.mean(0))


def _precision(std: Tensor) -> Tensor:
    """Return 1 / std^2, 0 for weights that were not selected."""
    return torch.where(std > 0, std.square().reciprocal(), 0.0)
