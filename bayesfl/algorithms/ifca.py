"""IFCA: M models; every client trains, and predicts by, the one that fits its data best, and models are averaged within these clusters.

Source: Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020, algorithm 1 with model
averaging.

>>> import bayesfl as bf
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.classes)
>>> result = bf.simulate(bf.algorithms.ifca(model, clusters=2), clients, rounds=1)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesfl.base.checks import whole
from bayesfl.base.protocols import Batch, Likelihood, Server, Uplink, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Mean, Mixture, Once
from bayesfl.likelihoods import Categorical
from bayesfl.models import anew
from bayesfl.optim import SGD, Rate


def ifca(
    model: nn.Module,
    *,
    clusters: int = 2,
    epochs: int = 5,
    batch_size: int | None = 50,
    lr: Rate = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by IFCA: each client trains the one of M models that fits its data best, and the server averages within clusters.

    Args:
        model: Any module; the clusters' models draw their starts anew from its layers.
        clusters: Number M of models. A model that no client of a round chose stays as it is.
        epochs: Number of passes over a client's data each round.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew each round.
        weight_decay: L2 coefficient; its term is added to the gradient.
        likelihood: Distribution of y given the model's outputs.

    Raises:
        ValueError: A number lies outside its range.
    """
    whole("clusters", clusters, least=1)

    def choose(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        total = (data["losses"] * data["weight"]).sum(-1)
        return view | {"cluster": F.one_hot(total.argmin(-1), clusters).to(total)}

    def counted(given: Server, view: View, batch: Batch) -> Tensor:
        return view["cluster"].unsqueeze(-1)

    def weight(server: Server, uplink: Uplink) -> Tensor:
        return uplink["n"].unsqueeze(-1) * uplink["cluster"]

    choice = Once(choose, data=True, losses=("models",))
    return Algorithm(
        model,
        {"models": Block(copies=clusters, start=anew(model), pool=Mean(weight))},
        (
            choice,
            Descend(
                Energy("models", ("models",), likelihood="mean", weight=counted),
                epochs=epochs,
                batch_size=batch_size,
                optimiser=SGD(lr, momentum, weight_decay),
            ),
        ),
        parts=("models",),
        likelihood=likelihood,
        reports={"cluster": torch.full((clusters,), 1 / clusters)},
        finetune=(choice,),
        predictor=Mixture("models", "cluster"),
    )
