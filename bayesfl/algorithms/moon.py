"""MOON: FedAvg with a loss that pulls a client's features towards those of the received model and
away from those of its own last model.

With z the features of the trained model w, $z_glob$ those of the model received in the round and
$z_prev$ those of the client's model at the end of its last round, both constant, client i minimises

    $F_i(w) - mu mean_x log(a / (a + b))$, $a = e^(cos(z, z_glob) / tau)$,
    $b = e^(cos(z, z_prev) / tau)$.

In its first round a client has no last model, and the initial model replaces it. If that is the
received model, both cosines are equal and the term has no gradient, as without it.

Features are the inputs of the head. The paper's network has a projection before its classifier, two
layers of width 256 with a ReLU between them: here it is the end of the body. Other models run in
evaluation mode.

Source: Li, He, Song, "Model-contrastive federated learning", CVPR 2021, equation 3 and algorithm 1;
the defaults are those of the same authors' code for CIFAR-10, github.com/QinbinLi/MOON.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Once, Penalty, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def moon(
    model: options.Split,
    *,
    mu: options.Strength = 5.0,
    temperature: options.Positive = 0.5,
    epochs: options.Epochs = 10,
    batch_size: options.BatchSize = 64,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9, weight_decay=1e-5),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by MOON: FedAvg with a contrastive term on the features.

    Args:
        mu: Strength of the contrastive term, added to the mean loss; 0 is FedAvg.
        temperature: Temperature tau of the cosines, > 0.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.moon(model, mu=1.0, epochs=1)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    energy = Energy(
        "w",
        ("w",),
        likelihood="mean",
        penalty=contrast(mu, temperature),
        at={"received": received, "previous": previous},
    )
    step = Descend(energy, epochs=epochs, batch_size=batch_size, optimiser=optimiser)
    return Algorithm(
        model,
        {"w": Block()},
        (step, Once(remember)),
        parts=("w",),
        likelihood=likelihood,
        private={"previous": start},
    )


def contrast(mu: float, temperature: float = 1.0, factor: float = 1.0) -> Penalty:
    """Return the penalty mu times the batch mean of -log(e^a / (e^a + e^b)). Here a and b - log
    factor are the cosines of features with those `received` and with those of the `previous` model;
    a and b are divided by the temperature.
    """

    def penalty(
        features: Any,
        outputs: Tensor,
        losses: Tensor,
        batch: Batch,
        given: Server,
        view: View,
    ) -> Tensor:
        near, far = (
            F.cosine_similarity(features, batch["at"][name].features, dim=-1)
            for name in ("received", "previous")
        )
        apart = F.softplus((math.log(factor) + far - near) / temperature)
        return mu * (apart * batch["weight"]).sum(-1) / batch["weight"].sum(-1)

    return penalty


def received(algorithm: Algorithm, given: Server, view: View) -> dict[str, Tensor]:
    """Return the weights of the received model."""
    return algorithm.leaves(("w",), given)


def previous(algorithm: Algorithm, given: Server, view: View) -> dict[str, Tensor]:
    """Return the weights of the client's last model."""
    return algorithm.leaves(("w",), view["previous"])


def remember(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Keep the client's model, with the statistics of its norms."""
    return {"previous": {name: view[name] for name in algorithm.whole(("w",))}}


def start(given: Server) -> dict[str, Any]:
    """Return the initial blocks, which replace a client's last model in its first round."""
    return {name: belief for name, belief in given.items() if isinstance(belief, dict)}
