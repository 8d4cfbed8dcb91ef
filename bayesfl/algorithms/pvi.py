"""PVI: one Gaussian posterior of the federation, the product of a prior and one factor for each
client. A client refines its factor by variational inference under all others.

With $q(w) = p(w) prod_j t_j(w)$ on the server and $t_j$ on client j, a round is

    $q_j = argmax_q E_q[log p(D_j | w)] - KL(q || q_old / t_j)$, mean fields, in gradient steps,

    $t_j <- t_j^(1 - damping) (q_j t_j / q_old)^damping$,

    $q <- q_old prod_(j in cohort) t_j / t_j^old$.

A fixed point is a stationary point of the evidence bound of all rows together, for any `damping`.
All clients refine at once or, with cohorts of one, one after the other.

Precisions of factors stay >= 0 (`bayesfl.composition.factors`), which the paper does not require.
After the first round $q_j$ starts with the mean of q and the client's own last deviations. From
there a few steps approach the maximum; from the client's own last mean they lag behind, and q
diverges. Numbers of steps and the optimiser are this library's choices.

Source: Ashman, Bui, Nguyen, Markou, Weller, Swaroop, Turner, "Partitioned variational inference: a
framework for probabilistic federated learning", 2022, algorithm 1 and the damping after it.
"""

from typing import Annotated

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Factors, Once, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam
from bayesfl.posteriors import MeanField


@options.method()
def pvi(
    model: options.Model,
    *,
    prior_precision: Annotated[float, options.INVERTIBLE] = 1.0,
    damping: options.Damping = None,
    epochs: options.Epochs = 10,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = Adam(1e-2),
    draws: options.Draws = 1,
    init_scale: options.Positive = 0.05,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by PVI: all clients share one Gaussian posterior of all weights.

    Its variances ignore correlations of weights, and are too small if weights are correlated.

    Args:
        prior_precision: Precision of the prior $N(0, 1 / prior_precision)$ of every weight.
        init_scale: Standard deviation of $q_j$ before the client's first step.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.pvi(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc', 'w.rho']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    factors = Factors("w", precision=prior_precision, damping=damping)
    field = MeanField(init_scale=init_scale)

    def begin(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"v": view["v"] | {"loc": view["w"]["loc"]}} if given["round"] > 1 else view

    def refine(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return factors.refined(given, view, *field.natural(view["v"]))

    fit = Descend(
        Energy("v", ("v",), likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
        draws=draws,
    )
    return Algorithm(
        model,
        {
            "w": factors.shared,
            "v": Block(posterior=field, prior=factors.prior, pool=None, keep=True),
        },
        (Once(begin), fit, Once(refine)),
        parts=("w",),
        likelihood=likelihood,
        adapt=(Once(join),),  # who joins has no factor in q before its first round
        draws=10,
        **factors.entries,
    )


def join(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """Start a new client's posterior at the federation's."""
    return {"v": view["w"]}
