"""Local training: every client trains alone, from a common start, and nothing is sent. It is the baseline of personalised methods.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.local(model), clients, rounds=1)
"""

from torch import nn

from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Descend, Energy
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Rate


def local(
    model: nn.Module,
    *,
    epochs: int = 1,
    batch_size: int | None = 50,
    lr: Rate = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    adapt_epochs: int = 100,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Train `model` on each client alone, from a common start; nothing is sent.

    Args:
        model: Any module.
        epochs: Number of passes over the client's data each round; Zhu et al. (FL-NeurIPS 2022) train 100 rounds of one pass.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule (round, rounds) -> rate.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew each round.
        weight_decay: L2 coefficient; its term is added to the gradient.
        adapt_epochs: Number of passes of a client that joins later, over its own data.
        likelihood: Distribution of y given the model's outputs.
    """
    energy, optimiser = Energy("w", ("w",), likelihood="mean"), SGD(lr, momentum, weight_decay)
    return Algorithm(
        model,
        {"w": Block(pool=None, keep=True)},
        (Descend(energy, epochs=epochs, batch_size=batch_size, optimiser=optimiser),),
        parts=("w",),
        likelihood=likelihood,
        adapt=(Descend(energy, epochs=adapt_epochs, batch_size=batch_size, optimiser=optimiser),),
        train="all",
    )
