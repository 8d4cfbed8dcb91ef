"""Statistics over sites whose rows may not be pooled: regressions whose table is the pooled one.

Every fit is a few questions, each answered by sums over a site's rows.
"""

from bayesfl.stats.fit import Fit
from bayesfl.stats.glm import glm
from bayesfl.stats.mixed import Mixed, mixed
from bayesfl.stats.tables import Tables, interaction, levels, tables

__all__ = ["Fit", "Mixed", "Tables", "glm", "interaction", "levels", "mixed", "tables"]
