"""Integrals over a site's own parameters, of any log density.

A site's log density f(phi, z) depends on the shared parameters phi [q] and on its own z [d], which
have no range. The site returns the logarithm of the integral of exp f(phi, z) over z: by Laplace's
approximation around the mode z^ of f,

    log m(phi) = f(phi, z^) - log |H| / 2 + d log(2 pi) / 2,      H = -Hessian of f by z at z^,

or by Gauss-Hermite quadrature around the same mode where parts of one or two parameters depend on
no others. A part is a patient of a hospital, for example: given what patients have in common, none
depends on another. H is then an arrow matrix, whose blocks need as many directions as a part has
parameters, whatever the number of parts.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode

Density: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A site's log density by phi [q] and z [d], in nats."""
NODES = {1: 15, 2: 9}
"""Nodes of the quadrature, by the number of a part's parameters; for each of them."""
NUMBERS = 2**18
"""So many own parameters are looked at at once."""
STEPS, HALVINGS = 100, 30
"""Newton's steps towards a mode at most, and how often each is halved."""


class Unasked(TorchFunctionMode):
    """Skip the validation of torch's distributions, which `torch.vmap` cannot do for many draws at
    once. What is not valid becomes NaN, and the draw is left out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._is_all_true or func is Tensor.__bool__:  # pyright: ignore[reportPrivateUsage]
            asking = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
            if asking.startswith("torch.distributions"):
                return True
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Parts:
    """Say which of a site's own parameters [d] depend on each other.

    Args:
        common: Places of those that all parts have in common, [s].
        parts: Places of those of each part, [G, r].
    """

    common: Tensor
    parts: Tensor

    @classmethod
    def whole(cls, size: int) -> "Parts":
        """Return all parameters as one part."""
        return cls(torch.arange(0), torch.arange(size)[None])

    @classmethod
    def of(cls, density: Density, phi: Tensor, z: Tensor, groups: Tensor) -> "Parts":
        """Return parts by the group of each parameter [d], -1 of what groups have in common; all as
        one where the Hessian at phi [q] and z [d] says that groups depend on each other, or they
        are of different sizes.
        """
        sizes = groups[groups >= 0].bincount()
        if len(sizes) < 2 or (sizes != sizes[0]).any():
            return cls.whole(len(z))
        order = groups.argsort(stable=True)
        common = (groups < 0).sum()
        found = cls(order[:common], order[common:].reshape(len(sizes), -1))

        def slope(z: Tensor) -> Tensor:
            return grad(density, argnums=1)(phi, z)

        images = vmap(lambda one: -jvp(slope, (z,), (one,))[1])(found.directions)
        corner, cross, inner = found.blocks(images)
        some = torch.linspace(-1, 1, len(z), dtype=z.dtype).exp()  # which no symmetry hides
        own, parts = found.split(some)
        top = corner @ own + (cross.mT @ parts[..., None]).sum(0)[:, 0]
        below = (cross @ own) + (inner @ parts[..., None])[..., 0]
        wanted = -jvp(slope, (z,), (some,))[1]
        apart = found.joined(top, below) - wanted
        return found if apart.abs().max() <= 1e-8 * wanted.abs().max() else cls.whole(len(z))

    @property
    def directions(self) -> Tensor:
        """Return directions whose images under H have all that is not 0 of it, [s + r, d]."""
        d = len(self.common) + self.parts.numel()
        found = torch.zeros(len(self.common) + self.parts.shape[1], d, dtype=torch.float64)
        found[torch.arange(len(self.common)), self.common] = 1
        for k, places in enumerate(self.parts.T, len(self.common)):
            found[k, places] = 1
        return found

    def blocks(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return H's blocks by the images of `directions`, [..., s + r, d]: of what is common
        [..., s, s], between parts and it [..., G, r, s], and of parts [..., G, r, r].
        """
        s = len(self.common)
        corner = images[..., :s, :][..., self.common]
        cross = images[..., :s, :][..., self.parts].movedim(-3, -1)
        return corner, cross, images[..., s:, :][..., self.parts].movedim(-3, -1)

    def split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the common numbers [..., s] and those of parts [..., G, r] among [..., d]."""
        return z[..., self.common], z[..., self.parts]

    def joined(self, common: Tensor, parts: Tensor) -> Tensor:
        """Return [..., d] of the common numbers and those of parts; see `split`."""
        order = torch.cat([self.common, self.parts.flatten()]).argsort()
        return torch.cat([common, parts.flatten(-2)], -1)[..., order]


@dataclass(frozen=True)
class Curved:
    """Hold H's factors at some z, eliminated part by part.

    Args:
        parts: Which parameters depend on each other.
        inner: H's blocks of parts, [..., G, r, r].
        follow: How parts follow what is common, [..., G, r, s].
        left: H of what is common when parts are eliminated, [..., s, s].
    """

    parts: Parts
    inner: Tensor
    follow: Tensor
    left: Tensor

    @classmethod
    def of(cls, parts: Parts, images: Tensor, safe: bool = False) -> "Curved":
        """Make it of the images of the directions of `Parts`, [..., s + r, d].

        Args:
            parts: Which parameters depend on each other.
            images: The images.
            safe: Whether eigenvalues are taken by their moduli, so that steps lead upwards.
        """
        better = _moduli if safe else (lambda block: block)
        corner, cross, inner = parts.blocks(images)
        inner = better(inner)
        follow = _solved(inner, cross)
        return cls(parts, inner, follow, better(corner - (cross.mT @ follow).sum(-3)))

    @property
    def log_volume(self) -> Tensor:
        """Return log |H|, [...]; NaN where H is not positive definite."""
        return _log_volume(self.inner).sum(-1) + _log_volume(self.left)

    def solved(self, slope: Tensor) -> Tensor:
        """Return H^-1 times a slope, [..., d]."""
        common, own = self.parts.split(slope)
        alone = _solved(self.inner, own[..., None])[..., 0]
        pull = common - (self.follow.mT @ own[..., None]).sum(-3)[..., 0]
        moved = _solved(self.left, pull[..., None])[..., 0]
        return self.parts.joined(moved, alone - (self.follow @ moved[..., None, :, None])[..., 0])

    def spread(self, noise: Tensor) -> Tensor:
        """Return standard normal noise [N, M, d] with H^-1 as covariance."""
        common, own = self.parts.split(noise)
        common = _spread(self.left[:, None], common)
        follow = self.follow[:, None] @ common[..., None, :, None]
        own = _spread(self.inner[:, None], own) - follow[..., 0]
        return self.parts.joined(common, own)


def _moduli(block: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((block + block.mT) / 2)
    return (vectors * values.abs().clamp_min(1e-10)[..., None, :]) @ vectors.mT


def _solved(block: Tensor, values: Tensor) -> Tensor:
    # not by torch.linalg.solve, whose second derivatives are NaN under vmap in torch 2.13
    return torch.cholesky_solve(values, torch.linalg.cholesky_ex(block)[0])


def _log_volume(block: Tensor) -> Tensor:
    lower, failed = torch.linalg.cholesky_ex(block)
    found = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(failed == 0, found, torch.nan)


def _spread(precision: Tensor, noise: Tensor) -> Tensor:
    lower = torch.linalg.cholesky_ex(precision)[0]  # with L L' the precision, L'^-1 noise has it
    return torch.linalg.solve_triangular(lower.mT, noise[..., None], upper=True)[..., 0]


@dataclass(frozen=True)
class Integral:
    """A site's integral over its own parameters.

    Args:
        density: The log density.
        parts: Which own parameters depend on each other.
        begin: Where the search for their mode begins, [d].
    """

    density: Density
    parts: Parts
    begin: Tensor

    @property
    def size(self) -> int:
        """Return the number d of own parameters."""
        return len(self.begin)

    def curved(self, phi: Tensor, z: Tensor, safe: bool = False) -> tuple[Tensor, Curved]:
        """Return the slope of f by z [d] and H, at one phi [q] and z [d]."""
        found: Any = vjp(lambda z: grad(self.density, argnums=1)(phi, z), z)
        slope, pull = found
        images = -vmap(lambda direction: pull(direction)[0])(self.parts.directions)
        return slope, Curved.of(self.parts, images, safe)

    def curvature(self, phi: Tensor, z: Tensor, safe: bool = False) -> tuple[Tensor, Curved]:
        """Return `curved` at several phi [N, q] and z [N, d]."""

        def one(phi: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            slope, curved = self.curved(phi, z, safe)
            return slope, curved.inner, curved.follow, curved.left

        slope, *blocks = vmap(one)(phi, z)
        return slope, Curved(self.parts, *blocks)

    def modes(self, phi: Tensor) -> Tensor:
        """Return the modes z^ [N, d] at phi [N, q], by Newton's steps, each halved where f fell."""
        z = self.begin.expand(len(phi), self.size).clone()
        if not self.size:
            return z
        with torch.no_grad():
            best, live = self.values(phi, z), torch.ones(len(phi), dtype=torch.bool)
            for _ in range(STEPS):
                slope, curved = self.curvature(phi, z, safe=True)
                move = curved.solved(slope)
                live &= (slope * move).sum(-1) > 1e-18
                left = live.clone()
                for _ in range(HALVINGS):
                    if not left.any():
                        break
                    after = self.values(phi, z + move)
                    taken = left & (after >= best - 1e-12 * best.abs())
                    z = torch.where(taken[:, None], z + move, z)
                    best = torch.where(taken, after, best)
                    move, left = move / 2, left & ~taken
                live &= ~left  # which rounding keeps from rising
                if not live.any():
                    break
        return z

    def values(self, phi: Tensor, z: Tensor) -> Tensor:
        """Return f [N] at phi [N, q] and z [N, d]; minus infinity where it is not a number."""
        return vmap(self.density)(phi, z).nan_to_num(
            -torch.inf, posinf=-torch.inf, neginf=-torch.inf
        )

    def laplace(self, phi: Tensor, z: Tensor) -> Tensor:
        """Return Laplace's log m [N] at phi [N, q] and their modes z [N, d]."""
        if not self.size:
            return self.values(phi, z)
        volume = self.curvature(phi, z)[1].log_volume
        return self.values(phi, z) - volume / 2 + self.size * math.log(2 * math.pi) / 2

    def slope(self, phi: Tensor, z: Tensor) -> Tensor:
        """Return the slope [q] of Laplace's log m at one phi [q] and its mode z [d], which moves
        with phi by H^-1 d2f / dz dphi.
        """

        def volume(phi: Tensor, z: Tensor) -> Tensor:
            return self.curved(phi, z)[1].log_volume / 2

        by_phi, by_z = grad(volume, argnums=(0, 1))(phi, z)
        moved = self.curved(phi, z)[1].solved(by_z)

        def rest(phi: Tensor) -> Tensor:
            pulled = grad(self.density, argnums=1)(phi, z)
            return self.density(phi, z) - pulled @ moved

        return grad(rest)(phi) - by_phi

    def hessian(self, phi: Tensor, z: Tensor) -> Tensor:
        """Return the Hessian [q, q] of Laplace's log m; see `slope`."""
        by_phi, by_z = jacrev(self.slope, argnums=(0, 1))(phi, z)
        cross = jacrev(lambda phi: grad(self.density, argnums=1)(phi, z))(phi)
        return by_phi + by_z @ vmap(self.curved(phi, z)[1].solved, 1, 1)(cross)

    def derivatives(self, phi: Tensor, order: int = 2) -> list[Tensor]:
        """Return Laplace's log m [N], and as far as the order says its slopes [N, q] and its
        Hessians [N, q, q] by phi [N, q].
        """
        z = self.modes(phi)
        of: tuple[Any, Any] = (self.slope, self.hessian)
        if not self.size:
            of = (grad(self.density), hessian(self.density))
        return [self.laplace(phi, z), *(vmap(one)(phi, z).detach() for one in of[:order])]

    @property
    def units(self) -> Tensor:
        """Return the places of parameters that depend on no others, [U, r]: of each part, or of
        all together where parts have something in common.
        """
        if len(self.parts.common):
            return torch.arange(self.size)[None]
        return self.parts.parts

    def log_marginals(self, phi: Tensor) -> Tensor:
        """Return log m [N] at phi [N, q], by quadrature where that is possible."""
        r = self.units.shape[1]
        with torch.no_grad():
            if r not in NODES:
                return self.laplace(phi, self.modes(phi))
            roots, masses = (torch.from_numpy(t) for t in np.polynomial.hermite.hermgauss(NODES[r]))
            nodes = torch.cartesian_prod(*[roots] * r).reshape(-1, r)
            logs = torch.cartesian_prod(*[masses.log()] * r).reshape(-1, r).sum(1)
            logs = logs + nodes.square().sum(1)
            some = max(1, NUMBERS // (len(nodes) * self.size))
            return torch.cat([self._by_nodes(one, nodes, logs) for one in phi.split(some)])

    def _by_nodes(self, phi: Tensor, nodes: Tensor, logs: Tensor) -> Tensor:
        """Return log m [N] by nodes [K, r] and the logarithms of their weights [K]."""
        z = self.modes(phi)
        noise = torch.zeros(len(nodes), self.size, dtype=torch.float64)
        noise[:, self.units] = math.sqrt(2) * nodes[:, None]
        to, volume = self.around(phi, z, noise.expand(len(phi), *noise.shape))
        found = (self.relative(phi, z, to) + logs[:, None]).logsumexp(1).sum(-1)
        return self.values(phi, z) + found - volume / 2 + self.size * math.log(2) / 2

    def around(self, phi: Tensor, z: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return what noise [N, M, d] makes draws of the normal approximation, [N, M, d], and the
        log determinant of H [N], at phi [N, q] and the modes z [N, d].
        """
        _, curved = self.curvature(phi, z)
        return z[:, None] + curved.spread(noise), curved.log_volume

    def relative(self, phi: Tensor, z: Tensor, to: Tensor) -> Tensor:
        """Return how much larger the share of f of each unit is at other values than at z,
        [N, M, U].

        f is a sum over units, of which the sum alone is known. But its slope by a unit's parameters
        depends on no other unit, and its integral along the way from z is the unit's share.

        Args:
            phi: Shared parameters, [N, q].
            z: Own ones, [N, d].
            to: Others, [N, M, d].
        """
        units = self.units
        if len(units) == 1:
            count = to.shape[1]
            at = self.values(phi.repeat_interleave(count, 0), to.flatten(0, 1))
            found = (at.unflatten(0, (-1, count)) - self.values(phi, z)[:, None])[..., None]
        else:
            way, found = to - z[:, None], to.new_zeros(())
            slope = vmap(vmap(grad(self.density, argnums=1), in_dims=(None, 0)))
            for root, mass in zip(*np.polynomial.legendre.leggauss(6), strict=True):
                at = slope(phi, z[:, None] + (root + 1) / 2 * way) * way
                found = found + mass / 2 * at[..., units].sum(-1)
        return found.nan_to_num(-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


@dataclass(frozen=True)
class Differences(Integral):
    """An integral of a log density without derivatives, whose are found by differences of values:
    of f by z, and of Laplace's log m by phi.
    """

    def values(self, phi: Tensor, z: Tensor) -> Tensor:
        """Return f [N], one after the other; see `Integral`."""
        found = [float(self.density(*both)) for both in zip(phi, z, strict=True)]
        return torch.tensor(found, dtype=torch.float64).nan_to_num(
            -torch.inf, posinf=-torch.inf, neginf=-torch.inf
        )

    def curvature(self, phi: Tensor, z: Tensor, safe: bool = False) -> tuple[Tensor, Curved]:
        """Return slopes and H by differences; see `Integral`."""

        def values(z: Tensor) -> Tensor:
            return self.values(phi.repeat_interleave(len(z) // len(phi), 0), z)

        slope, second = _differences(values, z, 1e-3)
        if safe:
            second = -_moduli(-second)
        return slope, Curved.of(self.parts, -second)

    def derivatives(self, phi: Tensor, order: int = 2) -> list[Tensor]:
        """Return Laplace's values, slopes and Hessians by differences; see `Integral`."""

        def values(phi: Tensor) -> Tensor:
            return self.laplace(phi, self.modes(phi))

        return [values(phi), *_differences(values, phi, 0.005)][: order + 1]


def _differences(
    values: Callable[[Tensor], Tensor], at: Tensor, step: float
) -> tuple[Tensor, Tensor]:
    """Return slopes [N, d] and Hessians [N, d, d] by central differences of values of [N', d]."""
    n, d = at.shape
    eye = step * torch.eye(d, dtype=at.dtype)
    i, j = torch.triu_indices(d, d)
    moves = torch.cat([eye[i] + eye[j], eye[i] - eye[j], eye[j] - eye[i], -eye[i] - eye[j]])
    both, one, other, neither = (
        values((at[:, None] + moves).flatten(0, 1)).reshape(n, 4, len(i)).unbind(1)
    )
    second = torch.zeros(n, d, d, dtype=at.dtype)
    second[:, i, j] = second[:, j, i] = (both - one - other + neither) / (4 * step**2)
    return (both - neither)[:, i == j] / (4 * step), second
