"""Distributed GroupDRO: one model for all clients that minimises the loss of the worst environment,
by weights that grow with the loss.

    $min_w max_q sum_e q_e R_e(w)$, q on the simplex of all clients' environments.

Each round a client measures its mean losses $R_e$ at the model received, and trains on
$sum_e q_e R_e$ over its own environments; the server updates $q_e <- q_e exp(eta R_e) / Z$ and
averages the models, each weighted by the sum of its client's $q_e$. With one plain local step this
is a gradient step on $sum_e q_e R_e$. The weights depend on all losses, so the server stores a
round's models until it has these. A client with one environment trains on its plain risk. In
addition to its model, a client sends two numbers for each of `environments` places: the risk, and
whether it has an example there.

Source: Sagawa, Koh, Hashimoto, Liang, "Distributionally robust neural networks for group shifts",
ICLR 2020, algorithm 1 (there for one machine); distributed as a baseline and as the lower problem
of PerInvFL (see `perinvfl`). The released code of that paper keeps the first round's losses and
uses q twice, in the local loss and in the mean; here losses are measured in each round and q is
used once.
"""

import math

import torch
from torch import Tensor

from bayesfl.base.protocols import Batch, Reported, Server, Uplink, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Once,
    Stack,
    by_environment,
    evenly,
    options,
    reweighted,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam


@options.method()
def group_dro(
    model: options.Model,
    *,
    eta: options.Eta = 1e-2,
    environments: options.Environments = 1,
    loss_examples: options.LossExamples = None,
    steps: options.Steps = 5,
    batch_size: options.BatchSize = 200,
    optimiser: options.KeptOptimiser = Adam(5e-4),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by GroupDRO: one model that minimises the largest loss over environments,
    which the data must have.

    Only the weights of a round's cohort are updated, and their sum does not change. A client starts
    with equal weights at its `environments` places. If it has fewer environments, its first round
    distributes the weights of the missing ones to all others in proportion.
    `result.server["log_q"]` has the weights' logarithms, [J, environments].

    Raises:
        ValueError: In the first round, a client has more than `environments` environments.

    Example:
        >>> clients = bf.data.coloured("digits")
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=2)
        >>> method = bf.algorithms.group_dro(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc', 'risk', 'present']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    if loss_examples is not None and loss_examples < environments:
        raise ValueError(
            f"loss_examples must be at least environments={environments}, so that each has one, "
            f"got {loss_examples}: pass more, or None for all of a client's"
        )

    def measure(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        _, count = by_environment(data["weight"], data)
        if (found := count.shape[-1]) > environments:
            raise ValueError(
                f"clients have up to {found} environments, the method was made for {environments}: "
                f"pass environments={found}"
            )
        some = evenly(data, loss_examples)
        risk, seen = by_environment(algorithm.losses(algorithm.leaves(("w",), view), some), some)
        risk, seen, count = (
            torch.nn.functional.pad(t, (0, environments - found)) for t in (risk, seen, count)
        )
        # Each example has the weight q_e / (n_e / n), so that batches drawn from all examples give
        # sum_e q_e R_e.
        q = torch.where(
            seen > 0, view["log_q"] + eta * risk, torch.full_like(risk, -torch.inf)
        ).softmax(-1)
        return {
            "risk": risk,
            "present": (seen > 0).to(risk),
            "emphasis": q * view["n"] / count.clamp_min(1),
        }

    def counted(given: Server, view: View, batch: Batch) -> Tensor:
        emphasis = view["emphasis"][..., : batch["environment"].shape[-1]]
        return (batch["environment"] @ emphasis.unsqueeze(-1)).squeeze(-1)

    def start(blocks: Server, clients: int) -> Server:
        return {
            "log_q": blocks["w"]["loc"].new_full(
                (clients, environments), -math.log(clients * environments)
            )
        }

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        log_q, loc = server["log_q"], server["w"]["loc"]
        new = reweighted(log_q[ids], uplink["risk"], uplink["present"], eta)
        # In logarithms, because a cohort's weights may all be almost 0.
        share = new.logsumexp(-1).softmax(0)
        known = log_q.double().index_copy(0, ids, new)
        # Distributes the weight of environments that do not exist.
        known = known - known.flatten().logsumexp(0)
        return {
            "log_q": known.to(log_q),
            "w": {"loc": (share @ uplink["w"]["loc"].double()).to(loc)},
        }

    step = Descend(
        Energy("w", ("w",), likelihood="mean", weight=counted),
        steps=steps,
        batch_size=batch_size,
        optimiser=optimiser,
        persist="w_optimiser",
    )
    return Algorithm(
        model,
        {"w": Block(pool=Stack())},
        (Once(measure, data=True), step),
        parts=("w",),
        likelihood=likelihood,
        server=start,
        address=lambda server, ids: {"log_q": server["log_q"][ids]},
        reports={
            "risk": torch.zeros(environments),
            "present": Reported(torch.ones(environments), options.Range(0, 1, "[]")),
        },
        combine=combine,
    )
