"""A check whether a client's full-batch steps on a head with a Gaussian prior around a centre are
stable, and whether its body gives informative features.

On a quadratic of curvature lambda, with a prior of precision k, a step of SGD with rate r and
momentum m is a linear map, which contracts if and only if

    r (lambda + k) < 2 (1 + m),
    r lambda < (1 + m) (2 + r k / (1 - m))    if the prior is solved after the step (`prox`).

Beyond this bound a head oscillates or diverges, and so does a body trained against it: losses stay
finite, because the softmax saturates, and accuracy is lost without an error. lambda is the largest
eigenvalue of the Hessian of the loss at the posterior means in a linear head's weights, by power
iteration, and of the generalised Gauss-Newton matrix for a head of several layers. For a posterior
with draws, the loss is an expectation over draws, whose curvature is close to that but not equal.

References:
    Polyak, "Some methods of speeding up the convergence of iteration methods", 1964, for the limit
    of the heavy ball.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from bayesfl.base.inputs import call
from bayesfl.base.layout import Layout
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Descend, Phase, Repeat, by_algebra
from bayesfl.composition.priors import is_normal
from bayesfl.curvature import Curvature
from bayesfl.curvature.layers import unsupported
from bayesfl.curvature.roots import check_known
from bayesfl.likelihoods import Bernoulli, Categorical
from bayesfl.models.altered import cut
from bayesfl.models.cutting import has_body
from bayesfl.optim import SGD, rate_at, rate_limit

ITERATIONS = 20
"""Steps of the power iteration; each costs about as much as one client's step on the head."""


CONSTANT = 0.9
"""Share of features with the same value for all examples, above which a body counts as dead."""

ENOUGH_EXAMPLES = 10
"""Minimum number of examples for the check of constant features."""


def watch(
    algorithm: Algorithm, phase: Phase | Repeat, given: Server, view: View, batch: Batch, who: str
) -> dict[str, str]:
    """Return a warning if a body is dead or a phase's steps on a head are unstable, as a method's
    `watch`; empty for phases of another kind.

    Args:
        algorithm: The algorithm with the phase.
        phase: A phase.
        given: State that every client received this round.
        view: The client's view at the start of the phase.
        batch: All of the client's examples.
        who: The client, for the message.
    """
    if not watched(phase, algorithm):
        return {}
    found = {
        "dead": if_dead(algorithm, phase, given, view, batch, who),
        "unstable": if_unstable(algorithm, phase, given, view, batch, who),
    }
    return {kind: said for kind, said in found.items() if said}


def is_due(round: int) -> bool:
    """Return whether a round is checked: the 1st, 2nd, 4th, 8th and so on; `round` is the number of
    rounds done before.
    """
    return round & (round + 1) == 0


def if_unstable(
    algorithm: Algorithm, phase: Descend, given: Server, view: View, batch: Batch, who: str
) -> str:
    """Return a warning and a remedy if a phase's steps on a head are unstable at the client's
    weights, '' if they are stable; see `watch` for the arguments.

    Only this round's rate is checked if it follows a schedule. The remedy is a lower rate or, if
    this rate leaves room for one in addition to the data's curvature, a smaller prior precision.
    """
    (name,) = phase.blocks
    scale, weight = phase.energy.scales(view["n"])
    prior: Any = algorithm.blocks[name].prior
    precision = float((weight / prior.variance(given, view)).max())
    try:
        curvature = float(scale * largest(algorithm, phase, given, view, batch))
    except (TypeError, ValueError):  # the likelihood or the outputs have no known curvature
        return ""
    assert isinstance(phase.optimiser, SGD)
    rate = rate_at(phase.optimiser.rate, given["round"], given["rounds"])
    momentum = phase.optimiser.momentum
    most = rate_limit(curvature, precision, momentum, prox=phase.prox)
    if not rate >= most:
        return ""
    # Room for the prior precision in addition to the data's curvature; under `prox` there is none,
    # because a larger prior precision helps.
    room = 2 * (1 + momentum) / rate - curvature
    tie = (
        f", or a prior precision below {room:.3g}, a prior scale above "
        f"{(float(weight) / room) ** 0.5:.3g} (precision in pfedmap, scale_floor or prior_scale in "
        "pfedvem)"
        if room > 0
        else ""
    )
    return (
        f"round {given['round']}: steps on {name!r} of {who} are unstable: at learning rate "
        f"{rate:g} and these weights the loss has curvature {curvature:.3g} in addition to the "
        f"prior precision {precision:.3g}; use a rate below {most:.3g} in head_optimiser of "
        f"pfedmap and pfedvem{tie}"
    )


