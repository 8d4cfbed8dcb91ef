"""Uses of a score of doubt: detecting inputs from elsewhere, and declining to answer where an error
is likely.

A score is one number for each example, [J, N], larger where the model should be trusted less:
`doubt`, `entropy`, or the epistemic part of `Predictions`. Rows come padded with a `mask` [J, N] as
in `bayesfl.metrics`; rows outside the mask are never read. A function of one measure returns [J]:
NaN for a client that lacks the data for it or has a score that is NaN. Ties are counted exactly, as
the average over their possible orders; scores that differ by rounding alone are ties
(`bayesfl.base.numerics.levelled`).

>>> inside, outside = result.predict(clients.test), result.predict(strangers)  # doctest: +SKIP
>>> scores = entropy(inside.probs), entropy(outside.probs)  # doctest: +SKIP
>>> auroc(*scores, inside.mask, outside.mask)  # doctest: +SKIP
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.numerics import levelled
from bayesfl.base.options import Share, declared
from bayesfl.evaluation.predictions import Predictions, present

# tolerance, so that 0.95 n is not rounded up where it would be an integer but for floating-point
# error
_ROUNDING = 1e-9


def doubt(probs: Tensor) -> Tensor:
    """Compute one minus the largest probability, [..., N] of [..., N, O].

    Hendrycks and Gimpel, "A baseline for detecting misclassified and out-of-distribution examples",
    ICLR 2017. It is the sum of the other probabilities, so that certain examples keep their order
    where 1 - p would round to 0.

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
    """Return the sum over classes of a function of probabilities, [..., N] in float64, without
    digits beyond those of `probs`, which would break ties.

    Raises:
        ValueError: A number is no probability.
    """
    probs = torch.as_tensor(probs).detach().cpu()
    if bool(((probs < -1e-6) | (probs > 1 + 1e-2)).any()):
        raise ValueError(
            f"probs must be in [0, 1], got {float(probs.min()):.4g} to {float(probs.max()):.4g}; "
            "of logits take softmax(-1), of log probabilities exp()"
        )
    return term(probs.double()).sum(-1).to(torch.promote_types(probs.dtype, torch.float32)).double()


def scores(predictions: Predictions) -> dict[str, Tensor]:
    """Compute every score that these predictions of classes have, [J, N] each.

    Returns:
        `doubt`, `entropy`, and `epistemic` unless the predictions were made at the mean, without
        draws.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=4, outputs=10))
        >>> predictions = bf.simulate(method, clients, rounds=1).predict(clients.test)
        >>> list(bf.detection.scores(predictions))
        ['doubt', 'entropy']
    """
    probs = present(predictions.probs)
    found = {"doubt": doubt(probs), "entropy": entropy(probs)}
    if bool(predictions.epistemic[predictions.mask].isnan().all()):
        return found
    return found | {"epistemic": predictions.epistemic.detach().cpu().double()}


def auroc(inside: Tensor, outside: Tensor, inside_mask: Tensor, outside_mask: Tensor) -> Tensor:
    """Compute the area under the ROC curve: the probability that an outsider scores above one of
    the client's own examples, ties counting half.

    Args:
        inside: Scores of each client's own examples, [J, N].
        outside: Scores that the same clients give to outsiders, [J, M]: examples of another data
            set, or of classes they never saw.
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

    def area(own: Tensor, other: Tensor) -> Tensor:
        below, upto = (torch.searchsorted(own, other, right=right) for right in (False, True))
        return (below + upto).double().mean() / (2 * len(own))

    return _each(area, inside, outside, inside_mask, outside_mask)


@declared
def fpr(
    inside: Tensor, outside: Tensor, inside_mask: Tensor, outside_mask: Tensor, *, tpr: Share = 0.95
) -> Tensor:
    """Compute the share of outside examples taken for a client's own, at the threshold that accepts
    a share `tpr` of its own examples.

    Examples with a score up to the threshold are accepted. It is the smallest one that accepts a
    share of at least `tpr` of the own examples. Liang, Li and Srikant, "Enhancing the reliability
    of out-of-distribution image detection in neural networks", ICLR 2018, section 4.2 (FPR at 95 %
    TPR, the client's own being the positives).

    Args:
        inside: Scores of each client's own examples, [J, N].
        outside: Scores that the same clients give to outsiders, [J, M].
        inside_mask: Which rows are own examples, [J, N] bool.
        outside_mask: Which rows are outsiders, [J, M] bool.
        tpr: Share of the own examples that are accepted, in (0, 1].

    Returns:
        Shape [J], in [0, 1]; less is better.

    Raises:
        ValueError: The shapes do not fit.

    Example:
        >>> inside, outside = torch.tensor([[0.1, 0.4]]), torch.tensor([[0.3, 0.9]])
        >>> mask = torch.tensor([[True, True]])
        >>> bf.detection.fpr(inside, outside, mask, mask).tolist()
        [0.5]
    """

    def passing(own: Tensor, other: Tensor) -> Tensor:
        return (other <= own[max(math.ceil(tpr * len(own) - _ROUNDING), 1) - 1]).double().mean()

    return _each(passing, inside, outside, inside_mask, outside_mask)


def detection_summary(
    inside: Mapping[str, Tensor],
    outside: Mapping[str, Tensor],
    inside_mask: Tensor,
    outside_mask: Tensor,
) -> dict[str, float]:
    """Summarise how well each score detects outsiders, averaged over the clients that have both own
    examples and outsiders.

    Args:
        inside: Scores of each client's own examples, {name: [J, N]}, as `scores` gives them.
        outside: Scores of outsiders, {name: [J, M]}; names that both have are compared.
        inside_mask: Which rows are own examples, [J, N] bool.
        outside_mask: Which rows are outsiders, [J, M] bool.

    Returns:
        For each name `{name}_auroc` and `{name}_fpr95`, NaN if one of these clients has a score
        that is NaN.

    Raises:
        ValueError: The shapes do not fit.

    Example:
        >>> inside, outside = torch.tensor([[0.1, 0.4]]), torch.tensor([[0.3, 0.9]])
        >>> mask = torch.tensor([[True, True]])
        >>> bf.detection.detection_summary({"doubt": inside}, {"doubt": outside}, mask, mask)
        {'doubt_auroc': 0.75, 'doubt_fpr95': 0.5}
    """
    shared = [name for name in inside if name in outside]
    both = torch.as_tensor(inside_mask).any(-1) & torch.as_tensor(outside_mask).any(-1)
    summary = {}
    for name in shared:
        pair = inside[name], outside[name], inside_mask, outside_mask
        summary |= {
            f"{name}_auroc": float(auroc(*pair)[both].mean()),
            f"{name}_fpr95": float(fpr(*pair)[both].mean()),
        }
    return summary


@dataclass(frozen=True)
class RiskCoverage:
    """The share of errors among the answers as a function of the share of examples answered, least
    doubtful first; see `risk_coverage`.

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
    score, right, mask = _selective(score, right, mask)
    if bool((score.isnan() & mask).any()):
        raise ValueError(
            "score is NaN where mask is True: the run diverged, or it is the epistemic part of a "
            "plug-in, which has none"
        )
    risk = _risks(score[mask], right[mask])
    return RiskCoverage(np.arange(1, len(risk) + 1) / max(len(risk), 1), risk.numpy())


