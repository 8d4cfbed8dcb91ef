"""FedEP: one Gaussian posterior of the federation, the product of a prior and one factor for each
client. Clients refine their factors by expectation propagation with Laplace approximations.

With $q(w) = p(w) prod_j t_j(w)$ on the server and $t_j$ on client j, a round is

    $w_j = argmax_w log p(D_j | w) + log(q_old(w) / t_j(w))$, in gradient steps,

    $q_j = N(w_j, 1 / (P + H))$, P the precision of $q_old / t_j$, H the diagonal of the GGN of
    $D_j$ at $w_j$,

    $t_j <- t_j^(1 - damping) (q_j t_j / q_old)^damping$,

    $q <- q_old prod_(j in cohort) t_j / t_j^old$.

At a fixed point the mean of q is a maximum of the posterior of all rows. The authors' code scales
the precisions of networks by 500, and clips the change of the server's mean; neither is done here,
where precisions are the GGN's. Among the paper's approximations, this is the Laplace one.

Source: Guo, Greengard, Wang, Gelman, Kim, Xing, "Federated learning as variational inference: a
scalable expectation propagation approach", ICLR 2023, algorithms 1 and 2.
"""

from typing import Annotated

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Factors, Once, options
from bayesfl.curvature import Curvature
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam


@options.method()
def fedep(
    model: options.Model,
    *,
    prior_precision: Annotated[float, options.INVERTIBLE] = 1.0,
    damping: options.Damping = None,
    epochs: options.Epochs = 10,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = Adam(1e-2),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedEP: all clients share one Gaussian posterior of all weights.

    Its variances ignore correlations of weights, and are too small if weights are correlated.

    Args:
        prior_precision: Precision of the prior $N(0, 1 / prior_precision)$ of every weight.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedep(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc', 'w.rho']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    factors = Factors("w", precision=prior_precision, damping=damping)

    def begin(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return join(algorithm, given, view, data) if given["round"] > 1 else view

    def project(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        mode = algorithm.network(view | {"w": algorithm.belief("w", view["v"])})
        curvature = Curvature(mode, algorithm.likelihood, pattern=algorithm.layout("w"))
        others, _ = factors.cavity(view)
        precision = others + curvature.diagonal(data).to(others)
        return factors.refined(given, view, precision, precision * view["v"]["loc"])

    climb = Descend(
        Energy("v", ("v",), likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
        prox=True,
    )
    return Algorithm(
        model,
        {"w": factors.shared, "v": Block(prior=factors.prior, pool=None, keep=True)},
        (Once(begin), climb, Once(project, data=True, batched=False)),
        parts=("w",),
        likelihood=likelihood,
        adapt=(Once(join),),  # who joins has no factor in q before its first round
        draws=10,
        **factors.entries,
    )


def join(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Start a client's weights at the federation's mean."""
    return {"v": {"loc": view["w"]["loc"]}}
