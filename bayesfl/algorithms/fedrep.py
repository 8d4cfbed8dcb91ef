"""FedRep: a shared body and personal heads; each round trains the head first, then the body with
the head fixed.

Source: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for personalized
federated learning", ICML 2021, algorithm 1; defaults from its CIFAR-10 experiments.
"""

from bayesfl.composition import Algorithm, Block, Descend, Energy, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def fedrep(
    model: options.BodyAndHead,
    *,
    head_epochs: options.Epochs = 10,
    body_epochs: options.BodyEpochs = 1,
    batch_size: options.BatchSize = 10,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.5),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedRep: a shared body and personal heads, trained in turn by one
    optimiser.

    Args:
        head_epochs: Number of passes over a client's data for its head each round; also for a
            client that joins later.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedrep(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    both = ("body", "head")
    rest = {"batch_size": batch_size, "optimiser": optimiser}
    fit_head = Descend(Energy("head", both, likelihood="mean"), epochs=head_epochs, **rest)
    fit_body = Descend(Energy("body", both, likelihood="mean"), epochs=body_epochs, **rest)
    return Algorithm(
        model,
        {"body": Block("body.*"), "head": Block("head.*", pool=None, keep=True)},
        (fit_head, fit_body),
        parts=both,
        likelihood=likelihood,
        adapt=(fit_head,),
    )
