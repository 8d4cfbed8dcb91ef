"""pFedHN: a network on the server computes each client's weights from an embedding of the client.

The server has an embedding $v_j$ for each client and the hypernetwork's weights phi. In a round

    $w_j = h(v_j; phi)$ is sent to client j of the cohort,

    $w_j'$, which is $w_j$ after `steps` steps, comes back,

    (v, phi) makes a step along the mean over the cohort of $(dw_j / d(v, phi))' (w_j - w_j')$,

with the gradient shortened to a norm of `clip`. h has `layers` linear layers with ReLU between
them, and then one linear map to all weights. The paper's cohorts are single clients, one after the
other.

The authors' code also clips the clients' gradients, which is not done here. A client that joins
later has a new embedding, and trains the model that h computes from it; in the paper it trains the
embedding, and needs h for this. The server's part takes most lines of the composition beyond
twenty-five.

Source: Shamsian, Navon, Fetaya, Chechik, "Personalized federated learning using hypernetworks",
ICML 2021, algorithm 1.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from bayesfl.base.protocols import Server, Tensors, Uplink, View
from bayesfl.base.random import Purpose, generator
from bayesfl.composition import Algorithm, Block, Descend, Energy, Stack, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Clip, rate_at


@options.method()
def pfedhn(
    model: options.Model,
    *,
    embedding: options.Count = 13,
    hidden: options.Count = 100,
    layers: options.Count = 4,
    steps: options.Steps = 50,
    batch_size: options.BatchSize = 64,
    optimiser: options.Optimiser = SGD(5e-3, momentum=0.9, weight_decay=5e-5),
    server_optimiser: options.Optimiser = SGD(1e-2, momentum=0.9, weight_decay=1e-3),
    clip: options.Positive = 50.0,
    seed: options.Natural = 0,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by pFedHN: the server's hypernetwork computes the weights of every client.

    The global model of `history["global_accuracy"]` is computed from the mean embedding. The server
    stores `hidden` numbers for each weight of the model.

    Args:
        embedding: Number of entries of a client's embedding; the paper uses $1 + J / 4$ for J = 50
            clients.
        hidden: Width of the hypernetwork's layers.
        layers: Number of the hypernetwork's layers.
        server_optimiser: Optimiser of the hypernetwork and of the embeddings; its state is kept.
        clip: Largest norm of their gradient.
        seed: Seed of their start, with the distributions of torch's linear layers and embeddings.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.pfedhn(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def start(blocks: Server, clients: int) -> Server:
        rng, sizes = generator(seed, Purpose.START), [embedding, *[hidden] * layers]
        hyper = {"v": torch.from_numpy(rng.standard_normal((clients, embedding)))}
        for k, (size, width) in enumerate(pairwise([*sizes, len(blocks["w"]["loc"])])):
            bound = 1 / math.sqrt(size)
            hyper |= {
                f"{name}{k}": torch.from_numpy(rng.uniform(-bound, bound, shape))
                for name, shape in (("weight", (width, size)), ("bias", (width,)))
            }
        state = server_optimiser.init(hyper)
        return {"hyper": hyper} | ({} if state is None else {"state": state})

    def make(hyper: Tensors, x: Tensor) -> Tensor:
        for k in range(layers + 1):
            x = linear(x.relu() if 0 < k < layers else x, hyper[f"weight{k}"], hyper[f"bias{k}"])
        return x

    def address(server: Server, ids: Tensor) -> View:
        return {"w": {"loc": make(server["hyper"], server["hyper"]["v"][ids])}}

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        order = ids.argsort()  # sums must not depend on the order of replies
        came = uplink["w"]["loc"][order]
        slope = torch.func.grad(  # of half the mean square of w_j - w_j'
            lambda h: (make(h, h["v"][ids[order]]) - came).square().sum() / (2 * len(ids))
        )(server["hyper"])
        rate = rate_at(server_optimiser.rate, uplink["round"], uplink["rounds"])
        hyper, state = Clip(server_optimiser, clip).update(
            server["hyper"], slope, server.get("state"), rate
        )
        now = {"w": {"loc": make(hyper, hyper["v"].mean(0))}, "hyper": hyper}
        return now | ({} if state is None else {"state": state})

    step = Descend(
        Energy("w", ("w",), likelihood="mean"),
        steps=steps,
        batch_size=batch_size,
        optimiser=optimiser,
    )
    return Algorithm(
        model,
        {"w": Block(pool=Stack())},
        (step,),
        parts=("w",),
        likelihood=likelihood,
        server=start,
        address=address,
        combine=combine,
        adapt=(step,),
    )
