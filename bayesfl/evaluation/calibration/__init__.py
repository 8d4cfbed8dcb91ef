"""Calibration after training: temperatures, biases, and prediction sets with guaranteed coverage,
fitted from aggregate sums.

For a single model, `temperature(logits, y)` returns its temperature.

>>> served = result.calibrate(Temperature(), Bias(), Conformal(level=0.9))  # doctest: +SKIP
>>> served.predict().sets  # doctest: +SKIP
"""

from bayesfl.evaluation.calibration.abstention import Abstention
from bayesfl.evaluation.calibration.bias import Bias
from bayesfl.evaluation.calibration.conformal import Conformal
from bayesfl.evaluation.calibration.steps import Fitted, Step, applied, fit
from bayesfl.evaluation.calibration.temperatures import Temperature, temperature

__all__ = [
    "Abstention",
    "Bias",
    "Conformal",
    "Fitted",
    "Step",
    "Temperature",
    "applied",
    "fit",
    "temperature",
]
