"""bayesfl: Bayesian inference for federated models.

Personal, calibrated models for clients whose data may not be pooled: published Bayesian and
personalised federated methods as short compositions of the same few parts, and those parts on their
own.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bayesfl import curvature, data, engine, likelihoods, models, optim, posteriors
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Once,
    Repeat,
    invariance,
    pools,
    predictors,
    priors,
    topology,
    with_personal,
    with_server_optimiser,
)
from bayesfl.engine import Engine
from bayesfl.evaluation import metrics
from bayesfl.federation.clients.client_model import ClientModel, load_client
from bayesfl.federation.errors import DivergenceError
from bayesfl.federation.private.privacy import ClientPrivacy
from bayesfl.federation.private.secure import SecureSum
from bayesfl.federation.rounds.admission import Admission
from bayesfl.federation.run.comparison import compare
from bayesfl.federation.run.loading import load
from bayesfl.federation.run.simulation import simulate
from bayesfl.posteriors import selection

if TYPE_CHECKING:
    from bayesfl import algorithms, flower
    from bayesfl.evaluation import calibration, detection, plots
    from bayesfl.federation.rounds import faults
    from bayesfl.federation.run import callbacks

__version__ = "0.3.0.dev0"
__all__ = [
    "Admission",
    "Algorithm",
    "Block",
    "ClientModel",
    "ClientPrivacy",
    "Descend",
    "DivergenceError",
    "Energy",
    "Engine",
    "Once",
    "Repeat",
    "SecureSum",
    "algorithms",
    "calibration",
    "callbacks",
    "compare",
    "curvature",
    "data",
    "detection",
    "engine",
    "faults",
    "flower",
    "invariance",
    "likelihoods",
    "load",
    "load_client",
    "metrics",
    "models",
    "optim",
    "plots",
    "pools",
    "posteriors",
    "predictors",
    "priors",
    "selection",
    "simulate",
    "topology",
    "with_personal",
    "with_server_optimiser",
]

_LATER = {
    "algorithms": "bayesfl.algorithms",
    "calibration": "bayesfl.evaluation.calibration",
    "callbacks": "bayesfl.federation.run.callbacks",
    "detection": "bayesfl.evaluation.detection",
    "faults": "bayesfl.federation.rounds.faults",
    "flower": "bayesfl.flower",
    "plots": "bayesfl.evaluation.plots",
}
"""Modules that are imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(_LATER[name])
    raise AttributeError(f"module 'bayesfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
