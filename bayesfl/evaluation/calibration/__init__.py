"""Calibration after training: temperatures, biases, conformal sets and more, fitted by surveys of
the clients.

Of one model alone `temperature(logits, y)` is its temperature.

>>> served = result.calibrate(Temperature(), Bias(), Conformal(level=0.9))  # doctest: +SKIP
>>> served.predict().sets  # doctest: +SKIP
"""

from bayesfl.evaluation.calibration.abstention import Abstention
from bayesfl.evaluation.calibration.bias import Bias
from bayesfl.evaluation.calibration.choice import Choice
from bayesfl.evaluation.calibration.conformal import Conformal
from bayesfl.evaluation.calibration.steps import Fitted, Step, applied, fit
from bayesfl.evaluation.calibration.temperatures import Temperature, temperature

__all__ = [
    "Abstention",
    "Bias",
    "Choice",
    "Conformal",
    "Fitted",
    "Step",
    "Temperature",
    "applied",
    "fit",
    "temperature",
]
