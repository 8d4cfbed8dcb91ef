"""What benchmarks of studies have in common: the options of their command lines, the examples whose
methods they take, and the file of their results.
"""

import argparse
import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bayesfl.evaluation import report
from bayesfl.study.table import Row

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))
from command_line import arguments  # noqa: E402


def example(name: str) -> SimpleNamespace:
    """What a script of examples/ defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / f"{name}.py")))


def cell(run: Row, /, **found: Any) -> dict[str, Any]:
    """What the results hold of a run: what was found, and where it was made."""
    return {**found, "environment": run.record.environment}


def record(
    name: str,
    doc: str | None,
    make: Callable[[argparse.Namespace, Path], dict[str, Any]],
    seeds: list[int],
    **more: Any,
) -> None:
    """Make a benchmark's results as its command line says, print them and write them.

    Runs are kept in runs/benchmarks/NAME, from which an interrupted command goes on; a run whose
    file is deleted is made anew. With `--quick` they are thrown away, and nothing is written.

    Args:
        name: Name of the results' file in benchmarks/results.
        doc: The script's docstring.
        make: (options, folder of runs) -> results, with `cells` by key.
        seeds: The seeds by default; `--quick` takes the first.
        **more: Further options, as of `arguments`.
    """
    options = arguments(doc, quick=False, seeds=seeds, jobs=1, data_root=None, **more)
    options.seeds = options.seeds[:1] if options.quick else options.seeds
    folder = ROOT / "runs" / "benchmarks" / name
    with tempfile.TemporaryDirectory() as scratch:
        results = make(options, Path(scratch) if options.quick else folder)
    for key, found in results["cells"].items():
        told = {word: value for word, value in found.items() if word != "environment"}
        print(f"{key}: {json.dumps(told)}")
    if not options.quick:
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        report.write_json(path, {"command": " ".join(["python", *sys.argv]), **results})
