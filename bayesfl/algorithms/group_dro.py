"""Distributed GroupDRO: one model for all whose worst environment has the smallest loss, by weights that grow where the loss is large.

    min_w max_q sum_e q_e R_e(w),  q on the simplex of all clients' environments.

Each round a client measures its mean losses R_e at the model received, and trains on  sum_e q_e R_e  over its own environments; the
server updates  q_e <- q_e exp(eta R_e) / Z  and averages the models, each weighted by the sum of its client's q_e. With one plain local
step this is a gradient step on sum_e q_e R_e. The weights are known only once all losses are, so the server holds a round's models until
then. A client with one environment trains on its plain risk. Beside its model a client sends two numbers for each of `environments` places:
the risk, and whether it has any example there.

Source: Sagawa, Koh, Hashimoto, Liang, "Distributionally robust neural networks for group shifts", ICLR 2020, algorithm 1 (there for one
machine); distributed as a baseline and as the lower problem of PerInvFL (see `perinvfl`). The released code of that paper keeps the first
round's losses for ever and uses q twice, in the local loss and in the mean; here losses are measured anew each round and q is used once.

>>> import bayesfl as bf
>>> clients = bf.data.coloured("digits")
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=2)
>>> result = bf.simulate(bf.algorithms.group_dro(model), clients, rounds=1)
"""

import math

import torch
from torch import Tensor, nn

from bayesfl.base.checks import number, whole
from bayesfl.base.protocols import Batch, Likelihood, Server, Uplink, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Once, Stack, by_environment, evenly, reweighted
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam, Optimiser


def group_dro(
    model: nn.Module,
    *,
    eta: float = 1e-2,
    environments: int = 1,
    loss_examples: int | None = None,
    steps: int = 5,
    batch_size: int | None = 200,
    optimiser: Optimiser = Adam(5e-4),
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by GroupDRO: one model whose largest loss over all environments is small; the data need environments.

    Only the weights of a round's cohort are updated, and their sum is kept. A client starts with equal weight at each of its `environments`
    places; when it first takes part and has fewer environments, the weight of the missing ones goes to all others in proportion.
    `result.server["log_q"]` has the weights' logarithms, [J, environments].

    Args:
        model: Any module.
        eta: Step size of the weights' logarithms, per nat of loss, >= 0.
        environments: Largest number of environments of a client.
        loss_examples: Number of a client's training examples on which its losses are measured, the same examples every round, in equal
            shares from each of its environments and evenly spaced there; at least `environments`, None for all.
        steps: Number of mini-batches of a client in a round.
        batch_size: Number of examples of a step; None for all of the client's.
        optimiser: Optimiser of the clients; its state is kept from round to round.
        likelihood: Distribution of y given the model's outputs.

    Raises:
        ValueError: A number lies outside its range; in the first round, a client has more than `environments` environments.
    """
    whole("environments", environments, least=1)
    whole("steps", steps, least=1)
    if not 0 <= number("eta", eta) < math.inf:
        raise ValueError(f"eta is the step of the weights and must be >= 0 and finite, got {eta}")
    if loss_examples is not None:
        if whole("loss_examples", loss_examples, least=1) < environments:
            raise ValueError(
                f"loss_examples must be at least environments={environments}, so that none is lost, got {loss_examples}: "
                "pass more, or None for all of a client's"
            )

    def measure(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        _, count = by_environment(data["weight"], data)
        if (found := count.shape[-1]) > environments:
            raise ValueError(f"clients have up to {found} environments, the method was made for {environments}: pass environments={found}")
        some = evenly(data, loss_examples)
        risk, seen = by_environment(algorithm.losses(algorithm.leaves(("w",), view), some), some)
        risk, seen, count = (torch.nn.functional.pad(t, (0, environments - found)) for t in (risk, seen, count))
        # Each example is weighted by q_e / (n_e / n), so that batches drawn from all examples give sum_e q_e R_e.
        q = torch.where(seen > 0, view["log_q"] + eta * risk, torch.full_like(risk, -torch.inf)).softmax(-1)
        return view | {"risk": risk, "present": (seen > 0).to(risk), "emphasis": q * view["n"] / count.clamp_min(1)}

    def counted(given: Server, view: View, batch: Batch) -> Tensor:
        emphasis = view["emphasis"][..., : batch["environment"].shape[-1]]
        return (batch["environment"] @ emphasis.unsqueeze(-1)).squeeze(-1)

    def start(blocks: Server, clients: int) -> Server:
        return {"log_q": blocks["w"]["loc"].new_full((clients, environments), -math.log(clients * environments))}

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        log_q, loc = server["log_q"], server["w"]["loc"]
        new = reweighted(log_q[ids], uplink["risk"], uplink["present"], eta)
        share = new.logsumexp(-1).softmax(0)  # in logarithms, as a cohort's weights may all be almost 0
        known = log_q.double().index_copy(0, ids, new)
        known = known - known.flatten().logsumexp(0)  # shares out the weight of environments that do not exist
        return {"log_q": known.to(log_q), "w": {"loc": (share @ uplink["w"]["loc"].double()).to(loc)}}

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
        reports={"risk": torch.zeros(environments), "present": torch.ones(environments)},
        combine=combine,
    )
