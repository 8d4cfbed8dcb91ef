"""Hierarchies: a site integrates out the effects of its groups.

A group's linear predictor is $X beta + Z L u$, with effects $u ~ N(0, I)$ and a root L of their
covariance. The first effects may be common to all groups, like a hospital's to its wards; the
others are each group's own. The marginal likelihood is an integral over all u. Laplace's
approximation around the minimum of

    $f(u) = loss(u) + |u|^2 / 2$, $log m = -f(uhat) - log |H(uhat)| / 2$, H the Hessian of f,

is exact for normal outcomes. For other outcomes and one effect it is Gauss-Hermite quadrature
around the same minimum. Groups' own effects depend on each other only through the common ones, so
Newton's steps and determinants eliminate them group by group. The design may be any matrix; leading
dimensions are draws of phi.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bayesfl.stats.density.integral import spread
from bayesfl.stats.families import Family

NODES = 15
"""Nodes of the quadrature of one effect."""


@dataclass(frozen=True)
class Groups:
    """The rows of G groups, padded to m.

    Args:
        x: The design of shared coefficients, [G, m, p].
        z: The design of effects, [G, m, r].
        y: Outcomes, [G, m].
        weights: The rows' weights, [G, m]; 0 for padding.
        offset: Offsets of the linear predictor, [G, m].
        common: Number of effects, the first ones, that all groups have in common.
    """

    x: Tensor
    z: Tensor
    y: Tensor
    weights: Tensor
    offset: Tensor
    common: int = 0

    @classmethod
    def of(
        cls,
        x: Tensor,
        z: Tensor,
        y: Tensor,
        weights: Tensor,
        offset: Tensor,
        group: Tensor,
        common: int = 0,
    ) -> "Groups":
        """Return rows [n, ...] by their groups.

        Args:
            x: As of the class, [n, p].
            z: The same, [n, r].
            y: The same, [n].
            weights: The same, [n].
            offset: The same, [n].
            group: The group of each row, [n], from 0.
            common: As of the class.
        """
        order, counts = group.argsort(stable=True), group.bincount().tolist()
        parts = (list(t[order].split(counts)) for t in (x, z, y, weights, offset))
        return cls(*(pad_sequence(rows, batch_first=True) for rows in parts), common=common)

    @property
    def share(self) -> Tensor:
        """Return a group's share of each effect's prior, [r]: 1 for its own effects, an equal share
        of common ones.
        """
        share = torch.ones(self.z.shape[-1], dtype=self.z.dtype)
        share[: self.common] /= len(self.z)
        return share


@dataclass(frozen=True)
class Phi:
    """Parameters of a hierarchy, with leading dimensions [...].

    Args:
        beta: Shared coefficients, [..., p].
        root: A root L of the covariance L L' of the effects, [..., r, r].
        own: The family's own parameters, [n_own, ..., 1, 1].
    """

    beta: Tensor
    root: Tensor
    own: Tensor


def _predictors(groups: Groups, phi: Phi) -> tuple[Tensor, Tensor]:
    """Return linear predictors without effects [..., G, m] and the design of u [..., G, m, r]."""
    fixed = torch.einsum("gmp,...p->...gm", groups.x, phi.beta) + groups.offset
    return fixed, groups.z @ phi.root.unsqueeze(-3)


def _at(
    family: Family, groups: Groups, phi: Phi, fixed: Tensor, z: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each group's part of f [..., G], of its slope [..., G, r] and of its Hessian
    [..., G, r, r] at u [..., G, r]; f is summed to [..., 1] if groups have common effects.
    """
    eta = (fixed + (z * u[..., None, :]).sum(-1)).clamp(max=family.largest)
    pieces = family.pieces(eta, groups.y, phi.own)
    w, share = groups.weights, groups.share
    value = (w * pieces.loss).sum(-1) + (share * u.square()).sum(-1) / 2
    slope = ((w * pieces.slope[..., 0])[..., None] * z).sum(-2) + share * u
    hessian = z.mT @ ((w * pieces.information[..., 0, 0])[..., None] * z) + share.diag()
    return (value.sum(-1, keepdim=True) if groups.common else value), slope, hessian


