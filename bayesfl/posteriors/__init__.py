"""Beliefs about weights, which can be used without a federation."""

from bayesfl.posteriors.laplace import Laplace
from bayesfl.posteriors.mean_field import MeanField
from bayesfl.posteriors.nuts import nuts
from bayesfl.posteriors.point import Point

__all__ = ["Laplace", "MeanField", "Point", "nuts"]
