"""Clients' own heads on a common body: last layers $w_j ~ N(centre, diag(tau^2))$, whose hierarchy
is fitted by sums over clients.

The outputs of a network are linear in its last layer, so a client's posterior given centre and tau
has one mode, found by Newton's steps, and the Gaussian around it has the exact Hessian. Let $S_j$
be its covariance, $T = diag(tau^2)$ and $pull_j = T^-1 (w_j - centre)$. Laplace's marginal
likelihood of a client then has, with respect to the centre, the slope $pull_j$ and the information
$M_j = T^-1 - T^-1 S_j T^-1$. With a prior $N(0, W)$ of the centre, Newton's steps give a normal
posterior of the centre given tau, with covariance $A^-1 = (sum M_j + W^-1)^-1$. With respect to the
logarithm of a tensor's tau, the marginal likelihood has the slope

    $sum (w_j - centre)^2 / tau^2 - known + shared$,

    $known = sum tau^2 M_j$, $shared = sum tau^2 M_j A^-1 M_j$,

with sums over clients and the diagonal entries of the tensor's weights; the last term arises
because the centre is integrated out. The curvature is that of the same number of normal variables
with one variance, $2 (known - squares - fit (known - 2 squares))$, with the squares of the tensor's
block of $tau M_j tau$ and $fit = sum (w_j - centre)^2 / tau^2 / known$. The prior of tau is
uniform, so that $log tau$ has a mode.

A point estimate of tau makes intervals too short if the data contain little information on it.
Therefore the posterior is a mixture over a grid of $log tau$ around its mode, and each client's
posterior is the Gaussian with the moments of that mixture; given tau, the centre's covariance adds
$S_j T^-1 A^-1 T^-1 S_j$. If the data determine tau, the grid has one point.

Source: Lindley, Smith, "Bayes estimates for the linear model", JRSS B 34, 1972; Gelman, "Prior
distributions for variance parameters in hierarchical models", Bayesian Analysis 1, 2006, for the
prior of tau; Rue, Martino, Chopin, "Approximate Bayesian inference for latent Gaussian models",
JRSS B 71, 2009, for the grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.curvature.roots import root
from bayesfl.posteriors.linearised import nll_of_predictive, predictive

ENOUGH = 1e-10
"""Maximum gain of a step, in nats, at which a head counts as converged."""
CLOSE = 1e-2
"""The hierarchy counts as converged if no tau changes by more than this share, and the expected
gain of the centre's step is below this number of nats for each client."""
SMALL, MOST = 1e-3, 50
"""Minimum of tau, for heads that do not differ, and maximum number of questions for the mode."""
FREE = 100.0
"""Maximum of tau, as a multiple of the tau at which half of a head comes from the centre: two
clients do not bound the tau of a single weight.
"""
KNOWN = 0.2
"""Maximum relative uncertainty of a tau for which its estimate is used without a grid."""
NODES = (-1.5, 0.0, 1.5)
"""Grid of another tau, in standard deviations of its logarithm."""
SCALES = (0.25, 0.5, 1.0, 2.0)
"""Multiples of tau that are compared on validation data."""
WIDTHS = (0.0, 0.5, 1.0)
"""Multiples of the heads' standard deviations that are compared there for predictions; 0 is the
mean.
"""


@dataclass(frozen=True)
class Rows:
    """Hold the inputs and labels of a network's last layer for a client's rows.

    Args:
        features: The layer's inputs, followed by a column of ones if it has a bias, [n, I], in
            float64.
        y: Labels or targets, [n, ...].
    """

    features: Tensor
    y: Tensor


