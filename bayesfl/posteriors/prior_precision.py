"""The choice of a Laplace approximation's prior precision after training, by the evidence of the
training data or on validation data.
"""

import contextlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bayesfl.base.inputs import Inputs
from bayesfl.base.numerics import own_modes
from bayesfl.base.options import INVERTIBLE
from bayesfl.base.warning import warn
from bayesfl.curvature.batches import Data, labelled
from bayesfl.curvature.kronecker import Kronecker
from bayesfl.likelihoods import Poisson
from bayesfl.posteriors.laplace import Laplace
from bayesfl.posteriors.linearised import Link, nll_of_predictive

GRID = tuple(10.0 ** (k / 2) for k in range(-8, 9))
"""Prior precisions from 1e-4 to 1e4, by half decades, that are tried on validation data."""
BISECTIONS = 60  # of the logarithm's range, 138, to its last digit


@own_modes()
def by_evidence(fitted: Laplace, x: Data | None, *, centre: float | Tensor = 0.0) -> Laplace:
    """Return the approximation under the one precision of largest log marginal likelihood, see
    `best_precision`.

    This is the evidence of the Gaussian approximation, under the prior with which the weights were
    trained. If the network was trained under another prior, or fits its training data nearly
    exactly, predictions can be far worse than those of the weights alone; `by_validation` looks at
    predictions.

    Where there is none, `fitted` is returned unchanged, with a warning. Labels are not needed: the
    likelihood at the weights does not depend on the precision.

    Args:
        fitted: The approximation, under any precision.
        x: The inputs that it was fitted to, [N, ...], or batches; None for a posterior of clients'
            rows, as `result.laplace().posterior`, or where it is `diagonal` or `kfac`.
        centre: Mean of the prior, one number or one for each weight, [D].

    Raises:
        ValueError: `x` has another number of examples, or `centre` does not fit.
    """
    uniform = bool((fitted.precision == fitted.precision[0]).all())
    own = fitted if uniform else fitted.with_precision(x, 1.0)
    chosen = slice(None) if fitted.indices is None else fitted.indices
    away = (fitted.loc - fitted.curvature.vector(centre))[chosen]
    precision = best_precision(_eigenvalues(own), away.square().sum())
    if precision is None:
        warn(
            "the log marginal likelihood has no maximum in the prior precision, which stays at "
            f"{float(fitted.precision.mean()):g}: the weights are the prior's centre, or have no "
            "curvature; by_validation needs neither",
        )
        return fitted
    return fitted.with_precision(x, precision)


def best_precision(eigenvalues: Tensor, square: Tensor) -> float | None:
    """Return the prior precision d under which Laplace's approximation has the largest log marginal
    likelihood; None where there is none, as for weights at the prior's centre.

    Of what the evidence says of d, - d |w|^2 / 2 - 1/2 sum_i log(1 + l_i / d), the derivative is 0
    where

        d |w|^2 = sum_i l_i / (l_i + d),

    the number of weights that the data determine. The left side grows in d and the right one falls,
    so that there is one maximum, which is found by bisection to rounding.

    Args:
        eigenvalues: Eigenvalues l >= 0 of the curvature, a sum over the data in nats, [D].
        square: Squared distance |w|^2 of the weights from the prior's centre, [].

    References:
        MacKay, "A practical Bayesian framework for backpropagation networks", Neural Computation
        4(3), 1992, eq. 4.9; Immer et al., "Scalable marginal likelihood estimation for model
        selection in deep learning", ICML 2021.

    Example:
        >>> from bayesfl.posteriors.prior_precision import best_precision
        >>> eigenvalues = torch.tensor([4.0, 4.0], dtype=torch.float64)
        >>> round(best_precision(eigenvalues, torch.tensor(1.0)), 6)  # d = 8 / (4 + d)
        1.464102
    """

    def falls(precision: float) -> bool:
        return float(precision * square) > float((eigenvalues / (eigenvalues + precision)).sum())

    low, high = math.log(INVERTIBLE.low), math.log(INVERTIBLE.high)
    if falls(INVERTIBLE.low) or not falls(INVERTIBLE.high):
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if falls(math.exp(middle)) else (middle, high)
    return math.exp((low + high) / 2)


def _eigenvalues(fitted: Laplace) -> Tensor:
    """Return the eigenvalues of the curvature as an approximation under one precision has them,
    without some that are 0.
    """
    if fitted.structure == "diagonal":
        return fitted.diagonal
    inverse = fitted.inverse
    if isinstance(inverse, Kronecker):
        return inverse.eigenvalues
    # The factor is of I + curvature / precision.
    ratios = torch.linalg.eigvalsh(inverse.chol @ inverse.chol.T) - 1
    return fitted.precision[0] * ratios.clamp_min(0)


@own_modes()
def by_validation(
    fitted: Laplace,
    x: Data | None,
    held: Data,
    labels: Tensor | None = None,
    *,
    link: Link = "contrasts",
    centre: bool = True,
    grid: Sequence[float] = GRID,
) -> Laplace:
    """Return the approximation under the largest precision whose predictions fit held-out data as
    well as the best, see `largest_alike`.

    Among precisions that fit equally well, the largest changes the predictions least. So
    predictions are no worse than those of the weights alone, but for the noise of the held-out
    data.

    Args:
        fitted: The approximation, under any precision.
        x: The inputs that it was fitted to, or None, as in `by_evidence`.
        held: Validation inputs [M, ...], or batches of (x, y).
        labels: Labels or targets of `held`; None where batches bring them.
        link: The closed form by which the approximation will predict, see `Laplace.predict`.
        centre: Whether predictions are centred, see `Laplace.linearised`.
        grid: Precisions to try, ascending.

    Raises:
        ValueError: Labels or targets do not fit, or `x` has another number of examples.
        RuntimeError: No precision of `grid` works.
    """
    # Read once: losses are compared by example, and a DataLoader that shuffles changes its order.
    pairs = list(labelled(held, labels, fitted.loc))
    losses = {}
    for precision in sorted(grid):
        with contextlib.suppress(torch.linalg.LinAlgError):  # it has no Cholesky factor
            found = _losses(fitted.with_precision(x, precision), pairs, link=link, centre=centre)
            if bool(found.isfinite().all()):
                losses[precision] = found
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


@own_modes()
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
    return float(_losses(fitted, labelled(x, y, fitted.loc), link=link, centre=centre).mean())


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
