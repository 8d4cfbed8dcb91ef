"""All measures of a federation of classifiers at once."""

import math

from torch import Tensor

from bayesfl.base.options import Count, declared
from bayesfl.evaluation.metrics.clients import bottom_decile
from bayesfl.evaluation.metrics.measured import Measured
from bayesfl.evaluation.metrics.reliability import calibration_error
from bayesfl.evaluation.metrics.scores import Scored


@declared
def classification_summary(
    probs: Tensor, labels: Tensor, mask: Tensor, *, bins: Count = 15
) -> dict[str, float]:
    """Summarise the predictions of a federation of classifiers.

    Args:
        probs: Class probabilities, [J, N, O].
        labels: True classes, [J, N], integers in [0, O).
        mask: Which rows are examples, [J, N] bool.
        bins: Number of confidence bins.

    Returns:
        `accuracy`, `nll`, `ece`, `mce`, `brier`, `macro_f1` and `auroc`: means over clients with
        equal weights, without clients that have no examples (or no AUROC). `accuracy_decile`: the
        lowest decile of accuracy over clients. `pooled_accuracy`, `pooled_nll`, `pooled_ece`,
        `pooled_mce`, `pooled_brier`: of all clients' examples pooled.

    Example:
        >>> probs = torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]])  # two clients of one example
        >>> labels, mask = torch.tensor([[0], [0]]), torch.ones(2, 1, dtype=torch.bool)
        >>> found = bf.metrics.classification_summary(probs, labels, mask)
        >>> found["accuracy"], found["accuracy_decile"], found["pooled_accuracy"]
        (0.5, 0.0, 0.5)
    """
    return measured_classes(Scored.of(probs, labels, mask), bins).summary()


def measured_classes(scored: Scored, bins: int = 15) -> Measured:
    """Compute all measures of `classification_summary` from checked predictions."""
    values = {"accuracy": scored.hits, "nll": scored.losses, "brier": scored.squares}
    found = Measured.of(scored.clients, {name: scored.told(t) for name, t in values.items()})
    everyone = scored.pooled()
    columns = {
        "accuracy": found.columns["accuracy"],
        "nll": found.columns["nll"],
        "ece": calibration_error(scored, bins),
        "mce": calibration_error(scored, bins, "max"),
        "brier": found.columns["brier"],
        "macro_f1": scored.macro_f1(),
        "auroc": scored.auroc(),
    }
    means = {name: float(t.nanmean()) for name, t in columns.items()}
    means["accuracy_decile"] = bottom_decile(columns["accuracy"])
    pooled = {
        **found.pooled,
        "ece": float(calibration_error(everyone, bins)),
        "mce": float(calibration_error(everyone, bins, "max")),
    }
    if scored.bad.any():
        means = dict.fromkeys(means, math.nan)
    return Measured(found.examples, columns, means, pooled)
