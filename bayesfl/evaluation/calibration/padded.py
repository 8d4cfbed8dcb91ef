"""Calibration after training, on held-out examples: temperatures, and conformal sets of classes; pooled or client by client.

Both need a calibration split to which no weight was fitted, and predictions made like those to which they will be applied: at the same
number of draws, and either both tempered or neither. Neither changes the order of classes. Predictions come padded as in
`bayesfl.metrics`: `probs` [J, N, O], `labels` [J, N], `mask` [J, N]; rows outside the mask are never read. Everything is
computed in float64.

>>> temperature = fit_temperature(held_out.probs, labels, held_out.mask)  # doctest: +SKIP
>>> probs = temper(predictions.probs, temperature.clients)  # doctest: +SKIP
>>> found = conformal(held_out.probs, labels, held_out.mask, alpha=0.1, by="client")  # doctest: +SKIP
>>> sets = found.sets(predictions.probs)  # doctest: +SKIP
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.checks import number, probability
from bayesfl.evaluation import metrics
from bayesfl.evaluation.calibration.temperature import GRID, Tempered

BOUNDS = (0.05, 20.0)
"""Smallest and largest temperature considered. If every prediction is right, the likelihood alone has no optimum: it is best at 0."""
By: TypeAlias = Literal["pooled", "client", "mixture"]
"""Scores that set a conformal threshold: all clients' as if from one source, the client's own, or all clients' from different sources."""
_ROUNDING = 1e-9  # tolerance, so that (n + 1) alpha is not rounded down where it would be an integer but for floating-point error


@dataclass(frozen=True)
class FittedTemperature:
    """The temperatures that `fit_temperature` found.

    Args:
        pooled: One temperature for all clients, also for clients that come later.
        clients: One for each client, [J] in float64; the pooled one for a client without calibration examples.
    """

    pooled: float
    clients: Tensor


def fit_temperature(
    probs: Tensor, labels: Tensor, mask: Tensor, *, strength: float = 10.0, bounds: tuple[float, float] = BOUNDS, logs: bool = False
) -> FittedTemperature:
    """Find the temperatures that minimise the negative log likelihood of held-out labels under softmax(logits / T).

    Guo et al., "On calibration of modern neural networks", ICML 2017, section 4.2. The pooled temperature T_0 serves all examples of all
    clients. That of client j minimises

        sum_i nll_i(T) + 1/2 strength h (log T - log T_0)^2,

    a Gaussian prior on log T around the pooled one, as precise as the information in `strength` average calibration examples: h, the Fisher
    information of one example about log T at T_0, is the variance of (logits / T_0) under softmax(logits / T_0), averaged over all
    examples (a unit-information prior: Kass and Wasserman, JASA 90, 1995). A client whose n examples are like all others is
    thus moved n / (n + strength) of the way to its own optimum, and the temperature of one whose every example is right stays away from 0.

    Args:
        probs: Class probabilities, [J, N, O]; their logarithms serve as logits, so this is exact. Those below the smallest normal number
            of their type count as that number.
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        strength: Weight of the pooled temperature in a client's, in examples, >= 0; `math.inf` gives every client the pooled one. Clients
            that differ more need less; from 9 to 100 examples and a spread of log T between 0.1 and 0.6, 10 is never far from the best.
        bounds: Smallest and largest temperature considered; an optimum at one of them means that the data do not bound it.
        logs: Whether `probs` are logits or log probabilities.

    Raises:
        ValueError: The shapes or types do not fit, a prediction is not finite, there is no example, or an option is out of range.
    """
    strength, (low, high) = number("strength", strength), (number("bounds", b) for b in bounds)
    if not strength >= 0:
        raise ValueError(f"strength is a number of examples, >= 0, got {strength}")
    if not 0 < low < high < math.inf:
        raise ValueError(f"bounds must be temperatures 0 < low < high < inf, got {bounds}")
    logits = _logits(probs, logs)
    labels, mask = _checked(logits.exp() if logs else probs, labels, mask)
    if not mask.any():
        raise ValueError("there is no example to calibrate on; make the data with calibration=0.2, or check mask")
    grid = torch.linspace(math.log(low), math.log(high), GRID, dtype=torch.float64)
    logits = (logits - logits.amax(-1, keepdim=True)).masked_fill(~mask[..., None], 0)  # 0 at every T if all logits are equal
    scored = Tempered(logits.mT.contiguous(), labels, grid)
    pooled = scored.minimise(grid.new_zeros(1).clamp(grid[0], grid[-1]), grid.new_zeros(1), together=True)
    own = pooled.expand(len(mask))
    if strength < math.inf:
        own = scored.minimise(own, strength * scored.slopes(own)[1].sum() / mask.sum())
    pooled, own = (t.exp().clamp(low, high) for t in (pooled, own))
    return FittedTemperature(float(pooled), own)


