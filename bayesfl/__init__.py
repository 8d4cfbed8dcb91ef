"""bayesfl: Bayesian inference for federated models.

Personal, calibrated models for clients whose data may not be pooled: published Bayesian and personalised federated methods as
short compositions of the same few parts, and those parts on their own.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bayesfl.blocks import Algorithm, Block
from bayesfl.engine import Engine
from bayesfl.local import DivergenceError
from bayesfl.result import load
from bayesfl.simulate import simulate

if TYPE_CHECKING:
    from bayesfl import (
        algorithms,
        calibration,
        curvature,
        data,
        detection,
        metrics,
        models,
        plots,
        posteriors,
        predictors,
        selection,
        topology,
    )

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "Block",
    "DivergenceError",
    "Engine",
    "algorithms",
    "calibration",
    "curvature",
    "data",
    "detection",
    "load",
    "metrics",
    "models",
    "plots",
    "posteriors",
    "predictors",
    "selection",
    "simulate",
    "topology",
]

_MODULES = (
    "algorithms",
    "calibration",
    "curvature",
    "data",
    "detection",
    "metrics",
    "models",
    "plots",
    "posteriors",
    "predictors",
    "selection",
    "topology",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"bayesfl.{name}")
    raise AttributeError(f"module 'bayesfl' has no attribute {name!r}")
