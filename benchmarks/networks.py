"""Networks as they come, under FedAvg, FedBN and pFedVEM: examples/networks.py at a size that means
something.

    python benchmarks/networks.py [--quick] [--parts ...] [--seeds ...] [--workers N] [--data-root
    DIR]

ResNet-18 of torchvision's with batch norms, a transformer that reads characters, adapters on a
frozen body, a network of two inputs; the clients and what is measured are those of the example,
whose sizes are in the results. Resumable: finished cells are passed over. Results:
benchmarks/results/networks.json; `python docs/tables.py` writes the page from them.
"""

import argparse
import itertools
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bayesfl.evaluation import report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "networks.json"
example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "networks.py")))


def main() -> None:
    """Runs the cells that are missing, writing each as it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the example's smoke size: shows that it runs; nothing is written",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=list(example.PARTS), default=list(example.PARTS)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument(
        "--workers", type=int, default=1, help="threads that run clients (default: %(default)s)"
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = example.SMOKE if options.quick else example.SIZES
    for part, seed in itertools.product(options.parts, [0] if options.quick else options.seeds):
        if not options.quick and any(
            key.startswith(f"{part}/") and key.endswith(f"/{seed}") for key in finished()
        ):
            continue
        environment, cells = report.environment(), {}
        for title, row in example.run(
            part, sizes[part], seed, options.data_root, options.workers
        ).items():
            print(
                f"{part}/{title}/{seed}: "
                + ", ".join(f"{name} {value:.3f}" for name, value in row.items()),
                flush=True,
            )
            cells[f"{part}/{title}/{seed}"] = {
                "row": row,
                "size": vars(sizes[part]),
                "environment": environment,
            }
        if not options.quick:
            cells = dict(sorted((finished() | cells).items(), key=place))
            report.write_json(RESULTS, {"command": "python benchmarks/networks.py", "cells": cells})


def finished() -> dict[str, Any]:
    """The cells that are in the results now."""
    return json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}


def place(cell: tuple[str, Any]) -> tuple[int, int]:
    """A cell's place in the results: by part and seed."""
    part, _, seed = cell[0].split("/")
    return list(example.PARTS).index(part), int(seed)


if __name__ == "__main__":
    main()
