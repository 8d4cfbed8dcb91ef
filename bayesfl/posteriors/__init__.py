"""Posteriors of weights, which can be used without a federation.

Those of one module are made by `fit`, or by a function that returns `Samples`, from inputs and
labels or batches of them. They have `predict` and `to_arviz`, and can be saved and loaded.
"""

from bayesfl.posteriors.full_gaussian import FullGaussian
from bayesfl.posteriors.ivon import ivon
from bayesfl.posteriors.laplace import Laplace
from bayesfl.posteriors.mean_field import MeanField
from bayesfl.posteriors.point import Point
from bayesfl.posteriors.sampling.ensembles import ensemble
from bayesfl.posteriors.sampling.langevin import sghmc, sgld
from bayesfl.posteriors.sampling.nuts import nuts
from bayesfl.posteriors.sampling.samples import Samples
from bayesfl.posteriors.sampling.swag import swag

__all__ = [
    "FullGaussian",
    "Laplace",
    "MeanField",
    "Point",
    "Samples",
    "ensemble",
    "ivon",
    "nuts",
    "sghmc",
    "sgld",
    "swag",
]
