"""APFL: each client predicts with weights between its own and the federation's, and learns its
share.

With $F_j$ a mean over client j's data and $vbar_j = alpha_j v_j + (1 - alpha_j) w_j$, each batch
makes three steps from the same state:

    $v_j <- v_j - lr alpha_j grad F_j(vbar_j)$,

    $alpha_j <- alpha_j - lr <v_j - w_j, grad F_j(vbar_j)>$, clipped to [0, 1],

    $w_j <- w_j - lr grad F_j(w_j)$.

The server takes the plain mean of the cohort's $w_j$; $v_j$ and $alpha_j$ stay on the client.

The authors' code changes $alpha_j$ only on the first batch of a round, uses the mixture of the
gradients at $v_j$ and $w_j$ instead of the gradient at $vbar_j$, and shrinks $alpha_j$ by a term
$0.02 alpha_j$; the paper has none of these. At $alpha_j = 0$ no step changes $v_j$, so $alpha_j$
leaves 0 only if $v_j$ and $w_j$ differ. The step on $v_j$ and $alpha_j$ takes most lines of the
composition beyond twenty-five.

Source: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020, algorithm 1 and the
update of alpha that follows it.
"""

from typing import Annotated

import torch
from torch import Tensor

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Mean,
    Once,
    Repeat,
    equal,
    options,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, rate_at


@options.method()
def apfl(
    model: options.Model,
    *,
    alpha: Annotated[float, options.Range(0, 1, "[]")] = 0.5,
    adaptive: bool = True,
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 20,
    optimiser: options.PlainSGD = SGD(1e-2),
    adapt_epochs: options.AdaptEpochs = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by APFL: each client predicts with a model between the global one and its
    own.

    `result.private["alpha"]` [J] has the clients' shares of their own weights.

    Args:
        alpha: Initial share of a client's own weights; 0 predicts with the global model, 1 with a
            model that the client trains alone.
        adaptive: Whether clients learn alpha, or keep its start.
        optimiser: SGD without momentum; its rate is also that of alpha.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.apfl(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def own_step(algorithm: Algorithm, given: Server, view: View, batch: Batch) -> View:
        def loss(vbar: Tensor) -> Tensor:
            losses = algorithm.losses(algorithm.layout("v").leaves(vbar), batch)
            return (batch["weight"] @ losses) / batch["weight"].sum()

        slope = torch.func.grad(loss)(between(view))
        v, share = view["v"]["loc"], view["alpha"]
        rate = rate_at(optimiser.rate, given["round"], given["rounds"])
        moved, _ = optimiser.update(v, share * slope, None, rate)
        learned = (share - rate * (slope @ (v - view["w"]["loc"]))).clamp(0, 1)
        return {"v": {"loc": moved}, "alpha": learned if adaptive else share}

    def interpolate(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"v": {"loc": between(view)}}

    def join(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        return {"v": view["w"]}

    step = Descend(Energy("w", ("w",), likelihood="mean"), optimiser=optimiser)
    inner = (Once(own_step, data=True), step)
    return Algorithm(
        model,
        {"w": Block(pool=Mean(equal)), "v": Block(pool=None, keep=True)},
        (Repeat(inner, epochs=epochs, batch_size=batch_size),),
        parts=("v",),
        likelihood=likelihood,
        private={"alpha": alpha},
        finetune=(Once(interpolate),),
        adapt=(Once(join), Repeat(inner, epochs=adapt_epochs, batch_size=batch_size)),
    )


def between(view: View) -> Tensor:
    """Return alpha v + (1 - alpha) w, [D]."""
    return view["w"]["loc"].lerp(view["v"]["loc"], view["alpha"])
