"""Accuracy, calibration and error of predictions, for each client and for all clients' examples
pooled.

Predictions are padded: `probs` [J, N, O], `labels` [J, N], and a `mask` [J, N] that is True for
examples; other rows are never read. A function of one measure returns [J], with NaN for a client
without examples; `pool` merges all clients into one. Arrays of one model, `probs` [N, O] and
`labels` [N], need no mask, and give one number, as in `ece(probs, y)`. Invalid input (shapes,
labels out of range, logits instead of probabilities) raises a ValueError with the remedy.

Everything is computed in float64 on the CPU, so that results do not depend on the device of the
predictions. Every measure is NaN for a client with a prediction that is not finite, for example
after a diverging run, and so is every mean over clients that includes it.
"""

from bayesfl.evaluation.metrics.clients import bottom_decile, pool
from bayesfl.evaluation.metrics.regression import (
    coverage,
    crps,
    gaussian_nll,
    rmse,
)
from bayesfl.evaluation.metrics.reliability import ReliabilityBins, ece, mce, reliability_bins
from bayesfl.evaluation.metrics.scores import accuracy, auroc, brier, macro_f1, nll
from bayesfl.evaluation.metrics.summaries import classification_summary

__all__ = [
    "ReliabilityBins",
    "accuracy",
    "auroc",
    "bottom_decile",
    "brier",
    "classification_summary",
    "coverage",
    "crps",
    "ece",
    "gaussian_nll",
    "macro_f1",
    "mce",
    "nll",
    "pool",
    "reliability_bins",
    "rmse",
]
