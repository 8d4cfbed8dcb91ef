"""Ditto: a global model by FedAvg, and for each client a personal model pulled towards the global
model received in the round.

Personal objective of client j: $F_j(v) + lambda / 2 |v - w|^2$, $F_j$ a mean over its data. The
pull is the prior $N(w, 1 / (lambda n_j))$.

The authors' code takes the steps of both models on the same batches; here each takes its own pass.
The centre is fixed during the round, so neither model's steps depend on the other's.

Source: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization",
ICML 2021, algorithm 1.
"""

from dataclasses import replace

from bayesfl.algorithms.fedavg import fedavg
from bayesfl.composition import (
    Algorithm,
    Block,
    Energy,
    Mean,
    Normal,
    equal,
    inverse_size,
    options,
    server_mean,
    with_personal,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def ditto(
    model: options.Model,
    *,
    lam: options.Strength = 1.0,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 16,
    optimiser: options.Optimiser = SGD(1e-2),
    adapt_epochs: options.AdaptEpochs = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by Ditto: FedAvg, and for each client a personal model that is pulled
    towards the global one.

    Args:
        lam: Strength of the pull towards the global model; 0 is local training. Steps need
            $rate (curvature + lam) < 2$.
        epochs: Number of passes over a client's data each round, for each of the two models.
        optimiser: Optimiser of both models; the authors' code has no momentum.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.ditto(model, lam=0.5)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    plain = fedavg(
        model, epochs=epochs, batch_size=batch_size, optimiser=optimiser, likelihood=likelihood
    )
    plain = replace(plain, blocks={"w": Block(pool=Mean(equal))})
    fit = replace(plain.phases[0], energy=Energy("v", ("v",), likelihood="mean"))
    tied = Normal(centre=server_mean("w"), variance=inverse_size(lam))
    return with_personal(plain, fit, prior=tied, adapt=(replace(fit, epochs=adapt_epochs),))
