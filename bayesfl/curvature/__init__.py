"""Curvature of a network: the generalised Gauss-Newton matrix in diagonal, subnetwork and Gram (dual) form, for any module."""

from bayesfl.curvature.dual import Inverse, cholesky, invert, restore
from bayesfl.curvature.ggn import Curvature
from bayesfl.curvature.roots import basis, root

__all__ = ["Curvature", "Inverse", "basis", "cholesky", "invert", "restore", "root"]
