"""The choice of a Laplace approximation's prior precision after training, by the evidence of the
training data or on validation data.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from bayesfl.base.inputs import Inputs
from bayesfl.base.warning import warn
from bayesfl.curvature.batches import Data, labelled
from bayesfl.likelihoods import Poisson
from bayesfl.posteriors.laplace import Laplace
from bayesfl.posteriors.linearised import Link, nll_of_predictive

GRID = tuple(10.0 ** (k / 2) for k in range(-8, 9))
"""Prior precisions from 1e-4 to 1e4, by half decades."""


def by_evidence(
    fitted: Laplace,
    x: Data,
    y: Tensor | None = None,
    *,
    centre: float | Tensor = 0.0,
    grid: Sequence[float] = GRID,
) -> Laplace:
    """Return the approximation under the precision of largest log marginal likelihood.

    It is the evidence of the Gaussian approximation, and speaks of the prior that the weights were
    trained under. Of a network that was trained under another one, or that fits its training data
    nearly exactly, predictions can be far worse than those of the weights alone; `by_validation`
    looks at predictions.

    An optimum at an edge of the grid means that the data say nothing about the precision (for the
    whole network the evidence often rises without bound): then `fitted` is returned unchanged, with
    a warning.

    Args:
        fitted: The approximation, under any precision.
        x: The inputs that it was fitted to, [N, ...], or batches of (x, y).
        y: Labels or targets of `x`; None where batches bring them.
        centre: Mean of the prior, one number or one for each weight, [D].
        grid: Precisions to try.

    Raises:
        ValueError: `grid` is empty, no precision of it works, or labels or targets do not fit.

    References:
        MacKay, "A practical Bayesian framework for backpropagation networks", Neural Computation
        4(3), 1992; Immer et al., "Scalable marginal likelihood estimation for model selection in
        deep learning", ICML 2021.
    """
    scores = _scores(
        fitted, x, grid, lambda candidate: candidate.log_marginal_likelihood(x, y, centre=centre)
    )
    precision = max(scores, key=lambda one: float(scores[one]))
    if precision in (min(scores), max(scores)):
        warn(
            f"the log marginal likelihood is largest at {precision:g}, an edge of the grid: it "
            "carries no information about the prior precision, which stays at "
            f"{float(fitted.precision.mean()):g}; by_validation needs none",
        )
        return fitted
    return fitted.with_precision(x, precision)


def by_validation(
    fitted: Laplace,
    x: Data,
    held: Data,
    labels: Tensor | None = None,
    *,
    link: Link = "contrasts",
    centre: bool = True,
    grid: Sequence[float] = GRID,
) -> Laplace:
    """Return the approximation under the largest precision whose predictions fit held-out data as
    well as the best, see `largest_alike`.

    Of candidates that the data do not tell apart, the largest changes the predictions least. So
    they are no worse than those of the weights alone, which a large precision leaves as they are,
    but for the noise of the held-out data.

    Args:
        fitted: The approximation, under any precision.
        x: The inputs that it was fitted to.
        held: Validation inputs [M, ...], or batches of (x, y).
        labels: Labels or targets of `held`; None where batches bring them.
        link: The closed form by which the approximation will predict, see `Laplace.predict`.
        centre: Whether predictions are centred, see `Laplace.linearised`.
        grid: Precisions to try, ascending.

    Raises:
        ValueError: `grid` is empty, no precision of it works, or labels or targets do not fit.
    """
    # Read once: losses are compared by example, and a DataLoader that shuffles changes its order.
    pairs = list(labelled(held, labels, fitted.loc))
    losses = _scores(
        fitted,
        x,
        sorted(grid),
        lambda candidate: _losses(candidate, pairs, link=link, centre=centre),
    )
    each = torch.stack(list(losses.values()))
    return fitted.with_precision(
        x, tuple(losses)[largest_alike(each.sum(1), each @ each.T, each.shape[1])]
    )


def largest_alike(total: Tensor, products: Tensor, examples: int) -> int:
    """Return the place of the largest candidate that fits as well as the best, to one standard
    error of their difference.

    The difference is paired by example: d_i = nll_i(candidate) - nll_i(best), whose sum has the
    standard error sqrt(n var d). Two candidates may differ by far less than the standard error of
    either.

    Args:
        total: Negative log likelihood under each candidate, [K], ascending candidates, summed over
            examples, in nats; infinite where a candidate does not work.
        products: Sum over examples of nll_i(k) nll_i(l), [K, K], in nats squared.
        examples: Number n of examples.

    Raises:
        ValueError: No candidate has a finite loss.
    """
    total = torch.where(total.isnan(), torch.inf, total)
    if not bool(total.isfinite().any()):
        raise ValueError(
            "no candidate gives finite predictions; look at the scale of inputs and weights"
        )
    best = int(total.argmin())
    apart = total - total[best]
    squares = products.diagonal() + products[best, best] - 2 * products[best]
    error = (
        examples * (squares - apart.square() / examples).clamp_min(0) / max(1, examples - 1)
    ).sqrt()
    return int((total.isfinite() & (apart <= error)).nonzero().max())


def predictive_nll(
    fitted: Laplace,
    x: Data,
    y: Tensor | None = None,
    *,
    link: Link = "contrasts",
    centre: bool = True,
) -> float:
    """Compute the mean negative log density of `y` under the predictive distribution in closed
    form, in nats; without `y`, of the labels or targets of batches (x, y).

    Raises:
        ValueError: Labels or targets do not fit the inputs or the classes.
    """
    pairs = labelled(x, y, fitted.loc)
    return float(_losses(fitted, pairs, link=link, centre=centre).mean())


def _losses(
    fitted: Laplace, pairs: Iterable[tuple[Inputs, Tensor]], *, link: Link, centre: bool
) -> Tensor:
    """Compute the negative log density of every label or target in closed form, [N], in nats."""
    counts = isinstance(fitted.curvature.likelihood, Poisson)
    return torch.cat(
        [
            nll_of_predictive(fitted.predict({"x": x}, link=link, centre=centre), y, counts=counts)
            for x, y in pairs
        ]
    )


def _scores(
    fitted: Laplace, x: Data, grid: Sequence[float], score: Callable[[Laplace], Tensor]
) -> dict[float, Tensor]:
    """Compute the score, or scores, of each precision; those without Cholesky factor or finite
    scores are left out.

    Raises:
        ValueError: No precision of the grid works.
    """
    found = {}
    for precision in grid:
        try:
            value = score(fitted.with_precision(x, precision))
        except torch.linalg.LinAlgError:
            continue
        if bool(value.isfinite().all()):
            found[precision] = value
    if not found:
        raise ValueError(
            f"no precision of the grid {tuple(grid)} gives finite predictions; look at the scale "
            "of the inputs and weights"
        )
    return found
