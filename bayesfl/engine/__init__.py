"""Running phases for chunks of clients: one driver and four kernels, which give the same numbers."""

from bayesfl.engine.crew import Crew
from bayesfl.engine.driver import Engine
from bayesfl.engine.plan import PhasePlan

__all__ = ["Crew", "Engine", "PhasePlan"]
