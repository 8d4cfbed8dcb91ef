"""Subnetworks of several networks that differ in their weights alone, fitted and used at once.

Where networks and data are small, the operations of `bayesfl.curvature.dual` take their time to
start, not to compute. Here each operation is for all networks: the formulas are those of the primal
form, with a first axis of C networks. Of the Jacobian only the columns $J_S$ [C, N, Q, P] of P
selected weights are formed. Networks with fewer rows are padded by rows of weight 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from bayesfl.base.protocols import Tensors
from bayesfl.curvature.dual import NO_CURVATURE, ONE, check_prior_precision, cholesky
from bayesfl.curvature.factors import Outer
from bayesfl.curvature.ggn import Curvature, check_outputs, check_values
from bayesfl.curvature.layers import Layers
from bayesfl.curvature.roots import basis
from bayesfl.models.weights import standing


def stackable(curvature: Curvature, x: Any) -> bool:
    """Return whether `Stack` has networks like this one at inputs like `x` [N, ...]: the covered
    layers must be linear, and used once for each example.
    """
    if not (isinstance(x, Tensor) and isinstance(curvature.engine, Layers)):
        return False
    rows = curvature.engine.linearise(x[:1], lambda outputs: outputs.unsqueeze(1))[1]
    return all(isinstance(factor, Outer) for factor in rows.factors)


@dataclass(frozen=True, eq=False)
class StackedRows:
    """Hold rows c' J of C networks, layer by layer.

    Args:
        outputs: The networks' outputs, [C, N, O] in float64.
        layers: Of each layer the inputs [C, N, I], the cotangents pulled back to its outputs [C, N,
            Q, H], and the positions of its weights [C, H, I], the same for all networks.
        size: Number of covered weights, D.
    """

    outputs: Tensor
    layers: list[tuple[Tensor, Tensor, Tensor]]
    size: int

    def squares(self) -> Tensor:
        """Compute each weight's sum of squares over a network's rows, [C, D] in float64."""
        out = self.outputs.new_zeros(len(self.outputs), self.size)
        for inputs, slopes, slots in self.layers:
            grid = slopes.square().sum(2).mT @ inputs.square()
            out.scatter_(1, slots.flatten(1), grid.flatten(1).to(out))
        return out

    def columns(self, indices: Tensor) -> Tensor:
        """Return the columns of each network's own weights `indices` [C, P], [C, N, Q, P] in
        float64.
        """
        parts = []
        for inputs, slopes, slots in self.layers:
            place = slots.new_full((self.size,), -1)
            place[slots[0].flatten()] = torch.arange(slots[0].numel(), device=slots.device)
            own, width = place[indices], inputs.shape[2]
            unit, feature = own.clamp_min(0) // width, own.clamp_min(0) % width
            x = inputs.take_along_dim(feature[:, None], 2) * (own >= 0)[:, None]
            parts.append(slopes.take_along_dim(unit[:, None, None], 3) * x.unsqueeze(2))
        return sum(parts[1:], parts[0]).double()


class Stack:
    """Compute the curvature of C networks at once, see `Curvature`.

    Args:
        curvature: The curvature of one of them, for which `stackable` holds.
        leaves: Their parameters by name, [C, *shape].
    """

    def __init__(self, curvature: Curvature, leaves: Mapping[str, Tensor]) -> None:
        self.curvature, self._leaves = curvature, dict(leaves)
        self.weights = curvature.layout.ravel(self._leaves).double()

    def vector(self, value: float | Tensor) -> Tensor:
        """Expand one number, or one for each weight, [D] or [C, D], to [C, D] in float64."""
        return torch.as_tensor(value).to(self.weights).expand_as(self.weights)

    def linearise(self, x: Tensor, cotangents: Callable[..., Tensor], *more: Tensor) -> StackedRows:
        """Compute outputs and rows c' J at inputs `x` [C, N, ...], for each network's cotangents c
        = `cotangents(outputs, *more)` [N, Q, O].

        Raises:
            ValueError: The outputs are not finite, or their number does not fit the likelihood.
        """

        def one(leaves: Tensors, x: Tensor, *more: Tensor) -> tuple[Tensor, list[Any]]:
            with standing(self.curvature.module, leaves):
                outputs, rows = self.curvature.engine.linearise(x, lambda f: cotangents(f, *more))
            return outputs, [(f.inputs, f.slopes, f.slots) for f in rows.factors]  # pyright: ignore[reportAttributeAccessIssue] (`stackable`)

        outputs, layers = vmap(one)(self._leaves, x, *more)
        check_values(outputs.flatten(0, 1), x.flatten(0, 1))
        check_outputs(self.curvature.likelihood, outputs.shape[-1])
        return StackedRows(outputs.double(), layers, self.curvature.size)

    def held(self, x: Tensor, weight: Tensor) -> tuple[StackedRows, Tensor]:
        """Compute the rows R' J with R R' = weight Lambda at inputs `x` [C, N, ...], for weights
        [C, N] of the examples, and the diagonal of each network's GGN, [C, D].

        Raises:
            ValueError: The outputs or the curvature are not finite.
        """

        def root(outputs: Tensor, weight: Tensor) -> Tensor:
            return self.curvature.root(outputs, weight).mT.to(outputs.dtype)

        rows = self.linearise(x, root, weight.double())
        diagonal = rows.squares()
        self.curvature.check_finite(
            diagonal.sum(0), torch.arange(rows.size, device=diagonal.device)
        )
        return rows, diagonal

    def invert(
        self,
        rows: StackedRows,
        precision: float | Tensor,
        *,
        indices: Tensor,
        diagonal: Tensor,
        scale: Tensor = ONE,
    ) -> "Subnetworks":
        """Compute the posterior covariances of each network's weights `indices` [C, P], see
        `bayesfl.curvature.invert`.

        Args:
            rows: The rows of the data, see `held`.
            precision: Prior precision, as `vector` takes it.
            indices: The selected weights, [C, P].
            diagonal: Diagonal of each network's GGN, [C, D].
            scale: Factors of the prior variances, for several covariances of each network, [G];
                one without a Cholesky factor is then NaN.

        Raises:
            ValueError: `precision` is not positive and finite.
            torch.linalg.LinAlgError: The only covariance of a network has no Cholesky factor.
        """
        precision = self.vector(precision).gather(1, indices)
        check_prior_precision(precision.flatten())
        variance = 1 / precision
        curved = diagonal.gather(1, indices) * variance >= NO_CURVATURE
        columns = rows.columns(indices).flatten(1, 2) * variance.sqrt().unsqueeze(1)
        factors = scale.to(variance).reshape(-1, 1, 1, 1)
        matrix = columns.mT @ columns * factors
        matrix.diagonal(dim1=-2, dim2=-1).add_(1)
        chol = cholesky(matrix, strict=not scale.dim())
        return Subnetworks(self, indices, variance, curved, chol, factors.unsqueeze(-1))


@dataclass(frozen=True, eq=False)
class Subnetworks:
    """Hold the posterior covariances of P weights of each of C networks, see `Inverse`.

    Args:
        stack: The networks.
        indices: The selected weights, [C, P].
        variance: Prior variances, [C, P].
        curved: Which weights have curvature, [C, P] bool; the others keep their prior variance.
        chol: Lower Cholesky factors of M, [G, C, P, P].
        scale: Factors of the prior variances, [G, 1, 1, 1, 1].
    """

    stack: Stack
    indices: Tensor
    variance: Tensor
    curved: Tensor
    chol: Tensor
    scale: Tensor

    def predict(self, x: Mapping[str, Tensor], *, centre: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the linearised networks' outputs at inputs [C N, ...], N for each network in
        turn: mean [C N, O] and covariance [G, C N, O, O], see `Inverse.predict`.
        """
        clients, size = self.indices.shape
        extra = (3 * len(self.scale) + 1) * size
        step = max(1, self.stack.curvature.at_once(x["x"][:1], extra) // clients)
        pieces = x["x"].unflatten(0, (clients, -1)).split(step, 1)
        found = zip(*(self._of(piece, centre=centre) for piece in pieces), strict=True)
        mean, covariance = (torch.cat(parts, axis) for axis, parts in enumerate(found, 1))
        return mean.flatten(0, 1), covariance.flatten(1, 2)

    def _of(self, x: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
        """Compute mean [C, N, O] and covariance [G, C, N, O, O] at inputs `x` [C, N, ...]."""

        def directions(outputs: Tensor) -> Tensor:
            return basis(outputs.shape[1], centre).to(outputs).T.expand(len(outputs), -1, -1)

        rows = self.stack.linearise(x, directions)
        columns = rows.columns(self.indices)
        known = torch.where(self.curved, 0.0, self.variance)[:, None, None]
        pulled = columns * (self.variance.sqrt() * self.curved)[:, None, None]
        half = torch.linalg.solve_triangular(self.chol, pulled.flatten(1, 2).mT, upper=False)
        half = half.mT.unflatten(2, pulled.shape[1:3])
        covariance = ((columns * known) @ columns.mT + half @ half.mT) * self.scale
        u = basis(rows.outputs.shape[-1], centre).to(covariance)
        mean = rows.outputs @ u @ u.T if centre else rows.outputs
        return mean, u @ covariance @ u.T if centre else covariance
