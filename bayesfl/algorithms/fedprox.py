"""FedProx: FedAvg with clients pulled towards the model they received, F_j(v) + mu / 2 |v - w|^2 with F_j a mean over the data.

The pull is a Gaussian prior N(w, 1 / (mu n_j)) on the client's weights. It is part of the gradient, so with momentum it enters the
velocity; some public implementations add it after the velocity.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks", MLSys 2020, algorithm 2.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.fedprox(model, mu=0.1), clients, rounds=1)
"""

from torch import nn

from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Descend, Energy, Normal, inverse_size, server_mean
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Rate


def fedprox(
    model: nn.Module,
    *,
    mu: float = 0.1,
    epochs: int = 5,
    batch_size: int | None = 50,
    lr: Rate = 1e-2,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedProx: FedAvg, where each client is pulled towards the model that it received.

    Args:
        model: Any module.
        mu: Strength of the pull towards the received model; 0 is FedAvg.
        epochs: Number of passes over a client's data each round.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule (round, rounds) -> rate.
        momentum: Momentum of SGD, in [0, 1); the paper has none.
        weight_decay: L2 coefficient; its term is added to the gradient.
        likelihood: Distribution of y given the model's outputs.
    """
    prior = Normal(centre=server_mean("w"), variance=inverse_size(mu))
    step = Descend(Energy("w", ("w",), likelihood="mean"), epochs=epochs, batch_size=batch_size, optimiser=SGD(lr, momentum, weight_decay))
    return Algorithm(model, {"w": Block(prior=prior)}, (step,), parts=("w",), likelihood=likelihood)
