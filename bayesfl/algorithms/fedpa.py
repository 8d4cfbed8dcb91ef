"""FedPA: clients send steps towards the mode of the product of their posteriors, estimated from
averages of SGD's iterates.

After `epochs` passes client j takes l = `samples` averages $x_1$, ..., $x_l$ of the iterates of
`average` steps each. With their mean m and covariance C, and from the model w received,

    $S = rho I + (1 - rho) C$, $rho = 1 / (1 + (l - 1) shrinkage)$,

    $delta = S^-1 (w - m)$, by l x l algebra,

    $w <- w - server_lr sum_j n_j delta_j / sum_j n_j$ on the server.

Under Gaussian posteriors $N(m_j, S_j)$ the fixed point is the mode of their product; FedAvg's is a
mean of the $m_j$. With shrinkage 0 or one sample, S is I. The same holds for the first
`fedavg_rounds`, because early iterates are far from stationary.

Source: Al-Shedivat, Gillenwater, Xing, Rostamizadeh, "Federated learning via posterior averaging: a
new perspective and practical algorithms", ICLR 2021, algorithms 2 and 3. The authors' recursion for
delta gives the same number.
"""

from functools import partial

import torch

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Mean,
    Once,
    Relaxed,
    Repeat,
    options,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def fedpa(
    model: options.Model,
    *,
    samples: options.Count = 5,
    average: options.Count = 10,
    shrinkage: options.Strength = 0.01,
    epochs: options.Epochs = 5,
    fedavg_rounds: options.Natural = 0,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9),
    server_lr: options.Positive = 1.0,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedPA: FedAvg whose clients correct their change by the covariance of
    their iterates.

    Its result is a point without a posterior: clients predict with the common model.

    Args:
        samples: Number l of averages over iterates.
        average: Number of mini-batches in each average.
        shrinkage: Weight r of the covariance; 0 is FedAvg to the clients' mean iterates.
        epochs: Number of passes over a client's data before the first average.
        fedavg_rounds: Number of initial rounds of FedAvg.
        server_lr: The server's step size, > 0.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.fedpa(model, epochs=1)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """

    def begin(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        loc = view["w"]["loc"]
        return {"samples": loc.new_zeros(samples, len(loc)), "taken": loc.new_zeros(samples, 1)}

    def add(place: int, algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        one = torch.zeros_like(view["taken"])
        one[place] = 1
        taken = view["taken"] + one
        apart = view["w"]["loc"] - view["samples"]
        return {"samples": view["samples"] + one * apart / taken.clamp_min(1), "taken": taken}

    def correct(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        if given["round"] <= fedavg_rounds:
            return view
        sent, drawn = given["w"]["loc"], view["samples"].double()
        mean = drawn.mean(0)
        delta, away = sent - mean, drawn - mean
        if shrinkage and samples > 1:
            rho = 1 / (1 + (samples - 1) * shrinkage)
            inner = away @ away.T + rho / (1 - rho) * (samples - 1) * torch.eye(samples).to(away)
            delta = (delta - away.T @ torch.linalg.solve(inner, away @ delta)) / rho
        return {"w": {"loc": sent - delta.to(sent)}}

    step = Descend(Energy("w", ("w",), likelihood="mean"), optimiser=optimiser)
    warm = Descend(
        Energy("w", ("w",), likelihood="mean"),
        epochs=epochs,
        batch_size=batch_size,
        optimiser=optimiser,
    )
    drawn = (
        Repeat((step, Once(partial(add, place))), times=average, batch_size=batch_size)
        for place in range(samples)
    )
    return Algorithm(
        model,
        {"w": Block(pool=Relaxed(Mean(), server_lr))},
        (warm, Once(begin), *drawn, Once(correct)),
        parts=("w",),
        likelihood=likelihood,
    )
