"""pFedVEM: personal heads under a hierarchical Gaussian, learned by variational EM.

Model: $w_j | w ~ N(w, rho_j^2 I)$ for the head of client j, flat prior on w; a body that all share.

E step (client): $q_j(w_j) = N(mu_j, diag sigma_j^2)$ maximises the bound
$E_q[log p(D_j | w_j)] - KL(q_j || N(w, rho_j^2 I))$.

M step (client): $rho_j^2 = (|sigma_j|^2 + |mu_j - w|^2) / D$.

M step (server): $w = (sum_j mu_j / rho_j^2) / (sum_j 1 / rho_j^2)$; a small $rho_j$ weighs more.

Every client trains in each round, and each sends its part with probability `participation`.

With initial widths of 0.1 and long training, the method loses accuracy after aggregation
(docs/studies/long-training.md): $rho_j$ follows the width of $q_j$ and not the spread of the heads,
so the pull towards the centre stays strong. `pfedvem_held` has one fixed rho for all clients, and
the server's mean then has equal weights.

Source: Zhu, Ma, Blaschko, "Tackling personalized federated learning with label concept drift via
hierarchical Bayesian modeling", FL-NeurIPS 2022, equations 5 to 7 and algorithm 1.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from bayesfl.base.protocols import AdditivePool, Batch, Reported, Server, Uplink, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Mean,
    Normal,
    Once,
    Relaxed,
    closest_variance,
    equal,
    options,
    server_mean,
    standard_normal,
    tempering,
)
from bayesfl.engine import stability
from bayesfl.likelihoods import Categorical
from bayesfl.models.cutting import has_body
from bayesfl.optim import SGD, rate_at
from bayesfl.posteriors import MeanField

BOTH = ("body", "head")
Scale = Annotated[
    float, options.Range(1e-15, 1e15, why="its square must be a number in float32, too")
]
HeadStart = Annotated[
    Literal["normal", "module"],
    "Whether the first heads are drawn from N(0, init_scale^2), as in the authors' code, or are "
    "the module's own.",
]


@options.method(idle=options.ALL_HEAD)
def pfedvem(
    model: options.MaybeAllHead,
    *,
    head_epochs: options.FullBatchSteps = 20,
    body_epochs: options.BodyEpochs = 5,
    batch_size: options.BatchSize = 50,
    head_optimiser: Annotated[
        SGD,
        options.check_sgd,
        "Optimiser of the head's means and scales; its velocity starts anew each round.",
    ] = SGD(1e-3, momentum=0.9),
    body_optimiser: options.BodyOptimiser = SGD(1e-2, momentum=0.9),
    draws: options.Draws = 5,
    init_scale: Scale = 1.0,
    scale_floor: options.Positive = 1e-3,
    scale_prior: tuple[options.Strength, options.Strength] | None = None,
    scale_update: Literal["before", "after"] = "before",
    scale_rate: options.ScaleRate = 1.0,
    head_start: HeadStart = "normal",
    beta: options.Kept = 0.0,
    likelihood_scale: options.LikelihoodScale = "sum",
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by pFedVEM: a shared body, and personal heads with Gaussian posteriors
    around a common mean.

    Its intervals are too narrow: in simulations with known truth, nominal 90 % intervals of a
    client's own coefficients cover about three times in four, and less often after longer training
    (docs/studies/truth.md).

    Args:
        init_scale: Standard deviation of $q_j$ at the start, and of the server's first head. On
            images the default may make the body's units inactive in the first round, and `simulate`
            warns; 0.1 does not (docs/studies/long-training.md).
        scale_floor: Smallest $rho_j$, in units of `init_scale`. It matters only above
            $sqrt(rate / (1 + momentum))$ of `head_optimiser` at the round's rate, in the head's own
            units; $rho_j$ never falls below this value. At $1 / sqrt(2)$ of it, steps towards the
            centre diverge; half of the limit remains for the curvature of the data
            (docs/derivations/pfedvem.md).
        scale_prior: Shape and scale of an inverse-gamma prior on $rho_j^2$, so that a client with a
            tiny $rho_j$ does not dominate the centre; None for no prior.
        scale_update: Whether $rho_j$ is updated before the head moves, as in the authors' code, or
            after, as in a textbook M step.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.pfedvem(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc', 'head.loc', 'rho2']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    parts = BOTH if has_body(model) else ("head",)
    q = MeanField(init_scale=init_scale, scale_rate=scale_rate)
    scales = _Scales(
        q, (scale_floor * init_scale) ** 2, head_optimiser, *(scale_prior or (0.0, 0.0))
    )
    head = Block(
        "head.*",
        posterior=q,
        prior=Normal(centre=server_mean("head"), variance=scales.variance),
        pool=_relaxed(Mean(precision), beta),
        keep=True,
        start=standard_normal(init_scale) if head_start == "normal" else "module",
    )
    e_step = Descend(
        Energy("head", parts, likelihood="sum", weight=tempering(likelihood_scale)),
        epochs=head_epochs,
        optimiser=head_optimiser,
        draws=draws,
    )
    m_step = Once(scales.update)
    body_step = Descend(
        Energy("body", BOTH, likelihood="mean"),
        epochs=body_epochs,
        batch_size=batch_size,
        optimiser=body_optimiser,
        draws=draws,
    )
    return _federated(
        model,
        head,
        (m_step, e_step) if scale_update == "before" else (e_step, m_step),
        body_step,
        beta,
        likelihood=likelihood,
        private={"rho2": init_scale**2},
        reports={"rho2": Reported(init_scale**2, options.Range(0))},
        server=lambda blocks, clients: {
            "log_rho2": torch.tensor(2 * math.log(init_scale)),
            "largest_share": torch.tensor(1 / clients),
        },
        broadcast=("log_rho2",),  # `largest_share` stays on the server, for people to read
        combine=summarise,
        adapt=(Once(pooled_scale), e_step, m_step, e_step),
    )


@options.method(idle=options.ALL_HEAD)
def pfedvem_held(
    model: options.MaybeAllHead,
    *,
    head_epochs: options.FullBatchSteps = 20,
    body_epochs: options.BodyEpochs = 5,
    batch_size: options.BatchSize = 50,
    head_optimiser: options.HeadOptimiser = SGD(1e-3, momentum=0.9),
    body_optimiser: options.BodyOptimiser = SGD(1e-2, momentum=0.9),
    draws: options.Draws = 5,
    prior_scale: Scale = 1.0,
    init_scale: Scale = 0.1,
    scale_rate: options.ScaleRate = 0.0,
    head_start: HeadStart = "module",
    beta: options.Kept = 0.0,
    likelihood_scale: options.LikelihoodScale = "sum",
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by pFedVEM with one fixed rho for all clients, and heads of fixed widths.

    It is `pfedmap` with noise of fixed size on the weights of the heads, and does not lose accuracy
    in long training as `pfedvem` does. The width was chosen on validation data of MNIST
    (docs/studies/long-training.md); prior scale and start were not tuned. Its intervals do not have
    nominal coverage: in simulations with known truth, nominal 90 % intervals cover in a third to
    three quarters of all cases, and nearly nominally if `scale_rate=1.0` learns the widths
    (docs/studies/truth.md).

    Args:
        prior_scale: The rho of all clients. `simulate` warns in round 1 if steps of SGD towards the
            centre diverge under it.
        init_scale: Standard deviation of $q_j$ at the start.

    Example:
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.pfedvem_held(model, prior_scale=0.5)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc', 'head.loc']
    """
    parts = BOTH if has_body(model) else ("head",)
    head = Block(
        "head.*",
        posterior=MeanField(init_scale=init_scale, scale_rate=scale_rate),
        prior=Normal(
            centre=server_mean("head"),
            variance=lambda given, view: torch.full_like(view["n"], prior_scale**2)[..., None],
        ),
        pool=_relaxed(Mean(equal), beta),
        keep=True,
        start=standard_normal(init_scale) if head_start == "normal" else "module",
    )
    e_step = Descend(
        Energy("head", parts, likelihood="sum", weight=tempering(likelihood_scale)),
        epochs=head_epochs,
        optimiser=head_optimiser,
        draws=draws,
    )
    body_step = Descend(
        Energy("body", BOTH, likelihood="mean"),
        epochs=body_epochs,
        batch_size=batch_size,
        optimiser=body_optimiser,
        draws=draws,
    )
    return _federated(
        model, head, (e_step,), body_step, beta, likelihood=likelihood, adapt=(e_step,)
    )


