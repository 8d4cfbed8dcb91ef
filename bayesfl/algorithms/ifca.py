"""IFCA: M models; every client trains the one that fits its data best and predicts with it, and
models are averaged within these clusters.

Source: Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated learning",
NeurIPS 2020, algorithm 1 with model averaging.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.protocols import Batch, Reported, Server, Uplink, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Mean, Mixture, Once, options
from bayesfl.likelihoods import Categorical
from bayesfl.models import anew
from bayesfl.optim import SGD


@options.method()
def ifca(
    model: options.Model,
    *,
    clusters: options.Count = 2,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by IFCA: each client trains the one of M models that fits its data best, and
    the server averages within clusters.

    Args:
        model: Any module; the clusters' models have new random starts for its layers.
        clusters: Number M of models. A model that no client of a round chose does not change.

    Example:
        >>> clients = bf.data.swapped_labels("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.ifca(model, clusters=2)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['models.loc', 'cluster']
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def choose(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        total = (data["losses"] * data["weight"]).sum(-1)
        return {"cluster": F.one_hot(total.argmin(-1), clusters).to(total)}

    def counted(given: Server, view: View, batch: Batch) -> Tensor:
        return view["cluster"].unsqueeze(-1)

    def weight(server: Server, uplink: Uplink) -> Tensor:
        return uplink["n"].unsqueeze(-1) * uplink["cluster"]

    choice = Once(choose, data=True, losses=("models",))
    energy = Energy("models", ("models",), likelihood="mean", weight=counted, trains=1)
    return Algorithm(
        model,
        {"models": Block(copies=clusters, start=anew(model), pool=Mean(weight))},
        (choice, Descend(energy, epochs=epochs, batch_size=batch_size, optimiser=optimiser)),
        parts=("models",),
        likelihood=likelihood,
        reports={
            "cluster": Reported(torch.full((clusters,), 1 / clusters), options.Range(0, 1, "[]"))
        },
        finetune=(choice,),
        predictor=Mixture("models", "cluster"),
    )
