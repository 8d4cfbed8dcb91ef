"""Measure how long FedPAC's programs take: 100 clients, a program over the weights of 100 heads for
each.

python benchmarks/simplex.py [--quick]

Feature statistics are random, of clients in five groups that are alike, and of clients that all
differ. scipy's SLSQP solves the first few of the same programs, one after another, and its seconds
are scaled; both sides run in turn, in CPU seconds, medians over repetitions. The violation of the
minimum's conditions is the worst over programs, in units of the quadratic's mean diagonal. Results:
benchmarks/results/simplex.json.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bayesfl.composition import simplex
from bayesfl.evaluation import report

RESULTS = Path(__file__).parent / "results" / "simplex.json"
AT_MOST = 0.3  # CPU seconds for all programs


def programs(clients: int, groups: int) -> tuple[Tensor, Tensor]:
    """Q [J, J] and b [J, J] of clients whose statistics are their group's and noise, variances of
    the order 1 / n.
    """
    rng = torch.Generator().manual_seed(0)
    centres = torch.rand(groups, 1280, generator=rng, dtype=torch.float64)
    h = centres[torch.arange(clients) % groups] + 0.05 * torch.randn(
        clients, 1280, generator=rng, dtype=torch.float64
    )
    variance = (0.5 + torch.rand(clients, generator=rng, dtype=torch.float64)) / 100
    gram = h @ h.T
    return gram + torch.diag(variance), gram


def by_slsqp(quadratic: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """One program."""
    scale = quadratic.diagonal().mean()
    start = np.full(len(linear), 1 / len(linear))
    found = minimize(
        lambda a: (a @ quadratic @ a - 2 * linear @ a) / scale,
        start,
        jac=lambda a: 2 * (quadratic @ a - linear) / scale,
        bounds=[(0, 1)] * len(linear),
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-14},
    )
    return found.x


def main() -> None:
    """Runs both sides, prints the table, writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="20 clients, once: shows that it runs; nothing is written",
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    environment = report.environment()
    clients = 20 if quick else 100
    some = 2 if quick else 5
    repetitions = 1 if quick else 7
    rows: dict[str, dict[str, Any]] = {}
    for groups in (5, clients):
        quadratic, linear = programs(clients, groups)
        ours, theirs = [], []
        found = simplex.minimise(quadratic, linear)
        others = np.zeros((some, clients))
        for _ in range(repetitions):
            start = time.process_time()
            found = simplex.minimise(quadratic, linear)
            ours.append(time.process_time() - start)
            start = time.process_time()
            for k in range(some):
                others[k] = by_slsqp(quadratic.numpy(), linear[k].numpy())
            theirs.append((time.process_time() - start) * clients / some)
        row = {
            "cpu_seconds": statistics.median(ours),
            "slsqp_cpu_seconds": statistics.median(theirs),
            "violation": float(simplex.kkt(quadratic, linear, found).max()),
            "slsqp_violation": float(
                simplex.kkt(quadratic, linear[:some], torch.from_numpy(others)).max()
            ),
        }
        rows[f"{groups} groups"] = row
        print(
            f"{clients} programs of {clients} weights, {groups} groups: {row['cpu_seconds']:.3f} "
            f"s (at most {AT_MOST}), violation {row['violation']:.1e}; SLSQP "
            f"{row['slsqp_cpu_seconds']:.1f} s, {row['slsqp_violation']:.1e}",
            flush=True,
        )
    if not quick:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "environment": environment,
            "at_most": AT_MOST,
            "rows": rows,
        }
        report.write_json(RESULTS, record)


if __name__ == "__main__":
    main()
