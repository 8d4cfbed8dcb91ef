"""Fed-RoD: a shared body with two heads. The generic one is trained for all classes alike, and
averaged; the personal one adds to its logits what a client's own class frequencies ask for.

With z the features of the body theta, psi the generic and phi the personal head, and n_k the
client's number of examples of class k, every batch makes a step on each of

    theta, psi:  the balanced softmax, the mean of -log( n_y e^psi_y(z) / sum_k n_k e^psi_k(z) ),
    phi:         the mean of -log softmax_y( psi(z) + phi(z) ) with psi and z as constants.

Clients predict by psi(z) + phi(z), and the federation, as in the history's `global_` columns, by
psi(z). Heads are linear, so that the sum of their logits is the head of weights psi + phi, which
is the block `personal`. phi starts at 0.

A class that a client has not, with n_k = 0, gets no gradient from it. The two steps of a batch do
not read each other's results. Fed-RoD (hyper), where a network makes phi from n_k, is not here.

Source: Chen, Chao, "On bridging generic and personalized federated learning for image
classification", ICLR 2022, equations 6 to 8; the authors' code is not public.

>>> import bayesfl as bf
>>> clients = bf.data.dirichlet("digits", clients=4, alpha=0.3)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.fedrod(model), clients, rounds=1)
"""

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Once,
    Penalty,
    Repeat,
    options,
    standard_normal,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD

GENERIC = ("body", "head")


@options.method()
def fedrod(
    model: options.Split,
    *,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9),
    adapt_epochs: options.AdaptEpochs = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by Fed-RoD: body and generic head are trained by a balanced softmax and
    averaged; a personal head adds to the logits.

    Args:
        model: A `bf.models.SplitModel` whose head is one `nn.Linear`.
        optimiser: Optimiser of both steps, with a state for each, which starts anew each round.
        likelihood: `Categorical`, without smoothing: a class that a client has not would have an
            infinite loss.

    Raises:
        ValueError: The head is not one `nn.Linear`, or the likelihood another.
    """
    if not isinstance(model.head, nn.Linear):
        raise ValueError(
            f"model must have a head that is one nn.Linear, got {type(model.head).__name__}; the "
            "sum of two heads' logits would be no head's"
        )
    if not isinstance(likelihood, Categorical) or likelihood.smoothing:
        raise ValueError(
            f"likelihood must be Categorical() without smoothing, got {likelihood!r}: the balanced "
            "softmax counts the examples of each class"
        )
    classes = model.head.out_features

    def count(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        of_class = F.one_hot(data["y"], classes).to(data["weight"])
        return view | {"counts": data["weight"] @ of_class}

    generic = Energy(GENERIC, GENERIC, likelihood="mean", penalty=shifted(likelihood, by_counts))
    personal = Energy(
        "phi",
        ("body", "phi"),
        likelihood="mean",
        penalty=shifted(likelihood, by_generic),
        at={"generic": generic_model},
    )
    own, common = (Descend(energy, optimiser=optimiser) for energy in (personal, generic))
    train = Repeat((own, common), epochs=epochs, batch_size=batch_size)
    later = replace(own, epochs=adapt_epochs, batch_size=batch_size)
    return Algorithm(
        model,
        {
            "body": Block("body.*"),
            "head": Block("head.*"),
            "phi": Block("head.*", pool=None, keep=True, start=standard_normal(0.0)),
            "personal": Block("head.*", pool=None, keep=True),
        },
        (Once(count, data=True), train, Once(add)),
        parts=("body", "personal"),
        likelihood=likelihood,
        finetune=(Once(add),),
        adapt=(later, Once(add)),
    )


def shifted(likelihood: Categorical, shift: Callable[[Batch, View], Tensor]) -> Penalty:
    """Return the penalty that puts the mean loss at logits moved by `shift`, which broadcasts
    against [..., B, O], in the place of the loss at the logits.
    """

    def penalty(
        features: Tensor | None,
        outputs: Tensor,
        losses: Tensor,
        batch: Batch,
        given: Server,
        view: View,
    ) -> Tensor:
        moved = likelihood.nll(outputs + shift(batch, view), batch["y"])
        return ((moved - losses) * batch["weight"]).sum(-1) / batch["weight"].sum(-1)

    return penalty


def by_counts(batch: Batch, view: View) -> Tensor:
    """Return the logarithms of the client's class counts, [..., 1, O]."""
    return view["counts"].log().unsqueeze(-2)


def by_generic(batch: Batch, view: View) -> Tensor:
    """Return the generic head's logits, [..., B, O]."""
    return batch["at"]["generic"].outputs


def generic_model(algorithm: Algorithm, given: Server, view: View) -> dict[str, Tensor]:
    """Return the weights of body and generic head, as they are on the client."""
    return algorithm.leaves(GENERIC, view)


def add(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Make the personal head, whose logits are the sum of the two heads'."""
    return view | {"personal": {"loc": view["head"]["loc"] + view["phi"]["loc"]}}
