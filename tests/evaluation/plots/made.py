"""Made-up predictions and histories, and what finds things in a drawing."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("matplotlib")
from matplotlib.axes import Axes


def federation(clients: int = 14, rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Random predictions of clients of different sizes; padded rows are NaN, and client 1 has no
    examples.
    """
    rng = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(clients, rows, 3, generator=rng)).softmax(-1)
    labels = torch.multinomial(probs.flatten(0, 1), 1, generator=rng).view(clients, rows)
    mask = torch.arange(rows) < torch.randint(10, rows, (clients, 1), generator=rng)
    mask[1] = False
    return probs.masked_fill(~mask[..., None], math.nan), labels, mask


def bars(ax: Axes, gid: str) -> list:
    return [patch for patch in ax.patches if patch.get_gid() == gid]


def beneath(ax: Axes) -> Axes:
    """The histogram that shares the diagram's x axis."""
    (histogram,) = [
        a
        for a in ax.figure.axes
        if a.get_label() == "histogram" and a.get_shared_x_axes().joined(a, ax)
    ]
    return histogram


def history(seed: int, rounds: int = 20, every: int = 5) -> dict[str, np.ndarray]:
    """Evaluated every few rounds, NaN between."""
    at = np.arange(1, rounds + 1)
    values = np.random.default_rng(seed).random(rounds)
    return {
        "round": at,
        "personal_accuracy": np.where(at % every == 0, values, math.nan),
        "loss": values,
    }
