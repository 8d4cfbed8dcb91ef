"""FedFomo: each client receives other clients' models, and moves towards those that are better than
its own on its validation rows.

With $x_j$ the client's model after its last round, $L_j$ its mean loss on validation rows, and
$theta_m$ the M models that it receives,

    $gain_m = (L_j(x_j) - L_j(theta_m)) / |theta_m - x_j|$,

    $x_j <- x_j + sum_m share_m (theta_m - x_j)$, $share_m = max(gain_m, 0)$, of sum 1,

and it then trains $x_j$ on its training rows. If no model is better, a client keeps its own. The
server has all models, and adds each gain to an affinity of the two clients. It sends the M models
with the largest affinity or, with a probability that falls from `explore` by `explore_decay` each
round, M random ones.

Clients see each other's models. In the authors' code, a client also discards its last training if
no model is better, and gains are divided by the sum of their sizes before they are added to the
affinity. The choice of models takes most lines of the composition beyond twenty-five.

Source: Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized federated learning with first order
model optimization", ICLR 2021, equations 4 to 6 and section 3.2.
"""

from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.protocols import Batch, Server, Uplink, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Once, Stack, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def fedfomo(
    model: options.Model,
    *,
    models: options.Count = 5,
    explore: Annotated[float, options.Range(0, 1, "[]")] = 0.3,
    explore_decay: Annotated[float, options.Range(0, 1, "[]")] = 0.05,
    rows: Literal["validation", "train"] = "validation",
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(0.1),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedFomo: each client mixes its own model with others' by their losses on
    its validation rows.

    `result.server["affinity"]` [J, J] has the sums of client j's gains from the model of client k.

    Args:
        models: Number M of models that a client receives.
        explore: Probability in the first round that a client receives random models, not the best.
        explore_decay: Decrease of this probability in each round.
        rows: Rows on which models are compared; the authors' code uses some of the training rows.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4, validation=0.2)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedfomo(model, models=2)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc', 'gain']
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def start(blocks: Server, clients: int) -> Server:
        return {
            "models": blocks["w"]["loc"].expand(clients, -1).clone(),
            "affinity": torch.zeros(clients, clients),
            "explore": explore,
        }

    def chosen(server: Server, ids: Tensor) -> Tensor:
        affinity, rng = server["affinity"], np.random.default_rng(int(server["draw"]))
        at_random, score = (
            torch.from_numpy(rng.random(shape)).to(affinity)
            for shape in ((len(affinity), 1), affinity.shape)
        )
        score = torch.where(at_random < server["explore"], score, affinity + 1e-9 * score)
        order = score.fill_diagonal_(-torch.inf).argsort(-1, descending=True)[ids]
        # With fewer clients the last place repeats, which is the client itself.
        return order[:, torch.arange(models).clamp_max(len(affinity) - 1)]

    def mix(algorithm: Algorithm, given: Server, view: View, batch: Batch) -> View:
        own, others = view["w"]["loc"], view["others"]

        def loss(w: Tensor) -> Tensor:
            losses = algorithm.losses(algorithm.layout("w").leaves(w), batch)
            return batch["weight"] @ losses / batch["weight"].sum().clamp_min(1)

        better = loss(own) - torch.stack([loss(w) for w in others])
        away = (others - own).norm(dim=-1)
        gain = torch.where(away == 0, 0, better / away)  # losses of equal models may round apart
        share = gain.clamp_min(0)
        share = share / share.sum().clamp_min(torch.finfo(share.dtype).tiny)
        return {"w": {"loc": own + share @ (others - own)}, "gain": gain}

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        sent, who = uplink["w"]["loc"], chosen(server, ids)
        every = server["models"].index_copy(0, ids, sent)
        return {
            "models": every,
            "w": {"loc": every.mean(0, dtype=torch.float64).to(every)},
            "affinity": server["affinity"].index_put((ids[:, None], who), uplink["gain"], True),
            "explore": (server["explore"] - explore_decay).clamp_min(0),
        }

    fit = Descend(
        Energy("w", ("w",), likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
    )
    return Algorithm(
        model,
        {"w": Block(pool=Stack(), keep=True)},
        (Once(mix, data=rows), fit),
        parts=("w",),
        likelihood=likelihood,
        server=start,
        drawn={"draw": lambda rng: int(rng.integers(2**62))},
        address=lambda server, ids: {"others": server["models"][chosen(server, ids)]},
        reports={"gain": lambda given: torch.zeros(models)},
        combine=combine,
        adapt=(fit,),
    )
