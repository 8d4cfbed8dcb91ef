"""Clustered FL: FedAvg within clusters of clients; a cluster splits in two when its clients'
updates point in different directions.

All clients start in one cluster. With w its model, $w_j$ client j's model after local training,
$u_j = w_j - w$ and $n_j$ its number of examples:

$w <- w + u$, $u = sum_j n_j u_j / sum_j n_j$, over the clients of the cluster. A cluster of more
than two clients splits where $|u| < eps1$ (its model hardly moves) while $max_j |u_j| > eps2$ (its
clients' models do); the parts are the last two groups of complete-linkage clustering on
$1 - cos(u_i, u_j)$.

The paper's eps are lengths of an update. These depend on the learning rate and the size of the
model, so on other data the same numbers may never cause a split. Here eps are multiples of |u| in
the first round.

Source: Sattler, Müller, Samek, "Clustered federated learning: model-agnostic distributed multi-task
optimization under privacy constraints", IEEE Transactions on Neural Networks and Learning Systems
32(8), 2021, algorithm 3; complete linkage, the size and the first round of a split are from the
authors' code, github.com/felisat/clustered-federated-learning. That code uses the positions of
clients within their cluster as their ids, which is wrong from the second split on; here positions
are converted to ids.
"""

import logging
from dataclasses import replace

import torch
from torch import Tensor

from bayesfl.algorithms.fedavg import fedavg
from bayesfl.base.protocols import Batch, Server, Uplink, View, Weight
from bayesfl.composition import Algorithm, Block, Once, Stack, by_size, counted, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD

log = logging.getLogger(__name__)
SMALLEST = 2  # a cluster of at most this many clients does not split


