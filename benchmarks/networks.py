"""Networks as they come, under FedAvg, FedBN and pFedVEM: examples/networks.py at a size that means
something.

    python benchmarks/networks.py [--quick] [--jobs N] [--parts NAME ...]

ResNet-18 of torchvision's with batch norms, a transformer that reads characters, adapters on a
frozen body and by peft on a vision transformer, a network of two inputs; the clients and what is
measured are those of the example, whose sizes are in the results. Results:
benchmarks/results/networks.json; `python docs/tables.py` writes the page from them.
"""

from pathlib import Path
from typing import Any

import script

shown = script.names_of("examples/networks.py")


def results(folder: Path, *, quick: bool, jobs: int, parts: list[str]) -> dict[str, Any]:
    """Every part, seed by seed; the others' stay."""
    cells = {} if quick else script.saved("networks").get("cells", {})
    for part in parts:
        size = (shown.QUICK if quick else shown.SIZES)[part]
        where = {"root": None, "folder": folder, "jobs": jobs}
        for title, run, row in shown.measured(part, size, [0] if quick else [0, 1], **where):
            cells[f"{part}/{title}/{run.seed}"] = script.cell(run, row=row, size=vars(size))
    return {"cells": cells}


if __name__ == "__main__":
    names = {"nargs": "+", "choices": [*shown.PARTS], "default": [*shown.PARTS]}
    script.main(__doc__, "networks", results, parts=names)
