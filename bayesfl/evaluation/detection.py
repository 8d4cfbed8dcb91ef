"""Uses of a score of doubt: detection of inputs from elsewhere, and selective prediction.

A score is one number for each example, [J, N], larger where the model is less reliable: `doubt`,
`entropy`, or the epistemic part of `Predictions`. Rows come padded with a `mask` [J, N] as in
`bayesfl.metrics`; rows outside the mask are never read. A function of one measure returns [J]: NaN
for a client that lacks the data for it or has a score that is NaN. Ties are counted exactly, as the
average over their possible orders; scores that differ by rounding alone are ties
(`bayesfl.base.numerics.levelled`).

>>> inside, outside = result.predict(clients.test), result.predict(strangers)  # doctest: +SKIP
>>> scores = entropy(inside.probs), entropy(outside.probs)  # doctest: +SKIP
>>> auroc(*scores, inside.mask, outside.mask)  # doctest: +SKIP
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.numerics import levelled
from bayesfl.evaluation.metrics.clients import Segments, check_shapes
from bayesfl.evaluation.metrics.scores import area


def doubt(probs: Tensor) -> Tensor:
    """Compute one minus the largest probability, [..., N] of [..., N, O].

    Hendrycks and Gimpel, "A baseline for detecting misclassified and out-of-distribution examples",
    ICLR 2017. It is computed as the sum of the other probabilities, so that examples near certainty
    keep their order where 1 - p would round to 0.

    Example:
        >>> bf.detection.doubt(torch.tensor([[0.75, 0.25], [0.5, 0.5]])).tolist()
        [0.25, 0.5]
    """
    return _of_probabilities(probs, lambda p: p.scatter(-1, p.argmax(-1, keepdim=True), 0))


def entropy(probs: Tensor) -> Tensor:
    """Compute the entropy of the predictive distribution in nats, [..., N] of [..., N, O];
    epistemic and aleatoric together.

    Example:
        >>> bf.detection.entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))  # 0 and log 2
        tensor([0.0000, 0.6931], dtype=torch.float64)
    """
    return _of_probabilities(probs, torch.special.entr)


def _of_probabilities(probs: Tensor, term: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum over classes of a function of probabilities, [..., N] in float64, rounded to
    the precision of `probs`, so that ties remain ties.

    Raises:
        ValueError: A number is not a probability.
    """
    probs = torch.as_tensor(probs).detach().cpu()
    if bool(((probs < -1e-6) | (probs > 1 + 1e-2)).any()):
        raise ValueError(
            f"probs must be in [0, 1], got {float(probs.min()):.4g} to {float(probs.max()):.4g}; "
            "for logits use softmax(-1), for log probabilities exp()"
        )
    return term(probs.double()).sum(-1).to(torch.promote_types(probs.dtype, torch.float32)).double()


def auroc(inside: Tensor, outside: Tensor, inside_mask: Tensor, outside_mask: Tensor) -> Tensor:
    """Compute the area under the ROC curve: the probability that an outsider scores above one of
    the client's own examples, ties counting half.

    Args:
        inside: Scores of each client's own examples, [J, N].
        outside: The same clients' scores of outsiders, [J, M]: examples of another data set, or of
            classes outside the training data.
        inside_mask: Which rows are own examples, [J, N] bool.
        outside_mask: Which rows are outsiders, [J, M] bool.

    Returns:
        Shape [J], in [0, 1]; 0.5 is the value of a random score.

    Raises:
        ValueError: The shapes do not fit.

    Example:
        >>> inside, outside = torch.tensor([[0.1, 0.4]]), torch.tensor([[0.3, 0.9]])
        >>> mask = torch.tensor([[True, True]])
        >>> bf.detection.auroc(inside, outside, mask, mask).tolist()
        [0.75]
    """
    inside, outside, inside_mask, outside_mask = (
        torch.as_tensor(t).detach().cpu() for t in (inside, outside, inside_mask, outside_mask)
    )
    check_shapes(inside[..., None], inside_mask)
    check_shapes(outside[..., None], outside_mask)
    mask = torch.cat([inside_mask, outside_mask], 1)
    clients, scores = Segments(mask.sum(1)), torch.cat([inside, outside], 1)[mask]
    is_outside = (torch.arange(mask.shape[1]) >= inside.shape[1]).expand_as(mask)[mask]
    return area(clients, scores, is_outside).masked_fill(clients.sum(scores.isnan()) > 0, math.nan)


@dataclass(frozen=True)
class RiskCoverage:
    """Hold the share of errors among the answers as a function of the share of examples answered,
    least doubtful first; see `risk_coverage`.

    Args:
        coverage: Share of examples answered, [n]: 1 / n to 1.
        risk: Expected share of errors among them, [n].

    Example:
        >>> score = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
        >>> right = torch.tensor([[True, True, False, True]])
        >>> curve = bf.detection.risk_coverage(score, right, torch.ones_like(right))
        >>> round(curve.aurc, 4)
        0.1458
    """

    coverage: np.ndarray
    risk: np.ndarray

    @property
    def aurc(self) -> float:
        """Return the area under the curve, the mean of the risks; NaN without examples."""
        return float(self.risk.mean()) if len(self.risk) else math.nan


def risk_coverage(score: Tensor, right: Tensor, mask: Tensor) -> RiskCoverage:
    """Compute the risk-coverage curve: the error rate among answered examples against the share
    answered, most confident first.

    The examples of all clients are pooled; for one client, pass its rows.

    El-Yaniv and Wiener, "On the foundations of noise-free selective classification", JMLR 11, 2010;
    Geifman, Uziel and El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers",
    ICLR 2019, equation 2.

    Args:
        score: Doubt in each prediction, [J, N]; examples with the largest are declined first.
        right: Whether the prediction is right, [J, N] bool: `probs.argmax(-1) == labels`.
        mask: Which rows are examples, [J, N] bool.

    Raises:
        ValueError: The shapes do not fit, or the score of an example is NaN.

    Example:
        >>> score = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
        >>> right = torch.tensor([[True, True, False, True]])
        >>> curve = bf.detection.risk_coverage(score, right, torch.ones_like(right))
        >>> curve.coverage.tolist(), curve.risk.round(2).tolist()
        ([0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.33, 0.25])
    """
    score, right, mask = (torch.as_tensor(t).detach().cpu() for t in (score, right, mask))
    check_shapes(score[..., None], mask, right=right)
    if bool((score.isnan() & mask).any()):
        raise ValueError(
            "score is NaN where mask is True: the run diverged, or it is the epistemic part of a "
            "plug-in, which has none"
        )
    _, group, count = levelled(score[mask]).unique(return_inverse=True, return_counts=True)
    wrong = 1 - right[mask].double()
    errors = torch.zeros(len(count), dtype=torch.float64).index_add_(0, group, wrong)
    before, start = (total.cumsum(0) - total for total in (errors, count))
    places = torch.arange(1, len(group) + 1)
    of = torch.repeat_interleave(torch.arange(len(count)), count)  # the group at each place
    risk = (before[of] + errors[of] * (places - start[of]) / count[of]) / places
    return RiskCoverage(places.numpy() / max(len(risk), 1), risk.numpy())
