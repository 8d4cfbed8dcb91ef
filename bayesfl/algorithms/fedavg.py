"""FedAvg: one model for all clients, the mean of their locally trained models by size; FedAvg-FT fine-tunes it on each client.

Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017, algorithm 1. Fine-tuning: Marfoq et al., "Federated multi-task learning under a mixture of distributions",
NeurIPS 2021, where FedAvg+ takes one more local epoch before each evaluation.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.fedavg(model, epochs=1), clients, rounds=1)
"""

from dataclasses import replace

from torch import nn

from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Descend, Energy
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Rate


def fedavg(
    model: nn.Module,
    *,
    epochs: int = 5,
    batch_size: int | None = 50,
    lr: Rate = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedAvg: clients train the common model, and the server averages their weights.

    Args:
        model: Any module.
        epochs: Number of passes over a client's data each round.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule (round, rounds) -> rate.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew each round.
        weight_decay: L2 coefficient; its term is added to the gradient.
        likelihood: Distribution of y given the model's outputs.
    """
    step = Descend(Energy("w", ("w",), likelihood="mean"), epochs=epochs, batch_size=batch_size, optimiser=SGD(lr, momentum, weight_decay))
    return Algorithm(model, {"w": Block()}, (step,), parts=("w",), likelihood=likelihood)


def fedavg_ft(
    model: nn.Module,
    *,
    epochs: int = 5,
    batch_size: int | None = 50,
    lr: Rate = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    finetune_epochs: int = 1,
    finetune_lr: Rate | None = None,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedAvg-FT: FedAvg, after which every client fine-tunes a copy of the whole model before it predicts.

    Args:
        model: Any module.
        epochs: As in `fedavg`.
        batch_size: As in `fedavg`.
        lr: As in `fedavg`.
        momentum: As in `fedavg`.
        weight_decay: As in `fedavg`.
        finetune_epochs: Number of fine-tuning passes over a client's data before it predicts.
        finetune_lr: Learning rate of fine-tuning; None for `lr`.
        likelihood: Distribution of y given the model's outputs.
    """
    plain = fedavg(model, epochs=epochs, batch_size=batch_size, lr=lr, momentum=momentum, weight_decay=weight_decay, likelihood=likelihood)
    (step,) = plain.phases
    rate = lr if finetune_lr is None else finetune_lr
    return replace(plain, finetune=(replace(step, epochs=finetune_epochs, optimiser=replace(step.optimiser, rate=rate)),))
