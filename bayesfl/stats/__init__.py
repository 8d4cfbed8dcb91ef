"""Statistics over sites whose rows may not be pooled. Regressions equal fits to the pooled rows.

Every fit puts a few questions, and sites answer with sums over their rows.
"""

from bayesfl.stats.density.plain import densities, posterior
from bayesfl.stats.density.posterior import Posterior
from bayesfl.stats.describe import Description, describe
from bayesfl.stats.fit import Fit
from bayesfl.stats.glm import glm
from bayesfl.stats.mixed import Mixed, mixed
from bayesfl.stats.policy import Policy
from bayesfl.stats.survival.cox import cox
from bayesfl.stats.survival.curves import KaplanMeier, kaplan_meier, logrank
from bayesfl.stats.survival.piecewise import piecewise
from bayesfl.stats.survival.tested import Tested
from bayesfl.stats.tables import Tables, tables
from bayesfl.stats.terms import levels

__all__ = [
    "Description",
    "Fit",
    "KaplanMeier",
    "Mixed",
    "Policy",
    "Posterior",
    "Tables",
    "Tested",
    "cox",
    "densities",
    "describe",
    "glm",
    "kaplan_meier",
    "levels",
    "logrank",
    "mixed",
    "piecewise",
    "posterior",
    "tables",
]


def __dir__() -> list[str]:
    return sorted(__all__)
