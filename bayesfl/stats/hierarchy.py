"""Hierarchies: groups whose own effects are integrated out where their rows are.

A group's linear predictor is X beta + Z (tau * u), with effects of its own u ~ N(0, I). Its
marginal likelihood is an integral over u: by Laplace's approximation around the minimum of

    f(u) = sum of losses + |u|^2 / 2,      log m = -f(u^) - log |I + T Z' W Z T| / 2,

which is exact for normal outcomes; of one effect by Gauss-Hermite quadrature around the same
minimum. Parameters phi are (beta, log tau, the family's own). The design may be anything, as the
features of a network's last layer; leading dimensions are draws of phi.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayesfl.stats.families import Family

NODES = 15
"""Nodes of the quadrature of one effect."""


@dataclass(frozen=True)
class Groups:
    """The rows of G groups, padded to m.

    Args:
        x: The design of shared coefficients, [G, m, p].
        z: The design of groups' own effects, [G, m, r].
        y: Outcomes, [G, m].
        weights: How often a row counts, [G, m]; 0 for padding.
        offset: What is added to the linear predictor, [G, m].
    """

    x: Tensor
    z: Tensor
    y: Tensor
    weights: Tensor
    offset: Tensor

    @classmethod
    def of(
        cls,
        x: Tensor,
        z: Tensor,
        y: Tensor,
        weights: Tensor,
        offset: Tensor,
        group: Tensor | None = None,
    ) -> "Groups":
        """Return rows [n, ...] by their groups.

        Args:
            x: As of the class, [n, p].
            z: The same, [n, r].
            y: The same, [n].
            weights: The same, [n].
            offset: The same, [n].
            group: The group of each row, [n], from 0; None for one group.
        """
        parts = (x, z, y, weights, offset)
        if group is None:
            return cls(*(t.unsqueeze(0) for t in parts))
        counts = torch.bincount(group)
        order = group.argsort(stable=True)
        place = torch.arange(len(group)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        padded = []
        for t in parts:
            whole = t.new_zeros(len(counts), int(counts.max()), *t.shape[1:])
            whole[group[order], place] = t[order]
            padded.append(whole)
        return cls(*padded)


@dataclass(frozen=True)
class Phi:
    """Parameters of a hierarchy, with leading dimensions [...].

    Args:
        beta: Shared coefficients, [..., p].
        tau: Standard deviations of the groups' own effects, [..., r].
        own: The family's own parameters, [n_own, ..., 1, 1].
    """

    beta: Tensor
    tau: Tensor
    own: Tensor

    @classmethod
    def of(cls, phi: Tensor, p: int, r: int) -> "Phi":
        """Return the parts of a vector [..., p + r + n_own], of log tau and the like."""
        own = phi[..., p + r :].movedim(-1, 0)[..., None, None]
        return cls(phi[..., :p], phi[..., p : p + r].exp(), own)


def _predictors(groups: Groups, phi: Phi) -> tuple[Tensor, Tensor]:
    """Return linear predictors without own effects [..., G, m] and what these multiply
    [..., G, m, r].
    """
    fixed = torch.einsum("gmp,...p->...gm", groups.x, phi.beta) + groups.offset
    return fixed, groups.z * phi.tau[..., None, None, :]


def _at(
    family: Family, groups: Groups, phi: Phi, fixed: Tensor, z: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return f [..., G], its slope [..., G, r] and its Hessian [..., G, r, r] at u."""
    pieces = family.pieces(fixed + (z * u[..., None, :]).sum(-1), groups.y, phi.own)
    w = groups.weights
    value = (w * pieces.loss).sum(-1) + u.square().sum(-1) / 2
    slope = ((w * pieces.slope[..., 0])[..., None] * z).sum(-2) + u
    weighted = (w * pieces.information[..., 0, 0])[..., None] * z
    hessian = z.mT @ weighted + torch.eye(u.shape[-1], dtype=u.dtype)
    return value, slope, hessian


