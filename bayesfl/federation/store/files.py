"""Files of runs, of clients' models and of nodes: one table of fields for each kind, used for
writing and reading.

For the format see `bayesfl.base.archive`. Tensors have dotted names, such as `server.body.loc`. A
saved result is the file `state.safetensors` in its own folder. A run in progress has checkpoints
such as `round-000012.safetensors`: the two newest are kept, so one remains if the other is damaged.

Every file is written under a temporary name, flushed and renamed, and then the folder is flushed,
so a process killed at any time leaves no partly written file. Temporary files of a killed process
are removed when its folder is used again. Nothing is pickled: loading executes no code.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesfl.base import archive
from bayesfl.base.described import anonymous, described, digest_of
from bayesfl.base.files import folder, remove_leftovers
from bayesfl.base.processes.ranks import current
from bayesfl.base.trees import flatten, nest
from bayesfl.base.warning import warn
from bayesfl.data.outline import Outline
from bayesfl.data.schema import Schema
from bayesfl.data.tensors import dtype_name
from bayesfl.engine import Engine
from bayesfl.evaluation.calibration import (
    Abstention,
    Bias,
    Conformal,
    Fitted,
    Step,
    Temperature,
)
from bayesfl.evaluation.history import History
from bayesfl.federation.settings import DTYPES, Settings
from bayesfl.federation.store.identity import Answer, identity

try:
    import fcntl
except ImportError:  # systems without such locks
    fcntl = None

STATE = "state.safetensors"
KEPT = 2
STEPS: dict[str, type] = {
    kind.__name__: kind for kind in (Temperature, Bias, Conformal, Abstention)
}
"""Steps of calibration by their names in files."""


class Entry(NamedTuple):
    """Convert a field to JSON, tensors and mappings of these for a file, and back."""

    write: Callable[[Any], Any] = lambda value: value
    read: Callable[[Any], Any] = lambda found: found


@dataclass(frozen=True)
class FileKind:
    """Describe a kind of file.

    Args:
        name: Its name in the file.
        what: Description of the content, for error messages.
        reader: How to read it, for error messages.
        fields: How each of its fields is written and read; {} for any mapping of tensors and plain
            values, unchanged.
    """

    name: str
    what: str
    reader: str
    fields: Mapping[str, Entry]


def described_steps(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Describe steps of calibration for a file, as JSON; for a user's class including its code.

    Raises:
        ValueError: A step's class is not in `STEPS`.
    """
    try:
        return [archive.plain(step, STEPS) | _source(type(step)) for step in steps]
    except archive.UnknownError as error:
        raise ValueError(
            f"the step {error} cannot be saved, because its code is needed to read it: register "
            f"the class before reading, bayesfl.federation.store.files.STEPS['{error}'] = {error}"
        ) from error


def read_steps(found: Any) -> tuple[Step, ...]:
    """Return the steps that a file describes, without their fitted parameters.

    Raises:
        ValueError: A step's class is not in `STEPS`, or its code has changed.
    """
    steps = archive.made(found, STEPS)
    for step, said in zip(steps, found, strict=True):
        if _source(type(step)).get("source") != said.get("source"):
            raise ValueError(f"the code of the class {type(step).__name__} has changed")
    return steps


def _source(kind: type) -> dict[str, str]:
    """Return a digest of the code of a user's class; empty for a class of bayesfl."""
    return {} if kind.__module__.startswith("bayesfl.") else {"source": digest_of(kind)}


def _written(one: Answer | Fitted) -> dict[str, Any]:
    if isinstance(one, Answer):
        return one._asdict() | {"state": dict(one.state)}
    return {
        **vars(one),
        "state": dict(one.state),
        "own": dict(one.own),
        "step": described_steps([one.step])[0],
    }


def _as_fitted(one: Mapping[str, Any]) -> Answer | Fitted:
    # Both are used on the CPU.
    kept = {
        name: {key: t.cpu() for key, t in one[name].items()}
        for name in ("state", "own")
        if name in one
    }
    if "step" not in one:
        return Answer(one["name"], kept["state"], one["reading"])
    return Fitted(read_steps([one["step"]])[0], **kept, reading=one["reading"])


def _write_history(history: History) -> dict[str, Any]:
    recorded = dict.fromkeys(column for of in history.recorded.values() for column in of)
    return {
        "rows": history.rows,
        "absent": list(history.absent.items()),
        "clients": {column: torch.from_numpy(history.clients(column)) for column in recorded},
    }


