"""The choice of a Laplace approximation's prior precision, and of its Gaussian noise, after
training: by the evidence of the training data or on validation data.
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bayesfl.base.inputs import Inputs
from bayesfl.base.numerics import own_modes
from bayesfl.base.options import INVERTIBLE
from bayesfl.base.warning import warn
from bayesfl.curvature.batches import Data, labelled
from bayesfl.curvature.kronecker import Kronecker
from bayesfl.likelihoods import Gaussian, Poisson
from bayesfl.posteriors.laplace import Laplace
from bayesfl.posteriors.linearised import Link, as_targets, nll_of_predictive

GRID = tuple(10.0 ** (k / 2) for k in range(-8, 9))
"""Prior precisions from 1e-4 to 1e4, by half decades, that are compared on validation data."""
BISECTIONS = 60  # they reduce the logarithm's range, 138, to rounding error
STEPS, NEAR = 500, 1e-9
"""Maximum number of fixed-point steps, and the relative change at which they stop."""
LEAST, MOST = 1e-8, 1e8
"""Bounds of a layer's precision, which are reached if its evidence has no maximum."""


@own_modes()
def by_evidence(fitted: Laplace, x: Data | None, *, centre: float | Tensor = 0.0) -> Laplace:
    """Return the approximation under the one precision with the largest log marginal likelihood,
    see `best_precision`.

    This is the evidence of the Gaussian approximation, under the prior of the training. If the
    network was trained under another prior, or fits its training data nearly exactly, predictions
    can be far worse than those of the weights alone; `by_validation` evaluates predictions.

    If there is no maximum, `fitted` is returned unchanged, with a warning. Labels are not needed:
    the likelihood at the weights does not depend on the precision.

    Args:
        fitted: The approximation, under any precision.
        x: The inputs of the fit, [N, ...], or batches; None for a posterior of clients' rows, as
            `result.laplace().posterior`, and for the structures `diagonal` and `kfac`.
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
            f"{float(fitted.precision.mean()):g}: the weights equal the prior's centre, or have no "
            "curvature; by_validation needs neither",
        )
        return fitted
    return fitted.with_precision(x, precision)


@own_modes()
def by_layer_evidence(fitted: Laplace, x: Data | None, *, centre: float | Tensor = 0.0) -> Laplace:
    """Return the approximation under a precision for each parameter tensor, such as a weight matrix
    or a bias, at which the log marginal likelihood has slope zero in each of them.

    The condition is

        $precision_l |w_l - centre|^2 = sum_(r in l) (1 - precision_l variance_r)$,

    where the right side is the number of its weights that the data determine; it is solved by
    fixed-point steps. If a layer has no solution, its precision ends at 1e-8 or 1e8.

    Args:
        fitted: The approximation of all covered weights, under any precision.
        x: See `by_evidence`.
        centre: See `by_evidence`.

    Raises:
        ValueError: `fitted` is for a subnetwork, where some layers have no weights; or see
            `by_evidence`.

    Source: MacKay, as for `best_precision`.
    """
    if fitted.indices is not None:
        raise ValueError(
            "a subnetwork has no weights of some layers; use another structure, or by_evidence"
        )
    layout = fitted.curvature.layout
    away = (fitted.loc - fitted.curvature.vector(centre)).square()
    for _ in range(STEPS):
        before = fitted.precision
        known = 1 - before * fitted.moments()[1]
        precision = torch.empty_like(before)
        for to, one, square in zip(
            *(layout.leaves(t).values() for t in (precision, known, away)), strict=True
        ):
            to.fill_((one.sum() / square.sum()).clamp(LEAST, MOST))
        fitted = fitted.with_precision(x, precision)
        if ((precision / before).log().abs() < NEAR).all():
            break
    return fitted


@own_modes()
def by_noise_evidence(
    fitted: Laplace, x: Data, y: Tensor | None = None, *, centre: float | Tensor = 0.0
) -> Laplace:
    """Return the approximation under the noise of a Gaussian likelihood, and one precision, that
    together have the largest log marginal likelihood.

    With S targets and the g weights that the data determine,

        $scale^2 = E / (S - g)$, $precision |w - centre|^2 = g$, E the sum of squared errors.

    Args:
        fitted: The approximation, under any precision and noise.
        x: The inputs of the fit, [N, ...], or batches of (x, y).
        y: Their targets; None if they are in the batches.
        centre: See `by_evidence`.

    Raises:
        TypeError: The likelihood is not Gaussian, or learns its scale.
        ValueError: The evidence has no maximum, for example if all weights equal the prior's
            centre.

    Source: MacKay, as for `best_precision`, eq. 4.10.

    Example:
        >>> from bayesfl.posteriors.prior_precision import by_noise_evidence
        >>> rng = torch.Generator().manual_seed(0)
        >>> x = torch.randn(400, 1, generator=rng)
        >>> y = 2 * x + 0.5 * torch.randn(400, 1, generator=rng)
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(2.0)
        >>> noise = bf.likelihoods.Gaussian()
        >>> fitted = bf.posteriors.Laplace.fit(model, x, y, precision=1.0, likelihood=noise)
        >>> round(by_noise_evidence(fitted, x, y).curvature.likelihood.scale, 2)
        0.53
    """
    likelihood = fitted.curvature.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.scale == "learned":
        raise TypeError(f"only a Gaussian with one scale has a noise to choose, not {likelihood}")
    own = fitted.with_precision(x, 1.0)
    chosen = slice(None) if own.indices is None else own.indices
    away = float((own.loc - own.curvature.vector(centre))[chosen].square().sum())
    errors = torch.cat(
        [
            (as_targets(given, outputs) - outputs).square()
            for inputs, given in labelled(x, y, own.loc)
            for outputs in [own.curvature.outputs({"x": inputs})]
        ]
    )
    weight = torch.ones_like(errors[:, 0]) if own.weight is None else own.weight.to(errors)
    total, targets = float(weight @ errors.sum(1)), float(weight.sum()) * errors.shape[1]
    scale, precision = float(likelihood.scale), 1.0
    unscaled = _eigenvalues(own) * scale**2
    for _ in range(STEPS):
        before = scale
        precision = best_precision(unscaled / scale**2, torch.tensor(away))
        if precision is None:
            raise ValueError("the evidence has no maximum; give precision and scale as numbers")
        scale = math.sqrt(total / (targets - precision * away))
        if abs(math.log(scale / before)) < NEAR:
            break
    return Laplace.fit(
        own.curvature.module,
        x,
        precision=precision,
        structure=own.structure,
        indices=own.indices,
        likelihood=replace(likelihood, scale=scale),
        pattern=own.curvature.layout,
        weight=own.weight,
    )


def best_precision(eigenvalues: Tensor, square: Tensor) -> float | None:
    """Return the prior precision d under which Laplace's approximation has the largest log marginal
    likelihood; None if there is none, as for weights at the prior's centre.

    The part of the evidence that depends on d is $- d |w|^2 / 2 - 1/2 sum_i log(1 + l_i / d)$. Its
    derivative is 0 where

        $d |w|^2 = sum_i l_i / (l_i + d)$,

    the number of weights that the data determine. The left side increases in d and the right side
    decreases, so there is one maximum, which is found by bisection up to rounding.

    Args:
        eigenvalues: Eigenvalues $l >= 0$ of the curvature, a sum over the data in nats, [D].
        square: Squared distance $|w|^2$ of the weights from the prior's centre, [].

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
    """Return the eigenvalues of the curvature, for an approximation with one precision; some that
    are 0 may be missing.
    """
    if fitted.structure == "diagonal":
        return fitted.diagonal
    inverse = fitted.inverse
    if isinstance(inverse, Kronecker):
        return inverse.eigenvalues
    # The factor is that of I + curvature / precision.
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

    Among precisions that fit equally well, the largest changes the predictions least. Predictions
    are therefore no worse than those of the weights alone, up to the noise of the held-out data. A
    warning is issued if the precision is at the lower edge of the grid, or at an upper edge below
    1e4.

    Args:
        fitted: The approximation, under any precision.
        x: The inputs of the fit, or None, as in `by_evidence`.
        held: Validation inputs [M, ...], or batches of (x, y).
        labels: Labels or targets of `held`; None if they are in the batches.
        link: The closed form with which the approximation will predict, see `Laplace.predict`.
        centre: Whether predictions are centred, see `Laplace.linearised`.
        grid: Precisions to compare, ascending.

    Raises:
        ValueError: Labels or targets do not fit, or `x` has another number of examples.
        RuntimeError: All precisions of `grid` fail.
    """
    # Read once: losses are compared by example, and a shuffling DataLoader changes the order.
    pairs = list(labelled(held, labels, fitted.loc))
    losses = {}
    for precision in sorted(grid):
        with contextlib.suppress(torch.linalg.LinAlgError):  # it has no Cholesky factor
            found = _losses(fitted.with_precision(x, precision), pairs, link=link, centre=centre)
            if bool(found.isfinite().all()):
                losses[precision] = found
    each = torch.stack(list(losses.values()))
    best = largest_alike(each.sum(1), each @ each.T, each.shape[1])
    precision = tuple(losses)[best]
    upper = max(losses) < GRID[-1]  # beyond it, predictions are those of the weights alone
    if len(losses) > 1 and (best == 0 or (upper and precision == max(losses))):
        warn(
            f"the precision is at the {'upper' if best else 'lower'} edge of its grid, "
            f"{precision:g}: the held-out data do not bound it; hold out more of them, or pass a "
            "wider grid"
        )
    return fitted.with_precision(x, precision)


def largest_alike(total: Tensor, products: Tensor, examples: int) -> int:
    """Return the index of the largest candidate that fits as well as the best, up to one standard
    error of their difference.

    The difference is paired by example: $d_i = nll_i(candidate) - nll_i(best)$, whose sum has the
    standard error $sqrt(n var d)$. Two candidates may differ by far less than the standard error of
    either.

    Args:
        total: Negative log likelihood under each candidate, [K], ascending candidates, summed over
            examples, in nats; infinite if a candidate fails.
        products: Sum over examples of $nll_i(k) nll_i(l)$, [K, K], in nats squared.
        examples: Number n of examples.

    Raises:
        ValueError: No candidate has a finite loss.
    """
    total = torch.where(total.isnan(), torch.inf, total)
    if not bool(total.isfinite().any()):
        raise ValueError(
            "no candidate gives finite predictions; check the scale of inputs and weights"
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