def _federated(
    model: nn.Module,
    head: Block,
    fit_head: tuple[Any, ...],
    fit_body: Descend,
    beta: float,
    **rest: Any,
) -> Algorithm:
    """Return the method with this head, and with a shared body if the model has one."""
    rest |= {"train": "all", "sampling": "bernoulli", "watch": stability.watch}
    if not has_body(model):
        return Algorithm(model, {"head": head}, fit_head, parts=("head",), **rest)
    blocks = {"body": Block("body.*", pool=_relaxed(Mean(), beta)), "head": head}
    return Algorithm(model, blocks, (*fit_head, fit_body), parts=BOTH, **rest)


def _relaxed(pool: AdditivePool, beta: float) -> AdditivePool:
    return Relaxed(pool, 1 - beta) if beta else pool


def precision(server: Server, uplink: Uplink) -> Tensor:
    """Weight each client by 1 / rho_j^2, [C]."""
    return 1 / uplink["rho2"]


def summarise(server: Server, ids: Tensor, uplink: Uplink) -> Server:
    """Keep the geometric mean of the cohort's rho_j^2, the start of new clients, and the largest
    share of one client.
    """
    weights = precision(server, uplink)
    return {"log_rho2": uplink["rho2"].log().mean(), "largest_share": weights.max() / weights.sum()}


def pooled_scale(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Start a new client from the geometric mean of the cohort's scales, not from `init_scale`."""
    return {"rho2": given["log_rho2"].exp()}


@dataclass(frozen=True)
class _Scales:
    """Compute the clients' rho_j^2: their M step, and the variance of their prior."""

    posterior: MeanField
    floor: float
    optimiser: SGD
    shape: float
    scale: float

    def update(self, algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        found = closest_variance(
            self.posterior.moments(view["head"]),
            given["head"]["loc"],
            shape=self.shape,
            scale=self.scale,
        )
        return {"rho2": self._floored(found, given)}

    def variance(self, given: Server, view: View) -> Tensor:
        # If rho_j was not updated in this round, it may be below the floor: at the start, or after
        # rounds with smaller rates.
        return self._floored(view["rho2"], given)[..., None]

    def _floored(self, rho2: Tensor, given: Server) -> Tensor:
        rate = rate_at(self.optimiser.rate, given["round"], given["rounds"])
        return rho2.clamp_min(max(self.floor, rate / (1 + self.optimiser.momentum)))