@dataclass(frozen=True)
class Head:
    """Describe a last layer, whose weights are a vector: [O, I - 1] of its weight, then [O] of its
    bias.

    Args:
        outputs: Number of outputs O.
        bias: Whether it has a bias.
        likelihood: Distribution of y given the outputs.
    """

    outputs: int
    bias: bool
    likelihood: Likelihood

    def matrix(self, w: Tensor) -> Tensor:
        """Return the weights [D] as the matrix that multiplies features, [O, I]."""
        if not self.bias:
            return w.reshape(self.outputs, -1)
        weight, bias = w[: -self.outputs], w[-self.outputs :]
        return torch.cat([weight.reshape(self.outputs, -1), bias[:, None]], 1)

    def order(self, inputs: int) -> Tensor:
        """Return the places of the vector's weights in the matrix [O, I], flattened, [D]."""
        at = torch.arange(self.outputs * inputs).reshape(self.outputs, inputs)
        return at.flatten() if not self.bias else torch.cat([at[:, :-1].flatten(), at[:, -1]])

    def given(self, rows: Rows, centre: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mode [D] of a client's posterior under N(centre, diag(tau^2)), its covariance
        there, [D, D], and Laplace's log marginal likelihood, in nats.

        Args:
            rows: The client's rows.
            centre: The prior's mean, [D].
            tau: Its standard deviations, [D].
        """
        w, precision = centre, tau**-2
        value, slope = self._loss(rows, w)
        for _ in range(100):
            here = value + (precision * (w - centre) ** 2).sum() / 2
            gradient = slope + precision * (w - centre)
            factor = torch.linalg.cholesky(self._hessian(rows, w) + precision.diag())
            move = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
            if float(gradient @ move) < ENOUGH:
                break
            for _ in range(40):
                value, slope = self._loss(rows, w - move)
                if value + (precision * (w - move - centre) ** 2).sum() / 2 <= here:
                    break
                move = move / 2
            w = w - move
        volume = factor.diagonal().log().sum() + tau.log().sum()  # pyright: ignore[reportPossiblyUnboundVariable]
        log_marginal = -here - volume  # pyright: ignore[reportPossiblyUnboundVariable, reportOperatorIssue]
        return w, torch.cholesky_inverse(factor), log_marginal  # pyright: ignore[reportPossiblyUnboundVariable]

    def posterior(self, rows: Rows, prior: Tensors) -> tuple[Tensor, Tensor]:
        """Return mean [D] and covariance [D, D] of a client's posterior.

        Args:
            rows: The client's rows.
            prior: The last state of `Hierarchy`.
        """
        means, covariances = [], []
        for centre, tau, spread in zip(prior["centre"], prior["tau"], prior["spread"], strict=True):
            mode, covariance, _ = self.given(rows, centre, tau)
            by_centre = covariance * tau**-2
            means.append(mode)
            covariances.append(covariance + by_centre @ spread @ by_centre.T)
        mean = prior["weight"] @ torch.stack(means)
        around = torch.stack(means) - mean
        between = (prior["weight"] * around.T) @ around
        return mean, torch.einsum("k,kab->ab", prior["weight"], torch.stack(covariances)) + between

    def spread(self, rows: Rows, covariance: Tensor) -> Tensor:
        """Return the covariances of the outputs of rows, [n, O, O], given that of the weights,
        [D, D].
        """
        inputs = rows.features.shape[1]
        back = self.order(inputs).argsort()
        covariance = covariance[back][:, back].reshape(self.outputs, inputs, self.outputs, inputs)
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
        for a in range(o):  # one at a time, because all at once would need [n, O, O, I]
            weighted = (curvature[:, a, :, None] * features[:, None]).flatten(1)
            full[a] = (features.T @ weighted).reshape(inputs, o, inputs)
        order = self.order(inputs)
        return full.reshape(o * inputs, -1)[order][:, order]


@dataclass(frozen=True)
class LocalHeads:
    """Hold the statistics about their last layers from which clients answer surveys.

    Args:
        rows: Each client's validation rows; None without any.
        train: Each client's training rows.
        ids: The clients' numbers in the federation, [J].
    """

    rows: Sequence[Rows | None]
    train: Sequence[Rows]
    ids: np.ndarray


@dataclass(frozen=True)
class Hierarchy:
    """Survey clients' heads to estimate their common distribution. The last state has K points of
    the hierarchy: `centre` [K, D], `tau` [K, D], the centre's covariance `spread` [K, D, D], and
    the points' probabilities `weight` [K].

    Args:
        head: The layer.
        sizes: Numbers of weights of its tensors, whose sum is D; each has one tau.
        start_at: Initial centre, [D].
    """

    head: Head
    sizes: tuple[int, ...]
    start_at: Tensor
    split = "train"
    reads = "head"
    sums = "the client's head relative to the centre of all"

    def start(self, about: Any, /) -> Tensors:
        """Return the initial centre and tau, the root mean square of each tensor's weights."""
        centre = self.start_at.double()
        parts = centre.split(self.sizes)
        tau = torch.stack([part.square().mean().sqrt().clamp_min(1e-2) for part in parts])
        none = centre.new_zeros(len(centre), len(centre))
        asked = torch.tensor(0)
        return {"centre": centre, "tau": tau, "width": tau, "spread": none, "n_asked": asked}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of one client's answer, about D^2 numbers."""
        d, t = len(state["centre"]), len(self.sizes)
        return {
            "n_clients": (),
            "log_marginal": (),
            "pull": (d,),
            "information": (d, d),
            "square": (t,),
            "known": (t,),
            "shared": (t,),
            "squares": (t,),
        }

    def answer(self, state: Tensors, local: LocalHeads) -> Tensors:
        """Return the clients' answers, [J, ...]."""
        tau, found = self._each(state["tau"]), []
        precision = tau**-2
        for rows in local.train:
            mode, covariance, log_marginal = self.head.given(rows, state["centre"], tau)
            away = mode - state["centre"]
            information = precision.diag() - precision[:, None] * covariance * precision
            shared = ((information @ state["spread"]) * information).sum(1)
            squares = ((tau[:, None] * information * tau) ** 2).split(self.sizes)
            blocks = [rows.split(self.sizes, 1)[place] for place, rows in enumerate(squares)]
            found.append(
                {
                    "n_clients": torch.tensor(1),
                    "log_marginal": log_marginal,
                    "pull": precision * away,
                    "information": information,
                    "square": self._by_tensor(away**2),
                    "known": self._by_tensor(tau**2 * information.diagonal()),
                    "shared": self._by_tensor(tau**2 * shared),
                    "squares": torch.stack([block.sum() for block in blocks]),
                }
            )
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Make a step of the centre, of each tau, and of each width of the centre's own prior; or,
        after these have converged, weight a point of the grid and move to the next.
        """
        weak = self._each(state["width"] ** -2)
        factor = torch.linalg.cholesky(total["information"] + weak.diag())
        gradient = total["pull"] - weak * state["centre"]
        move = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        centre, spread = state["centre"] + move, torch.cholesky_inverse(factor)
        promised = float(gradient @ move) / 2
        if "grid" in state:
            log = total["log_marginal"] - (weak * state["centre"] ** 2).sum() / 2 + promised
            log = log - factor.diagonal().log().sum() + state["tau"].log().sum()
            return self._weighed(state, centre, spread, log)
        count = total["n_clients"] * torch.tensor(self.sizes)
        share = (total["known"] / count).clamp(1e-9, 1 - 1e-9)
        slope = total["square"] / state["tau"] ** 2 - total["known"] + total["shared"] + 1
        fit, squares = total["square"] / state["tau"] ** 2 / total["known"], total["squares"]
        sure = 2 * (total["known"] - squares - fit * (total["known"] - 2 * squares))
        sure = torch.maximum(sure, squares).clamp_min(1e-9)
        alike = state["tau"] * ((1 - share) / share).sqrt()
        tau = torch.minimum(_moved(state["tau"], slope / sure), FREE * alike)
        of_centre = self._by_tensor(1 - weak * spread.diagonal())
        narrower = self._by_tensor(centre**2) / state["width"] ** 2 - of_centre
        width = _moved(state["width"], narrower / (2 * of_centre.clamp_min(1e-300)))
        asked = state["n_asked"] + 1
        after = {"centre": centre, "tau": tau, "width": width, "spread": spread, "n_asked": asked}
        # A tensor with information on a tenth of a weight moves on towards 0 without effect.
        settled = (of_centre < 0.1) | ((width / state["width"]).log().abs() < CLOSE)
        settled &= (tau / state["tau"]).log().abs() < CLOSE
        close = promised < CLOSE * float(total["n_clients"]) and bool(settled.all())
        if not close and int(asked) < MOST:
            return after, False
        return after | self._grid(tau, sure.rsqrt()), False

    def _grid(self, tau: Tensor, doubt: Tensor) -> Tensors:
        """Return the grid points of tau around its mode [T], from the standard deviations of its
        logarithms, and an empty list of results at them.
        """
        parts = [
            t * (torch.tensor(NODES if sd > KNOWN else (0.0,)).double() * sd.clamp_max(1)).exp()
            for t, sd in zip(tau, doubt, strict=True)
        ]
        grid = torch.cartesian_prod(*parts).reshape(-1, len(tau)).clamp_min(SMALL)
        d = len(self.start_at)
        empty = {"centres": (0, d), "spreads": (0, d, d), "logs": (0,)}
        found = {name: tau.new_zeros(shape) for name, shape in empty.items()}
        return {"grid": grid, "tau": grid[0], **found}

    def _weighed(
        self, state: Tensors, centre: Tensor, spread: Tensor, log: Tensor
    ) -> tuple[Tensors, bool]:
        """Return the state after a point of the grid: the next point, or all with their weights."""
        new = {"centres": centre, "spreads": spread, "logs": log}
        state = state | {name: torch.cat([state[name], t[None]]) for name, t in new.items()}
        place = len(state["logs"])
        if place < len(state["grid"]):
            return state | {"tau": state["grid"][place]}, False
        weight = state["logs"].softmax(0)
        kept = weight > 1e-3 * weight.max()
        return {
            "centre": state["centres"][kept],
            "tau": self._each(state["grid"][kept]),
            "spread": state["spreads"][kept],
            "weight": weight[kept] / weight[kept].sum(),
        }, True

    def _each(self, values: Tensor) -> Tensor:
        """Repeat each tensor's number [..., T] for each of its weights, [..., D]."""
        return values.repeat_interleave(torch.tensor(self.sizes), -1)

    def _by_tensor(self, values: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in values.split(self.sizes)])


