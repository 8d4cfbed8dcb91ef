"""Accuracy, calibration and error of predictions, for each client and for all of them in one pot.

Predictions come padded: `probs` [J, N, O], `labels` [J, N], and a `mask` [J, N] that says which rows are examples; what stands in the
others is never read. A function of one measure returns [J], with NaN for a client without examples; `pool` makes one client of all.
Input that does not fit (shapes, labels without a class, logits for probabilities) raises a ValueError that names the remedy.

Everything is computed in float64 on the CPU, so that the numbers do not depend on the device that predicted. A client with a prediction
that is not finite, as after a run that diverged, has NaN in every measure, and so has every mean over clients that it belongs to.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

Norm: TypeAlias = Literal["l1", "l2", "max"]
"""How the calibration gaps of the bins become one number: weighted mean, root of the weighted mean square, largest."""


def accuracy(probs: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Share of examples whose most probable class is the true one.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J], in [0, 1].
    """
    return _Scored.of(probs, labels, mask).accuracy()


def nll(probs: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Mean negative log probability of the true class, in nats.

    A probability below the smallest normal float64 counts as that, 2.2e-308: a certain and wrong prediction costs 708.4 nats, not inf.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J], >= 0.
    """
    return _Scored.of(probs, labels, mask).nll()


def brier(probs: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Brier score: squared error of the probabilities, summed over classes and averaged over examples.

    Brier, "Verification of forecasts expressed in terms of probability", Monthly Weather Review 1950. With two classes it is twice the
    score that counts only one of them.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J], in [0, 2].
    """
    return _Scored.of(probs, labels, mask).brier()


def ece(probs: Tensor, labels: Tensor, mask: Tensor, bins: int = 15, norm: Norm = "l1") -> Tensor:
    """Expected calibration error: how far confidence, the largest probability, is from accuracy.

    Examples are binned by confidence; bin k of B holds (k / B, (k + 1) / B], and confidence 0 goes to the first. Each bin has a gap
    |accuracy - mean confidence|, weighted by its share of the examples. Guo et al., "On calibration of modern neural networks",
    ICML 2017, equations 3 and 5. A small client has few examples a bin, which biases its value upwards: compare clients of like size.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        bins: Number of bins of equal width.
        norm: `l1`, the weighted mean of the gaps; `l2`, the root of their weighted mean square; `max`, the largest.

    Returns:
        Shape [J], in [0, 1].
    """
    return _Scored.of(probs, labels, mask).calibration(bins, norm)


def mce(probs: Tensor, labels: Tensor, mask: Tensor, bins: int = 15) -> Tensor:
    """Maximum calibration error: the largest gap of `ece` over bins that hold an example.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        bins: Number of bins of equal width.

    Returns:
        Shape [J], in [0, 1].
    """
    return _Scored.of(probs, labels, mask).calibration(bins, "max")


