"""Curvature of a network: generalised Gauss-Newton by diagonal, subnetwork and Gram (dual) form; useful alone, for any module."""

from bayesfl.curvature.dual import Inverse, cholesky, invert, restore
from bayesfl.curvature.ggn import Curvature
from bayesfl.curvature.roots import basis, root

__all__ = ["Curvature", "Inverse", "basis", "cholesky", "invert", "restore", "root"]
