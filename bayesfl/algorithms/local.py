"""Local training: every client trains alone from a common start, and sends nothing. It is the
baseline of personalised methods.
"""

from bayesfl.composition import Algorithm, Block, Descend, Energy, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def local(
    model: options.Model,
    *,
    epochs: options.Epochs = 1,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9),
    adapt_epochs: options.AdaptEpochs = 100,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Train `model` on each client alone, from a common start; nothing is sent.

    Args:
        epochs: Number of passes over a client's data each round; Zhu et al. (FL-NeurIPS 2022) train
            100 rounds of one pass.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.local(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        []
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    energy = Energy("w", ("w",), likelihood="mean")
    rest = {"batch_size": batch_size, "optimiser": optimiser}
    return Algorithm(
        model,
        {"w": Block(pool=None, keep=True)},
        (Descend(energy, epochs=epochs, **rest),),
        parts=("w",),
        likelihood=likelihood,
        adapt=(Descend(energy, epochs=adapt_epochs, **rest),),
        train="all",
    )
