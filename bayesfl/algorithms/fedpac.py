"""FedPAC: a shared body trained towards common class centroids, and for each client a mixture of
the heads that help it.

$z = body(x) in R^d$, K classes; client j has $n_j$ examples, $n_jk$ of them of class k,
$p_jk = n_jk / n_j$; $m_jk$ is the mean of z over them.

A client of the cohort:

1. With the body received, before training: $h_j[k] = p_jk m_jk$, the mean of $onehot(y) z'$, and
   $V_j = (sum_k p_jk mean_{y=k} |z|^2 - |h_j|^2) / n_j$, the trace of its covariance over $n_j$,
   which measures the uncertainty of that mean.
2. Head: SGD on the mean loss, with the body fixed.
3. Body: SGD on the mean loss + $lambda mean |z - c_y|^2 / d$, with the head fixed. $c_k$ is the
   received centroid, or the client's own $m_jk$ of step 1 if no client has sent one yet. There is
   no pull before the server has centroids, in the first round; a run that starts from another
   (`simulate(start=)`) uses its centroids.
4. With the body after training: centroids $c_jk$, the means of z.

The server: $body = sum_j (n_j / n) body_j$, $c_k = sum_j n_jk c_jk / sum_j n_jk$, and for every
client i of the cohort $head_i = sum_j a_ij head_j$ with $a_i$ = argmin over the simplex of
$sum_j a_j^2 V_j + |h_i - sum_j a_j h_j|^2$, variance plus squared bias; weights below 1e-3 are set
to 0 and the rest scaled to sum 1.

Source: Xu, Tong, Huang, "Personalized federated learning with feature alignment and classifier
collaboration", ICLR 2023, arXiv:2306.11867; order of steps, threshold and hyperparameters from the
authors' code, github.com/JianXu95/FedPAC. If rounding makes a program indefinite, that code drops
small eigenvalues, and the variances with them; here the programs are solved exactly, in float64.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.inputs import in_rows
from bayesfl.base.protocols import Batch, Reported, Server, Uplink, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Mixed, Once, options, simplex
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD

PARTS = ("body", "head")
# Smaller weights are set to 0. With over 100 heads the limit is a tenth of an equal share, so that
# most weight is kept.
SMALLEST_WEIGHT = 1e-3
ROWS_AT_ONCE = 256  # examples whose features are held at once
# A client with one example has V = 0. V is raised to at least the larger of these, so that the
# minimum is unique:
FLOOR = 1e-10  # in units of the median |h|^2 + V
ROUNDING = 1e-13  # in units of the largest |h|^2 + V


@options.method()
def fedpac(
    model: options.Split,
    *,
    head_epochs: options.Epochs = 1,
    body_epochs: options.BodyEpochs = 5,
    head_optimiser: options.HeadOptimiser = SGD(0.1, momentum=0.5, weight_decay=5e-4),
    body_optimiser: options.BodyOptimiser = SGD(1e-2, momentum=0.5, weight_decay=5e-4),
    lam: options.Strength = 1.0,
    batch_size: options.BatchSize = 50,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedPAC: the server averages the body, and mixes a head for each client
    from the heads that help it.

    In addition to its models a client sends, for every class, counts, mean features, and mean
    features weighted by the class's frequency, and one variance. The server therefore sees the
    frequencies of its labels. `result.server["head"]["weights"]` [C, C] has the last round's
    weights $a_ij$: row i is the client that receives a head, column j one whose head is mixed into
    it, and `result.server["head"]["cohort"]` [C] has these clients' numbers. Only heads of a
    round's cohort are mixed, among themselves. An absent client's head does not change, and becomes
    outdated because it was trained on another body. A client that never took part has the initial
    head.

    A client that joins later receives body and centroids. The program is solved for its statistics
    over the heads of the last cohort, and its head trains `head_epochs` passes from that mixture.
    (In practice a server would solve it; here the new client receives the heads and solves it.) The
    paper has no rule for such clients.

    The authors print two accuracies for each round. The one at the start of local training, with
    the mixed head, is `history["personal_accuracy"]` of the round before; the one after local
    training is `history["before_pool_accuracy"]`. The global model of `history["global_accuracy"]`
    has the mean of all clients' heads, which no client receives.

    Args:
        model: A `bf.models.SplitModel` whose head is one `nn.Linear`; its features are the inputs
            of its head.
        head_epochs: Number of passes over a client's data for its head each round.
        body_optimiser: Optimiser of the body; the paper's rate is 0.02 on CIFAR-10.
        lam: Strength lambda of the pull of features towards centroids.
        likelihood: Distribution of y given the model's outputs; its task must be classification.

    Raises:
        ValueError: `model` is not a `SplitModel`.

    Example:
        >>> clients = bf.data.dominant_classes("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> method = bf.algorithms.fedpac(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['body.loc', 'head.loc', 'counts', 'h', 'variance', 'centroids']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    linear: Any = model.get_submodule("head")
    classes, width = max(2, linear.out_features), linear.in_features

    def pull(
        features: Any,
        outputs: Tensor,
        losses: Tensor,
        batch: Batch,
        given: Server,
        view: View,
    ) -> Tensor:
        # Quicker than picking rows.
        target = F.one_hot(batch["y"], classes).to(features) @ view["target"]
        apart = (features - target).square().mean(-1) * batch["weight"]
        return lam * apart.sum(-1) / batch["weight"].sum(-1) * given["seen"].any()

    def start(blocks: Server, clients: int) -> Server:
        trained = {
            "head": blocks["head"]["loc"].new_zeros(0, len(blocks["head"]["loc"])),
            "h": torch.zeros(0, classes * width),
        }
        seen = torch.zeros(classes, dtype=torch.bool)
        return {
            "centroids": torch.zeros(classes, width),
            "seen": seen,
            "trained": {**trained, "variance": torch.zeros(0)},
        }

    measure = Once(statistics, data=True, batched=False)
    head = Energy("head", PARTS, likelihood="mean")
    body = Energy("body", PARTS, likelihood="mean", penalty=pull)
    fit_head = Descend(head, epochs=head_epochs, batch_size=batch_size, optimiser=head_optimiser)
    fit_body = Descend(body, epochs=body_epochs, batch_size=batch_size, optimiser=body_optimiser)
    each_class = torch.zeros(classes, width)
    return Algorithm(
        model,
        {"body": Block("body.*"), "head": Block("head.*", pool=Mixed(among), keep=True)},
        (measure, fit_head, fit_body, Once(centroids, data=True, batched=False)),
        parts=PARTS,
        likelihood=likelihood,
        server=start,
        broadcast=("centroids", "seen"),
        address=address,
        reports={
            "counts": Reported(torch.zeros(classes), options.AT_LEAST_0),
            "h": each_class,
            "variance": Reported(0.0, options.AT_LEAST_0),
            "centroids": each_class,
        },
        combine=combine,
        adapt=(measure, Once(join_newcomer, batched=False), fit_head),
    )


def moments(
    algorithm: Algorithm, view: View, data: Batch, classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute for every class the count of examples [K], mean features [K, d] and mean squared
    lengths [K]; 0 if the count is 0.
    """
    leaves = algorithm.leaves(PARTS, view)
    weight = data["weight"]
    of_class = F.one_hot(data["y"], classes).to(weight) * weight.unsqueeze(-1)
    inputs = in_rows(data["x"], ROWS_AT_ONCE)
    first = second = 0.0
    for x, rows in zip(inputs, of_class.split(ROWS_AT_ONCE), strict=True):
        z: Any = algorithm.features(leaves, x)[0]
        first = first + rows.mT @ z
        second = second + rows.mT @ z.square().sum(-1)
    counts = of_class.sum(0)
    each = counts.clamp_min(1)
    return counts, first / each.unsqueeze(-1), second / each


