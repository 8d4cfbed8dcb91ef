"""SCAFFOLD: FedAvg whose steps are corrected by control variates, so that the clients' models do
not drift apart.

The server has c, each client $c_i$, both initially 0. From the received model x a client makes K
steps $y <- y - lr (g - c_i + c)$, and then computes (the paper's option II)

    $c_i^new = c_i - c + (x - y) / (K lr)$,

the mean of its gradients g. It sends y and $c_i^new - c_i$. With N clients and a cohort of S, the
server computes $x <- x + server_lr mean_S (y - x)$ and $c <- c + sum_S (c_i^new - c_i) / N$, so c
is the mean of all clients' $c_i$.

The correction is linear in the weights, the prior `Tilt`. A weight decay is part of g. In a round
at rate 0, such as in a warm-up, no $c_i$ changes. Clients that join a continued run (`start=`)
begin with $c_i = c$, so c stays the mean; if others have left, all clients begin so. Option I of
the paper, with the gradient of all of a client's data at x as $c_i^new$, is not implemented.

Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging
for federated learning", ICML 2020, algorithm 1 and equations 3 to 5. The paper's server step is 1;
its rates are tuned, and its batches are a fifth of a client's data.
"""

import torch
from torch import Tensor

from bayesfl.base.protocols import Batch, Server, Uplink, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Mean,
    Once,
    Relaxed,
    Tilt,
    equal,
    options,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, rate_at


@options.method()
def scaffold(
    model: options.Model,
    *,
    epochs: options.Epochs = 1,
    batch_size: options.BatchSize = 50,
    optimiser: options.PlainSGD = SGD(1e-2),
    server_lr: options.Positive = 1.0,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by SCAFFOLD: FedAvg with a correction of every step by the difference
    between the federation's and the client's gradients.

    Args:
        server_lr: The server's step size, > 0; 1 is the mean of the clients' models.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.scaffold(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc', 'change']
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def vary(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        rate = rate_at(optimiser.rate, given["round"], given["rounds"])
        if not rate:
            return view
        gone = given["w"]["loc"] - view["w"]["loc"]
        own = view["own"] - given["c"] + gone / (view["steps"] * rate)
        return {"own": own, "change": own - view["own"]}

    step = Descend(
        Energy("w", ("w",), likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
        counts="steps",
    )
    return Algorithm(
        model,
        {"w": Block(prior=Tilt(correction), pool=Relaxed(Mean(equal), server_lr))},
        (step, Once(vary)),
        parts=("w",),
        likelihood=likelihood,
        server=lambda blocks, clients: {"c": torch.zeros_like(blocks["w"]["loc"])},
        broadcast=("c",),
        private={"own": lambda given: given["c"]},  # for a new client, so c stays the mean
        reports={"change": lambda given: torch.zeros_like(given["c"])},
        combine=combine,
        tally=True,
    )


def correction(given: Server, view: View) -> Tensor:
    """Return c - c_i [..., D], times the client's number of examples: the energy's mean divides a
    prior by it.
    """
    return view["n"].unsqueeze(-1) * (given["c"] - view["own"])


def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
    """Move c by the changes of the cohort's control variates, divided by the number of clients."""
    change = uplink["change"].sum(0, dtype=torch.float64) / uplink["clients"]
    return {"c": server["c"] + change.to(server["c"])}
