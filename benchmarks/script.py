"""What the scripts of this folder share: their command line, the folder of their runs, and where
results lie.
"""

import argparse
import runpy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def arguments(doc: str | None, **options: dict[str, Any]) -> argparse.Namespace:
    """Return the command line.

    Args:
        doc: What `--help` shows.
        **options: Arguments of `add_argument` for each option beside `--quick`, by its name.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = "the smallest size, which shows that it runs; no results are written"
    parser.add_argument("--quick", action="store_true", help=words)
    for name, given in options.items():
        parser.add_argument(f"--{name}", **given)
    torch.set_num_threads(1)
    return parser.parse_args()


JOBS: dict[str, Any] = {"type": int, "default": 1, "help": "number of runs at a time"}
FIGURE: dict[str, Any] = {
    "action": "store_true",
    "help": "draw the figure from the results that are there, and run nothing",
}


@contextmanager
def runs(name: str, *, quick: bool) -> Iterator[Path]:
    """Give the folder of a script's runs, from which it goes on; a quick one begins anew."""
    if not quick:
        yield ROOT / "runs" / "benchmarks" / name
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def names_of(path: str) -> SimpleNamespace:
    """Return what a script defines, by its path in the repository."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / path)))
