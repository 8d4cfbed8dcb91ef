"""Likelihoods: the distribution of the data given the network's outputs, for single examples.

Whether an objective takes their sum or mean over a client's data is decided by the energy.
"""

from bayesfl.likelihoods.classes import Bernoulli, Categorical
from bayesfl.likelihoods.labels import MultiLabel, Tokens
from bayesfl.likelihoods.numbers import Gaussian, Poisson, Quantiles

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "MultiLabel",
    "Poisson",
    "Quantiles",
    "Tokens",
]