def macro_f1(probs: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """F1 score averaged over the classes that occur among a client's labels or predictions.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J], in [0, 1].
    """
    return _Scored.of(probs, labels, mask).macro_f1()


def auroc(probs: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Area under the ROC curve: the probability that a positive example scores above a negative one, ties counting half.

    With two classes the score is the probability of class 1. With more it is one class against the rest, averaged over the classes of
    which a client has both positives and negatives. NaN where there is no such class.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J], in [0, 1] or NaN.
    """
    return _Scored.of(probs, labels, mask).auroc()


def pool(probs: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All examples of all clients in one pot: [J, N, *] as [1, J * N, *], for any measure here.

    Args:
        probs: Predictions, [J, N, O].
        labels: True classes, [J, N], or targets, [J, N, O].
        mask: Which rows are examples, [J, N] bool.

    Returns:
        The same three, for one client.
    """
    return probs.flatten(0, 1)[None], labels.flatten(0, 1)[None], mask.flatten(0, 1)[None]


def pooled(measure: Callable[..., Tensor], probs: Tensor, labels: Tensor, mask: Tensor, **options: Any) -> float:
    """One number for the examples of all clients together, as in `pooled(ece, probs, labels, mask, bins=10)`.

    Args:
        measure: A function of this module that takes `probs`, `labels` and `mask`.
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        options: Passed on to `measure`.
    """
    return float(measure(*pool(probs, labels, mask), **options))


def bottom_decile(values: Tensor | np.ndarray) -> float:
    """What the worst-served tenth of the clients gets: of J values in ascending order, the one at position floor(J / 10), from 0.

    So reported by Marfoq et al., "Federated multi-task learning under a mixture of distributions", NeurIPS 2021. For measures of which
    more is better.

    Args:
        values: One value a client, [J]; NaN is left out.

    Returns:
        NaN where no value is left.

    Raises:
        ValueError: There is more than one value a client.
    """
    values = torch.as_tensor(values).detach().to("cpu", torch.float64)
    if values.dim() != 1:
        raise ValueError(f"values must be one number a client, [J]; got shape {list(values.shape)}")
    ordered = values[~values.isnan()].sort().values
    return float(ordered[len(ordered) // 10]) if len(ordered) else math.nan


def classification_summary(probs: Tensor, labels: Tensor, mask: Tensor, *, bins: int = 15) -> dict[str, float]:
    """The measures of a federation of classifiers.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        bins: Number of confidence bins.

    Returns:
        `accuracy`, `nll`, `ece`, `mce`, `brier`, `macro_f1` and `auroc`: means over clients, each client counting once, those without
        examples (or without an AUROC) left out. `accuracy_decile`: of the worst-served tenth. `pooled_accuracy`, `pooled_nll`,
        `pooled_ece`, `pooled_mce`, `pooled_brier`: of all examples in one pot.
    """
    scored = _Scored.of(probs, labels, mask)
    clients, pot = scored.measures(bins), scored.pooled()
    summary = {name: _mean(values, scored.broken) for name, values in clients.items()}
    summary["accuracy_decile"] = math.nan if scored.broken.any() else bottom_decile(clients["accuracy"])
    together = {
        "accuracy": pot.accuracy(),
        "nll": pot.nll(),
        "ece": pot.calibration(bins),
        "mce": pot.calibration(bins, "max"),
        "brier": pot.brier(),
    }
    return summary | {f"pooled_{name}": float(value) for name, value in together.items()}


def per_client_table(probs: Tensor, labels: Tensor, mask: Tensor, *, bins: int = 15) -> dict[str, np.ndarray]:
    """Every measure of every client as columns [J], ready for a data frame.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        bins: Number of confidence bins.

    Returns:
        `client` and `examples` (integers), `accuracy`, `nll`, `ece`, `mce`, `brier`, `macro_f1`, `auroc`.
    """
    scored = _Scored.of(probs, labels, mask)
    index = {"client": np.arange(len(scored.mask)), "examples": scored.mask.sum(-1).numpy()}
    return index | {name: values.numpy() for name, values in scored.measures(bins).items()}


@dataclass(frozen=True)
class ReliabilityBins:
    """What a reliability diagram shows. Bin k of B holds confidences in (edges[k], edges[k + 1]].

    Args:
        edges: Bounds of the bins, [B + 1], from 0 to 1.
        confidence: Mean confidence in each bin, [B]; NaN in an empty one.
        accuracy: Share of right predictions in each bin, [B]; NaN in an empty one.
        count: Examples in each bin, [B], integers.
    """

    edges: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray

    @property
    def examples(self) -> int:
        """How many examples there are in all."""
        return int(self.count.sum())

    @property
    def ece(self) -> float:
        """Expected calibration error of these bins; NaN without examples."""
        gaps = np.abs(self.accuracy - self.confidence)[self.count > 0]
        return float(gaps @ self.count[self.count > 0] / self.examples) if self.examples else math.nan

    @property
    def mce(self) -> float:
        """Maximum calibration error of these bins; NaN without examples."""
        return float(np.abs(self.accuracy - self.confidence)[self.count > 0].max()) if self.examples else math.nan


def reliability_bins(probs: Tensor, labels: Tensor, mask: Tensor, bins: int = 15) -> ReliabilityBins:
    """Accuracy and mean confidence by bins of confidence, over all examples of all clients.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        bins: Number of bins of equal width.

    Raises:
        ValueError: A prediction that counts is not finite.
    """
    scored = _Scored.of(probs, labels, mask)
    if scored.broken.any():
        raise ValueError(
            f"clients {scored.broken.nonzero().flatten().tolist()} have predictions that are not finite: the run diverged (lower its "
            "learning rate), or `mask` covers padded rows"
        )
    count, hits, confidence = (t[0].numpy() for t in scored.pooled().binned(bins))
    with np.errstate(invalid="ignore"):
        return ReliabilityBins(np.arange(bins + 1) / bins, confidence / count, hits / count, count.astype(np.int64))


def rmse(mean: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Root of the mean squared error over examples and outputs, in the targets' unit.

    Args:
        mean: Predicted means, [J, N, O].
        targets: True values, [J, N, O], or [J, N] where O is 1.
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J], >= 0.
    """
    return _Fitted.of(mean, None, targets, mask).rmse()


def gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Negative log density of the targets under N(mean, variance), in nats per example, summed over outputs, every constant kept.

    Args:
        mean: Predictive means, [J, N, O].
        variance: Predictive variances, observation noise included, [J, N, O], > 0.
        targets: True values, [J, N, O], or [J, N] where O is 1.
        mask: Which rows are examples, [J, N] bool.

    Returns:
        Shape [J].
    """
    return _Fitted.of(mean, variance, targets, mask).nll()


def coverage(mean: Tensor, variance: Tensor, targets: Tensor, mask: Tensor, level: float = 0.9) -> Tensor:
    """Share of targets inside the central interval of N(mean, variance) that should hold a share `level` of them.

    Args:
        mean: Predictive means, [J, N, O].
        variance: Predictive variances, observation noise included, [J, N, O], > 0.
        targets: True values, [J, N, O], or [J, N] where O is 1.
        mask: Which rows are examples, [J, N] bool.
        level: Probability of the interval, in (0, 1).

    Returns:
        Shape [J], in [0, 1]; above `level` means too wide, below it too narrow.
    """
    return _Fitted.of(mean, variance, targets, mask).coverage(level)


def regression_summary(mean: Tensor, variance: Tensor, targets: Tensor, mask: Tensor) -> dict[str, float]:
    """The measures of a federation of regressors.

    Args:
        mean: Predictive means, [J, N, O].
        variance: Predictive variances, observation noise included, [J, N, O], > 0.
        targets: True values, [J, N, O], or [J, N] where O is 1.
        mask: Which rows are examples, [J, N] bool.

    Returns:
        `rmse`, `nll`, `coverage_50`, `coverage_90`: means over the clients that have examples; `pooled_` and the same names: of all
        examples in one pot.
    """
    fitted = _Fitted.of(mean, variance, targets, mask)
    summary = {name: _mean(values, fitted.broken) for name, values in fitted.measures().items()}
    return summary | {f"pooled_{name}": float(value) for name, value in fitted.pooled().measures().items()}


@dataclass(frozen=True)
class _Scored:
    """Checked predictions of classes, with zeros in every row that is padding or not finite."""

    probs: Tensor  # [J, N, O]
    labels: Tensor  # [J, N]
    mask: Tensor  # [J, N]
    broken: Tensor  # [J], clients with a prediction that is not finite

    @classmethod
    def of(cls, probs: Tensor, labels: Tensor, mask: Tensor) -> "_Scored":
        probs, labels, mask = (torch.as_tensor(t).detach().cpu() for t in (probs, labels, mask))
        if probs.dim() != 3 or not probs.shape[-1]:
            raise ValueError(f"probs must be [J, N, O], one row of class probabilities per example; got shape {list(probs.shape)}")
        _check_rows(probs, mask, labels=labels)
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels must be class numbers of an integer type, got {labels.dtype}; use labels.long()")
        labels = labels.long().masked_fill(~mask, 0)
        outputs = probs.shape[-1]
        lowest, highest = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
        if lowest < 0 or highest >= outputs:
            raise ValueError(
                f"labels must lie in [0, {outputs}), the classes that probs has columns for; got {lowest} to {highest}. "
                "Number the classes from 0, or mask the rows that are padding."
            )
        finite = probs.isfinite().all(-1)
        probs = probs.to(torch.float64).masked_fill(~(mask & finite)[..., None], 0)
        if probs.numel() and not (-1e-6 <= float(probs.min()) and float(probs.max()) <= 1 + 1e-2):
            raise ValueError(
                f"probs must be probabilities in [0, 1], got {float(probs.min()):.4g} to {float(probs.max()):.4g}; "
                "of logits take softmax(-1), of log probabilities exp()"
            )
        return cls(probs, labels, mask, (mask & ~finite).any(-1))

    def pooled(self) -> "_Scored":
        return _Scored(*pool(self.probs, self.labels, self.mask), broken=self.broken.any()[None])

    def measures(self, bins: int) -> dict[str, Tensor]:
        return {
            "accuracy": self.accuracy(),
            "nll": self.nll(),
            "ece": self.calibration(bins),
            "mce": self.calibration(bins, "max"),
            "brier": self.brier(),
            "macro_f1": self.macro_f1(),
            "auroc": self.auroc(),
        }

    @cached_property
    def top(self) -> tuple[Tensor, Tensor]:
        """Confidence and predicted class, [J, N] each; the first class of those that tie."""
        best = self.probs.max(-1)
        return best.values, best.indices

    @cached_property
    def hits(self) -> Tensor:
        return self.top[1] == self.labels

    def accuracy(self) -> Tensor:
        return self._average(self.hits)

    @cached_property
    def true(self) -> Tensor:
        """Probability of the true class, [J, N]."""
        return self.probs.gather(-1, self.labels[..., None])[..., 0]

    def nll(self) -> Tensor:
        return self._average(-self.true.clamp(torch.finfo(torch.float64).tiny, 1).log())

    def brier(self) -> Tensor:
        return self._average(self.probs.square().sum(-1) - self.true.square() + (1 - self.true).square())

    def binned(self, bins: int) -> tuple[Tensor, Tensor, Tensor]:
        """Number of examples, of right predictions, and sum of confidences, [J, B] each."""
        if bins < 1 or bins != int(bins):
            raise ValueError(f"bins is a number of confidence bins, an integer >= 1; got {bins}")
        confidence = self.top[0]
        inner = torch.arange(1, bins, dtype=torch.float64) / bins
        where = torch.bucketize(confidence, inner)
        return self._count(where, bins), self._count(where, bins, self.hits), self._count(where, bins, confidence)

    def calibration(self, bins: int, norm: Norm = "l1") -> Tensor:
        if norm not in get_args(Norm):
            raise ValueError(f"norm must be one of {get_args(Norm)}, got {norm!r}")
        count, hits, confidence = self.binned(bins)
        gap = (hits - confidence).abs() / count.clamp_min(1)
        share = count / count.sum(-1, keepdim=True)
        if norm == "max":
            return self._nan_broken(torch.where(count.any(-1), gap.amax(-1), math.nan))
        return self._nan_broken((share * gap).sum(-1) if norm == "l1" else (share * gap.square()).sum(-1).sqrt())

    def macro_f1(self) -> Tensor:
        outputs, predicted = self.probs.shape[-1], self.top[1]
        right = self._count(predicted, outputs, self.hits)
        total = self._count(predicted, outputs) + self._count(self.labels, outputs)
        return self._nan_broken((2 * right / total).nanmean(-1))  # 0 / 0 marks a class that does not occur

    def auroc(self) -> Tensor:
        clients, rows, outputs = self.probs.shape
        position = torch.arange(rows, dtype=torch.int32).expand(clients, rows)
        edge = torch.ones(clients, min(rows, 1), dtype=torch.bool)
        areas = []
        for k in (1,) if outputs == 2 else range(outputs):
            score, order = self.probs[..., k].masked_fill(~self.mask, math.inf).sort(-1)
            change = score[:, 1:] != score[:, :-1]
            first = torch.where(torch.cat([edge, change], -1), position, 0).cummax(-1).values
            last = torch.where(torch.cat([change, edge], -1), position, rows).flip(-1).cummin(-1).values.flip(-1)
            positive = ((self.labels == k) & self.mask).gather(-1, order)
            below = (first + last).double() / 2 * positive  # examples ranked below, of those that tie with it half
            ours = positive.sum(-1)
            areas.append((below.sum(-1) - ours * (ours - 1) / 2) / (ours * (self.mask.sum(-1) - ours)))
        return self._nan_broken(torch.stack(areas, -1).nanmean(-1))

    def _average(self, values: Tensor) -> Tensor:
        return self._nan_broken((values * self.mask).sum(-1, dtype=torch.float64) / self.mask.sum(-1))

    def _count(self, where: Tensor, size: int, weight: Tensor | None = None) -> Tensor:
        """Sums of `weight` [J, N] of each client's examples by the place `where` [J, N] in [0, size): [J, size]."""
        clients = len(where)
        weights = self.mask.double() if weight is None else self.mask * weight.double()
        index = where + size * torch.arange(clients)[:, None]
        return torch.bincount(index.flatten(), weights.flatten(), minlength=clients * size).double().view(clients, size)

    def _nan_broken(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.broken, math.nan)


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
        _check_rows(mean, mask)
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


def _check_rows(predictions: Tensor, mask: Tensor, **others: Tensor) -> None:
    """That `mask` and `others` have one entry for each row of `predictions` [J, N, O]."""
    rows = predictions.shape[:2]
    for name, value in {**others, "mask": mask}.items():
        if value.shape != rows:
            raise ValueError(f"{name} must be [J, N] = {list(rows)}, one entry for each row of predictions; got shape {list(value.shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where a row is an example; got {mask.dtype}, use mask.bool()")


def _mean(values: Tensor, broken: Tensor) -> float:
    """Mean over clients [J] of what is defined; NaN if anyone's predictions are broken, or nothing is defined."""
    return math.nan if broken.any() else float(values.nanmean())
