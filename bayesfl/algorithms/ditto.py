"""Ditto: a global model by FedAvg, and for each client a personal model pulled towards the global model received in the round.

Personal objective of client j:  F_j(v) + lambda / 2 |v - w|^2,  F_j a mean over its data. The pull is the prior N(w, 1 / (lambda n_j)).

The authors' code takes the steps of both models on the same batches; here each takes its own pass. The centre is fixed during
the round, so neither model's steps depend on the other's.

Source: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021, algorithm 1.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.ditto(model, lam=0.5), clients, rounds=1)
"""

from dataclasses import replace

from torch import nn

from bayesfl.algorithms.fedavg import fedavg
from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Energy, Mean, Normal, equal, inverse_size, server_mean, with_personal
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Rate


def ditto(
    model: nn.Module,
    *,
    lam: float = 1.0,
    epochs: int = 5,
    batch_size: int | None = 16,
    lr: Rate = 1e-2,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    adapt_epochs: int = 20,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by Ditto: FedAvg, and for each client a personal model that is pulled towards the global one.

    Args:
        model: Any module.
        lam: Strength of the pull towards the global model; 0 is local training. Steps need lr (curvature + lam) < 2.
        epochs: Number of passes over a client's data each round, for each of the two models.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule (round, rounds) -> rate.
        momentum: Momentum of SGD, in [0, 1); the authors' code has none.
        weight_decay: L2 coefficient; its term is added to the gradient.
        adapt_epochs: Number of passes of a client that joins later, from the global model.
        likelihood: Distribution of y given the model's outputs.
    """
    plain = fedavg(model, epochs=epochs, batch_size=batch_size, lr=lr, momentum=momentum, weight_decay=weight_decay, likelihood=likelihood)
    plain = replace(plain, blocks={"w": Block(pool=Mean(equal))})
    fit = replace(plain.phases[0], energy=Energy("v", ("v",), likelihood="mean"))
    tied = Normal(centre=server_mean("w"), variance=inverse_size(lam))
    return with_personal(plain, fit, prior=tied, adapt=(replace(fit, epochs=adapt_epochs),))
