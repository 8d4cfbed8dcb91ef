"""The inverse of $H = J' Lambda J + diag(precision)$, by the smaller of two Cholesky factors.

With $G = diag(1 / precision)$ and A the rows $R' J$ ($R R' = Lambda$) of all data, stacked:

    primal: $M = I + G^(1/2) A' A G^(1/2)$, order: the weights; $H^-1 = G^(1/2) M^-1 G^(1/2)$,

    dual: $M = I + A G A'$, order: $N (O - 1)$ rows; $H^-1 = G - G A' M^-1 A G$

(the latter by Woodbury's identity),

and $log |H| = log |M| + sum log precision$ in both. A weight without curvature (a zero column of A)
does not change M and keeps its prior variance; an example whose rows are zero does not change M
either. Both are left out first.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayesfl.base.inputs import at, join, named, unnamed
from bayesfl.base.options import INVERTIBLE, declared
from bayesfl.base.protocols import Tensors
from bayesfl.curvature.batches import Data, require
from bayesfl.curvature.ggn import Curvature, Piece
from bayesfl.curvature.jacobians import Rows

DualForm = Literal["auto", "primal", "dual"]

NO_CURVATURE = 1e-12
"""A weight has no curvature if its GGN entry times its prior variance is below this value. Let e be
the sum of these products over the weights left out: no weight's posterior variance changes by more
than e, relatively, and no output's by more than about sqrt(e)."""

