"""What a score of doubt is good for: telling inputs from elsewhere, and declining to answer where an error is likely.

A score is one number an example, [J, N], larger where the model should be trusted less: `doubt`, `entropy`, or the epistemic part of
`Predictions`. Rows come padded with a `mask` [J, N] as in `bayesfl.metrics`; what stands in the others is never read. A function of one
measure returns [J]: NaN for a client that lacks what it needs or has a score that is NaN. Ties are counted exactly, as the average over
the orders in which they could stand.

>>> inside, outside = result.predict(clients.test), result.predict(strangers)  # doctest: +SKIP
>>> auroc(entropy(inside.probs), entropy(outside.probs), inside.mask, outside.mask)  # doctest: +SKIP
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.checks import number
from bayesfl.evaluation import metrics
from bayesfl.evaluation.predictions import Predictions

_ROUNDING = 1e-9  # so that 0.95 n counts as the integer that it would be without rounding


def doubt(probs: Tensor) -> Tensor:
    """Takes one minus the largest probability, [..., N] of [..., N, O].

    Hendrycks and Gimpel, "A baseline for detecting misclassified and out-of-distribution examples", ICLR 2017. It is the sum of the other
    probabilities, so that certain examples keep their order where 1 - p would round to 0.
    """
    probs = torch.as_tensor(probs).detach().cpu().double()
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0).sum(-1)


def entropy(probs: Tensor) -> Tensor:
    """Computes the entropy of the predictive distribution in nats, [..., N] of [..., N, O]; epistemic and aleatoric together."""
    return torch.special.entr(torch.as_tensor(probs).detach().cpu().double()).sum(-1)


def scores(predictions: Predictions) -> dict[str, Tensor]:
    """Computes every score that these predictions of classes have, [J, N] each.

    Returns:
        `doubt`, `entropy`, and `epistemic` where the predictions are more than the plug-in.

    Raises:
        ValueError: The predictions are of regression.
    """
    if predictions.probs is None:
        raise ValueError("doubt and entropy need class probabilities, and these predictions are of regression; use their epistemic")
    found = {"doubt": doubt(predictions.probs), "entropy": entropy(predictions.probs)}
    if bool(predictions.epistemic[predictions.mask].isnan().all()):
        return found
    return found | {"epistemic": predictions.epistemic.detach().cpu().double()}


def unseen(labels: Tensor, mask: Tensor, train_labels: Tensor, train_mask: Tensor) -> Tensor:
    """Marks which examples are of a class that their client has no training example of, [J, N] bool: the mask of near outsiders.

    Args:
        labels: Classes [J, N].
        mask: Which rows are examples, [J, N] bool.
        train_labels: Classes of the same clients' training examples [J, M].
        train_mask: Which rows are examples, [J, M] bool.

    Raises:
        ValueError: The shapes do not fit.
    """
    labels, mask, train_labels, train_mask = (torch.as_tensor(t).detach().cpu() for t in (labels, mask, train_labels, train_mask))
    _check(labels=labels, mask=mask)
    _check(train_labels=train_labels, train_mask=train_mask)
    if len(labels) != len(train_labels):
        raise ValueError(f"labels are of {len(labels)} clients and train_labels of {len(train_labels)}; they must be the same")
    known = [torch.isin(y, seen[m]) for y, seen, m in zip(labels, train_labels, train_mask, strict=True)]
    return mask & ~torch.stack(known) if known else mask.clone()


def auroc(inside: Tensor, outside: Tensor, inside_mask: Tensor, outside_mask: Tensor) -> Tensor:
    """Computes the area under the ROC curve: the probability that an outsider scores above one of the client's own examples, ties half.

    Args:
        inside: Scores of each client's own examples, [J, N].
        outside: Scores that the same clients give to examples from elsewhere, [J, M]: another dataset, or classes they never saw.
        inside_mask: Which rows are examples, [J, N] bool.
        outside_mask: Likewise, [J, M] bool.

    Returns:
        Shape [J], in [0, 1]; 0.5 is a coin.

    Raises:
        ValueError: The shapes do not fit.
    """

    def area(own: Tensor, other: Tensor) -> Tensor:
        below, upto = (torch.searchsorted(own, other, right=right) for right in (False, True))
        return (below + upto).double().mean() / (2 * len(own))

    return _each(area, inside, outside, inside_mask, outside_mask)


def fpr(inside: Tensor, outside: Tensor, inside_mask: Tensor, outside_mask: Tensor, *, tpr: float = 0.95) -> Tensor:
    """Counts the share of outsiders that pass for the client's own where a share `tpr` of its own does.

    Everything up to a threshold passes: the least one that lets a share of at least `tpr` of the own examples pass. Liang, Li and
    Srikant, "Enhancing the reliability of out-of-distribution image detection in neural networks", ICLR 2018, section 4.2 (FPR at 95 %
    TPR, the client's own being the positives).

    Args:
        inside: Scores of each client's own examples, [J, N].
        outside: Scores that the same clients give to examples from elsewhere, [J, M].
        inside_mask: Which rows are examples, [J, N] bool.
        outside_mask: Likewise, [J, M] bool.
        tpr: Share of the own examples that pass, in (0, 1].

    Returns:
        Shape [J], in [0, 1]; less is better.

    Raises:
        ValueError: The shapes do not fit, or `tpr` is no such share.
    """
    if not 0 < number("tpr", tpr) <= 1:
        raise ValueError(f"tpr is a share of the client's own examples and must lie in (0, 1], got {tpr}; 95% is 0.95")

    def passing(own: Tensor, other: Tensor) -> Tensor:
        return (other <= own[max(math.ceil(tpr * len(own) - _ROUNDING), 1) - 1]).double().mean()

    return _each(passing, inside, outside, inside_mask, outside_mask)


def detection_summary(
    inside: Mapping[str, Tensor], outside: Mapping[str, Tensor], inside_mask: Tensor, outside_mask: Tensor
) -> dict[str, float]:
    """Sums up how well each score tells outsiders, averaged over the clients that have both kinds.

    Args:
        inside: {name: scores of each client's own examples, [J, N]}, as `scores` gives them.
        outside: {name: scores of examples from elsewhere, [J, M]}; names that both have are compared.
        inside_mask: Which rows are examples, [J, N] bool.
        outside_mask: Likewise, [J, M] bool.

    Returns:
        `{name}_auroc` and `{name}_fpr95`. NaN where a client has a score that is NaN.

    Raises:
        ValueError: The shapes do not fit, or no name is in both.
    """
    shared = [name for name in inside if name in outside]
    if not shared:
        raise ValueError(f"no score is in both: inside has {list(inside)}, outside has {list(outside)}")
    both = torch.as_tensor(inside_mask).any(-1) & torch.as_tensor(outside_mask).any(-1)
    summary = {}
    for name in shared:
        pair = inside[name], outside[name], inside_mask, outside_mask
        summary |= {f"{name}_auroc": float(auroc(*pair)[both].mean()), f"{name}_fpr95": float(fpr(*pair)[both].mean())}
    return summary


@dataclass(frozen=True)
class RiskCoverage:
    """Share of errors among the answers, answering the least doubtful examples first; made by `risk_coverage`.

    Args:
        coverage: Share of examples answered, [n]: 1 / n to 1.
        risk: Expected share of errors among them, [n].
    """

    coverage: np.ndarray
    risk: np.ndarray

    @property
    def aurc(self) -> float:
        """Area under the curve, the mean of the risks; NaN without examples."""
        return float(self.risk.mean()) if len(self.risk) else math.nan

    @property
    def best(self) -> float:
        """The area if every error were more doubtful than every right answer; no score does better at this accuracy."""
        n = len(self.risk)
        if not n:
            return math.nan
        right, places = n - round(self.risk[-1] * n), np.arange(1, n + 1)
        return float((np.maximum(places - right, 0) / places).mean())


def risk_coverage(score: Tensor, right: Tensor, mask: Tensor) -> RiskCoverage:
    """Makes the risk-coverage curve of all examples of all clients in one pot; for one client, pass its rows.

    El-Yaniv and Wiener, "On the foundations of noise-free selective classification", JMLR 11, 2010; Geifman, Uziel and El-Yaniv,
    "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019, equation 2.

    Args:
        score: Doubt in each prediction, [J, N]; the largest are declined first.
        right: Whether the prediction is right, [J, N] bool: `probs.argmax(-1) == labels`.
        mask: Which rows are examples, [J, N] bool.

    Raises:
        ValueError: The shapes do not fit, or a score that counts is NaN.
    """
    score, right, mask = _selective(score, right, mask)
    if bool((score.isnan() & mask).any()):
        raise ValueError("score is NaN where mask is True: the run diverged, or it is the epistemic part of a plug-in, which has none")
    risk = _risks(score[mask], right[mask])
    return RiskCoverage(np.arange(1, len(risk) + 1) / max(len(risk), 1), risk.numpy())


def aurc(score: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Computes the area under each client's risk-coverage curve, as in `risk_coverage`; a constant score gives the client's error rate.

    Args:
        score: Doubt in each prediction, [J, N].
        right: Whether the prediction is right, [J, N] bool.
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J], in [0, 1]; less is better.

    Raises:
        ValueError: The shapes do not fit.
    """
    return _curves(lambda risk: risk.mean(), score, right, mask)


def selective_accuracy(score: Tensor, right: Tensor, mask: Tensor, *, coverage: float = 0.8) -> Tensor:
    """Computes each client's accuracy on the share `coverage` of its examples, rounded up, that it doubts least.

    Args:
        score: Doubt in each prediction, [J, N].
        right: Whether the prediction is right, [J, N] bool.
        mask: Which rows are examples, [J, N] bool.
        coverage: Share of the examples that is answered, in (0, 1].

    Returns:
        Shape [J], in [0, 1].

    Raises:
        ValueError: The shapes do not fit, or `coverage` is no such share.
    """
    if not 0 < number("coverage", coverage) <= 1:
        raise ValueError(f"coverage is a share of the examples and must lie in (0, 1], got {coverage}; 80% is 0.8")
    return _curves(lambda risk: 1 - risk[max(math.ceil(coverage * len(risk) - _ROUNDING), 1) - 1], score, right, mask)


def selective_summary(probs: Tensor, labels: Tensor, mask: Tensor, *, score: Tensor | None = None) -> dict[str, float]:
    """Sums up what declining the doubtful gains a federation of classifiers.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        score: Doubt in each prediction, [J, N]; by default `doubt(probs)`.

    Returns:
        `aurc`, `accuracy_at_80`, `accuracy_at_90`: means over the clients that have examples. `pooled_aurc`, `pooled_aurc_excess`: of all
        examples in one pot, and what it is above the best possible at this accuracy. NaN where a prediction or score is not finite.

    Raises:
        ValueError: Input that does not fit.
    """
    probs, labels, mask = (torch.as_tensor(t).detach().cpu() for t in (probs, labels, mask))
    broken = bool((metrics.accuracy(probs, labels, mask).isnan() & mask.any(-1)).any())  # says what does not fit
    score = doubt(probs) if score is None else torch.as_tensor(score).detach().cpu()
    case = score, probs.argmax(-1) == labels, mask
    if broken or bool((score.isnan() & mask).any()):
        return dict.fromkeys(("aurc", "accuracy_at_80", "accuracy_at_90", "pooled_aurc", "pooled_aurc_excess"), math.nan)
    pot = risk_coverage(*case)
    return {
        "aurc": float(aurc(*case).nanmean()),
        "accuracy_at_80": float(selective_accuracy(*case, coverage=0.8).nanmean()),
        "accuracy_at_90": float(selective_accuracy(*case, coverage=0.9).nanmean()),
        "pooled_aurc": pot.aurc,
        "pooled_aurc_excess": pot.aurc - pot.best,
    }


def _risks(score: Tensor, right: Tensor) -> Tensor:
    """Computes the expected share of errors among the i least doubtful of n examples, [n], those that tie in random order."""
    _, group, count = score.unique(return_inverse=True, return_counts=True)
    errors = torch.zeros(len(count), dtype=torch.float64).index_add_(0, group, (~right).double())
    before, start = (total.cumsum(0) - total for total in (errors, count))
    places = torch.arange(1, len(score) + 1)
    of = torch.repeat_interleave(torch.arange(len(count)), count)  # the group at each place
    return (before[of] + errors[of] * (places - start[of]) / count[of]) / places


def _each(
    measure: Callable[[Tensor, Tensor], Tensor], inside: Tensor, outside: Tensor, inside_mask: Tensor, outside_mask: Tensor
) -> Tensor:
    """Applies `measure` to each client's own scores, in ascending order, and to those of the others, [J]."""
    inside, outside, inside_mask, outside_mask = (torch.as_tensor(t).detach().cpu() for t in (inside, outside, inside_mask, outside_mask))
    _check(inside=inside, inside_mask=inside_mask)
    _check(outside=outside, outside_mask=outside_mask)
    if len(inside) != len(outside):
        raise ValueError(
            f"inside is of {len(inside)} clients and outside of {len(outside)}; each client scores both its own and the others"
        )
    out = torch.full((len(inside),), math.nan, dtype=torch.float64)
    for j in range(len(inside)):
        own, other = inside[j][inside_mask[j]].double(), outside[j][outside_mask[j]].double()
        if len(own) and len(other) and not bool(own.isnan().any() | other.isnan().any()):
            out[j] = measure(own.sort().values, other)
    return out


def _curves(measure: Callable[[Tensor], Tensor], score: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Applies `measure` to each client's risks [n], [J]."""
    score, right, mask = _selective(score, right, mask)
    out = torch.full((len(score),), math.nan, dtype=torch.float64)
    for j, inside in enumerate(mask):
        if bool(inside.any()) and not bool(score[j][inside].isnan().any()):
            out[j] = measure(_risks(score[j][inside], right[j][inside]))
    return out


def _selective(score: Tensor, right: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    score, right, mask = (torch.as_tensor(t).detach().cpu() for t in (score, right, mask))
    _check(score=score, right=right, mask=mask)
    if right.dtype != torch.bool:
        raise ValueError(f"right must be bool, whether each prediction is right, got {right.dtype}; use probs.argmax(-1) == labels")
    return score.double(), right, mask


def _check(**rows: Tensor) -> None:
    """Checks that all have one entry for each row, and the last is a mask."""
    (first, values), *others = rows.items()
    if values.dim() != 2:
        raise ValueError(f"{first} must be [J, N], one number for each example; got shape {list(values.shape)}")
    for name, other in others:
        if other.shape != values.shape:
            raise ValueError(f"{name} must have the shape of {first}, {list(values.shape)}; got {list(other.shape)}")
    name, mask = others[-1]
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, True where a row is an example; got {mask.dtype}, use mask.bool()")
