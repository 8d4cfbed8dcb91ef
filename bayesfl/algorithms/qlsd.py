"""QLSD: Langevin chains of one model on the server, driven by gradients that clients quantise.

The server has M chains. With $U_j = -log p(D_j | w) + prior_precision / (2 J) |w|^2$, J clients, a
cohort of C, and e standard normal, a round moves each chain

    $w <- w - step J / C sum_j Q(grad U_j(w)) + (2 step)^(1/2) e$.

A client estimates its gradient on `batch_size` examples, and sends, with s levels,

    $Q(v)_d = |v| sign(v_d) l_d / s$, $l_d = floor(s |v_d| / |v|)$, or one more

with probability $s |v_d| / |v| - l_d$: integers of one byte, and the mean of $Q(v)$ is v. The one
gradient must stay one: leave QLSD out of a study with `steps=`, which would change it. The paper
averages over the draws of one chain; here clients predict with the last draws of all chains.

Chains forget their starts after about 1 / (step x the posterior's least precision) rounds: for a
weight that only the prior holds, 10,000 at the defaults.

Cohorts, batches and quantisation add noise. All chains share cohorts and batches, whose noise
moves their mean; quantisation also makes them wider than the posterior. A smaller `step` reduces
both. The paper's variants with reference gradients, QLSD* and QLSD++, which reduce this noise, are
not implemented.

Source: Vono, Plassier, Durmus, Dieuleveut, Moulines, "QLSD: quantised Langevin stochastic dynamics
for Bayesian federated learning", AISTATS 2022, algorithm 1.
"""

from typing import Annotated

import torch
from torch import Tensor

from bayesfl.base.protocols import Batch, Server, Uplink, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Mixture,
    Normal,
    Once,
    options,
)
from bayesfl.likelihoods import Categorical
from bayesfl.models import anew
from bayesfl.optim import SGD


@options.method()
def qlsd(
    model: options.Model,
    *,
    chains: options.Count = 5,
    step: options.Positive = 1e-4,
    levels: Annotated[int, options.Range(1, 127, "[]")] = 16,
    batch_size: options.BatchSize = None,
    prior_precision: options.Positive = 1.0,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by QLSD: draws from the posterior of one model given all clients' rows.

    Args:
        chains: Number M of chains, each with its own initial weights.
        step: The chains' step. It must be below 2 over the largest curvature of the sum of all
            clients' losses.
        levels: Number s of levels of the quantiser, from 1 to 127.
        batch_size: Number of examples of a gradient; None for all of the client's.
        prior_precision: Precision of the prior $N(0, 1 / prior_precision)$ of every weight.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.qlsd(model)
        >>> method.uplink(method.init(4))["levels"]  # of each chain and weight, in a byte each
        ((5, 565), torch.int8)
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def alike(given: Server, view: View, batch: Batch) -> Tensor:
        return torch.stack([torch.ones_like(batch["weight"])] * chains, -2)

    def begin(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"start": view["w"]["loc"]}

    def quantise(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        slope = view["n"] * (view["start"] - view["w"]["loc"])
        unit = slope.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(slope.dtype).tiny) / levels
        exact = slope.abs() / unit
        more = torch.special.ndtr(data["normals"]["w"]) < exact - exact.floor()
        whole = (exact.floor() + more).clamp_max(levels)
        sent = {"levels": (slope.sign() * whole).to(torch.int8), "unit": unit}
        return {"w": {"loc": view["start"]}, **sent}

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        slope = server["size"] * (uplink["levels"] * uplink["unit"]).mean(0)
        rng = torch.Generator().manual_seed(int(server["noise"]))
        e = torch.randn(slope.shape, generator=rng, dtype=torch.float64).to(slope)
        return {"w": {"loc": server["w"]["loc"] - step * slope + (2 * step) ** 0.5 * e}}

    prior = Normal(
        centre=lambda given, view: torch.zeros_like(view["start"]),
        variance=lambda given, view: given["size"] / prior_precision,
    )
    gradient = Descend(
        Energy("w", ("w",), likelihood="mean", weight=alike),
        steps=1,
        batch_size=batch_size,
        optimiser=SGD(1.0),
    )
    w = Block(prior=prior, pool=None, copies=chains, start=anew(model))
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Algorithm(
        model,
        {"w": w},
        (Once(begin), gradient, Once(quantise, normals=("w",))),
        parts=("w",),
        likelihood=likelihood,
        server=lambda blocks, clients: {"size": float(clients)},
        broadcast=("size",),
        # a block that no pool changes would be one that clients have from the start
        address=lambda server, ids: {"w": {"loc": server["w"]["loc"].expand(len(ids), -1, -1)}},
        drawn={"noise": lambda rng: rng.integers(2**62)},
        private={"chains": torch.full((chains,), 1 / chains, dtype=torch.float64)},
        reports={
            "levels": torch.zeros(chains, size, dtype=torch.int8),
            "unit": torch.zeros(chains, 1),
        },
        combine=combine,
        predictor=Mixture("w", "chains"),
    )