ONE = torch.ones((), dtype=torch.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Inverse:
    """Hold the posterior covariance of P selected weights, all others fixed, as a Cholesky factor;
    made by `invert`.

    It is $H_S^-1$, where H is the GGN plus $diag(precision)$ and the subscript S restricts it to
    the selected weights.

    Args:
        curvature: The curvature from which it was computed.
        form: The Cholesky factor that is stored, `primal` or `dual`.
        indices: Indices of the P selected weights, in the order of every vector here, [P]; None
            means all weights, and P = D.
        variance: Prior variances 1 / precision, [P].
        curved: Which weights are in the factor, [P] bool; the others have no curvature and keep
            their prior variance. In the dual form of all weights, where they cost nothing, none is
            left out.
        chol: Lower Cholesky factor of M, [K, K], or of each of several, [G, K, K].
        data: In the dual form `x` [N', ...] and `cotangents` [N', Q, O] of the examples whose rows
            are not zero; otherwise empty.
        rows: In the dual form the rows of these examples over the curved weights; otherwise None.
        scale: Factor of the prior variances; for several covariances at once, which can only
            predict, one for each, [G].

    Example:
        >>> x, model = torch.tensor([[1.0], [2.0]]), nn.Linear(1, 1, bias=False)
        >>> curvature = bf.curvature.Curvature(model, bf.likelihoods.Gaussian())
        >>> bf.curvature.invert(curvature, x, precision=5.0).marginals()  # 1 / (5 + 5)
        tensor([0.1000], dtype=torch.float64)
    """

    curvature: Curvature
    form: Literal["primal", "dual"]
    indices: Tensor | None
    variance: Tensor
    curved: Tensor
    chol: Tensor
    data: dict[str, Any]
    rows: Rows | None
    scale: Tensor = ONE

    @property
    def order(self) -> int:
        """Return the order K of the Cholesky factor."""
        return self.chol.shape[-1]

    @property
    def size(self) -> int:
        """Return the number of selected weights, P."""
        return len(self.variance)

    def log_det(self) -> Tensor:
        """Compute the log determinant of the posterior precision H_S, in nats."""
        return 2 * self.chol.diagonal().log().sum() - self.variance.log().sum()

    def marginals(self) -> Tensor:
        """Compute the diagonal of H_S^-1: posterior variances, [P]."""
        out = self.variance.clone()
        if not self.curved.any():
            return out
        prior = self.variance[self.curved]
        if self.rows is None:
            out[self.curved] = prior * torch.cholesky_inverse(self.chol).diagonal()
            return out
        # The variance is a difference, which rounding could make 0 or negative for well-determined
        # weights; it is kept positive.
        out[self.curved] = prior * (1 - prior * self.rows.solved(self.chol)).clamp_min(
            torch.finfo(torch.float64).eps
        )
        return out

    def ggn(self) -> Tensor:
        """Compute the GGN of the selected weights, [P, P]; in the primal form from the factor, to
        about 1e-15 of the precision, and 0 for weights without curvature.
        """
        if self.rows is None:
            scale = self.variance[self.curved].sqrt()
            own = self.chol @ self.chol.mT
            own.diagonal().sub_(1)
            own /= scale[:, None] * scale
        else:
            rows = self.rows.dense().flatten(0, 1)
            own = rows.mT @ rows
        out = own.new_zeros(self.size, self.size)
        curved = self.curved.nonzero().squeeze(1)
        out[curved[:, None], curved] = own
        return out

    @property
    def noise_size(self) -> int:
        """Return the number of standard normals for one draw."""
        return self.size + (self.order if self.form == "dual" else 0)

    def sample(self, noise: Tensor) -> Tensor:
        """Make S draws from N(0, H_S^-1), [S, P], by standard normals [S, `noise_size`].

        In the dual form a draw e of the prior is corrected by the data's residuals,
        $e - G A' M^-1 (A e + n)$ (Matheron's rule).
        """
        noise = noise.to(self.variance)
        draw = noise[:, : self.size] * self.variance.sqrt()
        prior = self.variance[self.curved]
        if self.rows is None:
            solved = torch.linalg.solve_triangular(
                self.chol.T, noise[:, : self.size][:, self.curved].T, upper=True
            )
            draw[:, self.curved] = solved.T * prior.sqrt()
        elif self.order:
            residual = (
                self.rows.forward(draw[:, self.curved].T.contiguous()) + noise[:, self.size :].T
            )
            draw[:, self.curved] -= (
                self.rows.back(torch.cholesky_solve(residual, self.chol)) * prior[:, None]
            ).T
        return draw

    def predict(self, x: Data, *, centre: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the linearised model's outputs at `x`: mean [N, O], covariance J_S H_S^-1 J_S'
        [N, O, O], or [G, N, O, O] for several, without noise of the data.

        In the dual form the covariance is a difference and is exact to about 1e-15 of the prior's.

        Args:
            x: Inputs [N, ...], or batches of them.
            centre: Whether to subtract from outputs and Jacobians their mean over the outputs; for
                classes, for which adding a constant to all logits changes no probability.
        """
        formed = self.form == "primal" or (
            self.indices is not None and self.curvature.backend != "layers"
        )
        extra = 3 * self.order * self.scale.numel() + (self.size if formed else 0)
        return self.curvature.spread(x, self._between, centre=centre, extra=extra)

    def _between(self, rows: Rows) -> Tensor:
        """Compute J H^-1 J' for rows J over all weights, example by example, [..., N, Q, Q]."""
        rows = rows if self.indices is None else rows.restrict(self.indices)
        scale = self.scale[..., None, None, None]
        if not self.order:
            return rows.within(self.variance) * scale
        prior = self.variance[self.curved]
        if self.rows is None:
            known, sides = torch.where(self.curved, 0.0, self.variance), scale
            pulled = (rows.dense()[..., self.curved] * prior.sqrt()).flatten(0, 1)
        else:
            inner = rows if self.curved.all() else rows.restrict(self.curved.nonzero().squeeze(1))
            known, sides = self.variance, -scale.square()
            pulled = inner.gram(self.rows, prior)
        half = torch.linalg.solve_triangular(self.chol, pulled.T, upper=False).mT
        half = half.unflatten(-2, (rows.examples, rows.cotangents))
        return rows.within(known) * scale + (half @ half.mT) * sides

    def tensors(self) -> Tensors:
        """Return all tensors that `restore` needs besides the model, for saving or moving."""
        out = {
            "variance": self.variance,
            "curved": self.curved,
            "chol": self.chol,
        }
        if self.data:
            out |= dict(named(self.data["x"])) | {"cotangents": self.data["cotangents"]}
        return out if self.indices is None else out | {"indices": self.indices}


def restore(curvature: Curvature, tensors: Tensors) -> Inverse:
    """Return the `Inverse` with these `tensors`, for the same model at the same weights; equal up
    to rounding, because rows are computed again.
    """
    tensors = {name: t.to(curvature.device) for name, t in tensors.items()}
    x = unnamed(tensors)
    data = {} if x is None else {"x": x, "cotangents": tensors["cotangents"]}
    indices, curved, rows = tensors.get("indices"), tensors["curved"], None
    if data:
        curvature.prove(data["x"])
        rows = _restricted(
            curvature.engine.linearise(data["x"], data["cotangents"].to)[1], indices, curved
        )
    return Inverse(
        curvature=curvature,
        form="dual" if data else "primal",
        indices=indices,
        variance=tensors["variance"],
        curved=curved,
        chol=tensors["chol"]
        .mT.contiguous()
        .mT,  # column-major, as after factorisation: rounding of solves depends on the layout
        data=data,
        rows=rows,
    )


@declared
def invert(
    curvature: Curvature,
    x: Data | Piece,
    precision: float | Tensor,
    *,
    indices: Tensor | None = None,
    form: DualForm = "auto",
    diagonal: Tensor | None = None,
    weight: Tensor | None = None,
    scale: Tensor = ONE,
) -> Inverse:
    """Compute the posterior covariance of P selected weights, all others held fixed: the inverse of
    curvature plus prior precision.

    It is the inverse of $H_S = J_S' Lambda J_S + diag(precision_S)$, where the subscript S
    restricts to the selected weights. It is stored as a Cholesky factor, by default of order
    min(curved weights, rows).

    Args:
        curvature: Curvature of the model.
        x: Inputs [N, ...], or batches of them that can be read twice.
        precision: Prior precision, one number or one for each of the D weights.
        indices: Indices of the P selected weights, [P]; by default all weights, which for large
            networks is feasible only in the dual form.
        form: `primal`, `dual`, or `auto` for the one whose factor has the smaller order.
        diagonal: Diagonal of the GGN [D], if already known, with the same `weight`.
        weight: Weight of each example's curvature, [N]; None for 1.
        scale: Factors of the prior variances, at most 1, for several covariances at once, [G]; a
            covariance without a Cholesky factor is NaN.

    Raises:
        ValueError: `precision` is not positive and finite; `indices` or `weight` is not valid; the
            curvature is not finite; or there are no data.
        MemoryError: The factor exceeds the available memory; the message has its size.
        torch.linalg.LinAlgError: M has no Cholesky factor, even with jitter.

    Example:
        >>> curvature = bf.curvature.Curvature(bf.models.mlp(64, hidden=20, outputs=10))
        >>> x = torch.rand(5, 64)
        >>> bf.curvature.invert(curvature, x, precision=1.0).form  # 5 x 10 outputs, 1,510 weights
        'dual'
        >>> bf.curvature.invert(curvature, x, precision=1.0, indices=torch.arange(30)).form
        'primal'
    """
    precision = curvature.vector(precision)
    if diagonal is None:
        diagonal = curvature.diagonal(x, weight=weight)
    else:
        diagonal = curvature.vector(diagonal)
        curvature.check_finite(diagonal, torch.arange(len(diagonal), device=curvature.device))
    if indices is not None:
        indices = curvature.check_indices(indices)
        precision, diagonal = precision[indices], diagonal[indices]
    check_prior_precision(precision)
    variance = 1 / precision
    curved = diagonal * variance >= NO_CURVATURE
    weights = int(curved.sum())
    rows = None
    data = {}
    order = weights
    inside = curved if indices is not None else torch.ones_like(curved)
    if form == "dual" or (
        form == "auto"
        and weights
        and not (isinstance(x, Piece) and x.rows.examples * x.rows.cotangents >= weights)
    ):
        rows, data, order = _stacked(
            curvature, x, weight, indices, variance, inside, weights if form == "auto" else None
        )
    # no example has curvature, or every example's rows count as zero although their sum is not
    # exactly zero
    if not order:
        rows, data, weights, curved = None, {}, 0, torch.zeros_like(curved)
    if rows is None:
        chosen = "primal"
        _require(curvature, weights, "primal")
        own = curved.nonzero().squeeze(1) if indices is None else indices[curved]
        roots = variance[curved].sqrt()
        matrix = (curvature.ggn(x, own, weight=weight) if weights else roots.diag()) * (
            roots[:, None] * roots
        )
    else:
        chosen, curved = "dual", inside
        _require(curvature, order, "dual")
        matrix = rows.gram(rows, variance[curved])
    matrix = matrix * scale[..., None, None]
    matrix.diagonal(dim1=-2, dim2=-1).add_(1)
    return Inverse(
        curvature=curvature,
        form=chosen,
        indices=indices,
        variance=variance,
        curved=curved,
        chol=cholesky(matrix, strict=not scale.dim()),
        data=data,
        rows=rows,
        scale=scale,
    )


def invert_ggn(curvature: Curvature, ggn: Tensor, precision: Tensor) -> Inverse:
    """Compute the inverse of a known GGN, such as a sum over several data sets, plus
    diag(precision), in the primal form.

    Args:
        curvature: Curvature of the model.
        ggn: The GGN of all weights, [D, D] in nats.
        precision: Prior precision [D].

    Raises:
        ValueError: An entry of `precision` is not positive and finite.
        MemoryError: The factor exceeds the available memory.
        torch.linalg.LinAlgError: M has no Cholesky factor, even with jitter.
    """
    check_prior_precision(precision)
    variance = 1 / precision
    curved = ggn.diagonal() * variance >= NO_CURVATURE
    weights = int(curved.sum())
    _require(curvature, weights, "primal")
    scale = variance[curved].sqrt()
    matrix = scale[:, None] * ggn[curved][:, curved] * scale
    matrix.diagonal().add_(1)
    return Inverse(
        curvature=curvature,
        form="primal",
        indices=None,
        variance=variance,
        curved=curved,
        chol=cholesky(matrix),
        data={},
        rows=None,
    )


def independent(curvature: Curvature, precision: Tensor, diagonal: Tensor) -> Inverse:
    """Compute the inverse of only the diagonal of H: its variances are stored like a prior's, and
    no weight is curved.

    Args:
        curvature: Curvature of the model.
        precision: Prior precision [D].
        diagonal: Diagonal of the GGN, [D].

    Raises:
        ValueError: An entry of `precision` is not positive and finite.
    """
    check_prior_precision(precision)
    return Inverse(
        curvature=curvature,
        form="primal",
        indices=None,
        variance=1 / (diagonal + precision),
        curved=torch.zeros_like(diagonal, dtype=torch.bool),
        chol=diagonal.new_zeros(0, 0),
        data={},
        rows=None,
    )


def check_prior_precision(precision: Tensor) -> None:
    """Check that every prior precision [D] is positive and finite, and that its inverse does not
    overflow.

    Raises:
        ValueError: An entry lies outside 1e-30 to 1e30.
    """
    bad = precision[~((precision >= INVERTIBLE.low) & (precision <= INVERTIBLE.high))]
    if len(bad):
        raise ValueError(
            f"a prior precision must be > 0 and {INVERTIBLE}, got {float(bad[0])} ({len(bad)} of "
            f"{len(precision)})"
        )


def _restricted(rows: Rows, indices: Tensor | None, curved: Tensor) -> Rows:
    """Return the rows over the curved ones of the weights `indices`."""
    if curved.all():
        return rows if indices is None else rows.restrict(indices)
    chosen = curved.nonzero().squeeze(1)
    return rows.restrict(chosen if indices is None else indices[chosen])


def _stacked(
    curvature: Curvature,
    x: Data | Piece,
    weight: Tensor | None,
    indices: Tensor | None,
    variance: Tensor,
    curved: Tensor,
    limit: int | None,
) -> tuple[Rows | None, dict[str, Any], int]:
    """Return A, the rows of all data over the curved weights, without examples whose rows are zero;
    None if there are at least `limit` rows.
    """
    parts: list[Rows] = []
    kept_x, kept_cotangents, order = [], [], 0
    for piece in curvature.pieces(x, weight, extra=0 if indices is None else len(indices)):
        rows = _restricted(piece.rows, indices, curved)
        sizes = rows.within(variance[curved]).diagonal(dim1=1, dim2=2)
        kept = (sizes >= NO_CURVATURE).any(-1).nonzero().squeeze(1)
        order += len(kept) * rows.cotangents
        if limit is not None and order >= limit:
            return None, {}, order
        parts.append(rows if len(kept) == rows.examples else rows.take(kept))
        kept_x.append(at(piece.x, kept))
        kept_cotangents.append(curvature.root(piece.outputs, piece.weight)[kept].mT)
    return (
        parts[0].join(parts[1:]),
        {"x": join(kept_x), "cotangents": torch.cat(kept_cotangents)},
        order,
    )


def _require(curvature: Curvature, order: int, form: str) -> None:
    """Check that there is memory for M, its factor and a copy."""
    require(
        3 * 8 * order**2,
        curvature.memory,
        f"the {form} form, of order {order},",
        "use a smaller subnetwork, fewer examples, or the diagonal",
    )


def cholesky(matrix: Tensor, *, strict: bool = True) -> Tensor:
    """Compute the lower Cholesky factors of symmetric matrices [..., K, K], with a small jitter if
    one fails without it; unless `strict`, NaN for those that fail nevertheless.

    Raises:
        torch.linalg.LinAlgError: The factorisation of a matrix fails even with a jitter of 1e-6 of
            its mean diagonal, or an entry is not finite, and `strict` is True.
    """
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    bad = infinite = ~matrix.sum((-2, -1), keepdim=True).isfinite()
    for jitter in (0.0, 1e-10, 1e-8, 1e-6):
        if jitter:
            eye = torch.eye(matrix.shape[-1]).to(matrix)
            matrix = torch.where(bad, matrix + jitter * mean * eye, matrix)
        factor, info = torch.linalg.cholesky_ex(matrix)
        bad = infinite | (info > 0)[..., None, None]
        if not bad.any():
            return factor
    if not strict:
        return factor.masked_fill(bad, torch.nan)
    raise torch.linalg.LinAlgError(
        f"the posterior precision, of order {matrix.shape[-1]}, is not finite, or has no Cholesky "
        f"factor even with 1e-6 of its mean diagonal {float(mean.mean()):.3g} added; a larger "
        "prior precision, or inputs of a smaller scale, help"
    )
