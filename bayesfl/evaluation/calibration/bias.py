"""A bias on the logits of each client, under a prior with an estimated variance."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bayesfl.base.options import Range, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import NotNegative
from bayesfl.base.warning import warn
from bayesfl.evaluation.calibration.steps import changed, refuse_numbers
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs

_STEPS = 100
_HALVINGS = 30
_ENOUGH = 1e-10
"""Largest slope, in nats, at which Newton's method counts as converged."""
_ROUNDING = 1e-13
"""Relative increase of a loss that is attributed to floating-point error."""


LEAST, LARGEST = 1e-4, 1e2
"""Smallest and largest prior variance considered."""
RISE = 1e-3
"""Smallest increase of a client's mean loss, in nats, at which it keeps 0."""
MOST, _CLOSE = 20, 0.02
"""Maximum number of questions, and the step of the variance's logarithm at which they end."""


@dataclass(frozen=True, kw_only=True)
@declared
class Bias:
    """Add a vector b_j [O] to each client's logits, for clients whose class frequencies differ.

    $b_j$ maximises $sum_i log softmax(z_i + b)_{y_i} - |b|^2 / 2v$ over the client's examples,
    $z_i$ the logits after the preceding steps. The prior variance v maximises Laplace's
    approximation of the clients' marginal likelihood:
    $v = sum_j |b_j|^2 / sum_j tr(H_j (H_j + I / v)^-1)$, $H_j$ the curvature at $b_j$ (MacKay,
    "Bayesian interpolation", Neural Computation 4, 1992). About five questions find it; each needs
    two numbers from every client. If clients are alike, v and every b are near 0.

    A client keeps $b_j = 0$, with a warning, if a bias does not generalise to its own rows: fitted
    to every second row, b increases the mean loss of the others by more than two standard errors,
    and by more than 0.001 nats. A client without examples also has 0.

    Args:
        split: The split for the fit.
        variance: The prior variance v; None to estimate it. With a number, clients send nothing.

    Example:
        >>> clients = bf.data.label_groups("digits", clients=4, validation=0.2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=1, evaluate_every=None)
        >>> local, rows = result.calibrate(bf.calibration.Bias()), clients.test
        >>> local.predict(rows).summary(rows)["nll"] < result.predict(rows).summary(rows)["nll"]
        True
    """

    split: str = "validation"
    variance: Annotated[float | None, Range(0)] = None

    def start(self, outputs: Outputs) -> Tensors:
        """Return the initial variance, 1 if it is estimated, and the state of its secant steps.

        Raises:
            ValueError: The predictions have no classes.
        """
        refuse_numbers(self, outputs)
        found = {
            "variance": 1.0 if self.variance is None else self.variance,
            "before": math.nan,
            "move": math.nan,
            "n_asked": 0.0,
        }
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of |b|^2 and of the number of parameters that the rows determine; no
        question if the variance is given.
        """
        asked = {"square": NotNegative(), "determined": NotNegative()}
        return asked if self.variance is None else {}

    def answer(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return |b_j|^2 and tr(H_j (H_j + I / v)^-1), [J] each."""
        logits, labels, clients = local.labelled
        b, curvature = _fitted(logits, labels, clients, state["variance"])
        left = torch.linalg.inv(curvature).diagonal(dim1=1, dim2=2) / state["variance"]
        return {"square": b.square().sum(-1), "determined": (1 - left).sum(-1).clamp_min(0)}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the next variance, by a secant step on the change that the formula gives, and
        whether it is the last.
        """
        if self.variance is not None:
            return state, True
        now = state["variance"].log()
        ends = math.log(LEAST), math.log(LARGEST)
        move = (total["square"] / total["determined"]).log().nan_to_num(nan=0.0) - now
        slope = (move - state["move"]) / (now - state["before"])
        step = -move / slope if float(slope) < 0 else move
        then = (now + step.clamp(-2, 2)).clamp(*ends)
        asked = state["n_asked"] + 1
        found = {"variance": then.exp(), "before": now, "move": move, "n_asked": asked}
        return found, bool((then - now).abs() < _CLOSE) or float(asked) >= MOST

    def settle(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return every client's b_j, [J, O].

        Warns:
            UserWarning: A client keeps 0.
        """
        logits, labels, clients = local.labelled
        b, _ = _fitted(logits, labels, clients, state["variance"])
        owner, more = clients.owner, torch.zeros(len(labels), dtype=torch.float64)
        second = (torch.arange(len(owner)) - clients.starts[owner]) % 2 == 1
        for fold in (second, ~second):
            other, _ = _fitted(logits[fold], labels[fold], clients.kept(fold), state["variance"])
            moved = other[owner]
            found = (logits + moved).logsumexp(-1) - moved.gather(-1, labels[:, None]).squeeze(-1)
            more = torch.where(fold, more, found)
        mean = clients.mean(more)
        spread = clients.sum((more - mean[owner]).square()) / (clients.counts - 1)
        kept = mean > (2 * (spread / clients.counts).sqrt()).clamp_min(RISE)
        if worse := int(kept.sum()):
            warn(
                f"Bias raises the loss of rows to which it was not fitted at {worse} of "
                f"{len(clients)} clients, which keep 0"
            )
        return {"bias": b.masked_fill(kept[:, None], 0.0)}

    def apply(self, state: Tensors, own: Tensors, local: LocalPredictions) -> Predictions:
        """Return predictions with softmax(log(probs) + b_j)."""
        return changed(local.predictions, local.logits + local.of_rows(own["bias"]))


def _fitted(
    logits: Tensor, labels: Tensor, clients: Segments, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Return every client's b [J, O], and the curvature there, including the prior's, [J, O, O].

    The objective is strictly convex; Newton's steps are halved until they decrease it.
    """
    counts, owner = clients.counts.tolist(), clients.owner
    seen = clients.count(labels, logits.shape[-1])

    def loss(b: Tensor) -> Tensor:
        z = (logits + b[owner]).logsumexp(-1)
        return clients.sum(z) - (seen * b).sum(-1) + b.square().sum(-1) / (2 * variance)

    b = torch.zeros_like(seen)
    now = loss(b)
    for _ in range(_STEPS):
        probs = (logits + b[owner]).softmax(-1)
        total = clients.sum(probs)
        slope = total - seen + b / variance
        products = torch.stack([p.T @ p for p in probs.split(counts)])
        curvature = torch.diag_embed(total + 1 / variance) - products
        if float(slope.abs().max()) <= _ENOUGH:
            break
        step = torch.linalg.solve(curvature, slope.unsqueeze(-1)).squeeze(-1)
        then, most = loss(b - step), now + _ROUNDING * (1 + now.abs())
        for _ in range(_HALVINGS):
            worse = then > most
            if not worse.any():
                break
            step = torch.where(worse.unsqueeze(-1), step / 2, step)
            then = loss(b - step)
        b, now = b - step, then
    return b, curvature  # pyright: ignore[reportPossiblyUnboundVariable]
