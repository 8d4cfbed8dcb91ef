"""Subnetworks of several networks that differ in their weights alone, fitted and used at once.

Where networks and data are small, the operations of `bayesfl.curvature.dual` take their time to
start, not to compute. Here each of them does all networks, and the formulas are those of the primal
form with a first axis of C networks: columns J_S [C, N, Q, P] of P selected weights are formed, and
nothing else of the Jacobian. Networks that have fewer rows are padded by rows of weight 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayesfl.base.protocols import Tensors
from bayesfl.curvature.dual import NO_CURVATURE, ONE, check_prior_precision, cholesky
from bayesfl.curvature.factors import BLOCK, Outer
from bayesfl.curvature.ggn import Curvature, check_outputs, check_values
from bayesfl.curvature.layers import ELEMENTWISE, Layers, stack
from bayesfl.curvature.roots import basis
from bayesfl.models.weights import standing


def joins(curvature: Curvature) -> bool:
    """Return whether a network is a stack of linear layers and functions of single numbers, used
    once for each example.
    """
    known = (nn.Linear, nn.Flatten, *ELEMENTWISE)
    return isinstance(curvature.engine, Layers) and all(
        isinstance(layer, known) for _, layer in stack(curvature.module)
    )


@dataclass(frozen=True, eq=False)
class StackedRows:
    """Hold rows c' J of C networks, layer by layer.

    Args:
        outputs: The networks' outputs, [C, N, O] in float64.
        layers: Inputs [C, N, I] and pulled cotangents [C, N, Q, H] of each layer, and the positions
            of its weights, [H, I].
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
            out[:, slots.flatten()] = grid.flatten(1).to(out)
        return out

    def columns(self, indices: Tensor) -> Tensor:
        """Return the columns of each network's own weights `indices` [C, P], [C, N, Q, P]."""
        out: Tensor | float = 0.0
        for inputs, slopes, slots in self.layers:
            place = torch.full((self.size,), -1, device=slots.device)
            place[slots.flatten()] = torch.arange(slots.numel(), device=slots.device)
            own = place[indices]
            h, i = own.clamp_min(0) // slots.shape[1], own.clamp_min(0) % slots.shape[1]
            x = inputs.take_along_dim(i[:, None], 2) * (own >= 0)[:, None]
            out = out + slopes.take_along_dim(h[:, None, None], 3) * x.unsqueeze(2)
        assert isinstance(out, Tensor)
        return out.double()


