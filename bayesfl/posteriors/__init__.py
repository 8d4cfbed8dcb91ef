"""Beliefs about weights; useful on their own, they know nothing of clients or servers."""

from bayesfl.posteriors.laplace import Laplace
from bayesfl.posteriors.mean_field import MeanField
from bayesfl.posteriors.nuts import nuts
from bayesfl.posteriors.point import Point

__all__ = ["Laplace", "MeanField", "Point", "nuts"]
