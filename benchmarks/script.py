"""What the scripts of this folder share: their command line, the folder of their runs, and how
results are written.
"""

import argparse
import json
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.files import atomic_path
from bayesfl.evaluation import report
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions
from bayesfl.study.table import Row

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}


def arguments(doc: str | None, **options: dict[str, Any]) -> argparse.Namespace:
    """Return the command line: `--quick`, and options by the arguments of `add_argument`."""
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
FIGURE: dict[str, Any] = {"action": "store_true", "help": "draw the figure from the results alone"}


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


def cell(run: Row, /, **found: Any) -> dict[str, Any]:
    """Return what the results hold of a run: what was found, and where it was made."""
    return {**found, "environment": run.record.environment}


def predictions(probs: Tensor, labels: Tensor) -> LocalPredictions:
    """Return probabilities [J, N, O] and labels [J, N] as predictions of as many clients."""
    mask = torch.ones(labels.shape, dtype=torch.bool)
    unknown = torch.full(labels.shape, torch.nan)
    found = Predictions(mask=mask, epistemic=unknown, probs=probs, labels=labels)
    return LocalPredictions(*found.rows(), np.arange(len(probs)))


def made() -> dict[str, Any]:
    """Return what makes results; to be asked first, as writing leaves an uncommitted change."""
    return {"command": " ".join(["python", *sys.argv]), "environment": report.environment()}


def saved(name: str) -> dict[str, Any]:
    """Return a script's results; none where they were never made."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(name: str, **parts: Any) -> None:
    """Put parts into a script's results, in which the others stay."""
    report.write_json(RESULTS / f"{name}.json", {**saved(name), **parts})


def write_rows(name: str, rows: dict[str, Any]) -> None:
    """Put rows, which may be measured one by one, into a script's results."""
    write(name, rows=saved(name).get("rows", {}) | rows)


def write_figure(name: str, figure: Any) -> None:
    """Put a figure into the documentation's images."""
    with atomic_path(ROOT / "docs" / "images" / f"{name}.png") as path:
        figure.savefig(path, dpi=110, format="png")


def main(
    doc: str | None,
    name: str,
    results: Callable[..., dict[str, Any]],
    *,
    draw: Callable[[dict[str, Any]], None] | None = None,
    **options: dict[str, Any],
) -> None:
    """Run a script's study and write its results, or draw their figure.

    `results` takes the folder of the runs, quick, jobs and the options, and returns `cells` by key,
    or another part where the option `part` says so.
    """
    given = arguments(doc, jobs=JOBS, **options, **({"figure": FIGURE} if draw else {}))
    if draw and given.figure:
        draw(saved(name))
        return
    more = {option: getattr(given, option) for option in options}
    with runs(name, quick=given.quick) as folder:
        found = results(folder, quick=given.quick, jobs=given.jobs, **more)
    for key, made in found[more.get("part", "cells")].items():
        told = {word: value for word, value in made.items() if word != "environment"}
        print(f"{key}: {json.dumps(told)}")
    if not given.quick:
        write(name, command=f"python benchmarks/{name}.py", **found)
