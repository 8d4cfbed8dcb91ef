"""Rules that select the subnetwork, the weights with uncertainty in a Laplace approximation.

A rule scores every weight; the highest scores are selected, exact ties by the smaller index.

Source of `wasserstein`: Daxberger, Nalisnick, Allingham, Antoran, Hernandez-Lobato, "Bayesian deep
learning via subnetwork inference", ICML 2021, eq. 15; used over clients in FedSI.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from bayesfl.base.random import Purpose, generator
from bayesfl.base.warning import warn
from bayesfl.curvature.dual import NO_CURVATURE


@dataclass(frozen=True)
class Evidence:
    """Hold the properties of a network's weights from which a rule scores them: their values,
    curvature and prior variances.

    Args:
        loc: Weights, [D]; [C, D] of several networks, for the rules by name, `curved_wasserstein`
            aside.
        curvature: Diagonal of the GGN, summed over the data, in nats, [..., D].
        variance: Prior variances, [..., D].
        seed: Seed of random rules.

    Example:
        >>> weights, curvature = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 9.0])
        >>> evidence = bf.selection.Evidence(weights, curvature, variance=torch.ones(3))
        >>> evidence.posterior_variance
        tensor([1.0000, 0.5000, 0.1000])
    """

    loc: Tensor
    curvature: Tensor
    variance: Tensor
    seed: int = 0

    @property
    def posterior_variance(self) -> Tensor:
        """Compute the posterior variance of each weight given all others, 1 / (GGN_rr + 1 /
        variance_r), [D].
        """
        return self.variance / (1 + self.curvature * self.variance)

    @property
    def curved(self) -> Tensor:
        """Return which weights the data determine at all, [D] bool; for the others the posterior
        equals the prior.
        """
        return self.curvature * self.variance >= NO_CURVATURE


Rule: TypeAlias = Callable[[Evidence], Tensor]
"""Function (evidence) -> scores [D], -inf for weights that must never be selected."""


def wasserstein(evidence: Evidence) -> Tensor:
    """Score weights by posterior variance, so that the subnetwork's posterior is nearest to the
    full diagonal one in Wasserstein distance.

    The squared 2-Wasserstein distance to it is the sum of the variances of the weights that are
    left out.

    Weights without curvature have the largest variances of all, so they come first; their posterior
    is the prior, and on inputs like the training data they change no prediction.

    Example:
        >>> weights, curvature = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 9.0])
        >>> evidence = bf.selection.Evidence(weights, curvature, variance=torch.ones(3))
        >>> bf.selection.wasserstein(evidence)
        tensor([1.0000, 0.5000, 0.1000])
    """
    return evidence.posterior_variance


def curved_wasserstein(evidence: Evidence) -> Tensor:
    """Score by `wasserstein`, but select only weights with non-zero curvature; the subnetwork is
    smaller if there are too few.

    Example:
        >>> weights, curvature = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 9.0])
        >>> evidence = bf.selection.Evidence(weights, curvature, variance=torch.ones(3))
        >>> bf.selection.curved_wasserstein(evidence)
        tensor([  -inf, 0.5000, 0.1000])
    """
    return wasserstein(evidence).masked_fill(~evidence.curved, -torch.inf)


def magnitude(evidence: Evidence) -> Tensor:
    """Score weights by their absolute value.

    Example:
        >>> weights, curvature = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.0, 1.0, 9.0])
        >>> evidence = bf.selection.Evidence(weights, curvature, variance=torch.ones(3))
        >>> bf.selection.magnitude(evidence)
        tensor([1., 2., 3.])
    """
    return evidence.loc.abs()


def random(evidence: Evidence) -> Tensor:
    """Score at random, so that all subnetworks are equally likely; equal seeds select equal ones,
    so the indices need not be sent.

    Example:
        >>> ones = torch.ones(100)
        >>> evidence = bf.selection.Evidence(ones, ones, ones, seed=1)
        >>> chosen = bf.selection.select(bf.selection.random, evidence, 3)
        >>> torch.equal(chosen, bf.selection.select("random", evidence, 3))
        True
    """
    scores = generator(evidence.seed, Purpose.SELECTION).standard_normal(evidence.loc.shape[-1])
    return torch.as_tensor(scores).to(evidence.loc).expand_as(evidence.loc)


def predictive_variance(evidence: Evidence) -> Tensor:
    """Score by each weight's share in the predictions' variance on the training data: GGN_rr times
    its posterior variance given all others.

    Example:
        >>> weights, curvature = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 9.0])
        >>> evidence = bf.selection.Evidence(weights, curvature, variance=torch.ones(3))
        >>> bf.selection.predictive_variance(evidence)
        tensor([0.0000, 0.5000, 0.9000])
    """
    return evidence.curvature * evidence.posterior_variance


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (wasserstein, curved_wasserstein, magnitude, random, predictive_variance)
}

ALIKE = [name for name in RULES if name != "curved_wasserstein"]
"""Rules that select the same weights under any prior variance common to all weights."""


def select(rule: str | Rule, evidence: Evidence, count: int) -> Tensor:
    """Select the subnetwork of `count` weights by a rule, as increasing indices [..., count]; fewer
    if the rule allows no more.

    Warns if most of the selected weights have no curvature: their posterior is then the prior, and
    the predictions are close to the MAP's, or worse.

    Raises:
        ValueError: `rule` is unknown, or the scores have another shape, are NaN, or are all -inf.

    Example:
        >>> weights, curvature = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 9.0])
        >>> evidence = bf.selection.Evidence(weights, curvature, variance=torch.ones(3))
        >>> bf.selection.select("predictive_variance", evidence, 2).tolist()
        [1, 2]
    """
    size = evidence.loc.shape[-1]
    check_rule("selection", rule)
    scores = (RULES[rule] if isinstance(rule, str) else rule)(evidence)
    if scores.shape != evidence.loc.shape or scores.isnan().any():
        raise ValueError(
            f"a selection gives one score for each of the {size} weights, not NaN, got "
            f"{list(scores.shape)}, {int(scores.isnan().sum())} of them NaN"
        )
    # much faster than sorting all
    least = scores.kthvalue(size - count + 1, -1, keepdim=True).values
    above = scores > least
    ties = (scores == least) & (scores > -torch.inf)
    above |= ties & (ties.cumsum(-1) <= count - above.sum(-1, keepdim=True))
    chosen = above.nonzero()[:, -1].view(*scores.shape[:-1], -1)
    if not chosen.numel():
        raise ValueError(f"the selection {rule!r} allows no weight at all: every score is -inf")
    if bool(((~evidence.curved).gather(-1, chosen).double().mean(-1) > 0.5).any()):
        # The text is always the same, so that Python shows it once for all rounds and clients of a
        # federation.
        warn(
            "most of the selected weights have no curvature (constant inputs, dead units; "
            "`uncurved_share` returns their share): the data contain nothing about them and the "
            "predictions will be near the MAP's; selection='random' or 'predictive_variance' "
            "select others",
        )
    return chosen


def size_of(share: float, weights: int) -> int:
    """Return the number of weights in a subnetwork: a share of D weights, rounded down, at least
    one.

    Example:
        >>> bf.selection.size_of(0.05, 1000)
        50
    """
    return max(1, int(share * weights + 1e-9))


def check_rule(name: str, rule: object) -> None:
    """Check that `rule` is a rule or the name of one.

    Raises:
        ValueError: `rule` is neither.
    """
    if not (callable(rule) or (isinstance(rule, str) and rule in RULES)):
        raise ValueError(
            f"selection must be one of {sorted(RULES)} or a function of the evidence, got {rule!r}"
        )


def uncurved_share(evidence: Evidence, indices: Tensor) -> float:
    """Return the share of the weights `indices` that have no curvature.

    Example:
        >>> weights, curvature = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 9.0])
        >>> evidence = bf.selection.Evidence(weights, curvature, variance=torch.ones(3))
        >>> bf.selection.uncurved_share(evidence, torch.tensor([0, 1]))
        0.5
    """
    return float((~evidence.curved[indices]).double().mean()) if len(indices) else 0.0
