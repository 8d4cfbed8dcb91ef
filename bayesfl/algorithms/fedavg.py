"""FedAvg: one model for all clients, the mean of their locally trained models by size; FedAvg-FT
fine-tunes it on each client.

Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep
networks from decentralized data", AISTATS 2017, algorithm 1. Fine-tuning: Marfoq et al., "Federated
multi-task learning under a mixture of distributions", NeurIPS 2021, where FedAvg+ takes one more
local epoch before each evaluation.
"""

from dataclasses import replace

from bayesfl.composition import Algorithm, Block, Descend, Energy, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def fedavg(
    model: options.Model,
    *,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedAvg: clients train the common model, and the server averages their
    weights.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedavg(model, epochs=1)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    step = Descend(
        Energy("w", ("w",), likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
    )
    return Algorithm(model, {"w": Block()}, (step,), parts=("w",), likelihood=likelihood)


@options.method()
def fedavg_ft(
    model: options.Model,
    *,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9),
    finetune_epochs: options.FinetuneEpochs = 1,
    finetune_optimiser: options.FinetuneOptimiser = None,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedAvg-FT: FedAvg, after which every client fine-tunes a copy of the
    whole model before it predicts.

    Example:
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.fedavg_ft(model, finetune_epochs=2)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
    """
    plain = fedavg(
        model, epochs=epochs, batch_size=batch_size, optimiser=optimiser, likelihood=likelihood
    )
    (step,) = plain.phases
    return replace(
        plain,
        finetune=(
            replace(step, epochs=finetune_epochs, optimiser=finetune_optimiser or optimiser),
        ),
    )
