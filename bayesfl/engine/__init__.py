"""How a phase runs for a chunk of clients: one driver, four kernels that give the same numbers."""

from bayesfl.engine.crew import Crew
from bayesfl.engine.driver import Engine
from bayesfl.engine.plan import PhasePlan

__all__ = ["Crew", "Engine", "PhasePlan"]