class Stack:
    """Compute the curvature of C networks of linear layers at once, see `Curvature`.

    Args:
        curvature: The curvature of any network like them, for which `joins` holds.
        leaves: The networks' parameters by name, [C, *shape].
    """

    def __init__(self, curvature: Curvature, leaves: Mapping[str, Tensor]) -> None:
        self._one, self._leaves = curvature, dict(leaves)
        self.weights = curvature.layout.ravel(self._leaves).double()

    @property
    def size(self) -> int:
        """Return the number of covered weights, D."""
        return self._one.size

    def vector(self, value: float | Tensor) -> Tensor:
        """Expand one number, one for each weight, or [C, D], to [C, D] in float64."""
        return torch.as_tensor(value).to(self.weights).expand_as(self.weights)

    def held(self, x: Tensor, weight: Tensor) -> StackedRows:
        """Compute the rows R' J with R R' = weight Lambda at inputs `x` [C, N, ...] with weights
        [C, N] of the examples.
        """

        def root(outputs: Tensor, weight: Tensor) -> Tensor:
            return self._one.root(outputs, weight).mT.to(outputs.dtype)

        return self.linearise(x, root, weight.double())

    def linearise(
        self, x: Tensor, cotangents: Callable[..., Tensor], *more: Tensor
    ) -> StackedRows:
        """Compute outputs and rows c' J at inputs `x` [C, N, ...] for the cotangents c =
        `cotangents(outputs, *more)` [N, Q, O] of a network.

        Raises:
            ValueError: An output is not finite, or their number does not fit the likelihood.
        """
        engine, module = self._one.engine, self._one.module

        def one(leaves: Tensors, x: Tensor, *more: Tensor) -> tuple[Tensor, list[Any]]:
            with standing(module, leaves):
                outputs, rows = engine.linearise(x, lambda f: cotangents(f, *more))
            return outputs, [(f.inputs, f.slopes, f.slots) for f in rows.factors]

        outputs, layers = vmap(one)(self._leaves, x, *more)
        check_values(outputs.flatten(0, 1), x.flatten(0, 1))
        check_outputs(self._one.likelihood, outputs.shape[-1])
        found = [(inputs, slopes, slots[0]) for inputs, slopes, slots in layers]
        return StackedRows(outputs.double(), found, self._one.size)

    def diagonal(self, rows: StackedRows) -> Tensor:
        """Compute the diagonal of each network's GGN, [C, D], from the rows of its data.

        Raises:
            ValueError: The curvature is not finite; the message names the parameters.
        """
        diagonal = rows.squares()
        self._one.check_finite(diagonal.sum(0), torch.arange(self.size, device=diagonal.device))
        return diagonal

    def at_once(self, x: Tensor, extra: int) -> int:
        """Return the number of rows of each network that fit a block of memory, see
        `Curvature.at_once`.
        """
        return max(1, self._one.at_once(x[:1], extra) // len(self.weights))

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
            rows: The rows of the data.
            precision: Prior precision, as `vector` takes it.
            indices: The selected weights, [C, P].
            diagonal: Diagonal of the GGN, [C, D].
            scale: Factors of the prior variances for several covariances of each network, [G].

        Raises:
            ValueError: `precision` is not positive and finite.
            torch.linalg.LinAlgError: The only covariance of a network has no Cholesky factor.
        """
        precision = self.vector(precision).gather(1, indices)
        check_prior_precision(precision.flatten())
        variance = 1 / precision
        curved = diagonal.gather(1, indices) * variance >= NO_CURVATURE
        columns = rows.columns(indices).flatten(1, 2) * (variance.sqrt() * curved).unsqueeze(1)
        matrix = columns.mT @ columns * scale.reshape(-1, 1, 1, 1)
        matrix.diagonal(dim1=-2, dim2=-1).add_(1)
        chol = cholesky(matrix, strict=not scale.dim())
        return Subnetworks(self, indices, variance, curved, chol, scale.reshape(-1, 1, 1, 1, 1))


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
        """Compute the linearised networks' outputs at inputs [C N, ...], each network's own N in
        turn: mean [C N, O], and covariance [G, C N, O, O]; see `Inverse.predict`.
        """
        size = self.indices.shape[1]
        own = x["x"].unflatten(0, (len(self.indices), -1))
        step = self.stack.at_once(x["x"], (3 * len(self.scale) + 1) * size)
        found = [self._of(some, centre=centre) for some in own.split(step, 1)]
        mean, covariance = (
            torch.cat(parts, axis) for axis, parts in enumerate(zip(*found, strict=True), 1)
        )
        return mean.flatten(0, 1), covariance.flatten(1, 2)

    def _of(self, x: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
        """Compute mean [C, N, O] and covariance [G, C, N, O, O] at inputs `x` [C, N, ...]."""

        def directions(outputs: Tensor) -> Tensor:
            return basis(outputs.shape[1], centre).to(outputs).T.expand(len(outputs), -1, -1)

        rows = self.stack.linearise(x, directions)
        columns, mean = rows.columns(self.indices), rows.outputs
        known = torch.where(self.curved, 0.0, self.variance)
        pulled = columns * (self.variance.sqrt() * self.curved)[:, None, None]
        half = torch.linalg.solve_triangular(self.chol, pulled.flatten(1, 2).mT, upper=False)
        half = half.mT.unflatten(2, pulled.shape[1:3])
        within = (columns * known[:, None, None]) @ columns.mT
        covariance = (within + half @ half.mT) * self.scale
        u = basis(mean.shape[-1], centre).to(mean)
        return (mean @ u @ u.T, u @ covariance @ u.T) if centre else (mean, covariance)