def statistics(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Compute the statistics h, V and counts under the received body, and set the features'
    targets: steps 1 and 3.
    """
    counts, means, squares = moments(algorithm, view, data, len(given["seen"]))
    share = counts / counts.sum()
    h = share.unsqueeze(-1) * means
    variance = ((share * squares).sum() - h.square().sum()).clamp_min(0) / counts.sum()
    target = torch.where(given["seen"].unsqueeze(-1), given["centroids"], means)
    return {"counts": counts, "h": h, "variance": variance, "target": target}


def centroids(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Compute the classes' mean features under the body after training: step 4."""
    return {"centroids": moments(algorithm, view, data, len(given["seen"]))[1]}


def mixing(h: Tensor, variance: Tensor, own: Tensor) -> Tensor:
    """Compute the weights [C, J] of J heads for C clients: argmin_a sum_j a_j^2 V_j + |own_i -
    sum_j a_j h_j|^2 over the simplex.

    The programs are solved in float64.

    Args:
        h: Feature statistics of the clients with heads in the mixture, [J, K d].
        variance: Variances V of these statistics, [J], >= 0.
        own: Feature statistics of the clients that receive the mixtures, [C, K d].
    """
    h, variance, own = h.double(), variance.double(), own.double()
    sizes = h.square().sum(-1) + variance
    # If all features and variances are 0, nothing distinguishes the heads, and they get equal
    # weights.
    floor = max(
        FLOOR * float(sizes.median()),
        ROUNDING * float(sizes.max()),
        torch.finfo(h.dtype).tiny ** 0.5,
    )
    variance = variance.clamp_min(floor)
    weights = simplex.minimise(h @ h.mT + torch.diag(variance), own @ h.mT)
    weights = torch.where(weights < min(SMALLEST_WEIGHT, 0.1 / len(h)), 0.0, weights)
    return weights / weights.sum(-1, keepdim=True)


def among(server: Server, ids: Tensor, uplink: Uplink) -> Tensor:
    """Compute the mixing weights among a round's cohort, [C, C]."""
    h = uplink["h"].flatten(1)
    return mixing(h, uplink["variance"], h)


def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
    """Average the centroids by the classes' counts, and keep the heads and statistics of the cohort
    for new clients.
    """
    h, counts = uplink["h"], uplink["counts"].double()
    total = counts.sum(0).unsqueeze(-1)
    means = (counts.unsqueeze(-1) * uplink["centroids"].double()).sum(0) / total.clamp_min(1)
    return {
        "centroids": torch.where(total > 0, means.to(h), server["centroids"]),
        "seen": server["seen"] | (total.squeeze(-1) > 0),
        "trained": {
            "head": uplink["head"]["loc"],
            "h": h.flatten(1),
            "variance": uplink["variance"],
        },
    }


def address(server: Server, ids: Tensor) -> View:
    """Send new clients the heads that they mix; clients that trained receive mixtures."""
    newcomers = len(server["trained"]["head"]) and not len(server["head"]["each"])
    return (
        {"trained": tree_map(lambda t: t.expand(len(ids), *t.shape), server["trained"])}
        if newcomers
        else {}
    )


def join_newcomer(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Give a new client the mixture of the last cohort's heads for its own statistics; if there are
    no such heads, keep the received head.
    """
    if "trained" not in view:
        return view
    trained = view["trained"]
    weights = mixing(trained["h"], trained["variance"], view["h"].flatten()[None])
    return {"head": {"loc": (weights[0] @ trained["head"].double()).to(view["h"])}}
