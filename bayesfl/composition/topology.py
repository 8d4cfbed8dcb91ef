"""Graphs of clients without a server, and the weights by which neighbours average.

A mixing matrix W [J, J] is doubly stochastic and 0 where there is no edge:
$theta_j <- sum_k W_jk theta_k$ keeps the mean over clients. Repeated mixing converges to that mean
if only one eigenvalue has modulus 1 (Xiao and Boyd, "Fast linear iterations for distributed
averaging", Systems and Control Letters 53(1), 2004). This holds on a connected graph if clients
also weight their own parameters, as by `metropolis`; it fails if two groups only swap parameters.
"""

from typing import Annotated

import torch
from torch import Tensor

from bayesfl.base.options import Count, Natural, Range, declared
from bayesfl.base.random import Purpose, generator

TRIES = 100  # maximum number of random graphs until one is connected
PERIODIC = 1e-7  # an eigenvalue whose modulus exceeds 1 minus this counts as 1


@declared
def ring(clients: Count) -> Tensor:
    """Return the edges [J, J] bool of a ring: each client has two neighbours; with two clients each
    has one, a single client has none.

    Example:
        >>> bf.topology.ring(4).int().tolist()
        [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]
    """
    places = torch.arange(clients)
    edges = torch.zeros(clients, clients, dtype=torch.bool)
    edges[places, (places + 1) % clients] = True
    return (edges | edges.T).fill_diagonal_(False)


@declared
def erdos_renyi(
    clients: Count, *, p: Annotated[float, Range(0, 1, "]")] = 0.5, seed: Natural = 0
) -> Tensor:
    """Draw edges [J, J] bool, each with probability p, given that the graph is connected.

    Raises:
        ValueError: p is so small that no connected graph was drawn.

    Example:
        >>> edges = bf.topology.erdos_renyi(10, p=0.4, seed=1)
        >>> bf.topology.connected(edges), torch.equal(edges, edges.T)
        (True, True)
    """
    for index in range(TRIES):
        rng = generator(seed, Purpose.GRAPH, index=index)
        upper = torch.zeros(clients, clients, dtype=torch.bool)
        for row in upper:  # numbers need eight times the memory of edges
            row.copy_(torch.from_numpy(rng.random(clients) < p))
        edges = upper.triu_(1) | upper.T
        if connected(edges):
            return edges
    raise ValueError(
        f"none of {TRIES} graphs of {clients} clients with p={p} was connected; use a larger p, or "
        "another graph"
    )


def connected(edges: Tensor) -> bool:
    """Return whether every client can be reached from every other, over edges [J, J] bool.

    Example:
        >>> edges = bf.topology.ring(5)
        >>> bf.topology.connected(edges), bf.topology.connected(edges & False)
        (True, False)
    """
    from scipy.sparse.csgraph import connected_components

    return connected_components(edges.cpu().numpy(), directed=False)[0] <= 1


def metropolis(edges: Tensor, clients: Tensor | None = None) -> Tensor:
    """Return Metropolis weights [J, J] in float64: 1 / (1 + the larger degree) for neighbours, the
    rest for oneself.

    On a complete graph all weights are $1 / J$.

    Args:
        edges: The graph's edges, [J, J] bool.
        clients: Clients with rows in the result, [C], for a result [C, J]; None for all.

    Raises:
        ValueError: `edges` is not a symmetric matrix of bools, False on its diagonal.

    Example:
        >>> bf.topology.metropolis(bf.topology.ring(4)).mul(3).round().int().tolist()  # thirds
        [[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]
    """
    edges = torch.as_tensor(edges)
    if (
        edges.dim() != 2
        or edges.dtype != torch.bool
        or not torch.equal(edges, edges.T)
        or bool(edges.diagonal().any())
    ):
        raise ValueError(
            "edges must be a symmetric [J, J] tensor of bools, False on its diagonal, got "
            f"{edges.dtype} {list(edges.shape)}"
        )
    clients = torch.arange(len(edges)) if clients is None else clients
    # Row by row: a sum of bools first converts all of them to integers.
    degree = torch.tensor(
        [int(row.sum()) for row in edges], dtype=torch.float64, device=edges.device
    )
    weights = torch.maximum(degree[clients, None], degree).add_(1).reciprocal_()
    weights.masked_fill_(~edges[clients], 0)
    weights[torch.arange(len(clients)), clients] = 1 - weights.sum(1)
    return weights


@declared
def check_mixing(weights: Tensor, clients: Count | None = None) -> Tensor:
    """Check a mixing matrix and return it in float64: repeated mixing must converge to the mean.

    Args:
        weights: The mixing matrix W, [J, J].
        clients: Number J of clients; None for any number.

    Raises:
        ValueError: `weights` is not a [J, J] matrix, is not doubly stochastic, or has negative
            entries; its graph is not connected; or repeated mixing does not converge.
    """
    weights = torch.as_tensor(weights, dtype=torch.float64)
    wanted = len(weights) if clients is None else clients
    if weights.shape != (wanted, wanted):
        raise ValueError(
            f"the mixing matrix must be [{wanted}, {wanted}], one row for each client, got "
            f"{list(weights.shape)}; topology.metropolis(topology.ring(clients)) makes one"
        )
    sums = torch.stack([weights.sum(0), weights.sum(1)])
    if (
        not sums.isfinite().all()
        or float(weights.min()) < 0
        or float((sums - 1).abs().max()) > 1e-6
    ):
        # A matrix in float32 is fine.
        raise ValueError(
            "the mixing matrix must be doubly stochastic: entries >= 0 (least "
            f"{float(weights.min()):.3g}), rows and columns that sum to 1 (off by up to "
            f"{float((sums - 1).abs().max()):.3g}); topology.metropolis(edges) makes one"
        )
    edges = weights > 0
    if not connected(edges | edges.T):
        raise ValueError(
            "the mixing matrix's graph is not connected, so some clients never exchange models; "
            "add edges"
        )
    # One client with a weight on itself is enough to prevent oscillation.
    if (
        len(weights) > 1
        and not weights.diagonal().any()
        and float(torch.linalg.eigvals(weights).abs().sort().values[-2]) > 1 - PERIODIC
    ):
        raise ValueError(
            "the mixing matrix's second largest eigenvalue has modulus 1, so repeated mixing "
            "oscillates and never converges to the mean: give every client a weight for itself, as "
            "topology.metropolis(edges) does"
        )
    return weights
