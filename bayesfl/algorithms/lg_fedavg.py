"""LG-FedAvg: personal bodies and a shared head, the reverse of FedPer.

The paper starts from a model trained by FedAvg; to do so, train one and pass the module with its weights.

Source: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act globally: federated learning with local
and global representations", arXiv:2001.01523, 2020.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.lg_fedavg(model), clients, rounds=1)
"""

from torch import nn

from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Descend, Energy
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Rate


def lg_fedavg(
    model: nn.Module,
    *,
    epochs: int = 1,
    batch_size: int | None = 50,
    lr: Rate = 5e-2,
    momentum: float = 0.5,
    weight_decay: float = 0.0,
    adapt_epochs: int = 20,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` (its parts named `body` and `head`) by LG-FedAvg: the server averages the head; bodies stay on their clients.

    Args:
        model: A `bf.models.SplitModel`, or any module whose parameters are named `body.*` and `head.*`.
        epochs: Number of passes over a client's data each round.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule (round, rounds) -> rate; the paper's is 0.05 on MNIST and 0.1 on CIFAR-10.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew each round.
        weight_decay: L2 coefficient; its term is added to the gradient.
        adapt_epochs: Number of passes of a client that joins later, on its body under the shared head.
        likelihood: Distribution of y given the model's outputs.
    """
    both = ("body", "head")
    rest = {"batch_size": batch_size, "optimiser": SGD(lr, momentum, weight_decay)}
    return Algorithm(
        model,
        {"body": Block("body.*", pool=None, keep=True), "head": Block("head.*")},
        (Descend(Energy(both, both, likelihood="mean"), epochs=epochs, **rest),),
        parts=both,
        likelihood=likelihood,
        adapt=(Descend(Energy("body", both, likelihood="mean"), epochs=adapt_epochs, **rest),),
    )