def _read_history(found: Mapping[str, Any]) -> History:
    # Files of version 0.3 have no values of single clients.
    recorded = {column: t.cpu().numpy() for column, t in found.get("clients", {}).items()}
    by_round = {
        row["round"]: {column: values[place] for column, values in recorded.items()}
        for place, row in enumerate(found["rows"])
        if recorded
    }
    return History(found["rows"], dict(found["absent"]), by_round)


PLAIN = Entry()
WHOLE = Entry(read=int)
METHOD = Entry(identity, dict)
SETTINGS = Entry(lambda settings: described(vars(settings)), lambda found: Settings(**found))
HISTORY = Entry(_write_history, _read_history)
DTYPE = Entry(dtype_name, DTYPES.__getitem__)
AFTER = Entry(
    lambda after: {str(place): _written(one) for place, one in enumerate(after)},
    lambda found: tuple(_as_fitted(found[str(place)]) for place in range(len(found))),
)

RUN = FileKind(
    "run",
    "a run of bf.simulate",
    "bf.load(path, algorithm) reads it, and bf.simulate(start=path) starts from it",
    {
        "algorithm": METHOD,
        "known": Entry(lambda known: known.outline.described(), Outline.read),
        "settings": SETTINGS,
        "engine": Entry(asdict, lambda found: Engine(**found)),
        **dict.fromkeys(("server", "private", "novel", "tolerant", "began", "predicting"), PLAIN),
        "round": WHOLE,
        "history": HISTORY,
        "dtype": DTYPE,
        "after": AFTER,
    },
)
CLIENT = FileKind(
    "client",
    "a client's own model",
    "bf.load_client(path, model) reads it",
    {
        "algorithm": METHOD,
        **dict.fromkeys(
            (
                *("name", "view", "value", "plug_in", "stored", "written"),
                "predicting",
            ),
            PLAIN,
        ),
        **dict.fromkeys(("client", "round", "seed"), WHOLE),
        "schema": Entry(Schema.described, Schema.read),
        "steps": AFTER,
    },
)
CLIENT_FILE = "client.safetensors"
NODE = FileKind(
    "node",
    "the files of a node in a deployment over Flower",
    "the node itself reads them; pass the server's folder of checkpoints",
    {},
)


def write(
    path: str | os.PathLike[str], kind: FileKind, content: Mapping[str, Any], *, file: str = STATE
) -> None:
    """Write one file of the folder `path`, completely or not at all.

    Raises:
        TypeError: `path` is neither text nor a path.
        OSError: `path` is a file, or lies under one.
        ValueError: `path` is empty; or the method or the data contain a function that cannot be
            recognised.
    """
    said = {name: kind.fields[name].write(content[name]) for name in kind.fields} or dict(content)
    refuse_nameless(*(said.get(name) for name in ("algorithm", "known", "schema", "settings")))
    made, tensors = _folder(path), flatten(_part(said, tensors=True))
    archive.write(made / file, kind.name, _part(said, tensors=False), tensors)


def refuse_nameless(*descriptions: object) -> None:
    """Raise ValueError if a description contains a function that cannot be recognised."""
    if any(map(anonymous, descriptions)):
        raise ValueError(
            "a function of the method or of the data has neither a name nor source text, for "
            "example because eval made it; it cannot be distinguished from others: define it with "
            "def in a file or a notebook"
        )


def write_round(path: str | os.PathLike[str], kind: FileKind, content: Mapping[str, Any]) -> None:
    """Write a checkpoint after `round` rounds, and remove all others except the one before it.

    Raises:
        ValueError: See `write`.
    """
    write(path, kind, content, file=f"round-{content['round']:06d}.safetensors")
    files = _rounds(Path(path))
    later = [file for file in files if round_of(file) > content["round"]]
    for file in later + [file for file in files if file not in later][KEPT:]:
        # Later checkpoints were damaged: the run was resumed before them.
        file.unlink(missing_ok=True)