def modes(family: Family, groups: Groups, phi: Phi) -> tuple[Tensor, Tensor]:
    """Return the groups' effects u^ [..., G, r] that minimise f, and its Hessian there
    [..., G, r, r], by Newton's steps, each halved where f rose.

    Args:
        family: The family of the outcomes.
        groups: The groups.
        phi: The parameters.
    """
    with torch.no_grad():
        fixed, z = _predictors(groups, phi)
        u = fixed.new_zeros(*fixed.shape[:-1], groups.z.shape[-1])
        value, slope, hessian = _at(family, groups, phi, fixed, z, u)
        for _ in range(100):
            move = torch.linalg.solve(hessian, slope)
            if float((move * slope).sum(-1).max()) < 1e-20:
                break
            after = _at(family, groups, phi, fixed, z, u - move)
            for _ in range(40):
                rose = ~(after[0] <= value + 1e-12 * value.abs())
                if not rose.any():
                    break
                move = torch.where(rose[..., None], move / 2, move)
                after = _at(family, groups, phi, fixed, z, u - move)
            u, (value, slope, hessian) = u - move, after
        return u, hessian


def log_marginals(family: Family, groups: Groups, phi: Phi) -> Tensor:
    """Return the log marginal likelihood of each group, [..., G] in nats; it can be differentiated
    twice by phi.

    Args:
        family: The family of the outcomes.
        groups: The groups.
        phi: The parameters.
    """
    u, hessian = modes(family, groups, phi)
    fixed, z = _predictors(groups, phi)
    if u.shape[-1] == 1 and family.own != ("log sigma",):
        return _quadrature(family, groups, phi, fixed, z, u, hessian)
    if phi.beta.requires_grad:
        # Two steps of Newton's at the minimum change nothing but make its derivatives right: the
        # first step the first ones, the second step the second ones.
        for _ in range(2):
            _, slope, hessian = _at(family, groups, phi, fixed, z, u)
            u = u - torch.linalg.solve(hessian, slope)
    value, _, hessian = _at(family, groups, phi, fixed, z, u)
    return -value - torch.linalg.slogdet(hessian).logabsdet / 2


def _quadrature(
    family: Family,
    groups: Groups,
    phi: Phi,
    fixed: Tensor,
    z: Tensor,
    u: Tensor,
    hessian: Tensor,
) -> Tensor:
    """Return the log of the integral over one effect, by nodes around its mode, which stay where
    they are under derivatives.
    """
    roots, masses = (torch.from_numpy(t) for t in np.polynomial.hermite.hermgauss(NODES))
    spread = math.sqrt(2) * hessian[..., 0, 0].rsqrt()
    at = u[..., 0, None] + spread[..., None] * roots  # [..., G, nodes]
    eta = fixed[..., None, :] + at[..., None] * z[..., 0].unsqueeze(-2)
    own = phi.own.unsqueeze(-1)
    loss = family.pieces(eta, groups.y[:, None], own).loss
    inside = -(groups.weights[:, None] * loss).sum(-1) - at.square() / 2
    logs = inside + roots.square() + masses.log()
    return logs.logsumexp(-1) + spread.log() - math.log(2 * math.pi) / 2


@torch.enable_grad()
def derivatives(
    family: Family, groups: Groups, phi: Tensor, r: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the groups' summed log marginal likelihood, its slope [q] and its Hessian [q, q].

    Args:
        family: The family of the outcomes.
        groups: The groups.
        phi: The parameters, [q].
        r: Number of effects.
    """
    at = phi.detach().clone().requires_grad_()
    total = log_marginals(family, groups, Phi.of(at, groups.x.shape[-1], r)).sum()
    (slope,) = torch.autograd.grad(total, at, create_graph=True)
    rows = [torch.autograd.grad(one, at, retain_graph=True)[0] for one in slope]
    return total.detach(), slope.detach(), torch.stack(rows)