@declared
def selective_accuracy(
    score: Tensor, right: Tensor, mask: Tensor, *, coverage: Share = 0.8
) -> Tensor:
    """Compute each client's accuracy on the share `coverage` of its examples, rounded up, that it
    doubts least.

    Args:
        score: Doubt in each prediction, [J, N].
        right: Whether the prediction is right, [J, N] bool.
        mask: Which rows are examples, [J, N] bool.
        coverage: Share of the examples that is answered, in (0, 1].

    Returns:
        Shape [J], in [0, 1].

    Raises:
        ValueError: The shapes do not fit.

    Example:
        >>> score = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
        >>> right = torch.tensor([[True, True, True, False]])
        >>> mask = torch.ones_like(right)
        >>> bf.detection.selective_accuracy(score, right, mask, coverage=0.75).tolist()
        [1.0]
    """
    score, right, mask = _selective(score, right, mask)

    def accuracy(own: Tensor, right: Tensor) -> Tensor:
        return 1 - _risks(own, right)[max(math.ceil(coverage * len(own) - _ROUNDING), 1) - 1]

    return _by_client(accuracy, (score, mask), (right, mask))


def _risks(score: Tensor, right: Tensor) -> Tensor:
    """Compute the expected share of errors among the i least doubtful of n examples, [n], with ties
    in random order.
    """
    _, group, count = levelled(score).unique(return_inverse=True, return_counts=True)
    errors = torch.zeros(len(count), dtype=torch.float64).index_add_(0, group, (~right).double())
    before, start = (total.cumsum(0) - total for total in (errors, count))
    places = torch.arange(1, len(score) + 1)
    of = torch.repeat_interleave(torch.arange(len(count)), count)  # the group at each place
    return (before[of] + errors[of] * (places - start[of]) / count[of]) / places


def _each(
    measure: Callable[[Tensor, Tensor], Tensor],
    inside: Tensor,
    outside: Tensor,
    inside_mask: Tensor,
    outside_mask: Tensor,
) -> Tensor:
    """Apply `measure` to each client's own scores, in ascending order, and to those of its
    outsiders, [J].
    """
    inside, outside, inside_mask, outside_mask = (
        torch.as_tensor(t).detach().cpu() for t in (inside, outside, inside_mask, outside_mask)
    )
    _check(inside=inside, inside_mask=inside_mask)
    _check(outside=outside, outside_mask=outside_mask)

    def levelled_measure(own: Tensor, other: Tensor) -> Tensor:
        own, other = levelled(torch.cat([own, other])).split([len(own), len(other)])
        return measure(own.sort().values, other)

    return _by_client(levelled_measure, (inside, inside_mask), (outside, outside_mask))


def _by_client(measure: Callable[..., Tensor], *rows: tuple[Tensor, Tensor]) -> Tensor:
    """Apply `measure` to each client's own rows of all pairs of values and mask, [J]; NaN where one
    has none, or a NaN.
    """
    out = torch.full((len(rows[0][0]),), math.nan, dtype=torch.float64)
    for j in range(len(out)):
        own = [values[j][mask[j]] for values, mask in rows]
        if all(len(t) and not bool(t.isnan().any()) for t in own):
            out[j] = measure(*own)
    return out


def _selective(score: Tensor, right: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    score, right, mask = (torch.as_tensor(t).detach().cpu() for t in (score, right, mask))
    _check(score=score, right=right)
    _check(score=score, mask=mask)
    return score.double(), right, mask


def _check(**rows: Tensor) -> None:
    """Check that all have one entry for each row, and that the last is bool."""
    shapes = {name: list(t.shape) for name, t in rows.items()}
    if any(len(shape) != 2 or shape != next(iter(shapes.values())) for shape in shapes.values()):
        raise ValueError(
            f"{', '.join(shapes)} must be [J, N], one number for each example; got {shapes}; of "
            "several labels of each example take predictions.places()"
        )
    name, mask = list(rows.items())[-1]
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name} must be bool, got {mask.dtype}; use {name}.bool(), or for whether predictions "
            "are right probs.argmax(-1) == labels"
        )