def read(
    path: str | os.PathLike[str], kind: FileKind, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return the fields that `write` stored in the folder `path`, from the newest undamaged file.

    A warning is issued if a newer file is damaged.

    Raises:
        TypeError: `path` is neither text nor a path.
        ValueError: `path` is empty.
        CheckpointError: The folder contains no file of this kind, or every file is damaged or has
            another format.
    """
    damage: list[str] = []
    for file in checkpoints(folder("path", path)):
        try:
            found = read_file(file, kind, device)
        except archive.OtherFileError:
            raise
        except archive.CheckpointError as error:
            damage.append(str(error))
            continue
        if damage:
            warn(f"{'; '.join(damage)}; using {file.name} instead")
        return found
    raise archive.CheckpointError(
        "; ".join(damage)
        or f"{str(path)!r} contains no saved run, neither {STATE} nor round-*.safetensors"
    )


def read_file(file: Path, kind: FileKind, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the fields of one file, after verifying its digest.

    Raises:
        CheckpointError: The file is damaged, or is of another kind or format.
    """
    found, said, flat = archive.read(file)
    if found != kind.name:
        other = {one.name: one for one in KINDS}.get(found)
        raise archive.OtherFileError(
            f"{str(file)!r} holds {other.what}, not {kind.what}: {other.reader}"
            if other
            else f"{str(file)!r} holds a {found}, not {kind.what}"
        )
    try:
        # Copies are aligned like the run's own tensors; otherwise sums might be grouped
        # differently.
        content = _joined(said, nest({name: t.to(device, copy=True) for name, t in flat.items()}))
        return (
            {name: entry.read(content[name]) for name, entry in kind.fields.items()}
            if kind.fields
            else content
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise archive.CheckpointError(
            f"{str(file)!r}, which bayesfl {archive.said_of(file).get('version')} wrote, is not "
            f"{kind.what} of this version: {type(error).__name__}, {error}"
        ) from error


KINDS = [RUN, CLIENT, NODE]
"""Every kind of file; a deployment adds its own."""


@contextlib.contextmanager
def claimed(path: str | os.PathLike[str] | None) -> Iterator[list[Path]]:
    """Lock the folder `path` for the checkpoints of one run, and remove temporary files of a killed
    process; None for no folder.

    The operating system releases the lock when the process ends, however it ends.

    Yields:
        The checkpoints in it, the newest first.

    Raises:
        OSError: `path` is a file, or lies under one.
        ValueError: Another run uses the folder, or the folder contains a saved result.
    """
    if path is None:
        yield []
        return
    made = _folder(folder("checkpoint", path))
    if (made / STATE).is_file():
        raise ValueError(
            f"checkpoint folder {str(path)!r} contains a saved result, {STATE}; use a separate "
            "folder for checkpoints"
        )
    with (made / "lock").open("a") as file:

        def claim() -> None:
            if current().rank:
                return
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise ValueError(
                        f"checkpoint folder {str(path)!r} is in use by another run, which would be "
                        "lost; stop that run first, or pass another folder"
                    ) from error
            remove_leftovers(made, ".safetensors")

        current().every(claim)
        yield _rounds(made)


def checkpoints(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files of saved runs in the folder `path`, the best one first."""
    state = Path(path) / STATE
    return [state] if state.is_file() else _rounds(Path(path))


def round_of(file: Path) -> int:
    """Return the round in a checkpoint's file name."""
    return int(file.stem.removeprefix("round-"))


def newest(path: str | os.PathLike[str]) -> int:
    """Return the round of the newest checkpoint in a folder, damaged or not; 0 if there is none."""
    return max(map(round_of, _rounds(Path(path))), default=0)


def _part(tree: Mapping[str, Any], *, tensors: bool) -> dict[str, Any]:
    """Return only the tensors of a nest of mappings, or only the rest."""
    inner = {
        key: _part(value, tensors=tensors) if isinstance(value, Mapping) else value
        for key, value in tree.items()
    }
    return {
        key: value
        for key, value in inner.items()
        if (
            bool(value) or not tensors
            if isinstance(value, dict)
            else isinstance(value, Tensor) == tensors
        )
    }


def _joined(said: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tensors and plain values back into one nest of mappings."""
    nested = {
        key: _joined(said[key], t) if isinstance(t, Mapping) and key in said else t
        for key, t in tensors.items()
    }
    return {**said, **nested}


def _folder(path: str | os.PathLike[str]) -> Path:
    made = folder("path", path)
    made.mkdir(parents=True, exist_ok=True)
    return made


def _rounds(path: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    return sorted(
        (
            file
            for file in path.glob("round-*")
            if re.fullmatch(r"round-\d{6,}\.safetensors", file.name)
        ),
        key=round_of,
        reverse=True,
    )
