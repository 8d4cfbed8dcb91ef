"""Measures of predicted numbers: error, density, score and coverage under a normal distribution or
a distribution of counts.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor

from bayesfl.base.options import PROBABILITY, declared
from bayesfl.evaluation.metrics.clients import Checked, Segments, as_clients, check_shapes
from bayesfl.evaluation.metrics.distributions import DISTRIBUTIONS, Distribution, DistributionName
from bayesfl.evaluation.metrics.measured import Measured, rooted


def rmse(mean: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the root of the mean squared error over examples and outputs, in the targets' unit.

    Args:
        mean: Predicted means, [J, N, O].
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.

    Returns:
        Shape [J], [] of one model, >= 0.

    Example:
        >>> bf.metrics.rmse(torch.zeros(2), torch.tensor([1.0, 7.0])).item()  # the root of 25
        5.0
    """
    fitted = Fitted.of(mean, None, targets, mask)
    return rooted("rmse", fitted.average(fitted.squares()))


def gaussian_nll(
    mean: Tensor, variance: Tensor, targets: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Compute the mean negative log density of the targets under N(mean, variance): nats per
    example, summed over outputs, with constants.

    Args:
        mean: Predictive means, [J, N, O].
        variance: Predictive variances, observation noise included, [J, N, O], > 0.
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.

    Returns:
        Shape [J], [] of one model.

    Example:
        >>> mean, variance, y = torch.zeros(2), torch.ones(2), torch.tensor([0.0, 1.0])
        >>> round(bf.metrics.gaussian_nll(mean, variance, y).item(), 3)  # log(2 pi) / 2 + 1 / 4
        1.169
    """
    fitted = Fitted.of(mean, variance, targets, mask)
    return fitted.average(fitted.losses())


@declared
def coverage(
    mean: Tensor,
    variance: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    level: Annotated[float, PROBABILITY] = 0.9,
    *,
    distribution: DistributionName = "normal",
) -> Tensor:
    """Compute the share of targets inside the central interval of nominal coverage `level`.

    Args:
        mean: Predictive means, [J, N, O].
        variance: Predictive variances, observation noise included, [J, N, O], > 0.
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.
        level: Probability of the interval, in (0, 1).
        distribution: `normal` or `counts`. A count y at the end of an interval lies inside in part:
            it counts as spread evenly over P(Y < y) to P(Y <= y) (Czado, Gneiting, Held,
            "Predictive model assessment for count data", Biometrics 65(4), 2009, eq. 2), so that
            calibrated predictions have the share `level`.

    Returns:
        Shape [J], [] of one model, in [0, 1]; above `level` means too wide, below it too narrow.

    Example:
        >>> mean, variance, y = torch.zeros(4), torch.ones(4), torch.tensor([0.0, 1.0, -1.0, 2.0])
        >>> bf.metrics.coverage(mean, variance, y, level=0.9).item()
        0.75
    """
    fitted = Fitted.of(mean, variance, targets, mask, distribution)
    return fitted.average(fitted.inside(level))


def crps(
    mean: Tensor,
    variance: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    distribution: DistributionName = "normal",
) -> Tensor:
    """Compute the mean continuous ranked probability score, averaged over outputs, in the targets'
    unit; for point predictions it is |y - m|.

    It is proper, like the NLL, and grows with the distance of an outlying target, not with its
    square. Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA
    102, 2007.

    Args:
        mean: Predictive means, [J, N, O].
        variance: Predictive variances, observation noise included, [J, N, O], > 0.
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool; None for the arrays of one model, without J.
        distribution: `normal` or `counts`.

    Returns:
        Shape [J], [] of one model, >= 0.

    Example:
        >>> round(bf.metrics.crps(torch.zeros(1), torch.ones(1), torch.zeros(1)).item(), 4)
        0.2337
    """
    fitted = Fitted.of(mean, variance, targets, mask, distribution)
    return fitted.average(fitted.scores())


def measured_numbers(fitted: "Fitted") -> Measured:
    """Compute every measure of checked predictions."""
    values = {
        "rmse": fitted.squares(),
        "nll": fitted.losses(),
        "crps": fitted.scores(),
        "coverage_50": fitted.inside(0.5),
        "coverage_90": fitted.inside(0.9),
    }
    found = Measured.of(fitted.clients, {name: fitted.told(t) for name, t in values.items()})
    return replace(found, columns={**found.columns, "width_90": fitted.width(0.9)})


@dataclass(frozen=True)
class Fitted(Checked):
    """Hold checked predictions of numbers, R rows; rows that are not finite have mean and target 0
    (1 for counts) and variance 1.
    """

    mean: Tensor  # [R, O]
    variance: Tensor  # [R, O]
    targets: Tensor  # [R, O]
    kind: DistributionName = "normal"

    @classmethod
    def of(
        cls,
        mean: Tensor,
        variance: Tensor | None,
        targets: Tensor,
        mask: Tensor | None,
        kind: DistributionName = "normal",
    ) -> "Fitted":
        """Return checked predictions and targets; without a mask, those of one model, [N, O].

        Raises:
            ValueError: Shapes do not fit, or the target of an example is not finite; or see
                `of_rows`.
        """
        loc, y, inside = (t.detach().cpu() for t in as_clients(mean, targets, mask))
        spread = torch.ones_like(loc)
        if variance is not None:
            spread = as_clients(variance, targets, mask)[0].detach().cpu()
        y = y[..., None] if y.dim() == 2 and loc.shape[-1] == 1 else y
        shapes = [list(t.shape) for t in (loc, spread, y)]
        if loc.dim() != 3 or any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                "mean, variance and targets must be [J, N, O], with a row of outputs for each "
                f"example, targets of one output also [J, N]; got {shapes}"
            )
        check_shapes(loc, inside)
        loc, spread, y = (t[inside] for t in (loc, spread, y))
        if not bool(y.isfinite().all()):
            raise ValueError("targets must be finite where mask is True; mask the padding")
        return cls.of_rows(Segments(inside.sum(1)), loc, spread, y, kind, single=mask is None)

    @classmethod
    def of_rows(
        cls,
        clients: Segments,
        mean: Tensor,
        variance: Tensor,
        targets: Tensor,
        kind: DistributionName = "normal",
        *,
        single: bool = False,
    ) -> "Fitted":
        """Return checked rows, [R, O] each.

        Raises:
            ValueError: A number lies outside the distribution's range.
        """
        bad = ~(mean.isfinite().all(-1) & variance.isfinite().all(-1))
        filled = float(kind == "counts")  # a mean of counts is above 0
        mean, targets = (t.double().masked_fill(bad[:, None], filled) for t in (mean, targets))
        variance = variance.double().masked_fill(bad[:, None], 1)
        no_counts = (mean <= 0) | (targets < 0) | (targets != targets.round())
        if kind == "counts" and bool(no_counts.any()):
            raise ValueError(
                "distribution='counts' is for means > 0 and targets that are whole numbers >= 0; "
                "leave it out for others"
            )
        return cls(clients, bad, single, mean, variance, targets, kind)

    @cached_property
    def distribution(self) -> Distribution:
        """Return the predictive distribution of every target."""
        return DISTRIBUTIONS[self.kind](self.mean, self.variance)

    def squares(self) -> Tensor:
        """Return the mean squared error of every example, [R]."""
        return (self.targets - self.mean).square().mean(-1)

    def losses(self) -> Tensor:
        """Return the negative log density of every example, [R] in nats."""
        return self.distribution.nll(self.targets).sum(-1)

    def scores(self) -> Tensor:
        """Return the continuous ranked probability score of every example, [R]."""
        return self.distribution.crps(self.targets).mean(-1)

    def _interval(self, level: float) -> tuple[Tensor, Tensor]:
        found = self.distribution
        return found.quantile((1 - level) / 2), found.quantile((1 + level) / 2)

    def inside(self, level: float) -> Tensor:
        """Return the share of an example's targets inside the central interval, [R]."""
        if self.kind == "counts":
            ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
            lower, upper = self._transform
            below = ((ends - lower) / (upper - lower).clamp_min(1e-300)).clamp(0, 1)
            return below.diff(dim=-1)[..., 0].mean(-1)
        lower, upper = self._interval(level)
        return ((lower <= self.targets) & (self.targets <= upper)).double().mean(-1)

    def width(self, level: float) -> Tensor:
        """Return the mean width of the central interval, [J]."""
        lower, upper = self._interval(level)
        return self.average((upper - lower).mean(-1))

    @cached_property
    def _transform(self) -> tuple[Tensor, Tensor]:
        """Return P(Y < y) and P(Y <= y), [R, O, 1] each."""
        return self.distribution.below(self.targets)[..., None], self.distribution.cdf(
            self.targets
        )[..., None]
