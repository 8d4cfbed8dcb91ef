"""FedRep: a shared body and personal heads; each round the head is trained first, then the body with the head fixed.

Source: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for personalized federated learning", ICML 2021,
algorithm 1; defaults from its CIFAR-10 experiments.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.fedrep(model), clients, rounds=1)
"""

from torch import nn

from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Descend, Energy
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Rate


def fedrep(
    model: nn.Module,
    *,
    head_epochs: int = 10,
    body_epochs: int = 1,
    batch_size: int | None = 10,
    lr: Rate = 1e-2,
    momentum: float = 0.5,
    weight_decay: float = 0.0,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` (its parts named `body` and `head`) by FedRep: a shared body and personal heads, trained in turn.

    Args:
        model: A `bf.models.SplitModel`, or any module whose parameters are named `body.*` and `head.*`.
        head_epochs: Number of passes over a client's data for its head each round; also of a client that joins later.
        body_epochs: Number of passes for the body after that.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule (round, rounds) -> rate.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew in each phase.
        weight_decay: L2 coefficient; its term is added to the gradient.
        likelihood: Distribution of y given the model's outputs.
    """
    both = ("body", "head")
    rest = {"batch_size": batch_size, "optimiser": SGD(lr, momentum, weight_decay)}
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
