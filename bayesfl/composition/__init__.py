"""The building blocks of methods: blocks, energies, phases, priors, pools, and the `Algorithm` that
combines them.
"""

from bayesfl.composition import options
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.block import Block, standard_normal
from bayesfl.composition.changes import with_personal, with_server_optimiser
from bayesfl.composition.energy import Energy, Penalty, tempering
from bayesfl.composition.factors import Factors
from bayesfl.composition.invariance import (
    Annealed,
    Estimator,
    anew_at,
    by_environment,
    evenly,
    irm_energy,
    reweighted,
    tied,
)
from bayesfl.composition.phases import Descend, Once, Repeat
from bayesfl.composition.pools import (
    Mean,
    Mixed,
    MomentMatched,
    PrecisionWeighted,
    Relaxed,
    Stack,
    by_size,
    counted,
    equal,
)
from bayesfl.composition.predictors import (
    LinearisedBelief,
    LinearisedLaplace,
    Mixture,
    Neighbours,
)
from bayesfl.composition.priors import (
    Normal,
    Parameter,
    Tilt,
    closest_variance,
    inverse_size,
    own_mean,
    server_mean,
)
from bayesfl.composition.topology import check_mixing, erdos_renyi, metropolis

__all__ = [
    "Algorithm",
    "Annealed",
    "Block",
    "Descend",
    "Energy",
    "Estimator",
    "Factors",
    "LinearisedBelief",
    "LinearisedLaplace",
    "Mean",
    "Mixed",
    "Mixture",
    "MomentMatched",
    "Neighbours",
    "Normal",
    "Once",
    "Parameter",
    "Penalty",
    "PrecisionWeighted",
    "Relaxed",
    "Repeat",
    "Stack",
    "Tilt",
    "anew_at",
    "by_environment",
    "by_size",
    "check_mixing",
    "closest_variance",
    "counted",
    "equal",
    "erdos_renyi",
    "evenly",
    "inverse_size",
    "irm_energy",
    "metropolis",
    "options",
    "own_mean",
    "reweighted",
    "server_mean",
    "standard_normal",
    "tempering",
    "tied",
    "with_personal",
    "with_server_optimiser",
]
