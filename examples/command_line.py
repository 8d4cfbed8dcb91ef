"""What the examples have in common: the options of their command lines, and what is checked of
these before anything is run or written.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = {
    "quick": "small, on data that need no file: shows that it runs",
    "rounds": "rounds of the federation",
    "seeds": "seeds, one run of each method for each",
    "jobs": "runs at a time",
    "data_root": "folder of the data; none for BAYESFL_DATA, else the user's cache",
    "out": "folder of the runs, from which an interrupted command goes on, and of what is written",
}


def arguments(
    doc: str | None, argv: Sequence[str] | None = None, **options: Any
) -> argparse.Namespace:
    """Read the options of a command line.

    Args:
        doc: What `--help` shows, the script's docstring.
        argv: The words of the command line; None for those of the process.
        **options: The default of each option, or (default, what it is) where `WORDS` does not say.
            A switch is False by default, an option of several values a list, a folder None or a
            path.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, given in options.items():
        default, words = given if isinstance(given, tuple) else (given, WORDS[name])
        shape: dict[str, Any] = {"type": Path if default is None else type(default)}
        if default is False:
            shape = {"action": "store_true"}
        elif isinstance(default, list):
            shape = {"type": type(default[0]), "nargs": "+"}
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=default,
            help=f"{words} (default: %(default)s)",
            **shape,
        )
    found = parser.parse_args(argv)
    for name, value in vars(found).items():
        if isinstance(value, list):  # a value that stands twice would count twice in means
            setattr(found, name, list(dict.fromkeys(value)))
    return found


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
