"""Integrals over a site's own parameters, of any log density.

A site's log density $f(phi, z)$ depends on the shared parameters phi [q] and on its own z [d], both
unconstrained. The site returns the logarithm of the integral of $exp f(phi, z)$ over z: by
Laplace's approximation around the mode $zhat$ of f,

    $log m(phi) = f(phi, zhat) - log |H| / 2 + d log(2 pi) / 2$, H the Hessian of -f by z at $zhat$,

or, unless this is exact, as for normal rows, by nodes around the same mode: at each node of the
parameters that parts have in common, by nodes of each part. A part is a patient of a hospital, for
example: given the common parameters, no patient depends on another. H is then an arrow matrix, and
its blocks need one direction for each parameter of a part, for any number of parts.

Nodes of one parameter are the trapezoid rule's after $z = c sinh(u)$, which also covers long tails;
those of a few are Gauss and Hermite's; those of more are draws of a Student t, weighted by
importance sampling.

Source: Takahasi, Mori, "Double exponential formulas for numerical integration", Publications of the
RIMS 9, 1974, for the change of variable.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from bayesfl.base.random import Purpose, generator
from bayesfl.posteriors.importance import WIDER, student

Density: TypeAlias = Callable[..., Tensor]
"""A site's log density by phi [q], z [d] and the tensors of its rows, in nats."""
FAR = torch.linspace(-5, 5, 41, dtype=torch.float64)
"""Nodes u of the trapezoid rule, where sinh(u) is 74 standard deviations at the ends."""
WIDE = 1.5
"""The factor c of sinh(u)."""
NODES, FEWER = {2: 9, 3: 5}, {1: 9, 2: 5}
"""Nodes of Gauss and Hermite for each parameter of a part, by their number; if parts have common
parameters, for each parameter of a part and each common one.
"""
DRAWS = 256
"""Number of draws of more parameters; a quarter if parts have common parameters."""
Rule: TypeAlias = tuple[Tensor, Tensor]
"""Nodes [K, r], in standard deviations, and the logarithms of their weights [K]."""
NUMBERS = 2**22
"""Maximum number of numbers, of rows or of own parameters, in one computation."""
STEPS, HALVINGS = 100, 30
"""Maximum number of Newton's steps towards a mode, and of halvings of each."""