def temper(probs: Tensor, temperature: float | Tensor, *, logs: bool = False) -> Tensor:
    """Return probabilities at another temperature, softmax(log(probs) / T); 1 changes nothing, higher values are less certain.

    Args:
        probs: Class probabilities, [J, N, O]. Those below the smallest normal number of their type count as that number.
        temperature: One temperature for all, or one for each client, [J]; > 0.
        logs: Whether `probs` are logits or log probabilities.

    Returns:
        Probabilities [J, N, O], of the type and on the device of `probs`; NaN stays NaN.

    Raises:
        ValueError: A temperature is not > 0 and finite, there is not one for each client, or `probs` are logits while `logs` is False.
    """
    probs = torch.as_tensor(probs)
    t = torch.as_tensor(temperature, dtype=torch.float64).detach().cpu()
    if probs.dim() != 3 or t.dim() > 1 or (t.dim() and len(t) != len(probs)):
        raise ValueError(
            f"probs must be [J, N, O] and temperature one number or one for each client, [J]; got {list(probs.shape)} and {list(t.shape)}"
        )
    if not bool(((t > 0) & t.isfinite()).all()):
        raise ValueError(f"temperature must be > 0 and finite, got {temperature}")
    if not logs and bool(((probs < -1e-6) | (probs > 1.01)).any()):
        raise ValueError("probs must be probabilities in [0, 1]; pass logits or log probabilities with logs=True")
    return (_logits(probs, logs) / t.reshape(-1, 1, 1)).softmax(-1).to(probs)


@dataclass(frozen=True)
class FittedSets:
    """The thresholds of conformal sets, made by `conformal`.

    Thresholds of pooled scores can be applied to any client; the promise of `conformal` holds as `by` says.

    Args:
        alpha: Share of labels that the sets may miss.
        by: The scores from which the thresholds come.
        threshold: Smallest probability of a class in the set (1 - the quantile of the scores), [J], or [1] of pooled scores; 0 admits every
            class.
        rank: Rank k of the threshold among n scores, counted from the smallest, integers of the same shape; k > n if the set has every
            class.
        examples: Number n of calibration scores, of the same shape.
    """

    alpha: float
    by: By
    threshold: Tensor
    rank: Tensor
    examples: Tensor

    def sets(self, probs: Tensor) -> Tensor:
        """Return which classes are in each set, [J, N, O] bool, for probabilities [J, N, O]; sets of padded rows (NaN) are empty.

        A set of an example may be empty too: then no class is as probable there as true classes were in the calibration.

        Raises:
            ValueError: The clients are not those of the calibration split.
        """
        probs = torch.as_tensor(probs).detach().cpu()
        if probs.dim() != 3 or len(self.threshold) not in (1, len(probs)):
            raise ValueError(
                f"probs must be [J, N, O] of the {len(self.threshold)} clients that were calibrated, got {list(probs.shape)}; a threshold "
                "of pooled scores (by='pooled' or 'mixture') serves any clients"
            )
        return probs.double() >= self.threshold[:, None, None]

    def evaluate(self, probs: Tensor, labels: Tensor, mask: Tensor) -> "Coverage":
        """Measure the coverage and size of the sets on test examples: probabilities [J, N, O], labels [J, N], mask [J, N] bool.

        Raises:
            ValueError: The shapes or types do not fit, or a prediction is not finite.
        """
        probs = torch.as_tensor(probs).detach().cpu()
        sets = self.sets(probs)
        labels, mask = _checked(probs, labels, mask)
        n = mask.sum(-1)
        inside = sets.gather(-1, labels[..., None])[..., 0] & mask
        rank, examples = (t.expand(len(mask)) for t in (self.rank, self.examples))
        return Coverage(self.alpha, self.by, inside.sum(-1) / n.double(), (sets.sum(-1) * mask).sum(-1) / n.double(), n, rank, examples)


