"""bayesfl: Bayesian inference for federated models.

Personal, calibrated models for clients whose data may not be pooled: published Bayesian and
personalised federated methods as short compositions of the same few parts, and those parts on their
own.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
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

_SHORT = {
    "calibration": "bayesfl.evaluation.calibration",
    "callbacks": "bayesfl.federation.run.callbacks",
    "detection": "bayesfl.evaluation.detection",
    "faults": "bayesfl.federation.rounds.faults",
    "invariance": "bayesfl.composition.invariance",
    "metrics": "bayesfl.evaluation.metrics",
    "plots": "bayesfl.evaluation.plots",
    "pools": "bayesfl.composition.pools",
    "predictors": "bayesfl.composition.predictors",
    "priors": "bayesfl.composition.priors",
    "selection": "bayesfl.posteriors.selection",
    "topology": "bayesfl.composition.topology",
}
"""Modules that have a short name, as `bayesfl.calibration`, beside that of their place. Type
checkers know them as attributes, `bf.calibration`, and not in `from bayesfl.calibration import`.
"""


class _ShortNames(Loader):
    """Imports a module by its short name, and what is in it, as the module that stands in its
    place: `from bayesfl.calibration import Temperature` makes no second class.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        top, _, inner = fullname.partition(".")
        name, dot, rest = inner.partition(".")
        if top != "bayesfl" or name not in _SHORT:
            return None
        return ModuleSpec(fullname, self, origin=_SHORT[name] + dot + rest)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # that of the short name, which is set meanwhile
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _ShortNames())  # first, as others would find what is in them once more


def __getattr__(name: str) -> Any:
    if name in _SHORT or name in ("algorithms", "flower"):  # imported when they are first used
        return importlib.import_module(f"bayesfl.{name}")
    raise AttributeError(f"module 'bayesfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
