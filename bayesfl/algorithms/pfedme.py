"""pFedMe: personal models $theta_j$ as proximal points of the client's copy $w_j$ of the global
model, which follows the Moreau envelope.

$theta_j(w) = argmin F_j(theta) + lambda / 2 |theta - w|^2$, by K steps on one batch; then
$w_j <- w_j - lr lambda (w_j - theta_j)$. The server's step is
$w <- (1 - beta) w + beta mean_j w_j$. All clients train, but only a cohort sends.

Source: Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020,
algorithm 1. As in the authors' code, the inner steps continue from the previous $theta_j$ within a
round, which starts at w; the server's mean has equal weights, as in the paper.
"""

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Mean,
    Normal,
    Once,
    Relaxed,
    Repeat,
    equal,
    inverse_size,
    options,
    own_mean,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def pfedme(
    model: options.Model,
    *,
    lam: options.Strength = 15.0,
    batches: options.Count = 20,
    inner_steps: options.Count = 5,
    batch_size: options.BatchSize = 20,
    lr: options.Strength = 5e-3,
    personal_optimiser: options.Optimiser = SGD(9e-2),
    beta: options.Positive = 1.0,
    warm_start: bool = True,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by pFedMe: personal models with a pull towards the global one, which moves
    towards them.

    Args:
        lam: Strength of the pull of $theta_j$ towards $w_j$; the mean loss makes it the prior
            $N(w_j, 1 / (lam n_j))$.
        batches: Number of batches in a round, each with one inner problem and one envelope step
            (the paper's R).
        inner_steps: Number of gradient steps on each inner problem (the paper's K).
        lr: Step size along the envelope's gradient, $lam (w_j - theta_j)$.
        personal_optimiser: Optimiser of the inner steps; the authors' code has a weight decay of
            1e-3.
        beta: The server's step size, > 0; 1 is the mean, and 2 the value of the authors' tuned
            runs.
        warm_start: Whether an inner problem starts from the previous one's $theta_j$, as in the
            authors' code, or from $w_j$.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.pfedme(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    tied = Normal(centre=own_mean("w"), variance=inverse_size(lam))
    inner = Descend(
        Energy("theta", ("theta",), likelihood="mean"),
        epochs=inner_steps,
        optimiser=personal_optimiser,
    )

    def restart(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"theta": view["w"]}

    def follow_envelope(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        w, theta = view["w"]["loc"], view["theta"]["loc"]
        return {"w": {"loc": w - lr * lam * (w - theta)}}

    again = () if warm_start else (Once(restart),)
    phases = (
        Once(restart),
        Repeat((*again, inner, Once(follow_envelope)), times=batches, batch_size=batch_size),
    )
    return Algorithm(
        model,
        {
            "w": Block(pool=Relaxed(Mean(equal), beta)),
            "theta": Block(prior=tied, pool=None, keep=True),
        },
        phases,
        parts=("theta",),
        likelihood=likelihood,
        adapt=phases,
        train="all",
    )
