"""FedBABU: only the body is trained and averaged, under one random head that stays fixed; clients fine-tune both to predict.

Source: Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR 2022, algorithm 1.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.fedbabu(model), clients, rounds=1)
"""

from torch import nn

from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Descend, Energy, Mean, equal
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Rate


def fedbabu(
    model: nn.Module,
    *,
    epochs: int = 5,
    batch_size: int | None = 50,
    lr: Rate = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    finetune_epochs: int = 5,
    finetune_lr: Rate | None = None,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedBABU: the body is averaged under a fixed random head, and clients fine-tune both to predict.

    Args:
        model: A `bf.models.SplitModel`, or any module whose parameters are named `body.*` and `head.*`; its head is the fixed one.
        epochs: Number of passes over a client's data for the body each round.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule; the paper's MobileNet takes `bayesfl.optim.multistep(0.1)`.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew each round.
        weight_decay: L2 coefficient; its term is added to the gradient.
        finetune_epochs: Number of fine-tuning passes over a client's data, on all parameters, before it predicts.
        finetune_lr: Learning rate of fine-tuning; None for `lr`.
        likelihood: Distribution of y given the model's outputs.
    """
    both = ("body", "head")
    rate = lr if finetune_lr is None else finetune_lr
    return Algorithm(
        model,
        {"body": Block("body.*", pool=Mean(equal)), "head": Block("head.*", pool=None)},
        (
            Descend(
                Energy("body", both, likelihood="mean"),
                epochs=epochs,
                batch_size=batch_size,
                optimiser=SGD(lr, momentum, weight_decay),
            ),
        ),
        parts=both,
        likelihood=likelihood,
        finetune=(
            Descend(
                Energy(both, both, likelihood="mean"),
                epochs=finetune_epochs,
                batch_size=batch_size,
                optimiser=SGD(rate, momentum, weight_decay),
            ),
        ),
    )
