"""Measure how long FedPAC's programs take: 100 clients, a program over the weights of 100 heads for
each.

python benchmarks/simplex.py [--quick]

Feature statistics are random, of clients in five groups that are alike, and of clients that all
differ. scipy's SLSQP solves the first few of the same programs, one after another, and its seconds
are scaled; both sides run in turn, in CPU seconds, medians over repetitions. The violation of the
minimum's conditions is the worst over programs, in units of the quadratic's mean diagonal. Results:
benchmarks/results/simplex.json.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import script
import timing
import torch
from scipy.optimize import minimize
from torch import Tensor

from bayesfl.composition import simplex

AT_MOST = 0.3  # CPU seconds for all programs


def kkt(quadratic: Tensor, linear: Tensor, weights: Tensor) -> Tensor:
    """Measure how far `weights` [C, K] are from a minimum, [C]: the worst violation of its
    conditions, in units of Q's mean diagonal.

    With g = Q a - b and nu = a' g the conditions are g - nu >= 0, with equality where a > 0, and
    that a lies on the simplex.
    """
    slope = weights @ quadratic - linear
    multipliers = slope - (weights * slope).sum(-1, keepdim=True)
    worst = torch.maximum((-multipliers).amax(-1), (weights * multipliers).abs().amax(-1))
    off = torch.maximum((weights.sum(-1) - 1).abs(), (-weights).amax(-1))
    return torch.maximum(worst / quadratic.diagonal().mean(), off).clamp_min(0)


def programs(clients: int, groups: int) -> tuple[Tensor, Tensor]:
    """Q [J, J] and b [J, J] of groups with noise, variances of the order 1 / n."""
    rng = torch.Generator().manual_seed(0)
    centres = torch.rand(groups, 1280, generator=rng, dtype=torch.float64)
    noise = torch.randn(clients, 1280, generator=rng, dtype=torch.float64)
    h = centres[torch.arange(clients) % groups] + 0.05 * noise
    variance = (0.5 + torch.rand(clients, generator=rng, dtype=torch.float64)) / 100
    gram = h @ h.T
    return gram + torch.diag(variance), gram


def by_slsqp(quadratic: Tensor, linear: Tensor) -> Tensor:
    """The solutions [J, J] of programs, one after another."""
    q, scale = quadratic.numpy(), float(quadratic.diagonal().mean())

    def solution(b: np.ndarray) -> np.ndarray:
        return minimize(
            lambda a: (a @ q @ a - 2 * b @ a) / scale,
            np.full(len(b), 1 / len(b)),
            jac=lambda a: 2 * (q @ a - b) / scale,
            bounds=[(0, 1)] * len(b),
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like},
            method="SLSQP",
            options={"maxiter": 1000, "ftol": 1e-14},
        ).x

    return torch.from_numpy(np.stack([solution(b) for b in linear.numpy()]))


def measure(clients: int, some: int, groups: int, repetitions: int) -> dict[str, float]:
    """CPU seconds of both sides, the other's of `some` programs, and violations."""
    quadratic, linear = programs(clients, groups)
    ours = partial(simplex.minimise, quadratic, linear)
    theirs = partial(by_slsqp, quadratic, linear[:some])
    found, others = ours(), theirs()

    def clocked(work: Callable[[], Tensor]) -> Callable[[], float]:
        return partial(timing.seconds, work, clock=time.process_time)

    sides = {"ours": clocked(ours), "theirs": clocked(theirs)}
    seconds = timing.in_turn(sides, repetitions)
    return {
        "cpu_seconds": statistics.median(seconds["ours"]),
        "slsqp_cpu_seconds": statistics.median(seconds["theirs"]) * clients / some,
        "violation": float(kkt(quadratic, linear, found).max()),
        "slsqp_violation": float(kkt(quadratic, linear[:some], others).max()),
    }


def main() -> None:
    quick = script.arguments(__doc__).quick
    made, rows = script.made(), {}
    clients, some, repetitions = (20, 2, 1) if quick else (100, 5, 7)
    for groups in (5, clients):
        name = f"{groups} groups"
        rows[name] = measure(clients, some, groups, repetitions)
        timing.show(f"{clients} programs of {clients} weights, {name}", rows[name])
    if not quick:
        script.write("simplex", **made, at_most=AT_MOST, rows=rows)


if __name__ == "__main__":
    main()
