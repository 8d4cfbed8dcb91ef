"""Rows of a Jacobian, layer by layer, as products of the layer's inputs and the cotangents pulled
back to its outputs.

For a linear layer the row of example n and cotangent q is an outer product: the derivative by
weight (h, i) is g[n, q, h] x[n, i]. For a layer used at T places (a convolution at every patch) it
is a sum over places. Every quantity below is computed from x and g; the [N, Q, D] matrix that they
represent is never formed. `slots` has the weights' positions in the flat vector, -1 for omitted
weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

BLOCK = 2**26
"""Maximum number of bytes of a temporary array in the loops below."""
MOST_COLUMNS = 512  # columns solved for at once
UNIT = 50
"""Cost of `quadratic_into` for each unit of a linear layer, in columns solved for; measured on one
core with a factor of order 2,250. The matrix is read once for each unit, however many of the unit's
weights are kept."""


def _size(per_item: int) -> int:
    """Return the number of items, with this number of float64 numbers each, that fit a block."""
    return max(1, BLOCK // (8 * max(1, per_item)))


class Factor(ABC):
    """Represent the part of the rows that belongs to one layer. This base class forms columns in
    pieces; `Outer` does not.
    """

    slots: Tensor
    own: ClassVar[tuple[str, ...]]  # tensors with an axis of examples; the last has cotangents too

    @abstractmethod
    def pieces(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slots [K] and columns [N, Q, K], with K chosen such that `rows` rows fit
        a block.
        """

    @abstractmethod
    def restrict(self, lookup: Tensor) -> "Factor | None":
        """Return the factor for the weights with lookup[slot] >= 0, which become their slots; None
        if there are none.
        """

    def take(self, examples: Tensor) -> "Factor":
        """Return the factor for the examples with these indices, or under this mask."""
        return replace(
            cast(Any, self), **{name: getattr(self, name)[examples] for name in self.own}
        )

    def join(self, others: "list[Factor]") -> "Factor":
        """Return one factor for this one's examples and those of the others."""
        parts = {name: [getattr(f, name) for f in (self, *others)] for name in self.own}
        return replace(cast(Any, self), **{name: torch.cat(each) for name, each in parts.items()})

    @property
    def examples(self) -> int:
        """Return the number of examples, N."""
        return len(getattr(self, self.own[-1]))

    @property
    def cotangents(self) -> int:
        """Return the number of cotangents of an example, Q."""
        return getattr(self, self.own[-1]).shape[1]

    @property
    def rows(self) -> int:
        """Return the number of rows, N times Q."""
        return self.examples * self.cotangents

    @property
    def columns(self) -> int:
        """Return the number of weights that are kept."""
        return int((self.slots >= 0).sum())

    @property
    def cost(self) -> int:
        """Return the cost of `quadratic_into`, in columns that `solved_into` solves for."""
        return 2 * self.columns

    def _columns(self) -> Iterator[tuple[Tensor, Tensor]]:
        for slots, values in self.pieces(self.rows):
            yield slots, values.flatten(0, 1).double()

    def columns_into(self, out: Tensor) -> None:
        """Write the columns into `out` [N, Q, size]."""
        for slots, values in self.pieces(self.rows):
            out[:, :, slots] = values.to(out)

    def squares_into(self, out: Tensor) -> None:
        """Write the sums of squares over rows into `out` [size]."""
        for slots, values in self.pieces(self.rows):
            out[slots] = values.square().sum((0, 1)).to(out)

    def gram(self, other: "Factor", weight: Tensor) -> Tensor:
        """Compute the sum over weights d of weight[d] J[n, q, d] J[m, p, d], [N Q, M P]; `other` is
        a factor of the same layer.
        """
        out = weight.new_zeros(self.rows, other.rows)
        rows = self.rows + other.rows
        for (slots, mine), (_, theirs) in zip(self.pieces(rows), other.pieces(rows), strict=True):
            out.addmm_(mine.flatten(0, 1).double() * weight[slots], theirs.flatten(0, 1).double().T)
        return out

    def within(self, weight: Tensor) -> Tensor:
        """Compute the blocks n = m of `gram` of the factor with itself, [N, Q, Q]."""
        out = weight.new_zeros(self.examples, self.cotangents, self.cotangents)
        for slots, values in self.pieces(self.rows):
            values = values.double()
            out.baddbmm_(values * weight[slots], values.mT)
        return out

    def forward(self, vectors: Tensor) -> Tensor:
        """Multiply the rows by `vectors` [size, K], [N Q, K]."""
        out = vectors.new_zeros(self.rows, vectors.shape[1])
        for slots, values in self._columns():
            out.addmm_(values, vectors[slots])
        return out

    def back_into(self, vectors: Tensor, out: Tensor) -> None:
        """Write the transposed rows times `vectors` [N Q, K] into `out` [size, K]."""
        for slots, values in self._columns():
            out[slots] = values.T @ vectors

    def quadratic_into(self, matrix: Tensor, out: Tensor) -> None:
        """Write the diagonal of J' M J, `matrix` M [N Q, N Q] symmetric, into `out` [size]."""
        for slots, values in self._columns():
            out[slots] = (values * (matrix @ values)).sum(0)

    def solved_into(self, chol: Tensor, out: Tensor) -> None:
        """Write the diagonal of J' (L L')^-1 J, `chol` L [N Q, N Q] lower triangular, into `out`
        [size].
        """
        for slots, values in self._columns():
            for some, part in zip(
                slots.split(MOST_COLUMNS), values.split(MOST_COLUMNS, 1), strict=True
            ):
                out[some] = torch.linalg.solve_triangular(chol, part, upper=False).square().sum(0)


