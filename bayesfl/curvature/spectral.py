"""Covariances of outputs that have the same eigenvectors for all examples, $V_n = U diag(s_n) U'$.

This holds for a last layer with Kronecker factors: U are the eigenvectors of B for every input. The
quantities that predictions need from $V_n$, [O, O] for each example, take $O^2$ operations, and
$V_n$ is not formed.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Spectral:
    """Hold the covariances of N examples' outputs, each [O, O].

    Args:
        vectors: Eigenvectors U as columns, [O, O].
        values: Eigenvalues s, [N, O].
    """

    vectors: Tensor
    values: Tensor

    def variances(self) -> Tensor:
        """Compute the diagonals, [N, O]."""
        return self.values @ self.vectors.square().T

    def rows(self, which: Tensor) -> Tensor:
        """Compute one row of each covariance, [N, O], that of output `which` [N]."""
        return (self.values * self.vectors[which]) @ self.vectors.T

    def rooted(self, noise: Tensor) -> Tensor:
        """Multiply `noise` [S, N, O] by the symmetric roots."""
        return (noise @ self.vectors * self.values.sqrt()) @ self.vectors.T

    def dense(self) -> Tensor:
        """Form the covariances, [N, O, O]."""
        return (self.vectors * self.values.unsqueeze(-2)) @ self.vectors.T

    def centred(self) -> "Spectral":
        """Return the covariances of the outputs minus their mean over the outputs.

        For classes (1, ..., 1) is an eigenvector, because B has no curvature along it. Only its
        column changes, to 0, so the others stay eigenvectors.
        """
        return Spectral(self.vectors - self.vectors.mean(0), self.values)
