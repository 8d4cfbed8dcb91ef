"""FedPer: a shared body and personal heads, trained together.

Source: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers", arXiv:1912.00818, 2019.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.fedper(model), clients, rounds=1)
"""

from torch import nn

from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Descend, Energy
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Rate


def fedper(
    model: nn.Module,
    *,
    epochs: int = 5,
    batch_size: int | None = 50,
    lr: Rate = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    adapt_epochs: int = 20,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` (its parts named `body` and `head`) by FedPer: the server averages the body; heads stay on their clients.

    Args:
        model: A `bf.models.SplitModel`, or any module whose parameters are named `body.*` and `head.*`.
        epochs: Number of passes over a client's data each round.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule (round, rounds) -> rate.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew each round.
        weight_decay: L2 coefficient; its term is added to the gradient.
        adapt_epochs: Number of passes of a client that joins later, on its head.
        likelihood: Distribution of y given the model's outputs.
    """
    both = ("body", "head")
    rest = {"batch_size": batch_size, "optimiser": SGD(lr, momentum, weight_decay)}
    return Algorithm(
        model,
        {"body": Block("body.*"), "head": Block("head.*", pool=None, keep=True)},
        (Descend(Energy(both, both, likelihood="mean"), epochs=epochs, **rest),),
        parts=both,
        likelihood=likelihood,
        adapt=(Descend(Energy("head", both, likelihood="mean"), epochs=adapt_epochs, **rest),),
    )
