"""The commands, their words and their errors."""

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from bayesfl.base import archive
from bayesfl.commands import demo, new_app
from bayesfl.data.recipes.readers import default_root, load
from bayesfl.data.sources import available
from bayesfl.evaluation.history import History
from bayesfl.federation.clients.client_model import only_file
from bayesfl.federation.run.reporting import write_deployed_report, write_report
from bayesfl.federation.store import files
from bayesfl.stats.kept import ledger
from bayesfl.study.table import read


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or print the help without one, and return the exit status: 0, or 2 after an
    error.

    Args:
        argv: The words after `bayesfl`; None for those of the process.

    Example:
        >>> from bayesfl.commands.main import main
        >>> main(["show", "no-folder"])
        2
    """
    parser = argparse.ArgumentParser(
        prog="bayesfl", description="Bayesian inference for federated models."
    )
    parser.add_argument("--version", action="version", version=f"bayesfl {version('bayesfl')}")
    parser.set_defaults(run=parser.print_help)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for run, name, words in (
        (demo.demo, "demo", "train three methods on digits, with reports"),
        (show, "show", "show what a saved run, a model or a study's folder holds"),
        (report, "report", "write report.html into the folder of a run or a study"),
        (study, "study", "print the table of a study's folder"),
        (data, "data", "list the data sets, and how to get them"),
        (new_app.new_app, "new-app", "make a small Flower app in a new folder"),
    ):
        told = f"{words[0].upper()}{words[1:]}."
        command = commands.add_parser(name, help=words, description=told)
        command.set_defaults(run=run)
        for one in inspect.signature(run).parameters.values():
            given = {} if one.default is one.empty else {"nargs": "?", "default": one.default}
            command.add_argument(one.name, metavar="FOLDER", type=Path, **given)
    words = vars(parser.parse_args(argv))
    name, run = words.pop("command"), words.pop("run")
    try:
        run(**words)
    except (ValueError, OSError, ImportError, archive.CheckpointError) as error:
        print(f"bayesfl {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def show(folder: Path = demo.FOLDER) -> None:
    """Print what a folder, or one file, holds: a node's ledger of statistics, a saved run, a
    client's model, also in a node's folder of states, another file of bayesfl's, or the runs of a
    study.

    Args:
        folder: The folder or the file; by default that of the demonstration.

    Raises:
        ValueError: It holds nothing of bayesfl's.
    """
    if (folder / ledger.FILE).is_file():
        print(ledger.Ledger.read(folder))
        return
    found = _file(folder)
    said = archive.said_of(found) if found else {}
    if not said:
        print(read(folder))
        return
    print(f"{said['kind']}, written by bayesfl {said['version']}: {found}")
    if "algorithm" in said:
        print(f"method: {said['algorithm']['method']}")
    if "name" in said:
        print(f"client: {said['name']}")
    if "known" in said:
        print(f"data: {said['known']['source']}, {len(said['known']['client_names'])} clients")
    if "settings" in said:
        settings = said["settings"]
        print(f"round: {said['round']} of {settings['rounds']}, seed {settings['seed']}")
        print(History(said["history"]["rows"]))


def _file(folder: Path) -> Path | None:
    """Return the file that identifies a folder; None for a study's, or without one."""
    if folder.is_file():
        return folder
    for found in (files.checkpoints(folder), sorted(folder.glob("*.safetensors"))):
        if found:
            return found[0]
    alone = any(folder.rglob(files.CLIENT_FILE)) and not any(folder.glob("*.record"))
    return only_file(folder) if alone else None


def report(folder: Path) -> None:
    """Write `report.html` into the folder of a saved run, of a server's checkpoints, or of a study,
    and print its path.

    Raises:
        ValueError: The folder holds neither.
        CheckpointError: The run is damaged.
    """
    path = folder / "report.html"
    saved = files.checkpoints(folder)
    if saved and archive.said_of(saved[0]).get("kind") == "deployment":
        from bayesfl.flower.deployed import DEPLOYMENT

        write_deployed_report(path, files.read(folder, DEPLOYMENT))
    elif saved:
        write_report(path, files.read(folder, files.RUN))
    else:
        read(folder).report(path)
    print(path)


def study(folder: Path) -> None:
    """Print the table of a study's folder.

    Raises:
        ValueError: It holds no runs.
    """
    print(read(folder))


def data() -> None:
    """Print the data sets by name, whether their files are there, and how to get them."""
    for name, info in available().items():
        try:
            there = f"{len(load(name).x):,} rows"
        except FileNotFoundError:
            there = "no files"
        print(f"{name:15} {there:12} {info.licence}")
    named = "BAYESFL_DATA" if os.environ.get("BAYESFL_DATA") else "BAYESFL_DATA is not set"
    print(
        f"Files are read from {default_root()} ({named}). Download images with\n"
        "  python -c \"import bayesfl as bf; bf.data.load('mnist', download=True)\"\n"
        "For heart and shakespeare, bf.data.load('heart') raises an error that names the files to "
        "download and their place."
    )
