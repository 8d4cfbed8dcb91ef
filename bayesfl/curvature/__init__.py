"""Curvature of a network: the generalised Gauss-Newton matrix in diagonal, subnetwork and Gram
(dual) form, for any module.
"""

from bayesfl.curvature.dual import Inverse, invert
from bayesfl.curvature.ggn import Curvature

__all__ = ["Curvature", "Inverse", "invert"]