@dataclass(frozen=True)
class Coverage:
    """Coverage and size of conformal sets on test data, client by client; made by `FittedSets.evaluate`.

    Args:
        alpha: Share of labels that the sets may miss.
        by: The scores from which the thresholds come.
        share: Share of labels inside their set, [J]; NaN for a client without test examples.
        size: Mean number of classes in a set, [J].
        tested: Number of test examples, [J].
        rank: Rank k of the threshold among the calibration scores, [J].
        examples: Number n of calibration scores from which the threshold comes, [J].
    """

    alpha: float
    by: By
    share: Tensor
    size: Tensor
    tested: Tensor
    rank: Tensor
    examples: Tensor

    def chance(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the central interval of a client's coverage if its calibration and test scores came from one continuous source, [J] each.

        Given the calibration scores, the probability that a set holds its label is then distributed as Beta(k, n + 1 - k), which makes
        the number of m test labels inside beta-binomial (Vovk, "Conditional validity of inductive conformal predictors", ACML 2012;
        Angelopoulos and Bates, "Conformal prediction: a gentle introduction", 2023, section 3.2 and appendix C). A client outside its
        interval differs from the data for which the threshold was made; with ties among the scores coverage only rises.

        Args:
            level: Probability of the interval, in (0, 1).

        Returns:
            Lower and upper bound of the share of labels inside their set.

        Raises:
            ValueError: `level` is not in (0, 1).
        """
        from scipy.stats import betabinom

        probability("level", level, "of the interval")
        table, client = np.unique(torch.stack([self.rank, self.examples, self.tested]).numpy(), axis=1, return_inverse=True)
        k, n, m = table.astype(float)
        bounds = []
        for tail in ((1 - level) / 2, (1 + level) / 2):
            with np.errstate(invalid="ignore", divide="ignore"):
                inside = np.where(k > n, m, betabinom.ppf(tail, m, k, np.maximum(n + 1 - k, 1))) / m
            bounds.append(torch.from_numpy(inside[client]))
        return bounds[0], bounds[1]

    def summary(self) -> dict[str, float]:
        """Return the coverage of all clients as a few numbers.

        Returns:
            `coverage` and `set_size`, means over clients; `coverage_decile`, of the worst-served tenth of the clients; `pooled_coverage`
            and `pooled_set_size`, means over all clients' examples.
        """
        some = self.tested > 0
        weight = (self.tested / self.tested.sum())[some]
        return {
            "coverage": float(self.share.nanmean()),
            "coverage_decile": metrics.bottom_decile(self.share),
            "set_size": float(self.size.nanmean()),
            "pooled_coverage": float((weight * self.share[some]).sum()) if some.any() else math.nan,
            "pooled_set_size": float((weight * self.size[some]).sum()) if some.any() else math.nan,
        }

    def table(self) -> dict[str, np.ndarray]:
        """Return columns [J]: `client`, `examples`, `calibrated` (scores behind the threshold), `coverage`, `set_size`."""
        index = {"client": np.arange(len(self.share)), "examples": self.tested.numpy(), "calibrated": self.examples.numpy()}
        return index | {"coverage": self.share.numpy(), "set_size": self.size.numpy()}


def conformal(probs: Tensor, labels: Tensor, mask: Tensor, *, alpha: float = 0.1, by: By = "pooled") -> FittedSets:
    """Fit prediction sets that hold the true class with probability at least 1 - alpha, if test examples are distributed as held-out ones.

    The sets are sets of classes. The promise holds for any model, if test examples come from the same distribution as the held-out ones;
    `by` says for whom it holds.

    Split conformal prediction (Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005; Angelopoulos and Bates,
    "Conformal prediction: a gentle introduction", Foundations and Trends in Machine Learning 16(4), 2023, section 1). The score of an
    example is 1 - p_y; the set holds the classes with a score up to the k-th smallest of n, k = ceil((n + 1)(1 - alpha)). If
    alpha < 1 / (n + 1), k exceeds n and the set holds every class. `by` says which scores are used, and for whom the promise holds:

    | `by` | n | promise |
    |---|---|---|
    | `pooled` | all examples | an example drawn from the same source as these; nothing for a client that differs |
    | `client` | the client's own | each client; one with fewer than 1 / alpha - 1 examples gets every class |
    | `mixture` | all examples, k = ceil((n + J)(1 - alpha)) | the mean over clients that differ, client j counting n_j + 1 |

    The last is Lu et al., "Federated conformal predictors for distributed uncertainty quantification", ICML 2023.

    Args:
        probs: Class probabilities of held-out examples, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        alpha: Share of labels that may be missed, in (0, 1).
        by: Which scores set the threshold, `pooled`, `client` or `mixture`.

    Raises:
        ValueError: The shapes or types do not fit, a prediction is not finite, or an option is out of range.
    """
    if not 0 < number("alpha", alpha) < 1:
        raise ValueError(f"alpha is the share of labels that a set may miss and must lie in (0, 1), got {alpha}; 10% is 0.1")
    if by not in get_args(By):
        raise ValueError(f"by must be one of {get_args(By)}, got {by!r}")
    probs = torch.as_tensor(probs).detach().cpu()
    labels, mask = _checked(probs, labels, mask)
    sources = len(mask) if by == "mixture" else 1
    true = probs.double().gather(-1, labels[..., None])[..., 0].masked_fill(~mask, -math.inf)
    if by != "client":
        true, mask = true.reshape(1, -1), mask.reshape(1, -1)
    n = mask.sum(-1)
    most = n + sources
    rank = most - (most.double() * alpha + _ROUNDING).floor().long().clamp(max=most - 1)
    ordered = torch.cat([true, true.new_full((len(true), 1), -math.inf)], -1).sort(-1, descending=True).values
    place = torch.minimum(rank, n + 1) - 1  # scores 1 - p ascend as p descends; beyond the last example the set has every class
    threshold = ordered.gather(-1, place[:, None])[:, 0].clamp_min(0)
    return FittedSets(float(alpha), by, threshold, rank, n)


def _logits(probs: Tensor, logs: bool) -> Tensor:
    """Return log probabilities [J, N, O] in float64 on the CPU; they are finite where `probs` are."""
    probs = torch.as_tensor(probs).detach().cpu()
    if not logs:
        least = torch.finfo(probs.dtype if probs.is_floating_point() else torch.float32).tiny
        probs = probs.double().clamp_min(least).log()
    return probs.double().log_softmax(-1)


def _checked(probs: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Check labels and mask against the probabilities, which must be finite; return both on the CPU, with padded labels 0."""
    labels, mask = (torch.as_tensor(t).detach().cpu() for t in (labels, mask))
    seen = metrics.accuracy(probs, labels, mask)  # raises if the input does not fit
    broken = (seen.isnan() & mask.any(-1)).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"clients {broken} have predictions that are not finite: the run diverged (lower its learning rate), or `mask` covers padded "
            "rows"
        )
    return labels.long().masked_fill(~mask, 0), mask
