"""Networks as they come, under FedAvg, FedBN and pFedVEM: examples/networks.py at a size that means
something.

    python benchmarks/networks.py [--quick] [--parts ...] [--seeds ...] [--jobs N] [--data-root DIR]

ResNet-18 of torchvision's with batch norms, a transformer that reads characters, adapters on a
frozen body, a network of two inputs; the clients and what is measured are those of the example,
whose sizes are in the results. Results: benchmarks/results/networks.json; `python docs/tables.py`
writes the page from them.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from recording import cell, example, record

shown = example("networks")


def results(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every part, seed by seed."""
    cells = {}
    for part in options.parts:
        size = (shown.QUICK if options.quick else shown.SIZES)[part]
        where = {"root": options.data_root, "folder": folder, "jobs": options.jobs}
        for title, run, row in shown.measured(part, size, options.seeds, **where):
            cells[f"{part}/{title}/{run.seed}"] = cell(run, row=row, size=vars(size))
    return {"cells": cells}


if __name__ == "__main__":
    parts = list(shown.PARTS)
    record("networks", __doc__, results, seeds=[0, 1], parts=(parts, f"of {', '.join(parts)}"))
