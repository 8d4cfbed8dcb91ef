"""Heads of clients' own on a common body: last layers w_j ~ N(centre, diag(tau^2)), whose
hierarchy is fitted by sums over clients.

The outputs of a network are linear in its last layer, so a client's posterior given centre and tau
has one mode, found by Newton's steps, and the Gaussian around it has the exact Hessian. With its
covariance S_j, T = diag(tau^2) and pull_j = T^-1 (w_j - centre), Laplace's marginal likelihood of a
client has by the centre the slope pull_j and the information M_j = T^-1 - T^-1 S_j T^-1. So the
centre makes Newton's steps on their sums, and each tensor's tau those of MacKay's fixed point,

    tau^2 = sum (w_j - centre)^2 / sum (1 - diag(S_j) / tau^2),

sums over clients and the tensor's weights; both stop where the marginal likelihood is stationary
but for what tau changes in the clients' Hessians.

Source: MacKay, "The evidence framework applied to classification networks", Neural Computation 4,
1992; Lindley, Smith, "Bayes estimates for the linear model", JRSS B 34, 1972.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.base.random import Purpose, generator
from bayesfl.curvature.roots import root
from bayesfl.posteriors.full_gaussian import FullGaussian
from bayesfl.posteriors.linearised import nll_of_predictive, predictive

ENOUGH = 1e-10
"""A head is at its mode where a step promises less than so many nats."""
CLOSE = 1e-2
"""The hierarchy is found where no tau changes by more than this share, and the centre's step
promises less than so many nats for each client."""
SMALL, MOST = 1e-3, 50
"""The least tau, of heads that do not differ, and the largest number of questions."""
SCALES = (0.25, 0.5, 1.0, 2.0)
"""Multiples of tau that are tried on validation data."""


@dataclass(frozen=True)
class Rows:
    """Hold what a client's rows say of its network's last layer.

    Args:
        features: The layer's inputs, after which comes a column of ones where it has a bias, [n,
            I], in float64.
        y: Labels or targets, [n, ...].
    """

    features: Tensor
    y: Tensor


@dataclass(frozen=True)
class Head:
    """A last layer, whose weights are a vector: [O, I - 1] of its weight, then [O] of its bias.

    Args:
        outputs: Number of outputs O.
        bias: Whether it has a bias.
        likelihood: Distribution of y given the outputs.
    """

    outputs: int
    bias: bool
    likelihood: Likelihood

    def matrix(self, w: Tensor) -> Tensor:
        """Return the weights [D] as they multiply features, [O, I]."""
        if not self.bias:
            return w.reshape(self.outputs, -1)
        weight, bias = w[: -self.outputs], w[-self.outputs :]
        return torch.cat([weight.reshape(self.outputs, -1), bias[:, None]], 1)

    def order(self, inputs: int) -> Tensor:
        """Return the places of the vector's weights in the matrix [O, I], flattened, [D]."""
        at = torch.arange(self.outputs * inputs).reshape(self.outputs, inputs)
        return at.flatten() if not self.bias else torch.cat([at[:, :-1].flatten(), at[:, -1]])

    def posterior(self, rows: Rows, centre: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mode [D] of a client's posterior under N(centre, diag(tau^2)), and the Hessian
        there, [D, D], in nats.

        Args:
            rows: The client's rows.
            centre: The prior's mean, [D].
            tau: Its standard deviations, [D].
        """
        w, precision = centre, tau**-2
        value, slope = self._loss(rows, w)
        for _ in range(100):
            gradient = slope + precision * (w - centre)
            hessian = self._hessian(rows, w) + precision.diag()
            move = torch.cholesky_solve(gradient[:, None], torch.linalg.cholesky(hessian))[:, 0]
            if float(gradient @ move) < ENOUGH:
                break
            here = value + (precision * (w - centre) ** 2).sum() / 2
            for _ in range(40):
                value, slope = self._loss(rows, w - move)
                if value + (precision * (w - move - centre) ** 2).sum() / 2 <= here:
                    break
                move = move / 2
            w = w - move
        return w, hessian  # pyright: ignore[reportPossiblyUnboundVariable]

    def spread(self, rows: Rows, hessian: Tensor) -> Tensor:
        """Return the covariances of the outputs of rows, [n, O, O], under a Gaussian of the
        weights with this Hessian [D, D].
        """
        inputs = rows.features.shape[1]
        back = self.order(inputs).argsort()
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(hessian))[back][:, back]
        covariance = covariance.reshape(self.outputs, inputs, self.outputs, inputs)
        through = torch.einsum("ni,oipj->nopj", rows.features, covariance)
        return torch.einsum("nopj,nj->nop", through, rows.features)

    def _loss(self, rows: Rows, w: Tensor) -> tuple[Tensor, Tensor]:
        outputs = rows.features @ self.matrix(w).T
        nll, slope = self.likelihood.nll_and_slope(outputs, rows.y)
        return nll.sum(), (slope.mT @ rows.features).flatten()[self.order(rows.features.shape[1])]

    def _hessian(self, rows: Rows, w: Tensor) -> Tensor:
        features = rows.features
        factor = root(self.likelihood, features @ self.matrix(w).T)
        curvature = factor @ factor.mT
        o, inputs = self.outputs, features.shape[1]
        full = features.new_zeros(o, inputs, o, inputs)
        for a in range(o):  # by pairs, as all at once would be [n, I, I]
            for b in range(a, o):
                both = (features * curvature[:, a, b, None]).T @ features
                full[a, :, b] = full[b, :, a] = both
        order = self.order(inputs)
        return full.reshape(o * inputs, -1)[order][:, order]


def belief(mode: Tensor, hessian: Tensor) -> Tensors:
    """Return the Gaussian around a mode [D] with this Hessian [D, D] as a belief of
    `FullGaussian`.
    """
    return {**FullGaussian().of_natural(hessian, hessian @ mode), "loc": mode}


@dataclass(frozen=True)
class LocalHeads:
    """Hold what clients know of their last layers when they are asked.

    Args:
        rows: Each client's rows on the question's split; None without any.
        train: Each client's training rows.
        ids: The clients' numbers in the federation, [J].
    """

    rows: Sequence[Rows | None]
    train: Sequence[Rows]
    ids: np.ndarray


@dataclass(frozen=True)
class Hierarchy:
    """A survey of clients' heads, which finds centre and tau; it ends with `centre` [D] and `tau`,
    one for each tensor.

    Args:
        head: The layer.
        sizes: Numbers of weights of its tensors, whose sum is D.
        start_at: Centre at first, [D].
    """

    head: Head
    sizes: tuple[int, ...]
    start_at: Tensor
    split = "train"

    def start(self, about: Any, /) -> Tensors:
        """Return centre and tau at first: of each tensor the root mean square of its weights."""
        parts = self.start_at.split(self.sizes)
        tau = torch.stack([part.square().mean().sqrt().clamp_min(1e-2) for part in parts])
        centre, tau = self.start_at.double(), tau.double()
        return {"centre": centre, "tau": tau, "width": tau, "n_asked": torch.tensor(0)}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of one client's answer, D^2 numbers and some."""
        d, t = len(state["centre"]), len(self.sizes)
        return {
            "n_clients": (),
            "pull": (d,),
            "information": (d, d),
            "square": (t,),
            "known": (t,),
        }

    def answer(self, state: Tensors, local: LocalHeads) -> Tensors:
        """Return the clients' answers, [J, ...]."""
        tau = state["tau"].repeat_interleave(torch.tensor(self.sizes))
        precision, found = tau**-2, []
        for rows in local.train:
            mode, hessian = self.head.posterior(rows, state["centre"], tau)
            covariance = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
            away = mode - state["centre"]
            known = 1 - covariance.diagonal() * precision
            found.append(
                {
                    "n_clients": torch.tensor(1),
                    "pull": precision * away,
                    "information": precision.diag() - precision[:, None] * covariance * precision,
                    "square": self._by_tensor(away**2),
                    "known": self._by_tensor(known),
                }
            )
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Make a step of the centre, of each tau, and of each width of the centre's own prior."""
        weak = (state["width"] ** -2).repeat_interleave(torch.tensor(self.sizes))
        factor = torch.linalg.cholesky(total["information"] + weak.diag())
        gradient = total["pull"] - weak * state["centre"]
        move = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        centre = state["centre"] + move
        known = 1 - weak * torch.cholesky_inverse(factor).diagonal()
        tau = _towards(state["tau"], total["square"], total["known"])
        width = _towards(state["width"], self._by_tensor(centre**2), self._by_tensor(known))
        promised = float(gradient @ move) / 2
        asked = state["n_asked"] + 1
        after = {"centre": centre, "tau": tau, "width": width, "n_asked": asked}
        before, now = (torch.cat([one["tau"], one["width"]]) for one in (state, after))
        # What the data know a tenth of a weight of goes on towards 0, and changes nothing.
        idle = torch.cat([total["known"], self._by_tensor(known)]) < 0.1
        settled = idle | ((now / before).log().abs() < CLOSE)
        done = promised < CLOSE * float(total["n_clients"]) and bool(settled.all())
        return after, done or int(asked) >= MOST

    def _by_tensor(self, values: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in values.split(self.sizes)])


