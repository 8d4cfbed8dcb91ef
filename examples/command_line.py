"""What the examples have in common: the options of their command lines."""

import argparse
from collections.abc import Sequence
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