def _eliminated(hessian: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the Schur complement of the first entries' Hessian, summed over groups,
    [..., first, first], and the derivative of the others by the first, negated,
    [..., G, r, first].

    Args:
        hessian: The groups' parts, [..., G, first + r, first + r].
        first: Number of entries that groups have in common.
    """
    cross = hessian[..., first:, :first]
    follow = torch.linalg.solve(hessian[..., first:, first:], cross)
    return (hessian[..., :first, :first] - cross.mT @ follow).sum(-3), follow


def _step(groups: Groups, slope: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Return Newton's step [..., G, r] from the parts of `_at`, and the log determinant of the
    Hessian: by group [..., G], or of all [..., 1] if these have common effects.
    """
    s = groups.common
    inner = hessian[..., s:, s:]
    alone = torch.linalg.solve(inner, slope[..., s:])
    volume = torch.linalg.slogdet(inner).logabsdet
    if not s:
        return alone, volume
    left, follow = _eliminated(hessian, s)
    pull = (slope[..., :s] - (follow.mT @ slope[..., s:, None])[..., 0]).sum(-2)
    common = torch.linalg.solve(left, pull)[..., None, :]
    own = alone - (follow @ common[..., None])[..., 0]
    move = torch.cat([common.expand(*own.shape[:-1], s), own], -1)
    return move, volume.sum(-1, keepdim=True) + torch.linalg.slogdet(left).logabsdet[..., None]


def modes(family: Family, groups: Groups, phi: Phi) -> tuple[Tensor, Tensor]:
    """Return the effects u^ [..., G, r] that minimise f, common ones the same for each group, and
    the groups' parts of its Hessian there [..., G, r, r], by Newton's steps, halved if f rises.

    Args:
        family: The family of the outcomes.
        groups: The groups.
        phi: The parameters.
    """
    with torch.no_grad():
        fixed, z = _predictors(groups, phi)
        u = fixed.new_zeros(*fixed.shape[:-1], groups.z.shape[-1])
        value, slope, hessian = _at(family, groups, phi, fixed, z, u)
        before = torch.inf
        for _ in range(100):
            move = _step(groups, slope, hessian)[0]
            promised = (move * slope).sum(-1)
            left = promised.sum(-1) if groups.common else promised
            # Converged, or limited by rounding: the expected decrease no longer falls.
            if bool(((left < 1e-20) | ((left < 1e-10) & (left > before / 4))).all()):
                break
            before = left
            after = _at(family, groups, phi, fixed, z, u - move)
            for _ in range(40):
                rose = ~(after[0] <= value + 1e-12 * value.abs())
                if not rose.any():
                    break
                move = torch.where(rose[..., None], move / 2, move)
                after = _at(family, groups, phi, fixed, z, u - move)
            u, (value, slope, hessian) = u - move, after
        return u, hessian


def drawn(groups: Groups, u: Tensor, hessian: Tensor, noise: Tensor) -> Tensor:
    """Return draws of the effects [..., G, r] of the normal approximation around their modes.

    Args:
        groups: The groups.
        u: The modes, of `modes`, [..., G, r].
        hessian: The Hessian there, [..., G, r, r].
        noise: Standard normal numbers, [..., G, r].
    """
    s = groups.common
    left, follow = _eliminated(hessian, s)
    common, own = spread(left, noise[..., 0, :s])[..., None, :], noise[..., s:]
    own = spread(hessian[..., s:, s:], own) - (follow @ common[..., None])[..., 0]
    return u + torch.cat([common.expand(*own.shape[:-1], s), own], -1)


def log_marginals(family: Family, groups: Groups, phi: Phi) -> Tensor:
    """Return the log marginal likelihood of each group, [..., G] in nats, or of all, [..., 1], if
    these have common effects. It can be differentiated twice by phi.

    Args:
        family: The family of the outcomes.
        groups: The groups.
        phi: The parameters.
    """
    u, hessian = modes(family, groups, phi)
    fixed, z = _predictors(groups, phi)
    normal = family.own == ("log sigma",)
    if u.shape[-1] == 1 and not normal:
        return _quadrature(family, groups, phi, fixed, z, u, hessian)
    if phi.beta.requires_grad:
        # Two steps of Newton's at the minimum change nothing but make its derivatives right: the
        # first step the first ones, the second step the second ones; of normal outcomes one step
        # makes all right, as f is quadratic.
        for _ in range(1 if normal else 2):
            _, slope, hessian = _at(family, groups, phi, fixed, z, u)
            u = u - _step(groups, slope, hessian)[0]
    value, slope, hessian = _at(family, groups, phi, fixed, z, u)
    return -value - _step(groups, slope, hessian)[1] / 2


def _quadrature(
    family: Family,
    groups: Groups,
    phi: Phi,
    fixed: Tensor,
    z: Tensor,
    u: Tensor,
    hessian: Tensor,
) -> Tensor:
    """Return the log of the integral over one effect, by nodes around its mode, which derivatives
    treat as constants.
    """
    roots, masses = (torch.from_numpy(t) for t in np.polynomial.hermite.hermgauss(NODES))
    spread = math.sqrt(2) * hessian[..., 0, 0].rsqrt()
    at = u[..., 0, None] + spread[..., None] * roots  # [..., G, nodes]
    eta = fixed[..., None, :] + at[..., None] * z[..., 0].unsqueeze(-2)
    own = phi.own.unsqueeze(-1)
    loss = family.pieces(eta.clamp(max=family.largest), groups.y[:, None], own).loss
    inside = -(groups.weights[:, None] * loss).sum(-1) - at.square() / 2
    logs = inside + roots.square() + masses.log()
    return logs.logsumexp(-1) + spread.log() - math.log(2 * math.pi) / 2


@torch.enable_grad()
def derivatives(
    family: Family, groups: Groups, phi: Callable[[Tensor], Phi], at: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the groups' summed log marginal likelihood, its slope [q] and its Hessian [q, q].

    Args:
        family: The family of the outcomes.
        groups: The groups.
        phi: Function from a vector [q] to the parameters.
        at: The vector, [q].
    """
    at = at.detach().clone().requires_grad_()
    total = log_marginals(family, groups, phi(at)).sum()
    (slope,) = torch.autograd.grad(total, at, create_graph=True)
    units = torch.eye(len(at)).to(at)
    (hessian,) = torch.autograd.grad(slope, at, units, is_grads_batched=True)
    return total.detach(), slope.detach(), hessian


def information(groups: Groups, phi: Phi) -> Tensor:
    """Return the information [p, p] on the coefficients of normal outcomes, X' V^-1 X with V the
    marginal covariance of the outcomes.

    Args:
        groups: The groups.
        phi: The parameters.
    """
    p = groups.x.shape[-1]
    z = torch.cat([groups.x, _predictors(groups, phi)[1]], -1)  # coefficients without a prior
    weights = groups.weights * torch.exp(-2 * phi.own[0])
    prior = torch.cat([groups.share.new_zeros(p), groups.share])
    left, _ = _eliminated(z.mT @ (weights[..., None] * z) + prior.diag(), p + groups.common)
    # One group eliminates the common effects.
    return _eliminated(left[None], p)[0]
