"""Measures of predicted numbers: error, density and coverage under a normal distribution."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfl.evaluation.metrics.clients import check_rows, mean_of_clients, pool


def rmse(mean: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Compute the root of the mean squared error over examples and outputs, in the targets' unit.

    Args:
        mean: Predicted means, [J, N, O].
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J], >= 0.
    """
    return _Fitted.of(mean, None, targets, mask).rmse()


def gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean negative log density of the targets under N(mean, variance): nats per example, summed over outputs, with constants.

    Args:
        mean: Predictive means, [J, N, O].
        variance: Predictive variances, observation noise included, [J, N, O], > 0.
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J].
    """
    return _Fitted.of(mean, variance, targets, mask).nll()


def coverage(mean: Tensor, variance: Tensor, targets: Tensor, mask: Tensor, level: float = 0.9) -> Tensor:
    """Compute the share of targets inside the central interval of N(mean, variance) that should hold a share `level` of them.

    Args:
        mean: Predictive means, [J, N, O].
        variance: Predictive variances, observation noise included, [J, N, O], > 0.
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool.
        level: Probability of the interval, in (0, 1).

    Returns:
        Shape [J], in [0, 1]; above `level` means too wide, below it too narrow.
    """
    return _Fitted.of(mean, variance, targets, mask).coverage(level)


def regression_summary(mean: Tensor, variance: Tensor, targets: Tensor, mask: Tensor) -> dict[str, float]:
    """Summarise the predictions of a federation of regressors.

    Args:
        mean: Predictive means, [J, N, O].
        variance: Predictive variances, observation noise included, [J, N, O], > 0.
        targets: True values, [J, N, O], or [J, N] if O is 1.
        mask: Which rows are examples, [J, N] bool.

    Returns:
        `rmse`, `nll`, `coverage_50`, `coverage_90`: means over the clients that have examples. The same names with the prefix `pooled_`: of
        all clients' examples pooled.
    """
    fitted = _Fitted.of(mean, variance, targets, mask)
    summary = {name: mean_of_clients(values, fitted.broken) for name, values in fitted.measures().items()}
    return summary | {f"pooled_{name}": float(value) for name, value in fitted.pooled().measures().items()}


@dataclass(frozen=True)
class _Fitted:
    """Checked Gaussian predictions, with mean and target 0 and variance 1 in every row that is padding or not finite."""

    mean: Tensor  # [J, N, O]
    variance: Tensor  # [J, N, O]
    targets: Tensor  # [J, N, O]
    mask: Tensor  # [J, N]
    broken: Tensor  # [J]

    @classmethod
    def of(cls, mean: Tensor, variance: Tensor | None, targets: Tensor, mask: Tensor) -> "_Fitted":
        mean, targets, mask = (torch.as_tensor(t).detach().cpu() for t in (mean, targets, mask))
        if mean.dim() != 3:
            raise ValueError(f"mean must be [J, N, O], one row of outputs per example; got shape {list(mean.shape)}")
        if targets.dim() == 2 and mean.shape[-1] == 1:
            targets = targets[..., None]
        variance = torch.ones_like(mean) if variance is None else torch.as_tensor(variance).detach().cpu()
        for name, value in {"variance": variance, "targets": targets}.items():
            if value.shape != mean.shape:
                remedy = "; targets may leave out the last axis only where there is one output" if name == "targets" else ""
                raise ValueError(f"{name} must have the shape of mean, {list(mean.shape)}; got {list(value.shape)}{remedy}")
        check_rows(mean, mask)
        if bool((targets.isfinite().all(-1) < mask).any()):
            raise ValueError("targets must be finite where mask is True; mask the rows that are padding")
        finite = mean.isfinite().all(-1) & variance.isfinite().all(-1)
        use = (mask & finite)[..., None]
        mean, targets = (t.to(torch.float64).masked_fill(~use, 0) for t in (mean, targets))
        variance = variance.to(torch.float64).masked_fill(~use, 1)
        if variance.numel() and not float(variance.min()) > 0:
            raise ValueError(f"variance must be > 0, got {float(variance.min()):.4g}; add the variance of the observation noise")
        return cls(mean, variance, targets, mask, (mask & ~finite).any(-1))

    def pooled(self) -> "_Fitted":
        mean, targets, mask = pool(self.mean, self.targets, self.mask)
        return _Fitted(mean, self.variance.flatten(0, 1)[None], targets, mask, self.broken.any()[None])

    def measures(self) -> dict[str, Tensor]:
        return {"rmse": self.rmse(), "nll": self.nll(), "coverage_50": self.coverage(0.5), "coverage_90": self.coverage(0.9)}

    def rmse(self) -> Tensor:
        return self._average((self.targets - self.mean).square().mean(-1)).sqrt()

    def nll(self) -> Tensor:
        squares = (self.targets - self.mean).square() / self.variance
        return self._average(0.5 * (squares + (2 * math.pi * self.variance).log()).sum(-1))

    def coverage(self, level: float) -> Tensor:
        if not 0 < level < 1:
            raise ValueError(f"level is the probability of the interval and must lie in (0, 1), got {level}; 90% is 0.9")
        half = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)) * self.variance.sqrt()
        return self._average(((self.targets - self.mean).abs() <= half).double().mean(-1))

    def _average(self, values: Tensor) -> Tensor:
        return ((values * self.mask).sum(-1) / self.mask.sum(-1)).masked_fill(self.broken, math.nan)