def _kept(slots: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return slots [K] and columns [N, Q, K] without the omitted weights."""
    chosen = (slots >= 0).nonzero().squeeze(1)
    return (
        (slots, values)
        if len(chosen) == len(slots)
        else (slots[chosen], values.index_select(2, chosen))
    )


@dataclass(eq=False)
class Matrix(Factor):
    """Store columns directly.

    Args:
        values: Columns, [N, Q, K].
        slots: Positions of the columns' weights, [K].
    """

    values: Tensor
    slots: Tensor
    own = ("values",)

    def pieces(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the columns, see `Factor`."""
        yield self.slots, self.values

    def restrict(self, lookup: Tensor) -> "Factor | None":
        """Return the factor for some of the weights, see `Factor`."""
        slots, values = _kept(lookup[self.slots], self.values)
        return Matrix(values, slots) if len(slots) else None


def _mirrored(matrix: Tensor, block: int = 512) -> Tensor:
    """Copy the upper triangle of `matrix` [K, K] to the lower, in place."""
    for start in range(0, len(matrix), block):
        stop = start + block
        corner = matrix[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).T)
        matrix[stop:, start:stop] = matrix[start:stop, stop:].T
    return matrix


@dataclass(eq=False)
class Shared(Factor):
    """Represent a layer whose weights are used at T places: a convolution, or a linear layer along
    further axes.

    Args:
        inputs: Inputs that the weights multiply, [N, T, I], with ones for the bias.
        slopes: Cotangents pulled back to the layer's outputs, [N, Q, H, T].
        slots: Positions of the weights, [H, I].
    """

    inputs: Tensor
    slopes: Tensor
    slots: Tensor
    own = ("inputs", "slopes")

    def pieces(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slots and columns, see `Factor`."""
        units = (self.slots >= 0).any(1).nonzero().squeeze(1)
        for some in units.split(_size(rows * self.slots.shape[1])):
            slots = self.slots[some].flatten()
            slopes = (
                self.slopes if len(some) == len(self.slots) else self.slopes.index_select(2, some)
            )
            yield _kept(
                slots,
                (slopes.flatten(1, 2) @ self.inputs).view(
                    self.examples, self.cotangents, len(slots)
                ),
            )

    def formed(self) -> Factor:
        """Return the columns directly if they need fewer numbers than the slopes, for any number of
        examples.
        """
        if int((self.slots >= 0).sum()) > self.slopes.shape[2] * self.slopes.shape[3]:
            return self
        parts = list(self.pieces(self.rows))
        return Matrix(
            torch.cat([values for _, values in parts], -1), torch.cat([slots for slots, _ in parts])
        )

    def restrict(self, lookup: Tensor) -> "Factor | None":
        """Return the factor for some of the weights, see `Factor`."""
        slots = torch.where(self.slots >= 0, lookup[self.slots], -1)
        return Shared(self.inputs, self.slopes, slots).formed() if (slots >= 0).any() else None


@dataclass(eq=False)
class Outer(Factor):
    """Represent a linear layer, whose rows are outer products.

    Args:
        inputs: Inputs that the weights multiply, [N, I], with ones for the bias.
        slopes: Cotangents pulled back to the layer's outputs, [N, Q, H].
        slots: Positions of the weights, [H, I].
    """

    inputs: Tensor
    slopes: Tensor
    slots: Tensor
    own = ("inputs", "slopes")

    @property
    def cost(self) -> int:
        """Return the cost of `quadratic_into`, see `Factor`."""
        return UNIT * len(self.slots)

    @cached_property
    def _x(self) -> Tensor:
        return self.inputs.double()

    @cached_property
    def _g(self) -> Tensor:
        return self.slopes.double()

    def pieces(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slots and columns, see `Factor`."""
        units, features = (self.slots >= 0).nonzero(as_tuple=True)
        for h, i in zip(units.split(_size(rows)), features.split(_size(rows)), strict=True):
            yield (
                self.slots[h, i],
                self.slopes.index_select(2, h) * self.inputs.index_select(1, i).unsqueeze(1),
            )

    def restrict(self, lookup: Tensor) -> "Factor | None":
        """Return the factor for some of the weights, see `Factor`."""
        slots = torch.where(self.slots >= 0, lookup[self.slots], -1)
        used = (slots >= 0).any(1).nonzero().squeeze(1)
        if len(used) == len(slots):
            return Outer(self.inputs, self.slopes, slots)
        return (
            Outer(self.inputs, self.slopes.index_select(2, used), slots[used])
            if len(used)
            else None
        )

    def _grid(self, weight: Tensor) -> Tensor:
        """Return `weight` [size, ...] as [H, I, ...], 0 for omitted weights."""
        kept = (self.slots >= 0).view(*self.slots.shape, *(1,) * (weight.dim() - 1))
        return torch.where(kept, weight[self.slots.clamp_min(0)], 0.0)

    def _write(self, grid: Tensor, out: Tensor) -> None:
        """Write `grid` [H, I, ...] to its places in `out` [size, ...]; the inverse of `_grid`."""
        slots, values = self.slots.flatten(), grid.flatten(0, 1).to(out)
        chosen = (slots >= 0).nonzero().squeeze(1)
        out[slots[chosen]] = values[chosen]

    def squares_into(self, out: Tensor) -> None:
        """Write sum_n (sum_q g^2) x^2, see `Factor`."""
        self._write(self.slopes.square().sum(1).T @ self.inputs.square(), out)

    def within(self, weight: Tensor) -> Tensor:
        """Compute sum_h g[q, h] g[p, h] (sum_i weight[h, i] x[i]^2), see `Factor`."""
        return (self._g * (self._x.square() @ self._grid(weight).T).unsqueeze(1)) @ self._g.mT

    def gram(self, other: Any, weight: Tensor) -> Tensor:
        """Compute sum_h g[n, q, h] g[m, p, h] k_h[n, m] with k_h = sum_i weight[h, i] x[n, i] x[m,
        i], see `Factor`.

        With equal weights k is the same for all units, and the result is the entrywise product of
        two Gram matrices.
        """
        grid = self._grid(weight)
        if (grid == grid[0, 0]).all():
            out = (self._g.flatten(0, 1) @ other._g.flatten(0, 1).T).view(
                self.examples, self.cotangents, other.examples, other.cotangents
            )
            out *= (self._x @ other._x.T * grid[0, 0])[:, None, :, None]
            return out.view(self.rows, other.rows)
        out = weight.new_zeros(self.examples, self.cotangents, other.rows)
        for units in torch.arange(len(grid), device=grid.device).split(
            _size(self.examples * other.examples)
        ):
            self._add_units(other, units, grid, out)
        gram = out.view(self.rows, other.rows)
        return _mirrored(gram) if other is self else gram

    def _add_units(self, other: "Outer", units: Tensor, grid: Tensor, out: Tensor) -> None:
        """Add the contribution of some hidden units to the Gram matrix `out` [N, Q, M P]; only for
        m >= n if `other` is this factor.
        """
        kernel = grid.new_empty(len(units), self.examples, other.examples)
        # Gathering rows is faster than gathering columns.
        mine, theirs = (self._x.T.contiguous(), other._x.T.contiguous())
        for k, h in enumerate(units.tolist()):
            used = grid[h].nonzero().squeeze(1)
            torch.mm((mine[used] * grid[h, used, None]).T, theirs[used], out=kernel[k])
        # [H', M, P].
        slopes, pulled = (self._g[:, :, units], other._g[:, :, units].permute(2, 0, 1).contiguous())
        for n in range(self.examples):
            first = n if other is self else 0
            right = pulled[:, first:] * kernel[:, n, first:, None]
            out[n][:, first * other.cotangents :].addmm_(slopes[n], right.flatten(1))

    def forward(self, vectors: Tensor) -> Tensor:
        """Multiply the rows by vectors, see `Factor`."""
        return (self._g @ torch.einsum("ni,hik->nhk", self._x, self._grid(vectors))).flatten(0, 1)

    def back_into(self, vectors: Tensor, out: Tensor) -> None:
        """Write the transposed rows times vectors, see `Factor`."""
        # [N, H, K].
        pulled = self._g.mT @ vectors.view(self.examples, self.cotangents, vectors.shape[-1])
        self._write(torch.einsum("nhk,ni->hik", pulled, self._x), out)

    def quadratic_into(self, matrix: Tensor, out: Tensor) -> None:
        """Write the diagonal of J' M J, see `Factor`.

        For each unit it is $sum_nm x[n, i] x[m, i] c_h[n, m]$, where
        $c_h = sum_qp g[n, q, h] M[nq, mp] g[m, p, h]$.
        """
        count = self.examples
        by_column = matrix.view(self.rows, count, self.cotangents).transpose(0, 1)  # [M, N Q, P]
        for units in torch.arange(len(self.slots), device=matrix.device).split(
            _size(count * self.rows)
        ):
            slopes = self._g[:, :, units]
            inner = (by_column @ slopes).view(count, count, self.cotangents, -1)  # [M, N, Q, H']
            inner = (inner * slopes).sum(2).permute(2, 0, 1)  # [H', M, N]
            for k, h in enumerate(units.tolist()):
                used = (self.slots[h] >= 0).nonzero().squeeze(1)
                x = self._x[:, used]
                out[self.slots[h, used]] = (x * (inner[k] @ x)).sum(0)
