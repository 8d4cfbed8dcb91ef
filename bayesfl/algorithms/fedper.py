"""FedPer: a shared body and personal heads, trained together.

Source: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers",
arXiv:1912.00818, 2019.
"""

from bayesfl.composition import Algorithm, Block, Descend, Energy, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def fedper(
    model: options.BodyAndHead,
    *,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9),
    adapt_epochs: options.AdaptEpochs = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedPer: the server averages the body; heads stay on their clients, and
    new clients train one.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedper(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    both = ("body", "head")
    rest = {"batch_size": batch_size, "optimiser": optimiser}
    return Algorithm(
        model,
        {"body": Block("body.*"), "head": Block("head.*", pool=None, keep=True)},
        (Descend(Energy(both, both, likelihood="mean"), epochs=epochs, **rest),),
        parts=both,
        likelihood=likelihood,
        adapt=(Descend(Energy("head", both, likelihood="mean"), epochs=adapt_epochs, **rest),),
    )