def if_dead(
    algorithm: Algorithm, phase: Descend, given: Server, view: View, batch: Batch, who: str
) -> str:
    """Return a warning if most features are the same for all of a client's examples, as for units
    that are never active; '' otherwise.

    Large first steps on a head with large weights or wide posteriors may make a body's units
    inactive, and no later step trains these; see `watch` for the arguments. Models without a body,
    and clients with fewer than `ENOUGH_EXAMPLES` examples, are not checked.
    """
    if not has_body(algorithm.model):
        return ""
    leaves = algorithm.leaves(phase.energy.parts, view)
    features: Any = algorithm.features(leaves, batch["x"])[0]
    flat = features[batch["weight"] > 0].flatten(1)
    if len(flat) < ENOUGH_EXAMPLES:
        return ""
    same = int((flat == flat[:1]).all(0).sum())
    if same <= CONSTANT * flat.shape[1]:
        return ""
    return (
        f"round {given['round']}: {same} of the {flat.shape[1]} features are the same for "
        f"all examples of {who}, because units are dead and train no more, or because inputs "
        "do not vary; start with a smaller init_scale, if the method has one, or a lower rate of "
        "body_optimiser"
    )


def watched(phase: Phase | Repeat, algorithm: Algorithm) -> TypeGuard[Descend]:
    """Return whether a phase takes full-batch steps of SGD on a head only, made of a sequence of
    torch's layers, under a Normal prior.
    """
    if (
        not by_algebra(phase)
        or phase.batch_size is not None
        or not isinstance(phase.optimiser, SGD)
        or len(phase.blocks) != 1
    ):
        return False
    (name,) = phase.blocks
    return (
        cut(algorithm.model)
        and not unsupported(algorithm.model.head)
        and all(leaf.startswith("head.") for leaf in algorithm.layout(name).names)
        and is_normal(algorithm.blocks[name].prior)
        and algorithm.copies(phase.energy.parts) is None
    )


def largest(
    algorithm: Algorithm, phase: Descend, given: Server, view: View, batch: Batch
) -> Tensor:
    """Compute the largest eigenvalue of the curvature of a phase's weighted mean loss in its one
    block, at the means of all posteriors.

    Raises:
        TypeError: The curvature of the likelihood is not known.
        ValueError: Outputs are not finite.
    """
    likelihood, shares = algorithm.likelihood, phase.energy.shares(given, view, batch)
    check_known(likelihood)
    network: Any = algorithm.network(view, phase.energy.parts)
    with torch.no_grad():
        features = call(network.body, batch["x"])
        if isinstance(likelihood, Categorical | Bernoulli):
            shares = shares * likelihood.times(network.head(features), batch["y"])
            likelihood = type(likelihood)()  # its curvature, scaled by these, is the loss's
    names = [leaf.removeprefix("head.") for leaf in algorithm.layout(phase.blocks[0]).names]
    layout = Layout(algorithm.model.get_submodule("head"), tuple(names))
    curvature = Curvature(network.head, likelihood, pattern=layout)
    rows = curvature.linearise(features, weight=shares.double())[1]
    noise = torch.randn(curvature.size, 1, generator=torch.Generator().manual_seed(0))
    direction = noise.to(shares.device, torch.float64)
    value, tiny = direction.norm() * 0, torch.finfo(torch.float64).tiny
    for _ in range(ITERATIONS):
        # A product is 0 where outputs are saturated.
        direction = direction / direction.norm().clamp_min(tiny)
        product = rows.back(rows.forward(direction))
        value, direction = (direction * product).sum(), product
    return value
