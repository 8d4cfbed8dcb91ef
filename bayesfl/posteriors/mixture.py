"""Mixtures of M components with latent membership: responsibilities, and mixture weights that
maximise a bound by EM.

    $p(y | x) = sum_m pi_m p_m(y | x)$,

    $log p(y | x) >= sum_m q_m (log pi_m + log p_m(y | x) - log q_m)$,

with equality if $q_m$ is the posterior probability that component m generated the example. All is
computed in log space: no density underflows.

Source: Dempster, Laird, Rubin, "Maximum likelihood from incomplete data via the EM algorithm", JRSS
B 39(1), 1977; for personal federated models Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated
multi-task learning under a mixture of distributions", NeurIPS 2021.
"""

import torch
from torch import Tensor

from bayesfl.base.options import Count, declared

LEAST = 1e-12
"""Minimum mixture weight: a weight of exactly 0 would stay 0."""


def responsibilities(weights: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the posterior of each example's component, q [..., N, M], and the log marginal
    likelihood of each example [..., N] in nats.

    Args:
        weights: Mixture weights pi [..., M], on the simplex.
        losses: Negative log densities of each component, [..., M, N], in nats.

    Raises:
        ValueError: `weights` and `losses` differ in their number of components.
    """
    joint = (weights.clamp_min(LEAST).log().unsqueeze(-1) - losses).mT
    evidence = joint.logsumexp(-1)
    return (joint - evidence.unsqueeze(-1)).exp(), evidence


def mean_weights(q: Tensor, counts: Tensor) -> Tensor:
    """Compute the weights pi [..., M] that maximise the bound: the mean of the responsibilities
    over examples, without padding.

    Args:
        q: Responsibilities, [..., N, M].
        counts: 1 for an example, 0 for padding, [..., N].
    """
    pi = (q * counts.unsqueeze(-1)).sum(-2) / counts.sum(-1, keepdim=True)
    pi = pi.clamp_min(LEAST)
    return pi / pi.sum(-1, keepdim=True)


@declared
def fit_weights(losses: Tensor, counts: Tensor, *, iterations: Count = 20) -> Tensor:
    """Fit only the mixture weights pi [..., M] by EM, from equal ones. The problem is concave, and
    the likelihood never decreases.

    Args:
        losses: Negative log densities of each component, [..., M, N], in nats.
        counts: 1 for an example, 0 for padding, [..., N].
        iterations: Number of EM iterations.
    """
    pi = torch.full_like(losses[..., 0], 1 / losses.shape[-2])
    for _ in range(iterations):
        pi = mean_weights(responsibilities(pi, losses)[0], counts)
    return pi
