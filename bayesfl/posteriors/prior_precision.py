"""Choosing the prior precision of a Laplace approximation after training: by the evidence of the training data, or on validation data."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayesfl.curvature.batches import Inputs
from bayesfl.posteriors.laplace import Laplace
from bayesfl.posteriors.linearised import nll

GRID = tuple(10.0 ** (k / 2) for k in range(-8, 9))
"""From 1e-4 to 1e4, by half decades."""
ALIKE = 1e-3
"""Mean negative log likelihoods this near, in nats, say nothing about which candidate is better."""


def by_evidence(fitted: Laplace, x: Tensor, y: Tensor, *, centre: float | Tensor = 0.0, grid: Sequence[float] = GRID) -> Laplace:
    """The approximation under the precision of largest log marginal likelihood.

    An optimum at an edge of the grid means that the data say nothing about the precision (for the whole network the evidence often
    rises without bound): then `fitted` comes back as it is, with a warning.

    Args:
        fitted: The approximation, under any precision.
        x: What it was fitted to, [N, ...].
        y: The labels or targets of `x`.
        centre: Of the prior.
        grid: Precisions to try.

    Raises:
        ValueError: An empty grid, one of which no precision works, or labels or targets that don't fit.

    References:
        MacKay, "A practical Bayesian framework for backpropagation networks", Neural Computation 4(3), 1992; Immer et al., "Scalable
        marginal likelihood estimation for model selection in deep learning", ICML 2021.
    """
    scores = _scores(fitted, x, grid, lambda candidate: float(candidate.log_marginal_likelihood(x, y, centre=centre)))
    precision = max(scores, key=lambda one: scores[one])
    if precision in (min(scores), max(scores)):
        warnings.warn(
            f"the log marginal likelihood is largest at {precision:g}, an edge of the grid: it carries no information about the prior "
            f"precision, which stays at {float(fitted.precision.mean()):g}; by_validation needs none",
            stacklevel=2,
        )
        return fitted
    return fitted.with_precision(x, precision)


def by_validation(
    fitted: Laplace, x: Inputs, held: Tensor, labels: Tensor, *, centre: bool = True, grid: Sequence[float] = GRID
) -> Laplace:
    """The approximation under the precision whose predictions have the smallest mean negative log likelihood on held-out data.

    Of precisions that are as good as the best, to `ALIKE` nats an example, the largest, which does least.

    Args:
        fitted: The approximation, under any precision.
        x: What it was fitted to.
        held: Validation inputs [M, ...].
        labels: Their labels or targets.
        centre: Whether predictions are centred, see `Laplace.linearised`.
        grid: Precisions to try.

    Raises:
        ValueError: An empty grid, one of which no precision works, or labels or targets that don't fit.
    """
    scores = _scores(fitted, x, grid, lambda candidate: -predictive_nll(candidate, held, labels, centre=centre))
    return fitted.with_precision(x, max(precision for precision, value in scores.items() if value >= max(scores.values()) - ALIKE))


def predictive_nll(fitted: Laplace, x: Inputs, y: Tensor, *, centre: bool = True) -> float:
    """Mean negative log density of `y` under the predictive distribution in closed form, in nats.

    Raises:
        ValueError: Labels or targets that don't fit the inputs or the classes.
    """
    return float(nll(fitted.predict(x, centre=centre), y).mean())


def _scores(fitted: Laplace, x: Inputs, grid: Sequence[float], score: Callable[[Laplace], float]) -> dict[float, float]:
    """The score of each precision; those without Cholesky factor or finite score are passed over.

    Raises:
        ValueError: An empty grid, or one of which no precision works.
    """
    if not len(grid):
        raise ValueError("grid is empty: pass one prior precision or more")
    found = {}
    for precision in grid:
        try:
            value = score(fitted.with_precision(x, precision))
        except torch.linalg.LinAlgError:
            continue
        if math.isfinite(value):
            found[precision] = value
    if not found:
        raise ValueError(f"no precision of the grid {tuple(grid)} gives finite predictions; look at the scale of the inputs and weights")
    return found
