"""A paper's tables by one command.

    python -m benchmarks.papers NAME [--quick | --full] [--device cuda] [--jobs N] [--merge FILE]

A cell is one run: a method, a choice of its options or the chosen one, and a seed. Cells that the
results hold from a clean tree, at the options that are chosen now, are not run again. Every other
is written to benchmarks/results/papers as soon as it is done, and one that was interrupted goes on
from its last checkpoint. So a table can be made over days, and on several machines, whose cells
`--merge` puts together. Options are chosen by validation data with the first seed, and stay; the
last round is measured.
"""

import argparse
import importlib
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import torch

import bayesfl as bf
from bayesfl.evaluation import report
from bayesfl.study.grid import combinations, grids
from benchmarks import script
from benchmarks.papers import Part, Size

NAMES = sorted(file.stem for file in Path(__file__).parent.glob("[!_]*.py"))
MADE = ("date", "cpu", "cores", "accelerator", "torch", "commit")
Cells = dict[str, dict[str, Any]]


class Cell(NamedTuple):
    """One run: a part of a paper, a method, its options (None for those that are chosen), and a
    seed.
    """

    part: str
    method: str
    options: tuple[tuple[str, float], ...] | None
    seed: int

    @property
    def key(self) -> str:
        """Return its name in the results."""
        if self.options is None:
            return f"{self.part}/{self.method}/{self.seed}"
        words = ", ".join(f"{name} {value:g}" for name, value in self.options)
        return f"{self.part}/{self.method}/validation/{words}"


def module(paper: str) -> Any:
    """Return a paper's file."""
    return importlib.import_module(f"benchmarks.papers.{paper}")


def tried(name: str, part: Part, method: str) -> list[Cell]:
    """Return the cells among which a method's options are chosen; none where there is no choice."""
    grid = grids(part.methods, part.grid)[0][method]
    found = [tuple(one.items()) for one in combinations(grid)]
    return [Cell(name, method, one, part.seeds[0]) for one in found if len(found) > 1]


def chosen(name: str, part: Part, method: str, cells: Cells) -> dict[str, float]:
    """Return the options with the best validation measure, as the results have it."""
    found = [cells[cell.key] for cell in tried(name, part, method)]
    if not found:
        grid = grids(part.methods, part.grid)[0][method]
        return {option: values[0] for option, values in grid.items()}
    sign = -1 if report.better(part.by) == "lower" else 1
    return max(found, key=lambda one: sign * one.get("value", -sign * math.inf))["options"]


