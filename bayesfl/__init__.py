"""bayesfl: Bayesian inference for federated models.

Personal, calibrated models for clients whose data may not be pooled: published Bayesian and
personalised federated methods as short compositions of the same few parts, and those parts on their
own.
"""

import importlib
import inspect
import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bayesfl import curvature, data, engine, likelihoods, models, optim, posteriors
from bayesfl.base.processes.ranks import rank
from bayesfl.composition import (
    Algorithm,
    Block,
    Descend,
    Energy,
    Factors,
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
from bayesfl.evaluation import calibration, detection, metrics, plots
from bayesfl.federation.clients.asking import survey
from bayesfl.federation.clients.client_model import ClientModel, load_client
from bayesfl.federation.clients.pooling import with_heads
from bayesfl.federation.errors import DivergenceError
from bayesfl.federation.private.privacy import ClientPrivacy
from bayesfl.federation.private.secure import SecureSum
from bayesfl.federation.rounds import faults
from bayesfl.federation.rounds.admission import Admission
from bayesfl.federation.run import callbacks
from bayesfl.federation.run.loading import load
from bayesfl.federation.run.simulation import simulate
from bayesfl.posteriors import selection
from bayesfl.study.study import Study
from bayesfl.study.table import table

if TYPE_CHECKING:
    from bayesfl import algorithms, flower, pyro, stats

__version__ = "0.4.0"
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
    "Factors",
    "Once",
    "Repeat",
    "SecureSum",
    "Study",
    "algorithms",
    "calibration",
    "callbacks",
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
    "pyro",
    "rank",
    "selection",
    "simulate",
    "stats",
    "survey",
    "table",
    "topology",
    "with_heads",
    "with_personal",
    "with_server_optimiser",
]

for _place in (
    "composition.invariance",
    "composition.pools",
    "composition.predictors",
    "composition.priors",
    "composition.topology",
    "evaluation.calibration",
    "evaluation.detection",
    "evaluation.metrics",
    "evaluation.plots",
    "federation.rounds.faults",
    "federation.run.callbacks",
    "posteriors.selection",
):
    # Each module has a short name, too, as in `from bayesfl.calibration import Temperature`. It is
    # the same module, so that no class exists twice. Type checkers see attributes,
    # `bf.calibration`.
    _whole = f"bayesfl.{_place}"
    for _name in [name for name in sys.modules if f"{name}.".startswith(f"{_whole}.")]:
        _short = f"bayesfl.{_place.rpartition('.')[2]}{_name.removeprefix(_whole)}"
        sys.modules[_short] = sys.modules[_name]


def __getattr__(name: str) -> Any:
    if name in ("algorithms", "flower", "pyro", "stats"):  # imported when they are first used
        return importlib.import_module(f"bayesfl.{name}")
    raise AttributeError(f"module 'bayesfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _offers(module: ModuleType) -> list[str]:
    """Return the names of a public module for completion, without those that it imports."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = [
        name
        for name, it in vars(module).items()
        if getattr(it, "__module__", None) == module.__name__
    ]
    return sorted(name for name in {*own, *inspect.get_annotations(module)} if name[0] != "_")


for _module in list(map(globals().get, __all__)):
    if isinstance(_module, ModuleType):
        vars(_module)["__dir__"] = partial(_offers, _module)
