"""Newton's method on sums over sites: a step for each question, halved where the sum rose."""

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors

ENOUGH = 1e-10
"""Converged when the expected decrease of a step is below this value, in nats. That step is still
taken, and one more question returns the Hessian there."""
SURE = 1e-5
"""Below this expected decrease, in nats, Newton's steps converge. A rise after such a step is
rounding, for example of secure sums, and does not halve it.
"""
ROUNDING = 1e-11
"""Relative rise of the sum that counts as rounding."""


def begin(start: Tensor) -> Tensors:
    """Return the state before the first question, at the parameters `start` [q]."""
    size = len(start)
    return {
        "theta": start,
        "best": torch.zeros(size, dtype=torch.float64),
        "loss": torch.tensor(torch.inf, dtype=torch.float64),
        "hessian": torch.zeros(size, size, dtype=torch.float64),
        "first": torch.zeros(size, size, dtype=torch.float64),
        "n_halved": torch.tensor(0),
        "promised": torch.tensor(torch.inf, dtype=torch.float64),
    }


def outside(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Return the answer of a site with a row outside the model's range: zeros, and 1 for
    `n_outside`.
    """
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()} | {
        "n_outside": torch.tensor(1.0)
    }


def step(state: Tensors, loss: Tensor, slope: Tensor, hessian: Tensor) -> tuple[Tensors, bool]:
    """Return the next state from the sites' sums at `theta`, and whether it is the minimum.

    If the Hessian is not positive definite, the moduli of its eigenvalues replace them.

    Args:
        state: The state, of `begin` or of the step before.
        loss: The sum, in nats; infinite if theta is outside the model's range.
        slope: Its gradient, [q].
        hessian: Its Hessian, [q, q].

    Raises:
        ValueError: Thirty halvings in a row do not lower the sum.
    """
    promised = float(state["promised"])
    most = state["loss"] + ROUNDING * state["loss"].abs()
    if not loss.isfinite() or (promised >= SURE and loss > most):
        if state["n_halved"] >= 30:
            raise ValueError(
                "the sum over sites does not fall along Newton's step: leave out terms, or give a "
                "weak prior, prior=2.5"
            )
        between = (state["theta"] + state["best"]) / 2
        return state | {"theta": between, "n_halved": state["n_halved"] + 1}, False
    values, vectors, size = eigen(hessian)
    move = -(vectors @ ((vectors.T @ (slope / size)) / values.abs().clamp_min(1e-14))) / size
    here = state["theta"]
    return {
        "theta": here + move,
        "best": here,
        "loss": loss,
        "hessian": hessian,
        "first": hessian if state["loss"].isinf() else state["first"],
        "n_halved": torch.zeros_like(state["n_halved"]),
        "promised": -slope @ move / 2,
    }, promised < ENOUGH or not len(here)


def eigen(hessian: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a Hessian [q, q] in parameter units that make its
    diagonal 1 or -1, and the roots of the original diagonal, [q].
    """
    size = hessian.diagonal().abs().sqrt()
    size = torch.where(size > 0, size, 1.0)
    values, vectors = torch.linalg.eigh((hessian + hessian.T) / 2 / torch.outer(size, size))
    return values, vectors, size
