"""FedBABU: only the body is trained and averaged, under one random head that stays fixed; clients
fine-tune both to predict.

Source: Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification",
ICLR 2022, algorithm 1.
"""

from bayesfl.composition import Algorithm, Block, Descend, Energy, Mean, equal, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def fedbabu(
    model: options.BodyAndHead,
    *,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9),
    finetune_epochs: options.FinetuneEpochs = 5,
    finetune_optimiser: options.FinetuneOptimiser = None,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedBABU: the body is averaged under a fixed random head, and clients
    fine-tune both to predict.

    Args:
        optimiser: Optimiser of the body; for the paper's MobileNet its rates are
            `bayesfl.optim.multistep(0.1)`.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedbabu(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    both = ("body", "head")
    tuner = finetune_optimiser or optimiser
    fit = Descend(
        Energy("body", both, likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
    )
    tune = Descend(
        Energy(both, both, likelihood="mean"),
        epochs=finetune_epochs,
        batch_size=batch_size,
        optimiser=tuner,
    )
    return Algorithm(
        model,
        {"body": Block("body.*", pool=Mean(equal)), "head": Block("head.*", pool=None)},
        (fit,),
        parts=both,
        likelihood=likelihood,
        finetune=(tune,),
    )