def _moved(width: Tensor, step: Tensor) -> Tensor:
    """Return standard deviations after a step of their logarithms, limited to a factor e."""
    return (width * step.clamp(-1, 1).exp()).clamp_min(SMALL)


@dataclass(frozen=True)
class Scaled:
    """Survey heads to select, by the negative log likelihood of validation rows, the width of the
    heads' prior and the share of the heads' uncertainty in predictions. The last state has the
    multiples of tau, `scale`, and of the heads' standard deviations, `width`: 1 if no client has
    such rows.

    Args:
        head: The layer.
        prior: The last state of `Hierarchy`.
    """

    head: Head
    prior: Tensors
    split = "train"
    reads = "head"
    sums = "losses of validation rows under each width of prior and head, in nats"

    def start(self, about: Any, /) -> Tensors:
        """Return an empty state."""
        return {}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of an answer, a sum over rows for each pair, in nats."""
        return {"nll": (len(WIDTHS), len(SCALES))}

    def answer(self, state: Tensors, local: LocalHeads) -> Tensors:
        """Return the clients' answers, [J, ...]."""
        found = torch.zeros(len(local.ids), len(WIDTHS), len(SCALES), dtype=torch.float64)
        for j, (rows, train) in enumerate(zip(local.rows, local.train, strict=True)):
            if rows is None:
                continue
            for k, scale in enumerate(SCALES):
                prior = self.prior | {"tau": scale * self.prior["tau"]}
                mean, covariance = self.head.posterior(train, prior)
                outputs = rows.features @ self.head.matrix(mean).T
                spread = self.head.spread(rows, covariance)
                for w, width in enumerate(WIDTHS):
                    predicted = predictive(self.head.likelihood, outputs, width**2 * spread)
                    found[j, w, k] = nll_of_predictive(predicted, rows.y).sum()
        return {"nll": found}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the multiples with the smallest sum."""
        if not total["nll"].any():
            return {"scale": torch.tensor(1.0), "width": torch.tensor(1.0)}, True
        width, scale = divmod(int(total["nll"].argmin()), len(SCALES))
        return {"scale": torch.tensor(SCALES[scale]), "width": torch.tensor(WIDTHS[width])}, True
