"""Tables of results, files written atomically, and a record of the machine.

>>> from bayesfl.evaluation.report import Column, table
>>> rows = {"FedAvg": {"accuracy": [0.811, 0.807]}, "FedEM": {"accuracy": [0.835, 0.841]}}
>>> print(table(rows, columns=[Column("accuracy", better="higher")]))
method        accuracy
------  --------------
FedAvg  0.809 ± 0.002
FedEM   0.838 ± 0.003*
"""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.display.html import Cell
from bayesfl.base.display.sheet import Sheet
from bayesfl.base.files import atomic_write
from bayesfl.base.options import declared

_BETTER: dict[str, Literal["higher", "lower"]] = {
    **dict.fromkeys(("accuracy", "accuracy_decile", "macro_f1", "auroc"), "higher"),
    **dict.fromkeys(
        ("nll", "ece", "mce", "brier", "rmse", "crps", "pinball", "interval_score"), "lower"
    ),
}
_ACRONYMS = ("auroc", "crps", "ece", "f1", "mce", "nll", "rmse")


@dataclass(frozen=True)
@declared
class Column:
    """Describe a column of a table: one quantity and its format.

    Args:
        key: The quantity's name in the rows.
        title: The column's title; None derives it from `key`.
        scale: Factor by which values are multiplied, 1000 for milliseconds for instance; shares
            such as accuracies stay fractions.
        digits: Number of decimals.
        better: Which values are best, `higher` or `lower`, so that the best is marked; None marks
            nothing.
    """

    key: str
    _: KW_ONLY
    title: str | None = None
    scale: float = 1.0
    digits: int = 3
    better: Literal["higher", "lower"] | None = None

    def __post_init__(self) -> None:
        if self.title is None:
            object.__setattr__(self, "title", in_prose(self.key))


def better(key: str) -> Literal["higher", "lower"] | None:
    """Return which values of a quantity are best, from the measure's name at the end of its name;
    None if unknown.
    """
    return next(
        (
            which
            for measure, which in _BETTER.items()
            if key == measure or key.endswith(f"_{measure}")
        ),
        None,
    )


def in_prose(key: str) -> str:
    """Return a quantity's name in words: `personal_nll` becomes personal NLL."""
    return " ".join(word.upper() if word in _ACRONYMS else word for word in key.split("_"))


def mean_and_error(values: Sequence[float] | np.ndarray | Tensor) -> tuple[float, float]:
    """Compute the mean over seeds and its standard error, std(ddof=1) / sqrt(number of seeds).

    Args:
        values: One value for each seed.

    Returns:
        The mean and the error. The error is NaN for a single seed; both are NaN for no seed, or if
        a value is NaN.
    """
    array = np.asarray(
        values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64
    ).reshape(-1)
    mean = float(array.mean()) if len(array) else math.nan
    return mean, float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else math.nan


@declared
def table(
    rows: Mapping[str, Mapping[str, Sequence[float] | float]],
    *,
    columns: Sequence[str | Column] | None = None,
    corner: str = "method",
    marks: Collection[tuple[str, str]] = (),
) -> Sheet:
    """Return a table of methods by quantities, each cell `mean ± standard error` over seeds.

    Args:
        rows: Values for each method, {method: {key: one value a seed}}; a single number is one
            seed, which has no error. A quantity that a method lacks is shown as `-`.
        columns: The quantities to show, and how; a plain key is shown as `Column(key)`. None for
            every key, in order of appearance.
        corner: Title of the column of methods.
        marks: Methods and keys, whose cells get a dagger in LaTeX.

    Returns:
        A table whose best values have `*` in text, and are bold in `to_markdown` and `to_latex`.
        Methods whose printed means are equal share the mark.
    """
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    specs = [Column(c) if isinstance(c, str) else c for c in (keys if columns is None else columns)]
    return Sheet(
        {
            corner: [" ".join(name.splitlines()) for name in rows],
            **{spec.title or "": _cells(spec, rows, marks) for spec in specs},
        }
    )


def _cells(
    spec: Column, rows: Mapping[str, Mapping[str, Any]], marks: Collection[tuple[str, str]]
) -> list[Cell]:
    """Return the cells of one column."""
    cells = []
    for name, row in rows.items():
        mean, error = mean_and_error(np.asarray(row.get(spec.key, ())) * spec.scale)
        shown = f"{mean:.{spec.digits}f}" if spec.key in row else "-"
        known = "" if math.isnan(error) else f"{error:.{spec.digits}f}"
        cells.append(Cell(mean, shown, known, mark="†" * ((name, spec.key) in marks)))
    if spec.better is None:
        return cells
    finite = [round(one.value, spec.digits) for one in cells if math.isfinite(one.value)]
    best = (max if spec.better == "higher" else min)(finite) if len(finite) > 1 else None
    return [one._replace(best=round(one.value, spec.digits) == best) for one in cells]


def write_json(path: str | os.PathLike[str], obj: Any) -> None:
    """Write `obj` as an indented JSON file, atomically.

    Args:
        path: The file.
        obj: Mappings, sequences, numbers, strings, tensors, arrays, paths and dataclasses, nested.
            JSON has no NaN and no infinity: both become null.

    Raises:
        TypeError: A part of `obj` is none of these.
    """
    plain = json.loads(json.dumps(obj, default=_jsonable), parse_constant=lambda _: None)
    atomic_write(path, json.dumps(plain, indent=2, ensure_ascii=False) + "\n")


def environment() -> dict[str, Any]:
    """Return the machine and the versions of a run or a benchmark, ready for `write_json`.

    Returns:
        `date` (UTC), `bayesfl`, `python`, `torch` and `numpy` versions, `platform` (system,
        processor family, C library), `cpu` (its model), `cores` that this process may use,
        `threads` of torch, `accelerator` (its name), and `commit` of bayesfl's own repository,
        ending in `-dirty` if tracked files were changed; entries that cannot be determined are
        None.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "bayesfl": importlib.metadata.version("bayesfl"),
        "python": platform.python_version(),
        "platform": "-".join(
            part for part in (platform.system(), platform.machine(), *platform.libc_ver()) if part
        ),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
    }


def _cpu_model() -> str | None:
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or None


def _commit() -> str | None:
    here = Path(__file__).resolve()

    def git(*words: str) -> str | None:
        try:  # without optional locks: reading must not write to the repository
            done = subprocess.run(
                ["git", "--no-optional-locks", *words],
                cwd=here.parent,
                capture_output=True,
                text=True,
                timeout=10,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside another project's repository, which does not track it.
    tracked = git("ls-files", "--error-unmatch", here.name) is not None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") if tracked else None


def _jsonable(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else os.fspath(value)  # pyright: ignore[reportArgumentType] (an instance)
