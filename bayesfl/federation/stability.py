"""A look at whether a client's full-batch steps on a linear head, tied to a centre, are stable.

Near a minimum of curvature lambda, under a tie of precision k, a step of SGD with rate r and momentum m is a linear map, which contracts if
and only if

    r (lambda + k) < 2 (1 + m),        or, with the tie solved after the step (`prox`),        r lambda < (1 + m) (2 + r k / (1 - m)).

Beyond that a head oscillates or diverges, and a body trained against it, too: losses stay finite, since the softmax saturates, and accuracy
is lost without an error. lambda is the largest eigenvalue of the generalised Gauss-Newton matrix of the energy, by power iteration.

References:
    Polyak, "Some methods of speeding up the convergence of iteration methods", 1964, for the limit of the heavy ball.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Descend, by_algebra
from bayesfl.composition.priors import is_normal
from bayesfl.curvature.roots import root
from bayesfl.models.altered import cut
from bayesfl.optim import SGD, rate_at

ITERATIONS = 20
"""Steps of the power iteration, each about as dear as a step on the head."""


def looked_at(round: int) -> bool:
    """Say whether a round is looked at: the 1st, 2nd, 4th, 8th and so on; `round` is the number of rounds done before."""
    return round & (round + 1) == 0


def warn_if_unstable(algorithm: Algorithm, phase: Any, given: Server, view: View, batch: Batch, who: str) -> None:
    """Warn, with a rate that fits, if a phase's steps on a head are unstable at the client's weights; nothing for phases of another kind.

    Args:
        algorithm: The algorithm that has the phase.
        phase: A phase.
        given: What every client received this round.
        view: The client's view at the start of the phase.
        batch: All of the client's examples.
        who: The client, for the message.
    """
    if not watched(algorithm, phase):
        return
    (name,) = phase.blocks
    scale, weight = phase.energy.scales(view["n"])
    prior = algorithm.blocks[name].prior
    assert is_normal(prior)
    precision = float((weight / prior.variance(given, view)).max())
    try:
        curvature = float(scale * largest(algorithm, phase, given, view, batch))
    except TypeError:  # a likelihood whose curvature is not known
        return
    assert isinstance(phase.optimiser, SGD)
    rate = rate_at(phase.optimiser.rate, given["round"], given["rounds"])
    most = limit(curvature, precision, phase.optimiser.momentum, prox=phase.prox)
    if rate >= most:
        warnings.warn(
            f"round {given['round'] + 1}: steps on {name!r} of {who} are unstable: at learning rate {rate:g} the loss has curvature "
            f"{curvature:.3g} beside the tie's {precision:.3g}; take a rate below {most:.2g}, or a weaker tie",
            stacklevel=2,
        )


def watched(algorithm: Algorithm, phase: Any) -> bool:
    """Say whether a phase takes full-batch steps of SGD on a linear head alone, under a Normal prior."""
    if not by_algebra(phase) or phase.batch_size is not None or not isinstance(phase.optimiser, SGD) or len(phase.blocks) != 1:
        return False
    (name,) = phase.blocks
    linear = cut(algorithm.model) and isinstance(algorithm.model.head, nn.Linear)
    heads = all(leaf.startswith("head.") for leaf in algorithm.layout(name).names)
    return linear and heads and is_normal(algorithm.blocks[name].prior) and algorithm.copies(phase.energy.parts) is None


def limit(curvature: float, precision: float, momentum: float, *, prox: bool) -> float:
    """Return the learning rate from which on steps diverge; infinite if none does."""
    if not prox:
        return 2 * (1 + momentum) / (curvature + precision)
    left = curvature - (1 + momentum) / (1 - momentum) * precision
    return 2 * (1 + momentum) / left if left > 0 else torch.inf


def largest(algorithm: Algorithm, phase: Descend, given: Server, view: View, batch: Batch) -> Tensor:
    """Compute the largest eigenvalue of the curvature of a phase's weighted mean loss in its one block, at the means of all beliefs.

    Raises:
        TypeError: The curvature of the likelihood is not known.
    """
    (name,) = phase.blocks
    layout, leaves = algorithm.layout(name), algorithm.leaves(phase.energy.parts, view)
    features, outputs = algorithm.features(leaves, batch["x"])
    factor = root(algorithm.likelihood, outputs).to(outputs)
    shares = phase.energy.shares(given, view, batch)
    constant = {leaf: t if leaf.startswith("body.") else torch.zeros_like(t) for leaf, t in leaves.items()}
    head = algorithm.module(outputs).get_submodule("head")

    def linear(vector: Tensor) -> Tensor:
        moved = {leaf.removeprefix("head."): t for leaf, t in (constant | layout.leaves(vector)).items() if leaf.startswith("head.")}
        return functional_call(head, moved, (features,))

    direction = torch.randn(layout.size, generator=torch.Generator().manual_seed(0)).to(outputs)
    value = direction.new_zeros(())
    for _ in range(ITERATIONS):
        direction = (direction / direction.norm()).requires_grad_()
        with torch.enable_grad():
            moved = linear(direction)  # J d, whose derivative along u is J' u; torch's forward mode is not for several threads
        weighed = torch.einsum("noq,npq,np->no", factor, factor, moved.detach()) * shares[:, None]
        (product,) = torch.autograd.grad(moved, direction, weighed)
        value, direction = direction.detach() @ product, product
    return value
