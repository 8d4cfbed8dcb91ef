"""Fed-RoD: a shared body with two heads. The generic head is trained on a balanced loss, and
averaged; the personal head's logits are added to its logits and adapt them to a client's class
frequencies.

With z the features of the body theta, psi the generic and phi the personal head, and $n_k$ the
client's number of examples of class k, every batch makes a step on each loss:

    theta, psi: the balanced softmax, the mean of
    $-log(n_y e^(psi_y(z)) / sum_k n_k e^(psi_k(z)))$,

    phi: the mean of $-log softmax_y(psi(z) + phi(z))$ with psi and z as constants.

Clients predict with $psi(z) + phi(z)$, and the history's `global_` columns with $psi(z)$. Heads are
linear, so the sum of their logits is a head with weights $psi + phi$, the block `personal`. phi
starts at 0.

A class without examples on a client, $n_k = 0$, gets no gradient from it. The two steps of a batch
do not read each other's results; norms with statistics of batches update them in both steps.
Fed-RoD (hyper), in which a network computes phi from $n_k$, is not implemented.

Source: Chen, Chao, "On bridging generic and personalized federated learning for image
classification", ICLR 2022, equations 6 to 8; the authors' code is not public.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Once, Repeat, options
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
    """Federate `model` by Fed-RoD: body and generic head are trained with a balanced softmax and
    averaged; a personal head adds to the logits.

    Args:
        model: A `bf.models.SplitModel` whose head is one `nn.Linear`.
        optimiser: Optimiser of both steps, with a state for each, which is reset each round.
        likelihood: `Categorical`.

    Raises:
        ValueError: The head is not one `nn.Linear`, or the likelihood is not `Categorical`.

    Example:
        >>> clients = bf.data.dirichlet("digits", clients=4, alpha=0.3)
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.fedrod(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc', 'head.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    head = model.get_submodule("head")
    if not isinstance(head, nn.Linear) or not isinstance(likelihood, Categorical):
        raise ValueError(
            "Fed-RoD adds the logits of two linear heads and counts examples by class: it needs a "
            f"head that is one nn.Linear, and Categorical(), got {type(head).__name__} and "
            f"{likelihood!r}"
        )
    classes = head.out_features

    def count(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"counts": data["weight"] @ F.one_hot(data["y"], classes).to(data["weight"])}

    def moved(z: Any, outputs: Tensor, losses: Tensor, batch: Batch, given: Any, view: View) -> Any:
        """Replace the mean loss by the loss at logits shifted by the generic head's logits, or by
        log n.
        """
        by = batch["at"]["generic"].outputs if "at" in batch else view["counts"].log()[..., None, :]
        more = likelihood.nll(outputs + by, batch["y"]) - losses
        return (more * batch["weight"]).sum(-1) / batch["weight"].sum(-1)

    generic = Energy(GENERIC, GENERIC, likelihood="mean", penalty=moved)
    personal = Energy(
        "phi", ("body", "phi"), likelihood="mean", penalty=moved, at={"generic": generic_model}
    )
    own, common = (Descend(energy, optimiser=optimiser) for energy in (personal, generic))
    train = Repeat((own, common), epochs=epochs, batch_size=batch_size)
    later = replace(own, epochs=adapt_epochs, batch_size=batch_size)
    alone = Block("head.*", pool=None, keep=True)
    phi = replace(alone, start=lambda rng, size: torch.zeros(size))
    return Algorithm(
        model,
        {"body": Block("body.*"), "head": Block("head.*"), "phi": phi, "personal": alone},
        (Once(count, data=True), train, Once(add)),
        parts=("body", "personal"),
        likelihood=likelihood,
        finetune=(Once(add),),
        adapt=(later, Once(add)),
    )


def generic_model(algorithm: Algorithm, given: Server, view: View) -> dict[str, Tensor]:
    """Return the client's weights of body and generic head."""
    return algorithm.leaves(GENERIC, view)


def add(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Make the personal head; its logits are the sum of the two heads'."""
    return {"personal": {"loc": view["head"]["loc"] + view["phi"]["loc"]}}
