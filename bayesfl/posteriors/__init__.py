"""Beliefs about weights; useful on their own, they know nothing of clients or servers."""

from bayesfl.posteriors.mean_field import MeanField
from bayesfl.posteriors.point import Point

__all__ = ["MeanField", "Point"]
