"""Rows c' J of a Jacobian, one for each example and cotangent, which are used without being formed
all at once.

`FactorRows` stores them layer by layer (factors.py); `PulledRows` computes them again, a few
examples at a time, whenever they are read.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bayesfl.base.inputs import Inputs, at, join
from bayesfl.curvature.factors import BLOCK, Factor, Matrix


class FactorRows:
    """Store rows layer by layer, as a sum over factors: row (n, q) is c[n, q]' J[n], for cotangents
    c [N, Q, O]. Sums are in float64.

    Args:
        factors: One factor for each layer with any of the weights.
        shape: (examples, cotangents, size); weights that no factor covers have zero columns.
        like: A tensor on the rows' device.
    """

    def __init__(
        self, factors: Sequence[Factor], shape: tuple[int, int, int], like: Tensor
    ) -> None:
        self.factors, self._like = tuple(factors), like
        self.examples, self.cotangents, self.size = shape

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._like.device)

    def _filled(self, out: Tensor, fill: Callable[[Factor], None]) -> Tensor:
        for factor in self.factors:
            fill(factor)
        return out

    def _added(self, parts: Sequence[Tensor], *shape: int) -> Tensor:
        """Add up the factors' parts of this shape; zeros if there is no factor."""
        return _sum(parts) if parts else self._zeros(*shape)

    def restrict(self, indices: Tensor) -> "FactorRows":
        """Return the columns `indices` [K], in that order."""
        lookup = torch.full((self.size,), -1, device=indices.device)
        lookup[indices] = torch.arange(len(indices), device=indices.device)
        kept = [
            factor for factor in (f.restrict(lookup) for f in self.factors) if factor is not None
        ]
        return FactorRows(kept, (self.examples, self.cotangents, len(indices)), self._like)

    def take(self, examples: Tensor) -> "FactorRows":
        """Return the rows of the examples with these indices."""
        return FactorRows(
            [f.take(examples) for f in self.factors],
            (len(examples), self.cotangents, self.size),
            self._like,
        )

    def join(self, others: "Sequence[Rows]") -> "FactorRows":
        """Return these rows and those of further examples, over the same weights."""
        rows = [r for r in others if isinstance(r, FactorRows)]
        return FactorRows(
            [
                f.join([r.factors[k] for r in rows]) if rows else f
                for k, f in enumerate(self.factors)
            ],
            (self.examples + sum(r.examples for r in rows), self.cotangents, self.size),
            self._like,
        )

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rows themselves, [N, Q, size]; in float64 by default."""
        out = self._zeros(self.examples, self.cotangents, self.size).to(dtype or torch.float64)
        return self._filled(out, lambda factor: factor.columns_into(out))

    def squares(self) -> Tensor:
        """Compute each weight's sum of squares over all rows, [size]."""
        out = self._zeros(self.size)
        return self._filled(out, lambda factor: factor.squares_into(out))

    def gram(self, other: Any, weight: Tensor) -> Tensor:
        """Compute the products of these rows with another's over the same weights, weighted by
        `weight` [size]: [N Q, M P].
        """
        return self._added(
            [
                mine.gram(theirs, weight)
                for mine, theirs in zip(self.factors, other.factors, strict=True)
            ],
            self.examples * self.cotangents,
            other.examples * other.cotangents,
        )

    def within(self, weight: Tensor) -> Tensor:
        """Compute the same products among the rows of each example, [N, Q, Q]."""
        return self._added(
            [factor.within(weight) for factor in self.factors],
            self.examples,
            self.cotangents,
            self.cotangents,
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """Compute J v for `vectors` v [size, K]: [N Q, K]."""
        return self._added(
            [factor.forward(vectors) for factor in self.factors],
            self.examples * self.cotangents,
            vectors.shape[1],
        )

    def back(self, vectors: Tensor) -> Tensor:
        """Compute J' v for `vectors` v [N Q, K]: [size, K]."""
        out = self._zeros(self.size, vectors.shape[1])
        return self._filled(out, lambda factor: factor.back_into(vectors, out))

    def solved(self, chol: Tensor) -> Tensor:
        """Compute the diagonal of J' (L L')^-1 J, `chol` L [N Q, N Q] lower triangular: [size]."""
        out = self._zeros(self.size)
        if sum(f.columns for f in self.factors) <= len(chol) + sum(f.cost for f in self.factors):
            return self._filled(out, lambda factor: factor.solved_into(chol, out))
        inverse = torch.cholesky_inverse(chol)
        return self._filled(out, lambda factor: factor.quadratic_into(inverse, out))


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """Add up one or more tensors of the same shape; the sum overwrites the first of them and is
    returned.
    """
    return functools.reduce(operator.iadd, parts)


class PulledRows:
    """Compute rows over all weights by pulling back through the network whenever they are read, a
    few examples at a time, see `FactorRows`.

    If restricted to some of the weights, the rows are formed and stored.

    Args:
        pull: (x [B, ...], cotangents [B, Q, O]) -> rows [B, Q, size].
        x: Inputs [N, ...].
        cotangents: Cotangents of the outputs, [N, Q, O].
        size: Number of weights.
    """

    def __init__(
        self, pull: Callable[[Any, Tensor], Tensor], x: Inputs, cotangents: Tensor, size: int
    ) -> None:
        self._pull, self._x, self._with, self.size = pull, x, cotangents, size
        self.examples, self.cotangents = cotangents.shape[:2]

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of examples and their rows [B, Q, size]."""
        step = max(1, BLOCK // (8 * self.size * max(1, self.cotangents)))
        for start in range(0, self.examples, step):
            some = slice(start, start + step)
            yield some, self._pull(at(self._x, some), self._with[some])

    def restrict(self, indices: Tensor) -> FactorRows:
        """Return some of the columns, see `FactorRows`."""
        shape = (self.examples, self.cotangents, len(indices))
        if not len(indices):
            return FactorRows([], shape, indices)
        values = torch.cat([rows.index_select(2, indices) for _, rows in self._blocks()])
        return FactorRows(
            [Matrix(values, torch.arange(len(indices), device=indices.device))], shape, indices
        )

    def take(self, examples: Tensor) -> "PulledRows":
        """Return the rows of some examples, see `FactorRows`."""
        return PulledRows(self._pull, at(self._x, examples), self._with[examples], self.size)

    def join(self, others: "Sequence[Rows]") -> "PulledRows":
        """Return the rows of further examples too, see `FactorRows`."""
        rows = [self, *(r for r in others if isinstance(r, PulledRows))]
        return PulledRows(
            self._pull, join([r._x for r in rows]), torch.cat([r._with for r in rows]), self.size
        )

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rows themselves, see `FactorRows`."""
        return torch.cat([rows.to(dtype or torch.float64) for _, rows in self._blocks()])

    def squares(self) -> Tensor:
        """Compute each weight's sum of squares, see `FactorRows`."""
        return _sum(rows.double().square().sum((0, 1)) for _, rows in self._blocks())

    def gram(self, other: Any, weight: Tensor) -> Tensor:
        """Compute products of rows, see `FactorRows`."""
        out = weight.new_zeros(self.examples, self.cotangents, other.examples, other.cotangents)
        for mine, left in self._blocks():
            left = left.flatten(0, 1).double() * weight
            for theirs, right in other._blocks():
                out[mine, :, theirs] = (left @ right.flatten(0, 1).double().T).view(
                    out[mine, :, theirs].shape
                )
        return out.flatten(2).flatten(0, 1)

    def within(self, weight: Tensor) -> Tensor:
        """Compute products of rows of the same example, see `FactorRows`."""
        return torch.cat(
            [(rows.double() * weight) @ rows.double().mT for _, rows in self._blocks()]
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """Compute J v, see `FactorRows`."""
        return torch.cat([rows.flatten(0, 1).double() @ vectors for _, rows in self._blocks()])

    def back(self, vectors: Tensor) -> Tensor:
        """Compute J' v, see `FactorRows`."""
        split = vectors.view(self.examples, self.cotangents, -1)
        return _sum(
            rows.flatten(0, 1).double().T @ split[some].flatten(0, 1)
            for some, rows in self._blocks()
        )

    def solved(self, chol: Tensor) -> Tensor:
        """Compute the diagonal of J' (L L')^-1 J, see `FactorRows`: the sums of squares of L^-1 J,
        computed by `back` a few rows at a time.
        """
        out = chol.new_zeros(self.size)
        identity = torch.eye(len(chol), dtype=chol.dtype, device=chol.device)
        inverse = torch.linalg.solve_triangular(chol, identity, upper=False)
        for some in inverse.split(max(1, BLOCK // (8 * self.size))):
            out += self.back(some.T).square().sum(1)
        return out


Rows: TypeAlias = FactorRows | PulledRows
