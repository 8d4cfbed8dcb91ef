"""Calibration after training: temperatures, biases and conformal sets, fitted by surveys of the clients.

>>> served = result.calibrate(Temperature(), Bias(), Conformal(level=0.9))  # doctest: +SKIP
>>> served.predict().sets  # doctest: +SKIP
"""

from bayesfl.evaluation.calibration.bias import Bias
from bayesfl.evaluation.calibration.conformal import Conformal
from bayesfl.evaluation.calibration.steps import Fitted, Step, apply, fit
from bayesfl.evaluation.calibration.temperature import Temperature

__all__ = [
    "Bias",
    "Conformal",
    "Fitted",
    "Step",
    "Temperature",
    "apply",
    "fit",
]
