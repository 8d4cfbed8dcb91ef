"""The covariance of a Laplace approximation in a form that predicts without the training data.

With G the prior variances, A the rows of all data over the curved weights and $M = L L'$ as in
`bayesfl.curvature.dual`,

    primal: $H^-1 = G^(1/2) M^-1 G^(1/2) = R R'$, $R = G^(1/2) L^-T$, [P, P],

    dual: $H^-1 = G - G A' M^-1 A G = G - R R'$, $R = G A' L^-T$, [P, N (O - 1)],

so that $J H^-1 J'$ for rows J at new inputs needs only $J R$ and the prior's part $J G J'$. In the
dual form each column of this R stands for an example, whose inputs could be read off; so R is
rotated to the eigenvectors of $R R'$, which leaves only the posterior's covariance. That is no
protection: if a unit responds to a single example, that example can be computed from it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.curvature.batches import Data, require
from bayesfl.curvature.dual import Inverse
from bayesfl.curvature.ggn import Curvature
from bayesfl.curvature.jacobians import Rows


@dataclass(frozen=True, eq=False)
class Covariance:
    """Hold the posterior covariance of P selected weights, without the data: diag(variance) + sign
    R R' on the curved weights.

    Args:
        curvature: Curvature of the model, at the weights of the fit.
        variance: Diagonal part, [P].
        root: Factor R over the K curved weights, [K, R].
        sign: 1 if $R R'$ is the covariance of the curved weights, whose `variance` is then 0; -1 if
            it is the reduction by the data.
        curved: Which of the selected weights R covers, [P] bool.
        indices: Indices of the selected weights, [P]; None means all weights.
    """

    curvature: Curvature
    variance: Tensor
    root: Tensor
    sign: int
    curved: Tensor
    indices: Tensor | None

    @classmethod
    def of(cls, inverse: Inverse, *, limit: int) -> "Covariance":
        """Make the covariance of a fitted inverse.

        Args:
            inverse: The inverse.
            limit: Maximum number of bytes of R.

        Raises:
            MemoryError: R exceeds `limit`; the message has its size.
        """
        curved, order = int(inverse.curved.sum()), inverse.order
        what = f"its covariance, a factor of {curved} x {order} numbers,"
        require(8 * curved * order, limit, what, "use fewer examples or fewer weights")
        prior = inverse.variance[inverse.curved]
        eye = torch.eye(order, dtype=torch.float64, device=inverse.variance.device)
        back = torch.linalg.solve_triangular(inverse.chol.T, eye, upper=True)  # L^-T
        if inverse.rows is None:
            root = prior.sqrt()[:, None] * back
            variance = torch.where(inverse.curved, 0.0, inverse.variance)
            sign = 1
        else:
            root = _of_covariance(prior[:, None] * inverse.rows.back(back))
            variance = inverse.variance
            sign = -1
        return cls(inverse.curvature, variance, root, sign, inverse.curved, inverse.indices)

    def tensors(self) -> Tensors:
        """Return all tensors that `restored` needs in addition to the model."""
        out = {
            "variance": self.variance,
            "root": self.root,
            "sign": torch.tensor(self.sign),
            "curved": self.curved,
        }
        return out if self.indices is None else out | {"indices": self.indices}

    @classmethod
    def restored(cls, curvature: Curvature, tensors: Tensors) -> "Covariance":
        """Return the covariance with these `tensors`, for the same model at the same weights."""
        found = {name: t.to(curvature.device) for name, t in tensors.items()}
        variance, root, curved = (found[name] for name in ("variance", "root", "curved"))
        indices = found.get("indices")
        return cls(curvature, variance, root, int(found["sign"]), curved, indices)

    def predict(self, x: Data, *, centre: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the linearised model's outputs at `x`: mean [N, O] and covariance [N, O, O], see
        `Inverse.predict`.
        """
        return self.curvature.spread(x, self._between, centre=centre, extra=3 * self.root.shape[1])

    def _between(self, rows: Rows) -> Tensor:
        """Compute J H^-1 J' for rows J over all weights, example by example, [N, Q, Q]."""
        rows = rows if self.indices is None else rows.restrict(self.indices)
        prior = rows.within(self.variance)
        if not self.root.numel():
            return prior
        curved = rows if self.curved.all() else rows.restrict(self.curved.nonzero().squeeze(1))
        half = curved.forward(self.root).view(rows.examples, rows.cotangents, -1)
        return prior + self.sign * (half @ half.mT)


def _of_covariance(root: Tensor) -> Tensor:
    """Return the root of R R' along its eigenvectors, which reveals nothing beyond R R'; the
    columns of R [P, K] stand for examples.
    """
    values, vectors = torch.linalg.eigh(root.T @ root)
    return root @ vectors[:, values > 1e-18 * values.max()] if root.numel() else root
