"""The choice of a Laplace approximation's prior precision after training, by the evidence of the training data or on validation data."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayesfl.curvature.batches import Inputs
from bayesfl.posteriors.laplace import Laplace
from bayesfl.posteriors.linearised import nll

GRID = tuple(10.0 ** (k / 2) for k in range(-8, 9))
"""Prior precisions from 1e-4 to 1e4, by half decades."""
ALIKE = 1e-3
"""Difference of mean negative log likelihoods, in nats, below which candidates count as equally good."""


def by_evidence(fitted: Laplace, x: Tensor, y: Tensor, *, centre: float | Tensor = 0.0, grid: Sequence[float] = GRID) -> Laplace:
    """Return the approximation under the precision of largest log marginal likelihood.

    An optimum at an edge of the grid means that the data say nothing about the precision (for the whole network the evidence often
    rises without bound): then `fitted` is returned unchanged, with a warning.

    Args:
        fitted: The approximation, under any precision.
        x: The inputs that it was fitted to, [N, ...].
        y: Labels or targets of `x`.
        centre: Mean of the prior, one number or one for each weight, [D].
        grid: Precisions to try.

    Raises:
        ValueError: `grid` is empty, no precision of it works, or labels or targets do not fit.

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
    """Return the approximation under the precision whose predictions have the smallest mean negative log likelihood on held-out data.

    Among precisions within `ALIKE` nats per example of the best, the largest is taken, which changes the predictions least.

    Args:
        fitted: The approximation, under any precision.
        x: The inputs that it was fitted to.
        held: Validation inputs [M, ...].
        labels: Labels or targets of `held`.
        centre: Whether predictions are centred, see `Laplace.linearised`.
        grid: Precisions to try.

    Raises:
        ValueError: `grid` is empty, no precision of it works, or labels or targets do not fit.
    """
    scores = _scores(fitted, x, grid, lambda candidate: -predictive_nll(candidate, held, labels, centre=centre))
    return fitted.with_precision(x, max(precision for precision, value in scores.items() if value >= max(scores.values()) - ALIKE))


def predictive_nll(fitted: Laplace, x: Inputs, y: Tensor, *, centre: bool = True) -> float:
    """Compute the mean negative log density of `y` under the predictive distribution in closed form, in nats.

    Raises:
        ValueError: Labels or targets do not fit the inputs or the classes.
    """
    return float(nll(fitted.predict(x, centre=centre), y).mean())


def _scores(fitted: Laplace, x: Inputs, grid: Sequence[float], score: Callable[[Laplace], float]) -> dict[float, float]:
    """Compute the score of each precision; those without Cholesky factor or finite score are left out.

    Raises:
        ValueError: `grid` is empty, or no precision of it works.
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
