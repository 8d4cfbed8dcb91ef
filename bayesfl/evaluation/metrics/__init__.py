"""Accuracy, calibration and error of predictions, for each client and for all clients' examples
pooled.

Predictions come padded: `probs` [J, N, O], `labels` [J, N], and a `mask` [J, N] that is True for
rows that are examples; the other rows are never read. A function of one measure returns [J], with
NaN for a client without examples; `pool` makes one client of all. Arrays of one model, `probs`
[N, O] and `labels` [N], need no mask, and give one number, as in `ece(probs, y)`. Input that does
not fit (shapes, labels without a class, logits for probabilities) raises a ValueError that names
the remedy.

Everything is computed in float64 on the CPU, so that the numbers do not depend on the device that
predicted. A client with a prediction that is not finite, as after a run that diverged, has NaN in
every measure, and so has every mean over clients that includes it.
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