@options.method()
def clustered(
    model: options.Model,
    *,
    eps1: options.Strength = 0.4,
    eps2: options.Strength = 1.6,
    first_split: options.Natural = 20,
    epochs: options.Epochs = 1,
    batch_size: options.BatchSize = 128,
    optimiser: options.Optimiser = SGD(0.1, momentum=0.9),
    weight: Weight = by_size,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by clustered FL: FedAvg within clusters of clients; a cluster splits if its
    clients' updates disagree.

    The server has `models` [clusters, D], each client's `cluster` [J] (-1 before its first round),
    the first round's `unit` |u|, and `norms` [clusters, 2], |u| and $max |u_j|$ of the last round
    in this unit, which show how close a cluster is to a split. It sends each client the model of
    its cluster. A cluster splits only if all its clients are in the round's cohort, so let every
    client take part in each round. A new client receives all models and uses the one that fits its
    training data best, as in `ifca`, for predictions and, if it joins in training, as its cluster.

    Args:
        eps1: Length in units of the first round's |u|; a cluster can split only if |u| is less.
        eps2: Length in the same unit; a cluster can split only if the largest $|u_j|$ exceeds it.
        first_split: Number of rounds without a split at the start.
        optimiser: Optimiser of the clients' steps; under a falling schedule, updates become too
            small for splits.
        weight: (server, uplink) -> weights [C] of clients in their cluster's mean, not normalised;
            by size by default, equal in the authors' code (`bayesfl.pools.equal`).

    Example:
        >>> clients = bf.data.swapped_labels("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.clustered(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc', 'joined']
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def server(blocks: Server, clients: int) -> Server:
        models, cluster = blocks["w"]["loc"].unsqueeze(0), torch.full((clients,), -1)
        return {
            "models": models,
            "cluster": cluster,
            "unit": torch.tensor(0.0),
            "norms": torch.zeros(1, 2),
        }

    def address(server: Server, ids: Tensor) -> View:
        models, cluster = server["models"], server["cluster"][ids]
        own = {"w": {"loc": models[cluster.clamp_min(0)]}}
        if len(models) > 1 and bool((cluster < 0).any()):  # newcomers choose among all of them
            return own | {"models": models.expand(len(ids), *models.shape), "known": cluster}
        return own

    def choose(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        if "models" not in view:
            return view
        layout = algorithm.layout("w")
        total = torch.stack(
            [
                (algorithm.losses(layout.leaves(loc), data) * data["weight"]).sum(-1)
                for loc in view["models"]
            ]
        )
        chosen = torch.where(view["known"] < 0, total.argmin(), view["known"])
        return {
            "w": {"loc": view["models"].index_select(0, chosen.view(1)).squeeze(0)},
            "joined": chosen,
        }

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        models = list(server["models"].double())
        cluster = server["cluster"]
        if len(models) == 1:
            cluster = cluster.clamp_min(0)
        elif len(new := (cluster[ids] < 0).nonzero().flatten()):
            joined = uplink["joined"][new].clamp(0, len(models) - 1)  # whatever a client says
            cluster = cluster.index_copy(0, ids[new], joined)
        updates = uplink["w"]["loc"].double() - torch.stack(models)[cluster[ids]]
        counts = counted(weight, server, uplink, "w")

        def mean(places: Tensor) -> Tensor:
            return counts[places] @ updates[places] / counts[places].sum()

        # Not round 0: failed rounds, and rounds at rate 0, are counted but do not set the unit.
        first = not bool(server["unit"])
        unit = mean(torch.arange(len(ids))).norm() if first else server["unit"].double()
        norms = list(server["norms"].double())
        member = cluster.clone()
        for c, centre in enumerate(tuple(models)):
            places = (cluster[ids] == c).nonzero().flatten()
            if not len(places):
                continue
            moved, furthest = mean(places).norm(), updates[places].norm(dim=1).max()
            norms[c] = torch.stack([moved, furthest]) / unit.clamp_min(
                torch.finfo(torch.float64).tiny
            )
            whole_cluster = len(places) == int((cluster == c).sum()) and len(places) > SMALLEST
            if (
                whole_cluster
                and uplink["round"] > first_split
                and moved < eps1 * unit
                and furthest > eps2 * unit
            ):
                # From positions in the cluster to positions in the cohort.
                new = places[bipartition(updates[places])]
                log.info(
                    "round %d: cluster %d splits, %d of its %d clients leave",
                    int(uplink["round"]),
                    c,
                    len(new),
                    len(places),
                )
                member[ids[new]] = len(models)
                models.append(centre + mean(new))
                norms.append(norms[c])
                places = places[~torch.isin(places, new)]
            models[c] = centre + mean(places)
        loc, made = server["w"]["loc"], torch.stack(models)
        mean_of_all = {"loc": made[member[member >= 0]].mean(0).to(loc)}
        found = {
            "models": made.to(loc),
            "cluster": member,
            "unit": unit.to(loc),
            "norms": torch.stack(norms).to(loc),
        }
        return {"w": mean_of_all, **found}

    plain = fedavg(
        model, epochs=epochs, batch_size=batch_size, optimiser=optimiser, likelihood=likelihood
    )
    choice = (Once(choose, data=True),)
    return replace(
        plain,
        blocks={"w": Block(pool=Stack())},
        phases=choice + plain.phases,
        server=server,
        address=address,
        reports={"joined": torch.tensor(0)},
        combine=combine,
        finetune=choice,
    )


def bipartition(updates: Tensor) -> Tensor:
    """Split updates into two groups by complete linkage on 1 - cosine similarity.

    An update of length 0 has distance 1 from all others. Among equal distances, the first in
    scipy's order is chosen.

    Args:
        updates: Updates of the clients, [C, D].

    Returns:
        True for updates that are not in the group of the first, [C] bool.
    """
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    directions = updates.double() / updates.double().norm(dim=1, keepdim=True).clamp_min(
        torch.finfo(torch.float64).tiny
    )
    distances = (1 - directions @ directions.T).clamp_min(0).fill_diagonal_(0)
    tree = linkage(squareform(distances.cpu().numpy(), checks=False), method="complete")
    group = torch.from_numpy(cut_tree(tree, 2)[:, 0]).to(updates.device)
    return group != group[0]
