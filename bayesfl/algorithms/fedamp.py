"""FedAMP: every client trains its own model, pulled towards its cloud model, a mixture of all
clients' models with larger weights for similar ones.

The server mixes what the clients send, and client i trains under a pull to its mixture:

    $u_i = sum_j xi_ij w_j$,

    $xi_ij = alpha A'(|w_i - w_j|^2)$ for $j != i$, $xi_ii = 1 - sum_j xi_ij$,

    $w_i = argmin_w F_i(w) + lam / (2 alpha) |w - u_i|^2$,

with $F_i$ a mean over its data and $A(x) = 1 - exp(-x / sigma)$, so that
$A'(x) = exp(-x / sigma) / sigma$. The pull is the prior $N(u_i, alpha / (lam n_i))$. The paper
computes the minimum; here `epochs` of steps from the client's last model approach it. Clients
outside a round's cohort keep their cloud models.

The distance grows with the number of weights. If $|w_i - w_j|^2$ is much larger than sigma, clients
train alone; if it is much smaller, all others have equal weight. Choose sigma for the network. The
defaults are the library's: with an `alpha` of $sigma / J$ no client's own weight can become
negative.

Source: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized cross-silo federated learning on
non-IID data", AAAI 2021, algorithm 1 and its equations 3 to 6.
"""

from dataclasses import replace

import torch
from torch import Tensor

from bayesfl.base.protocols import Server, Uplink, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Normal, Stack, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def fedamp(
    model: options.Model,
    *,
    lam: options.Strength = 1.0,
    alpha: options.Positive | None = None,
    sigma: options.Positive = 1.0,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2),
    adapt_epochs: options.AdaptEpochs = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedAMP: each client has its own model, pulled towards a mixture of all
    with larger weights for models near its own.

    `result.server["cloud"]` [J, D] has the clients' cloud models. The global model of
    `history["global_accuracy"]` has their mean, with which a client that joins later starts.

    Args:
        lam: Strength of the pull, which is $lam / alpha$; 0 is local training. Steps need
            $rate (curvature + lam / alpha) < 2$.
        alpha: The server's step size, > 0; None for $sigma / J$, with J clients.
        sigma: Squared distance of two models that lowers their attention by a factor e.

    Raises:
        ValueError: In a round, a client's own weight is negative because `alpha` is too large.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedamp(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def start(blocks: Server, clients: int) -> Server:
        return {"cloud": blocks["w"]["loc"].expand(clients, -1), "size": float(clients)}

    def spread(given: Server, view: View) -> Tensor:
        return (alpha or sigma / given["size"]) / (lam * view["n"])[..., None]

    def mix(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        w = uplink["w"]["loc"].double()
        mixed = attention(w, alpha or sigma / uplink["clients"], sigma) @ w
        cloud = server["cloud"].index_copy(0, ids, mixed.to(server["cloud"]))
        return {"cloud": cloud, "w": {"loc": cloud.mean(0, dtype=torch.float64).to(cloud)}}

    step = Descend(
        Energy("w", ("w",), likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
    )
    tied = Normal(centre=lambda given, view: view["cloud"], variance=spread)
    return Algorithm(
        model,
        {"w": Block(prior=tied, pool=Stack(), keep=True)},
        (step,),
        parts=("w",),
        likelihood=likelihood,
        server=start,
        broadcast=("size",),
        address=lambda server, ids: {"cloud": server["cloud"][ids]},
        combine=mix,
        adapt=(replace(step, epochs=adapt_epochs),),
    )


def attention(w: Tensor, alpha: float, sigma: float) -> Tensor:
    """Return the weights xi [C, C] of C clients' models `w` [C, D] in their cloud models.

    Raises:
        ValueError: A client's own weight is negative.
    """
    weights = alpha / sigma * (-torch.cdist(w, w).square() / sigma).exp()
    weights.fill_diagonal_(0)
    own = 1 - weights.sum(-1)
    if bool((own < 0).any()):
        raise ValueError(
            f"alpha={alpha:g} gives a client's own model the weight {float(own.min()):.3g}; use "
            f"alpha at most sigma / {len(w)}"
        )
    return weights + torch.diag(own)
