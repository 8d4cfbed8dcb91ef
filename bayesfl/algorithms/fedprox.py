"""FedProx: FedAvg with clients pulled towards the model they received, $F_j(v) + mu / 2 |v - w|^2$
with $F_j$ a mean over the data.

The pull is a Gaussian prior $N(w, 1 / (mu n_j))$ on the client's weights. It is part of the
gradient, so with momentum it enters the velocity; some public implementations add it after the
velocity.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous
networks", MLSys 2020, algorithm 2.
"""

from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Normal,
    inverse_size,
    options,
    server_mean,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def fedprox(
    model: options.Model,
    *,
    mu: options.Strength = 0.1,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedProx: FedAvg, where each client is pulled towards the model that it
    received.

    Args:
        mu: Strength of the pull towards the received model; 0 is FedAvg.
        optimiser: Optimiser of the clients' steps; the paper's has no momentum.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedprox(model, mu=0.1)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    prior = Normal(centre=server_mean("w"), variance=inverse_size(mu))
    step = Descend(
        Energy("w", ("w",), likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
    )
    return Algorithm(model, {"w": Block(prior=prior)}, (step,), parts=("w",), likelihood=likelihood)
