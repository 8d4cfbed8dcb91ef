"""pFedVEM: personal heads under a hierarchical Gaussian, learned by variational EM.

Model.  w_j | w ~ N(w, rho_j^2 I) for the head of client j, flat prior on w; a body shared by all.
E step  (client)  q_j(w_j) = N(mu_j, diag sigma_j^2)  maximises  E_q[log p(D_j | w_j)] - KL(q_j || N(w, rho_j^2 I)).
M step  (client)  rho_j^2 = (sum sigma_j^2 + |mu_j - w|^2) / D.
M step  (server)  w = sum_j mu_j / rho_j^2  over  sum_j 1 / rho_j^2:  clients with a small rho_j have more weight.

Started at widths of 0.1 and trained for long, the method loses accuracy after pooling (docs/long-training.md): rho_j follows the width of
q_j and not the spread of the heads, so that the tie to the centre stays strong. `pfedvem_held` learns neither rho_j nor the widths.

Source: Zhu, Ma, Blaschko, "Tackling personalized federated learning with label concept drift via hierarchical Bayesian
modeling", FL-NeurIPS 2022, equations 5 to 7 and algorithm 1.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.pfedvem(model), clients, rounds=1)
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesfl.base.checks import number, refuse_idle
from bayesfl.base.protocols import AdditivePool, Batch, Likelihood, Server, Uplink, View
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
    server_mean,
    standard_normal,
    tempering,
)
from bayesfl.likelihoods import Categorical
from bayesfl.models.cutting import has_body
from bayesfl.optim import SGD, Rate, rate_at, refuse_divergence
from bayesfl.posteriors import MeanField


def pfedvem(
    model: nn.Module,
    *,
    head_epochs: int = 20,
    body_epochs: int = 5,
    batch_size: int | None = 50,
    head_lr: Rate = 1e-3,
    body_lr: Rate = 1e-2,
    momentum: float = 0.9,
    draws: int = 5,
    init_scale: float = 1.0,
    scale_floor: float = 1e-3,
    scale_prior: tuple[float, float] | None = None,
    scale_update: Literal["before", "after", "never"] = "before",
    prior_scale: float | None = None,
    scale_lr: float | None = None,
    head_start: Literal["normal", "module"] = "normal",
    beta: float = 0.0,
    likelihood_scale: Literal["sum", "mean"] = "sum",
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by pFedVEM: a shared body, and personal heads with Gaussian posteriors around a common mean.

    Args:
        model: A `bf.models.SplitModel`, or any module whose parameters are named `body.*` and `head.*`. It may be all head, as
            `bf.models.mlp(inputs, outputs=2, hidden=())` is: then this is a hierarchical logistic regression, and the body's
            options are refused.
        head_epochs: Number of full-batch variational steps on the head each round; the authors' code calls one step an epoch.
        body_epochs: Number of passes over the client's data for the body each round, while the head's posterior is fixed.
        batch_size: Number of examples of a step on the body; None for all of the client's.
        head_lr: Learning rate of the head's means and scales, or a schedule.
        body_lr: Learning rate of the body, or a schedule.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew in each phase.
        draws: Number of posterior draws of the head per step.
        init_scale: Standard deviation of q_j at the start, and of the server's first head. On images the default may kill the body's
            units in the first round, of which `simulate` warns; 0.1 does not there (docs/long-training.md).
        scale_floor: Smallest rho_j, in units of `init_scale`. It matters only above sqrt(head_lr / (1 + momentum)) at the round's rate, in
            the head's own units, below which rho_j never falls: at 1 / sqrt(2) of that, steps towards the centre diverge, and half of the
            limit is left to the curvature of the data (docs/derivations/pfedvem.md).
        scale_prior: Shape and scale of an inverse-gamma prior on rho_j^2, which keeps a client with a tiny rho_j from dominating the
            centre; None for no prior.
        scale_update: Whether rho_j is updated before the head moves, as in the authors' code, or after, as in a textbook M step, or stays
            at `prior_scale`.
        prior_scale: Under scale_update="never" the rho of all clients; None for `init_scale`. One under which steps of a rate `head_lr`
            towards the centre diverge is refused; where that is a schedule, `simulate` warns in the rounds that it looks at.
        scale_lr: Learning rate of the scales of q_j; None for `head_lr`, 0 to hold them. Another one needs a `head_lr` that is a number.
        head_start: Whether the first heads are drawn from N(0, init_scale^2), as in the authors' code, or are the module's own.
        beta: Share of the old body and centre that the server keeps, in [0, 1).
        likelihood_scale: Whether the head's likelihood is the `sum` over the client's data, as in the authors' code, or their `mean` with
            the whole KL, as in the paper's energy, which is a likelihood tempered by 1 / n_j.
        likelihood: Distribution of y given the model's outputs.

    Raises:
        ValueError: A number lies outside its range, `scale_update`, `head_start` or `likelihood_scale` is none of its words, an option
            is given that `scale_update` or a model without a body does not use, or steps towards the centre diverge under `prior_scale`.
    """
    if scale_update not in ("before", "after", "never"):
        raise ValueError(f"scale_update must be 'before', 'after' or 'never', got {scale_update!r}")
    if head_start not in ("normal", "module"):
        raise ValueError(f"head_start must be 'normal' or 'module', got {head_start!r}")
    never = scale_update == "never"
    refuse_idle(pfedvem, locals(), ("scale_floor", "scale_prior") if never else ("prior_scale",), f"under scale_update={scale_update!r}")
    if not has_body(model):
        refuse_idle(pfedvem, locals(), ("body_epochs", "body_lr", "batch_size"), "for a model that trains no parameter named body.*")
    for name, value in {"init_scale": init_scale, "scale_floor": scale_floor, "beta": beta}.items():
        number(name, value)
    if scale_prior is not None and not (isinstance(scale_prior, tuple | list) and len(scale_prior) == 2):
        raise ValueError(f"scale_prior must be two numbers, shape and scale, or None, got {scale_prior!r}")
    shape, scale = (number("each of scale_prior", value) for value in scale_prior or (0.0, 0.0))
    if not (scale_floor > 0 and shape >= 0 and scale >= 0):
        raise ValueError(f"scale_floor must be > 0, and scale_prior's shape and scale >= 0, got {scale_floor} and {scale_prior}")
    if not 0 <= beta < 1:
        raise ValueError(f"beta is the share of the old state that is kept and must lie in [0, 1), got {beta}")
    head_optimiser, body_optimiser = SGD(head_lr, momentum), SGD(body_lr, momentum)
    posterior = MeanField(init_scale=init_scale, scale_rate=_pace(scale_lr, head_lr))
    rho = init_scale if prior_scale is None else number("prior_scale", prior_scale)
    if not never and not 1e-15 < scale_floor * init_scale < 1e15:
        raise ValueError(f"scale_floor * init_scale must lie within (1e-15, 1e15), got {scale_floor} * {init_scale}")
    if never:
        if not 1e-15 < rho < 1e15:
            raise ValueError(f"prior_scale must lie within (1e-15, 1e15), so that its square is a number in float32, got {rho}")
        refuse_divergence(head_optimiser, rho**-2, "prior_scale", rho, lambda tie: tie**-0.5)
    both = ("body", "head") if has_body(model) else ("head",)

    def floored(rho2: Tensor, given: Server) -> Tensor:
        rate = rate_at(head_lr, given["round"], given["rounds"])
        return rho2.clamp_min(max((scale_floor * init_scale) ** 2, rate / (1 + momentum)))

    def variance(given: Server, view: View) -> Tensor:
        # Where rho_j was not updated in this round, it may be below the floor: at the start, or after rounds of smaller rates.
        return (torch.full_like(view["n"], rho**2) if never else floored(view["rho2"], given))[..., None]

    def relaxed(pool: AdditivePool) -> AdditivePool:
        return Relaxed(pool, 1 - beta) if beta else pool

    head = Block(
        "head.*",
        posterior=posterior,
        prior=Normal(centre=server_mean("head"), variance=variance),
        pool=relaxed(Mean(equal if never else lambda server, uplink: 1 / uplink["rho2"])),
        keep=True,
        start=standard_normal(init_scale) if head_start == "normal" else "module",
    )

    def update_scale(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        found = closest_variance(posterior.moments(view["head"]), given["head"]["loc"], shape=shape, scale=scale)
        return view | {"rho2": floored(found, given)}

    def pooled_scale(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        # A client never seen starts from the geometric mean of the cohort's scales, not from `init_scale`.
        return view | {"rho2": given["log_rho2"].exp()}

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        precision = 1 / uplink["rho2"]
        return {"log_rho2": uplink["rho2"].log().mean(), "largest_share": precision.max() / precision.sum()}

    energy = Energy("head", both, likelihood="sum", weight=tempering(likelihood_scale))
    head_step = Descend(energy, epochs=head_epochs, optimiser=head_optimiser, draws=draws)
    body_step = Descend(
        Energy("body", both, likelihood="mean"),
        epochs=body_epochs,
        batch_size=batch_size,
        optimiser=body_optimiser,
        draws=draws,
    )
    scale_step = Once(update_scale)
    steps = {"before": (scale_step, head_step), "after": (head_step, scale_step), "never": (head_step,)}[scale_update]
    held: dict[str, Any] = {"adapt": (head_step,)}
    learned: dict[str, Any] = {
        "private": {"rho2": init_scale**2},
        "reports": {"rho2": init_scale**2},
        "server": lambda blocks, clients: {
            "log_rho2": torch.tensor(2 * math.log(init_scale)),
            "largest_share": torch.tensor(1 / clients),
        },
        "broadcast": ("log_rho2",),  # `largest_share` stays on the server, for people to read
        "combine": combine,
        "adapt": (Once(pooled_scale), head_step, scale_step, head_step),
    }
    return Algorithm(
        model,
        blocks={"body": Block("body.*", pool=relaxed(Mean())), "head": head} if "body" in both else {"head": head},
        phases=(*steps, body_step) if "body" in both else steps,
        **(held if never else learned),
        parts=both,
        likelihood=likelihood,
        train="all",
        sampling="bernoulli",
    )


def pfedvem_held(model: nn.Module, **options: Any) -> Algorithm:
    """Federate `model` by pFedVEM with nothing learned of its scales: prior scale 1, widths 0.1, heads that start as the module's.

    It is `pfedmap` with noise of fixed size on the weights of the heads, and does not fall as `pfedvem` does when it is trained for long.
    The width was chosen on validation data of MNIST (docs/long-training.md); prior scale and start were not chosen on any.

    Args:
        model: As of `pfedvem`.
        **options: Options of `pfedvem`, which replace these, all but `scale_update`.

    Raises:
        ValueError: As of `pfedvem`, or `scale_update` is another than "never".
    """
    if options.get("scale_update", "never") != "never":
        raise ValueError(f"scale_update is 'never' in pfedvem_held, got {options['scale_update']!r}; pfedvem itself learns scales")
    held: dict[str, Any] = {"scale_update": "never", "prior_scale": 1.0, "init_scale": 0.1, "scale_lr": 0.0, "head_start": "module"}
    return pfedvem(model, **{**held, **options})


def _pace(scale_lr: float | None, head_lr: Rate) -> float:
    """Return how fast the scales of q_j move, as a multiple of the means.

    Raises:
        ValueError: `scale_lr` is negative or not finite, or is a multiple of no number: `head_lr` is a schedule, or 0.
    """
    if scale_lr is None:
        return 1.0
    if not 0 <= number("scale_lr", scale_lr) < math.inf:
        raise ValueError(f"scale_lr must be >= 0 and finite, got {scale_lr}")
    if scale_lr == 0:
        return 0.0
    if callable(head_lr) or head_lr == 0:
        what = "a schedule" if callable(head_lr) else "0"
        raise ValueError(f"scale_lr={scale_lr} is a multiple of a head_lr that is a number > 0, got {what}; take scale_lr=None or 0")
    return scale_lr / head_lr