def done(
    cell: Cell, options: dict[str, float], *, paper: str, size: Size, device: str, folder: Path
) -> dict[str, Any]:
    """Run a cell, and return what the results hold of it."""
    warnings.simplefilter("ignore", UserWarning)  # temperatures at an end of their range
    part = module(paper).parts(size)[cell.part]
    tries = cell.options is not None
    study = bf.Study(
        data=part.choice if tries and part.choice else part.data,
        model=part.model,
        methods={cell.method: partial(part.methods[cell.method], **options)},
        seeds=[cell.seed],
        rounds=part.rounds,
        **{"evaluate_every": part.rounds, "device": device, **part.settings}
        | part.own.get(cell.method, {}),
    )
    table = study.run(folder, keep="result", every=max(1, part.rounds // 10), progress=False)
    (run,) = table.rows
    if run.record.error is not None:
        found: dict[str, Any] = {
            "error": f"{run.record.error['class']}: {run.record.error['text']}"
        }
    elif tries:
        found = {"value": run.measures("last", None)[part.by]}
    else:
        found = part.measure(run, run.load())
        found |= {"data": run.record.data, "often": run.record.often}
    return {"options": options, **found, "environment": run.record.environment}


def waves(parts: dict[str, Part]) -> Iterator[list[Cell]]:
    """Return all cells, in an order in which each list needs only those before it: part by part the
    choices, then seed by seed.
    """
    for name, part in parts.items():
        yield [cell for method in part.methods for cell in tried(name, part, method)]
        for seed in part.seeds:
            yield [Cell(name, method, None, seed) for method in part.methods]


def results(paper: str, size: Size) -> str:
    """Return the name of a paper's results."""
    return f"papers/{paper}" + ("_full" if size == "full" else "")


def write(paper: str, size: Size, cells: Cells) -> None:
    """Write cells, with what was published and what is planned."""
    script.write(
        results(paper, size),
        command=f"python -m benchmarks.papers {paper}" + (" --full" if size == "full" else ""),
        published=module(paper).PUBLISHED,
        place=module(paper).PLACE,
        plan={
            name: {"methods": list(part.methods), "seeds": list(part.seeds), "rounds": part.rounds}
            for name, part in module(paper).parts(size).items()
        },
        cells=cells,
    )


def tree() -> str | None:
    """Return the commit of the working tree, which results that are written do not change."""
    commit = report.environment()["commit"]
    asked = ["git", "status", "--porcelain", "--untracked-files=no", ".", ":!benchmarks/results"]
    changed = subprocess.run(asked, cwd=script.ROOT, capture_output=True, text=True).stdout
    return commit if changed or commit is None else commit.removesuffix("-dirty")


def run(paper: str, size: Size, *, device: str, jobs: int, folder: Path) -> None:
    """Run the cells that are left, and write each as it is done."""
    parts, commit = module(paper).parts(size), tree()
    cells: Cells = {} if size == "quick" else script.saved(results(paper, size)).get("cells", {})

    def options(cell: Cell) -> dict[str, float]:
        return dict(cell.options or chosen(cell.part, parts[cell.part], cell.method, cells))

    def there(cell: Cell) -> bool:
        """Return whether the results hold the cell, at the options that are chosen now, from a
        clean tree.
        """
        known = cells.get(cell.key)
        return (
            known is not None
            and not str(known["environment"]["commit"]).endswith("-dirty")
            and (cell.options is not None or known["options"] == options(cell))
        )

    def call(cell: Cell) -> tuple[Cell, dict[str, Any]]:
        where: dict[str, Any] = {"paper": paper, "size": size, "device": device, "folder": folder}
        return cell, done(cell, options(cell), **where)

    every = list(waves(parts))
    left = [cell for wave in every for cell in wave if cell.key not in cells]
    hours = sum(parts[cell.part].seconds for cell in left) / 3600 / jobs
    print(f"{len(left)} runs are left, about {hours:.1f} hours", flush=True)
    if size != "quick":
        write(paper, size, cells)
    for wave in every:
        parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
        todo = [cell for cell in wave if not there(cell)]
        for cell, found in parallel(joblib.delayed(call)(cell) for cell in todo):
            made = found["environment"]
            if str(made["commit"]).removesuffix("-dirty") == commit:
                made = made | {"commit": commit}
            found["environment"] = {key: made[key] for key in MADE}
            cells[cell.key] = found
            shown = {key: value for key, value in found.items() if key != "environment"}
            print(f"{cell.key}: {json.dumps(shown)}", flush=True)
            if size != "quick":
                write(paper, size, cells)


def main() -> None:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paper", choices=NAMES)
    sizes = parser.add_mutually_exclusive_group()
    for size, words in (
        ("quick", "toy size, which shows that it runs; no results are written"),
        ("full", "the paper's size"),
    ):
        sizes.add_argument(
            f"--{size}",
            action="store_const",
            const=size,
            dest="size",
            default="reduced",
            help=words,
        )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", **script.JOBS)
    parser.add_argument("--merge", metavar="FILE", help="add the cells of other results, and end")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.merge:
        here = script.saved(results(given.paper, given.size)).get("cells", {})
        write(given.paper, given.size, json.loads(Path(given.merge).read_text())["cells"] | here)
        return
    with script.runs(f"papers/{given.paper}", quick=given.size == "quick") as folder:
        try:
            run(given.paper, given.size, device=given.device, jobs=given.jobs, folder=folder)
        except (OSError, ValueError) as error:  # as of data that are not there
            sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