def _towards(width: Tensor, square: Tensor, known: Tensor) -> Tensor:
    """Return MacKay's next standard deviations, at most a factor e off the present ones."""
    ratio = (square / known.clamp_min(1e-300)).sqrt() / width
    return (width * ratio.clamp(math.exp(-1), math.e)).clamp_min(SMALL)


@dataclass(frozen=True)
class Scaled:
    """A survey of validation rows, which chooses by their negative log likelihood how wide the
    prior of heads is, and whether the mean or draws predict.

    It ends with `loss`, [2, K] in nats, a sum over all rows, of the mean and of draws for each
    multiple of tau.

    Args:
        head: The layer.
        sizes: As of `Hierarchy`.
        centre: The centre, [D].
        tau: Of each tensor.
        draws: Number S of draws.
        seed: Seed of the draws.
    """

    head: Head
    sizes: tuple[int, ...]
    centre: Tensor
    tau: Tensor
    draws: int
    seed: int
    split = "validation"

    def start(self, about: Any, /) -> Tensors:
        """Return nothing."""
        return {}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"loss": (2, len(SCALES))}

    def answer(self, state: Tensors, local: LocalHeads) -> Tensors:
        """Return the clients' answers, [J, ...]."""
        tau = self.tau.repeat_interleave(torch.tensor(self.sizes))
        found = torch.zeros(len(local.ids), 2, len(SCALES), dtype=torch.float64)
        likelihood = self.head.likelihood
        for j, (rows, train) in enumerate(zip(local.rows, local.train, strict=True)):
            if rows is None:
                continue
            rng = generator(self.seed, Purpose.POSTERIOR, client=int(local.ids[j]) + 1)
            shape = (self.draws, len(rows.features), self.head.outputs)
            noise = torch.from_numpy(rng.standard_normal(shape))
            for k, scale in enumerate(SCALES):
                mode, hessian = self.head.posterior(train, self.centre, scale * tau)
                outputs = rows.features @ self.head.matrix(mode).T
                plain = likelihood.nll_and_slope(outputs, rows.y)[0]
                drawn = predictive(likelihood, outputs, self.head.spread(rows, hessian), noise)
                found[j, :, k] = torch.stack([plain.sum(), nll_of_predictive(drawn, rows.y).sum()])
        return {"loss": found}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the sums."""
        return total, True