def bent(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the Hessian of a function by its first argument, without torch's forward mode, whose
    first call takes seconds.
    """
    return jacrev(grad(function))


class InDouble(TorchFunctionMode):
    """Compute in float64 where torch would use float32: for numbers in distributions, to whose
    precision a gamma rounds its values, and for products of whole numbers with a parameter without
    dimensions.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        found = func(*args, **options)
        single = isinstance(found, Tensor) and found.dtype is torch.float32
        return found.double() if single else found


class Unasked(TorchFunctionMode):
    """Skip the validation of torch's distributions, which `torch.vmap` cannot do for many draws at
    once. Invalid values become NaN, and the draw is left out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch._is_all_true, Tensor.__bool__, torch.isclose):  # pyright: ignore[reportPrivateUsage]
            frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            while frame.f_code.co_name == "__torch_function__":  # another mode's
                frame = frame.f_back
            if frame.f_globals.get("__name__", "").startswith("torch.distributions"):
                return torch.ones_like(args[0]).bool() if func is torch.isclose else True
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Parts:
    """Declare which of a site's own parameters [d] depend on each other.

    Args:
        common: Places of the parameters that all parts have in common, [s].
        parts: Places of the parameters of each part, [G, r].
    """

    common: Tensor
    parts: Tensor

    @classmethod
    def whole(cls, size: int) -> "Parts":
        """Return all parameters as one part."""
        return cls(torch.arange(0), torch.arange(size)[None])

    @classmethod
    def of(cls, density: Density, phi: Tensor, z: Tensor, groups: Tensor) -> "Parts":
        """Return parts from the group of each parameter [d], -1 for common ones. All parameters are
        one part if the Hessian at phi [q] and z [d], or near them, shows that groups depend on each
        other, or if groups have different sizes.
        """
        sizes = groups[groups >= 0].bincount()
        if len(sizes) < 2 or (sizes != sizes[0]).any():
            return cls.whole(len(z))
        order = groups.argsort(stable=True)
        common = (groups < 0).sum()
        found = cls(order[:common], order[common:].reshape(len(sizes), -1))
        some = torch.linspace(-1, 1, len(z), dtype=z.dtype).exp()  # without symmetries
        beside = phi + 0.3 * torch.linspace(-1, 1, len(phi) + 1, dtype=phi.dtype)[1:].exp()
        for at, own in ((phi, z), (beside, z + 0.1 * some)):  # a correlation may be 0 at phi
            pull: Any = vjp(lambda z, at=at: grad(density, argnums=1)(at, z), own)[1]
            images = -vmap(lambda one, pull=pull: pull(one)[0])(found.directions)
            corner, cross, inner = found.blocks(images)
            shared, parts = found.split(some)
            top = corner @ shared + (cross.mT @ parts[..., None]).sum(0)[:, 0]
            below = (cross @ shared) + (inner @ parts[..., None])[..., 0]
            wanted = -pull(some)[0]  # H is symmetric
            apart = found.joined(top, below) - wanted
            if not apart.abs().max() <= 1e-8 * wanted.abs().max():
                return cls.whole(len(z))
        return found

    @property
    def directions(self) -> Tensor:
        """Return directions whose images under H contain all its nonzero entries, [s + r, d]."""
        d = len(self.common) + self.parts.numel()
        found = torch.zeros(len(self.common) + self.parts.shape[1], d, dtype=torch.float64)
        found[torch.arange(len(self.common)), self.common] = 1
        for k, places in enumerate(self.parts.T, len(self.common)):
            found[k, places] = 1
        return found

    def blocks(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return H's blocks from the images of `directions`, [..., s + r, d]: of common parameters
        [..., s, s], between parts and these [..., G, r, s], and of parts [..., G, r, r].
        """
        s = len(self.common)
        corner = images[..., :s, :][..., self.common]
        cross = images[..., :s, :][..., self.parts].movedim(-3, -1)
        return corner, cross, images[..., s:, :][..., self.parts].movedim(-3, -1)

    def split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the common numbers [..., s] and the parts' [..., G, r] among [..., d]."""
        return z[..., self.common], z[..., self.parts]

    def joined(self, common: Tensor, parts: Tensor) -> Tensor:
        """Return [..., d] from the common numbers and the parts'; see `split`."""
        order = torch.cat([self.common, self.parts.flatten()]).argsort()
        return torch.cat([common, parts.flatten(-2)], -1)[..., order]


@dataclass(frozen=True)
class Curved:
    """Hold H's factors at some z, eliminated part by part.

    Args:
        parts: The dependence of parameters.
        inner: H's blocks of parts, [..., G, r, r].
        follow: `inner`^-1 times H's blocks between parts and common parameters, [..., G, r, s].
        left: H of the common parameters with parts eliminated, [..., s, s].
    """

    parts: Parts
    inner: Tensor
    follow: Tensor
    left: Tensor

    @classmethod
    def of(cls, parts: Parts, images: Tensor, safe: bool = False) -> "Curved":
        """Make the factors from the images of the directions of `Parts`, [..., s + r, d].

        Args:
            parts: The dependence of parameters.
            images: The images.
            safe: Whether eigenvalues are replaced by their moduli, so that steps lead upwards.
        """
        better = _moduli if safe else (lambda block: block)
        corner, cross, inner = parts.blocks(images)
        inner = better(inner)
        follow = _solved(inner, cross)
        return cls(parts, inner, follow, better(corner - (cross.mT @ follow).sum(-3)))

    @property
    def log_volume(self) -> Tensor:
        """Return log |H|, [...]; NaN if H is not positive definite."""
        return _log_volume(self.inner).sum(-1) + _log_volume(self.left)

    def solved(self, slope: Tensor) -> Tensor:
        """Return H^-1 times a slope, [..., d]."""
        common, own = self.parts.split(slope)
        alone = _solved(self.inner, own[..., None])[..., 0]
        pull = common - (self.follow.mT @ own[..., None]).sum(-3)[..., 0]
        moved = _solved(self.left, pull[..., None])[..., 0]
        return self.parts.joined(moved, alone - (self.follow @ moved[..., None, :, None])[..., 0])

    def spread(self, noise: Tensor) -> Tensor:
        """Return standard normal noise [..., M, d] with H^-1 as covariance."""
        common, own = self.parts.split(noise)
        common = spread(self.left.unsqueeze(-3), common)
        follow = self.follow.unsqueeze(-4) @ common[..., None, :, None]
        own = spread(self.inner.unsqueeze(-4), own) - follow[..., 0]
        return self.parts.joined(common, own)


def _moduli(block: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((block + block.mT) / 2)
    return (vectors * values.abs().clamp_min(1e-20)[..., None, :]) @ vectors.mT


def _solved(block: Tensor, values: Tensor) -> Tensor:
    # not by torch.linalg.solve, whose second derivatives are NaN under vmap in torch 2.13
    return torch.cholesky_solve(values, torch.linalg.cholesky_ex(block)[0])


def _log_volume(block: Tensor) -> Tensor:
    lower, failed = torch.linalg.cholesky_ex(block)
    found = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(failed == 0, found, torch.nan)


def spread(precision: Tensor, noise: Tensor) -> Tensor:
    """Return noise [..., r] with the inverse of a precision [..., r, r] as covariance."""
    lower = torch.linalg.cholesky_ex(precision)[0]  # with L L' the precision, L'^-1 noise has it
    return torch.linalg.solve_triangular(lower.mT, noise[..., None], upper=True)[..., 0]


def _rule(size: int, nested: bool) -> Rule:
    """Return the nodes of a part's parameters, or of the common ones.

    Args:
        size: The number of parameters.
        nested: Whether parts have common parameters.
    """
    counts = FEWER if nested else NODES
    if size == 1 and not nested:
        step = WIDE * float(FAR[1] - FAR[0])
        return WIDE * FAR.sinh()[:, None], FAR.cosh().log() + math.log(step)
    if size and size not in counts:
        count = DRAWS // 4 if nested else DRAWS
        points = stats.qmc.Halton(size + 1, rng=0).random(count)
        standard, logs = student(points[:, 1:], points[:, 0], torch.eye(size).double() * WIDER)
        return WIDER * standard, -logs - math.log(count)
    roots, masses = (
        torch.from_numpy(t) for t in np.polynomial.hermite.hermgauss(counts.get(size, 1))
    )
    places = torch.cartesian_prod(torch.arange(1), *[torch.arange(len(roots))] * size)
    places = places.reshape(-1, 1 + size)[:, 1:]
    nodes = math.sqrt(2) * roots[places]
    logs = masses.log()[places].sum(1) + nodes.square().sum(1) / 2
    return nodes, logs + size * math.log(2) / 2


@dataclass(frozen=True)
class Integral:
    """The integrals of J alike sites over their own parameters: one density of different rows. All
    are computed at once, at N shared vectors phi [N, q].

    Args:
        density: The log density.
        parts: The dependence of own parameters.
        begin: Start of the search for their modes, [J, d].
        rows: Tensors that the density takes, [J, ...].
        width: Number of elements of a site's longest tensor.
    """

    density: Density
    parts: Parts
    begin: Tensor
    rows: tuple[Tensor, ...] = ()
    width: int = 1
    rounding: ClassVar[float] = 1e-8
    """Tolerance, in nats, of the test whether a density is normal."""

    @property
    def size(self) -> int:
        """Return the number d of a site's own parameters."""
        return self.begin.shape[1]

    def each(self, function: Callable[..., Any], phi: Tensor, *at: Tensor) -> Any:
        """Return the values of a function of one phi [q], other arguments and one site's rows at
        all vectors and sites.

        Args:
            function: The function.
            phi: Shared parameters, [N, q].
            at: The others, [J, N, ...].
        """
        rows = [None] * len(self.rows)
        points = vmap(function, in_dims=(0, *[0] * len(at), *rows))
        if len(self.begin) > 1:
            return vmap(points, in_dims=(None, *[0] * (len(at) + len(rows))))(phi, *at, *self.rows)
        found = points(phi, *(t[0] for t in (*at, *self.rows)))
        return tree_map(lambda t: t[None], found)

    def curved(
        self, phi: Tensor, z: Tensor, *rows: Tensor, safe: bool = False
    ) -> tuple[Tensor, Curved]:
        """Return the slope of f by z [d] and H, at one phi [q] and z [d]."""
        found: Any = vjp(lambda z: grad(self.density, argnums=1)(phi, z, *rows), z)
        slope, pull = found
        images = -vmap(lambda direction: pull(direction)[0])(self.parts.directions)
        return slope, Curved.of(self.parts, images, safe)

    def curvature(self, phi: Tensor, z: Tensor, safe: bool = False) -> tuple[Tensor, Curved]:
        """Return `curved` at several phi [N, q] and z [J, N, d]."""

        def one(phi: Tensor, z: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
            slope, curved = self.curved(phi, z, *rows, safe=safe)
            return slope, curved.inner, curved.follow, curved.left

        slope, *blocks = self.each(one, phi, z)
        return slope, Curved(self.parts, *blocks)

    def modes(self, phi: Tensor) -> Tensor:
        """Return the modes z^ [J, N, d] at phi [N, q], by Newton's steps, halved if f falls."""
        z = self.begin[:, None].expand(-1, len(phi), -1).clone()
        if not self.size:
            return z
        with torch.no_grad():
            best = self.values(phi, z)
            live = torch.ones_like(best, dtype=torch.bool)
            for _ in range(STEPS):
                slope, curved = self.curvature(phi, z, safe=True)
                move = curved.solved(slope)
                live &= (slope * move).sum(-1) > 1e-18 + 1e-16 * best.abs()  # else rounding
                left = live.clone()
                for _ in range(HALVINGS):
                    if not left.any():
                        break
                    after = self.values(phi, z + move)
                    taken = left & (after >= best - 1e-12 * best.abs())
                    z = torch.where(taken[..., None], z + move, z)
                    best = torch.where(taken, after, best)
                    move, left = move / 2, left & ~taken
                live &= ~left  # rounding prevents a rise
                if not live.any():
                    break
        return z

    def has_modes(self, phi: Tensor) -> Tensor:
        """Return whether `modes` finds maxima, [J] at phi [1, q]."""
        if not self.size:
            return torch.ones(len(self.begin), dtype=torch.bool)
        with torch.no_grad():
            slope, curved = self.curvature(phi, self.modes(phi))
            left = (slope * curved.solved(slope)).sum(-1).abs()
            return (curved.log_volume.isfinite() & (left < 1e-6))[:, 0]

    def values(self, phi: Tensor, z: Tensor) -> Tensor:
        """Return f [J, N] at phi [N, q] and z [J, N, d]; minus infinity if it is NaN."""
        return self.each(self.density, phi, z).nan_to_num(-torch.inf, -torch.inf, -torch.inf)

    def laplace(self, phi: Tensor, z: Tensor) -> Tensor:
        """Return Laplace's log m [J, N] at phi [N, q] and their modes z [J, N, d]."""
        if not self.size:
            return self.values(phi, z)
        volume = self.curvature(phi, z)[1].log_volume
        return self.values(phi, z) - volume / 2 + self.size * math.log(2 * math.pi) / 2

    def slope(self, phi: Tensor, z: Tensor, *rows: Tensor) -> Tensor:
        """Return the slope [q] of Laplace's log m at one phi [q] and its mode z [d], which moves
        with phi by H^-1 d2f / dz dphi.
        """

        def volume(phi: Tensor, z: Tensor) -> Tensor:
            return self.curved(phi, z, *rows)[1].log_volume / 2

        by_phi, by_z = grad(volume, argnums=(0, 1))(phi, z)
        moved = self.curved(phi, z, *rows)[1].solved(by_z)

        def rest(phi: Tensor) -> Tensor:
            pulled = grad(self.density, argnums=1)(phi, z, *rows)
            return self.density(phi, z, *rows) - pulled @ moved

        return grad(rest)(phi) - by_phi

    def hessian(self, phi: Tensor, z: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slope and the Hessian [q, q] of Laplace's log m; see `slope`."""

        def twice(phi: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            found = self.slope(phi, z, *rows)
            return found, found

        found: Any = jacrev(twice, argnums=(0, 1), has_aux=True)(phi, z)
        (by_phi, by_z), slope = found
        cross = jacrev(lambda phi: grad(self.density, argnums=1)(phi, z, *rows))(phi)
        moved = vmap(self.curved(phi, z, *rows)[1].solved, 1, 1)(cross)
        return slope, by_phi + by_z @ moved

    def derivatives(self, phi: Tensor, order: int = 2) -> list[Tensor]:
        """Return Laplace's log m [J, N], with `order` 1 also its slopes [J, N, q], and with 2 also
        its Hessians [J, N, q, q] by phi [N, q].
        """
        z = self.modes(phi)
        found = [self.laplace(phi, z)]
        if not self.size:
            of = (grad(self.density), bent(self.density))[:order]
            found += [self.each(one, phi, z).detach() for one in of]
        elif order:
            told = self.each(self.hessian if order > 1 else self.slope, phi, z)
            found += [t.detach() for t in (told if order > 1 else (told,))]
        return found

    @property
    def units(self) -> Tensor:
        """Return the places of independent groups of parameters, [U, r]: each part, or all together
        if parts have common parameters.
        """
        if len(self.parts.common):
            return torch.arange(self.size)[None]
        return self.parts.parts

    def log_marginals(self, phi: Tensor) -> Tensor:
        """Return log m [J, N] at phi [N, q], by nodes unless Laplace's approximation is exact."""
        s, r = len(self.parts.common), self.parts.parts.shape[1]
        with torch.no_grad():
            if not self.size or self._is_normal(phi[[0, -1]]):
                return self.laplace(phi, self.modes(phi))
            rules = _rule(s, s > 0), _rule(r, s > 0)
            size = len(rules[0][0]) * len(rules[1][0])
            return torch.cat([self._by_nodes(one, *rules) for one in self.split(phi, size)], 1)

    def _is_normal(self, phi: Tensor) -> bool:
        """Return whether the own parameters are normal given phi [N, q], judged at some draws."""
        noise = torch.from_numpy(generator(0, Purpose.POSTERIOR).standard_normal((9, self.size)))
        logs = self.weights(phi, noise.expand(len(self.begin), len(phi), -1, -1))[1]
        return bool((logs.abs() < self.rounding).all())

    def weights(self, phi: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return draws of the normal approximation at phi [N, q] from noise [J, N, M, d], and the
        logarithms of their weights relative to the mode's, by unit, [J, N, M, U].
        """
        with torch.no_grad():
            z = self.modes(phi)
            to = z.unsqueeze(2) + self.curvature(phi, z)[1].spread(noise)
            logs = self.relative(phi, z, to, self.units)
        return to, logs + noise[..., self.units].square().sum(-1) / 2

    def split(self, phi: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return phi [N, q] in parts; `count` own values for each vector are computed at once."""
        return phi.split(max(1, NUMBERS // (count * len(self.begin) * max(self.size, self.width))))

    def _by_nodes(self, phi: Tensor, outer: Rule, inner: Rule) -> Tensor:
        """Return log m [J, N] by nodes of the common parameters, and at each by nodes of each part,
        which is then independent of the others.
        """
        z = self.modes(phi)
        curved = self.curvature(phi, z)[1]
        spots, steps = (torch.zeros(len(one[0]), self.size).double() for one in (outer, inner))
        spots[:, self.parts.common] = outer[0]
        steps[:, self.parts.parts] = inner[0][:, None]
        at = z.unsqueeze(2) + curved.spread(spots.expand(*z.shape[:2], -1, -1))
        to = at.unsqueeze(3) + curved.spread(steps.expand(*z.shape[:2], -1, -1)).unsqueeze(2)
        many, at, to = phi.repeat_interleave(len(spots), 0), at.flatten(1, 2), to.flatten(1, 2)
        shares = self.relative(many, at, to, self.parts.parts) + inner[1][:, None]
        found = (self.values(many, at) + shares.logsumexp(2).sum(-1)).unflatten(1, (len(phi), -1))
        return (found + outer[1]).logsumexp(2) - curved.log_volume / 2

    def relative(self, phi: Tensor, z: Tensor, to: Tensor, units: Tensor) -> Tensor:
        """Return the difference of each unit's term of f between other values and z, [J, N, M, U].

        f is a sum over units, and only the sum can be computed. But its slope by a unit's
        parameters depends on no other unit, and the integral of the slope along the way from z is
        the difference of the unit's term.

        Args:
            phi: Shared parameters, [N, q].
            z: Own ones, [J, N, d].
            to: Others, [J, N, M, d].
            units: Places of independent groups of parameters, [U, r]; others are as in z.
        """
        if len(units) == 1:
            count = to.shape[2]
            at = self.values(phi.repeat_interleave(count, 0), to.flatten(1, 2))
            found = (at.unflatten(1, (-1, count)) - self.values(phi, z)[..., None])[..., None]
        else:

            def slopes(phi: Tensor, z: Tensor, *rows: Tensor) -> Tensor:
                return vmap(lambda z: grad(self.density, argnums=1)(phi, z, *rows))(z)

            way, found = to - z[:, :, None], to.new_zeros(())
            for root, mass in zip(*np.polynomial.legendre.leggauss(6), strict=True):
                at = self.each(slopes, phi, z[:, :, None] + (root + 1) / 2 * way) * way
                found = found + mass / 2 * at[..., units].sum(-1)
        return found.nan_to_num(-torch.inf, posinf=-torch.inf, neginf=-torch.inf)


@dataclass(frozen=True)
class Differences(Integral):
    """The integral of one site's log density without derivatives. They are differences of values:
    of f by z, and of Laplace's log m by phi. The density takes several vectors, [N, q] and [N, d].
    """

    rounding = 1e-4

    def values(self, phi: Tensor, z: Tensor) -> Tensor:
        """Return f [1, N]; see `Integral`."""
        return self.density(phi, z[0])[None].nan_to_num(-torch.inf, -torch.inf, -torch.inf)

    def curvature(self, phi: Tensor, z: Tensor, safe: bool = False) -> tuple[Tensor, Curved]:
        """Return slopes and H by differences; see `Integral`."""

        def values(z: Tensor) -> Tensor:
            return self.values(phi.repeat_interleave(len(z) // len(phi), 0), z[None])[0]

        slope, second = _differences(values, z[0], 1e-3)
        if safe:
            second = -_moduli(-second)
        return slope[None], Curved.of(self.parts, -second[None])

    def derivatives(self, phi: Tensor, order: int = 2) -> list[Tensor]:
        """Return Laplace's values, slopes and Hessians by differences; see `Integral`."""

        def values(phi: Tensor) -> Tensor:
            return self.laplace(phi, self.modes(phi))[0]

        return [t[None] for t in (values(phi), *_differences(values, phi, 0.005))][: order + 1]


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
