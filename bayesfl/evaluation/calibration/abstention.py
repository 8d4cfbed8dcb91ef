"""Abstention: a threshold of doubt that bounds the share of wrong answers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from bayesfl.base.options import PROBABILITY, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.warning import warn
from bayesfl.evaluation.binomial import upper_bound
from bayesfl.evaluation.calibration.steps import refuse_numbers
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs

THRESHOLDS = 200
"""Number of tested thresholds, from `risk` to 1 in equal steps."""


@dataclass(frozen=True, kw_only=True)
@declared
class Abstention:
    """Answer rows whose doubt, 1 minus the largest probability, is at most a threshold, so that at
    most `risk` of the answers are wrong.

    Thresholds are fixed beforehand, from doubt = `risk` upwards, and tested in sequence on all
    clients' rows together: a test passes if the Clopper-Pearson bound, at 1 - `delta`, of the share
    of wrong answers is at most `risk`. The last threshold before the first failure is used. The
    true share of wrong answers is then at most `risk` with a probability of at least 1 - `delta`
    over the data (Angelopoulos, Bates, Candès, Jordan and Lei, "Learn then test", Annals of Applied
    Statistics 19, 2025, fixed-sequence testing). This holds for all clients' rows together; a
    client's own share may be higher, see the column `answered_accuracy` of `Predictions.table`.

    Fit a `Temperature` before: with calibrated probabilities the first test should pass. The test
    needs at least $log(delta) / log(1 - risk)$ rows, 59 for 5 % and 5 %.

    Args:
        risk: Maximum share of wrong answers, in (0, 1).
        delta: Maximum probability that the bound fails, in (0, 1).
        split: The split for the tests, to which nothing else was fitted.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, validation=0.2, calibration=0.3)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=16, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=10, evaluate_every=None)
        >>> steps = bf.calibration.Temperature(), bf.calibration.Abstention(risk=0.1)
        >>> found = result.calibrate(*steps).predict(clients.test)
        >>> bool(found.answered.any()), bool(found.answered.all())
        (True, False)
    """

    risk: Annotated[float, PROBABILITY] = 0.05
    delta: Annotated[float, PROBABILITY] = 0.05
    split: str = "calibration"
    last: ClassVar[bool] = True

    def start(self, outputs: Outputs) -> Tensors:
        """Return the thresholds.

        Raises:
            ValueError: The predictions have no classes.
        """
        refuse_numbers(self, outputs)
        return {"thresholds": torch.linspace(self.risk, 1.0, THRESHOLDS, dtype=torch.float64)}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the counts of rows, and of wrong predictions, between each threshold
        and the preceding one.
        """
        return {"n_rows": (THRESHOLDS,), "n_wrong": (THRESHOLDS,)}

    def answer(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return the clients' counts, [J, THRESHOLDS].

        Raises:
            ValueError: Rows have several labels each.
        """
        if local.predictions.probs is not None and local.predictions.probs.dim() == 3:
            raise ValueError(
                "Abstention counts rows as independent, and the several labels of one row are not: "
                "leave it out"
            )
        logits, labels, clients = local.labelled
        place = torch.bucketize(_doubt(logits), state["thresholds"]).clamp_max(THRESHOLDS - 1)
        return {
            "n_rows": clients.count(place, THRESHOLDS),
            "n_wrong": clients.count(place, THRESHOLDS, logits.argmax(-1) != labels),
        }

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the last threshold before the first failing test; -inf if the first test fails."""
        n, wrong = total["n_rows"].cumsum(0).numpy(), total["n_wrong"].cumsum(0).numpy()
        passes = torch.from_numpy(upper_bound(wrong, n, self.delta) <= self.risk)
        good = int(passes.long().cumprod(0).sum())
        if not good:
            warn(
                f"no answer is given: of {int(n[0])} rows in {self.split!r} of a doubt of at most "
                f"{self.risk:g}, {int(wrong[0])} are wrong, which does not show a risk of "
                f"{self.risk:g} with confidence {1 - self.delta:g}; give it more rows or allow "
                "more risk, and fit a Temperature before if there is none",
            )
        threshold = (
            state["thresholds"][good - 1] if good else state["thresholds"].new_tensor(-math.inf)
        )
        return {"threshold": threshold}, True

    def settle(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return nothing, because all clients have the same threshold."""
        return {}

    def apply(self, state: Tensors, own: Tensors, local: LocalPredictions) -> Predictions:
        """Return predictions with `answered`."""
        return replace(
            local.predictions, answered=_doubt(local.logits) <= state["threshold"], risk=self.risk
        )


def _doubt(logits: Tensor) -> Tensor:
    """Return 1 minus the largest probability, [...], from log probabilities [..., O]."""
    return 1 - logits.softmax(-1).amax(-1)
