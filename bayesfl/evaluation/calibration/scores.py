"""Nonconformity scores of classes and numbers. A conformal set contains all values whose score is
at most a threshold.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from bayesfl.base.numerics import levelled
from bayesfl.evaluation.predictions import Predictions, present

Score: TypeAlias = Literal["lac", "aps"]


def class_scores(score: Score, probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the score of every class, [..., O] in float64, of probabilities [..., O].

    `lac` is $1 - p_c$ (Sadinle, Lei and Wasserman, JASA 114, 2019), which gives the smallest sets
    on average. `aps` is the total probability of all classes more probable than c, plus u times
    that of c (Romano, Sesia and Candès, NeurIPS 2020), which gives sets whose size follows the
    difficulty of an example; they are larger than those of `lac`.

    Args:
        score: The kind of score.
        probs: Probabilities of classes; the scores of a row with NaN are NaN.
        uniform: Draws u within (0, 1), [...]; not used by `lac`.
    """
    probs = probs.double()
    if score == "lac":
        return 1 - probs
    order = torch.sort(levelled(probs.float()), dim=-1, descending=True, stable=True).indices
    ordered = probs.gather(-1, order)
    # Sums of probabilities round.
    ranked = (ordered.cumsum(-1) - ordered * (1 - uniform.double().unsqueeze(-1))).clamp_max(1.0)
    return torch.empty_like(ranked).scatter_(-1, order, ranked)


def number_scores(predictions: Predictions, targets: Tensor) -> Tensor:
    """Return the largest score of each example's targets [R, O] under predicted numbers, [R] in
    float64.

    The score is $|y - m| / s$ for a mean m and a standard deviation s (Lei, G'Sell, Rinaldo,
    Tibshirani and Wasserman, JASA 113, 2018); and for intervals $max(lower - y, y - upper)$, which
    is negative inside (Romano, Patterson and Candès, NeurIPS 2019).
    """
    y = targets.double().reshape(len(predictions.mask), -1)
    if predictions.variance is None:
        lower, upper = present(predictions.lower).double(), present(predictions.upper).double()
        return torch.maximum(lower - y, y - upper).amax(-1)
    return (
        (y - present(predictions.mean).double()).abs()
        / present(predictions.variance).double().sqrt()
    ).amax(-1)


def intervals(predictions: Predictions, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and upper ends, [R, O], of the numbers whose score is at most a row's
    threshold [R]; crossed ends are set to their middle.
    """
    t = threshold.unsqueeze(-1)
    if predictions.variance is None:
        lower, upper = (
            present(predictions.lower).double() - t,
            present(predictions.upper).double() + t,
        )
        middle = (lower + upper) / 2
        return torch.minimum(lower, middle.nan_to_num(nan=-torch.inf)), torch.maximum(
            upper, middle.nan_to_num(nan=torch.inf)
        )
    half = t * present(predictions.variance).double().sqrt()
    return present(predictions.mean).double() - half, present(predictions.mean).double() + half
