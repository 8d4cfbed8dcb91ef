"""L2GD: personal models under a penalty on their distance from their mean, by random gradient steps
on the data or on the penalty.

With $F_j$ a mean over client j's $n_j$ rows and xbar the mean of the J clients' models, it
minimises

    $1 / J sum_j F_j(x_j) + lam / (2 J) sum_j |x_j - xbar|^2$.

With probability p all clients make a step towards the mean, $x_j <- x_j - s (x_j - xbar)$,
otherwise a step on the data, $x_j <- x_j - lr grad F_j(x_j)$. With $s = lr lam (1 - p) / p$ steps
are unbiased: their mean is $(1 - p) lr J$ times the objective's gradient. A step towards the mean
does not change the mean, so clients communicate only if such a step follows a step on the data. A
round is one such communication: steps towards the mean, then steps on the data. Both numbers of
steps are geometric and the same for all clients.

Two public versions divide s by $(1 - p)$ instead of p, or count the first client twice in the mean.

Source: Hanzely, Richtarik, "Federated learning of a mixture of global and local models", 2020,
algorithm 1.
"""

from typing import Annotated

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import Algorithm, Block, Descend, Energy, Mean, Once, equal, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, rate_at


@options.method()
def l2gd(
    model: options.Model,
    *,
    lam: options.Strength = 1.0,
    p: Annotated[float, options.Range(0, 1)] = 0.2,
    batch_size: options.BatchSize = None,
    optimiser: options.PlainSGD = SGD(0.1),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by L2GD: personal models with a penalty on the distance from their mean.

    Args:
        lam: Strength of the penalty; 0 trains each client alone, and a large value makes all models
            equal.
        p: Probability of a step towards the mean, in (0, 1); a round has 1 / p steps on the data on
            average.
        batch_size: Number of examples of a step; None, as in the paper, for all of the client's. A
            round then has 1 / p passes on average.
        optimiser: SGD without momentum; the size of a step towards the mean is
            $s = lr lam (1 - p) / p$, which should be below 1.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.l2gd(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['x.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def pull(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        x, rate = view["x"]["loc"], rate_at(optimiser.rate, given["round"], given["rounds"])
        left = (1 - rate * lam * (1 - p) / p) ** given["pulls"].to(x)
        return {"x": {"loc": given["x"]["loc"].lerp(x, left)}}

    fit = Energy("x", ("x",), likelihood="mean")
    phases = (
        Once(pull),
        Descend(fit, epochs="steps", batch_size=batch_size, optimiser=optimiser),
    )
    return Algorithm(
        model,
        {"x": Block(pool=Mean(equal), keep=True)},
        phases,
        parts=("x",),
        likelihood=likelihood,
        drawn={"pulls": lambda rng: rng.geometric(1 - p), "steps": lambda rng: rng.geometric(p)},
        adapt=phases,
        train="all",
    )
