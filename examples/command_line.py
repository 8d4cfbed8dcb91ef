"""What the examples check of their command lines before anything is run or written."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def one_experiment(folder: str | os.PathLike[str], arguments: Mapping[str, Any]) -> None:
    """Refuses a folder that holds another experiment's files; an absent or empty folder is
    accepted, and left as it is.

    Args:
        folder: The folder, in which `report.write_json` wrote `table.json` with the experiment's
            arguments under `arguments`.
        arguments: The arguments that define the experiment, by name, without those for files or the
            number of threads.

    Raises:
        ValueError: The folder has files but no such table, or a table of other arguments; the
            message names the first that differs.
    """
    folder = Path(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    remedy = "choose another --out, or delete the folder"
    try:
        there = json.loads((folder / "table.json").read_text())["arguments"]
        there = {name: there[name] for name in arguments}
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(
            f"--out {folder} holds files that are not of this script: {remedy}"
        ) from None
    for name, mine in json.loads(json.dumps(arguments, default=os.fspath)).items():
        if there[name] != mine:
            raise ValueError(
                f"--out {folder} holds a run with --{name} {there[name]}, now it is {mine}: "
                f"{remedy}"
            )


def refuse_repeats(arguments: Mapping[str, Sequence[Any]]) -> None:
    """Refuses lists of a command line in which a value stands twice, and would count twice in
    means.

    Args:
        arguments: The lists by the name of their argument.

    Raises:
        ValueError: A list repeats a value.
    """
    for name, values in arguments.items():
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} must name each once, got {' '.join(map(str, values))}")
