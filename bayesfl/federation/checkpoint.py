"""Files of saved runs: safetensors whose metadata hold everything that is not a tensor, and one digest over the whole.

Format 3. A file holds the server's and the clients' tensors under dotted names, as `server.body.loc`, `private.head.loc`. Its metadata have
two entries: `bayesfl`, JSON whose keys keep their order (that of the history's columns), and `digest`, the SHA-256 over that JSON and over
name, dtype, shape and bytes of every tensor in the order of names. A saved result is the file `state.safetensors` in a folder of its own.
A run in progress has checkpoints such as `round-000012.safetensors`: the two newest are kept, so that one remains if the other is damaged.

Every file is written under a temporary name, flushed and renamed, and then the folder is flushed, so that a process killed at any time
leaves no partly written checkpoint. Temporary files that a killed process has left are removed when its folder is used again.
Nothing is pickled: loading a run executes no code.
"""

import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bayesfl.base import digest
from bayesfl.base.files import atomic_path, folder, remove_leftovers
from bayesfl.base.trees import detached, nest
from bayesfl.federation.errors import CheckpointError

FORMAT = 3
CALIBRATED = 4
"""Format of files with steps of calibration. Earlier versions refuse it; otherwise they would leave the steps out and say nothing."""


STATE = "state.safetensors"


ROUND = re.compile(r"round-(\d{6,})\.safetensors")


KEPT = 2


RUN, DEPLOYMENT = "run", "deployment"


KINDS = {
    RUN: ("a run of bf.simulate", "bf.load(path, algorithm) reads it, and bf.simulate(start=path) begins from it"),
    DEPLOYMENT: (
        "the checkpoints of a deployment over Flower",
        "bayesfl.flower.load(path, algorithm) reads them, and bayesfl.flower.serve(start=path) begins from them; its clients' states are "
        "on their nodes",
    ),
}
"""What a folder holds, and what reads it."""


def write(path: str | os.PathLike[str], meta: Mapping[str, Any], tensors: Mapping[str, Any], *, name: str = STATE) -> None:
    """Write a nest of tensors and JSON-able `meta` into one file of the folder `path`, completely or not at all.

    Raises:
        TypeError: `path` is neither text nor a path.
        ValueError: `path` is empty, or is a file, or lies under one.
    """
    from safetensors.torch import save_file

    made = _folder(path)
    flat = detached(tensors)
    text = json.dumps({**meta, "format": CALIBRATED if meta.get("steps") else FORMAT})
    with atomic_path(made / name) as temporary:
        save_file(flat, str(temporary), metadata={"bayesfl": text, "digest": digest.of_tensors(text, flat)})


def write_round(path: str | os.PathLike[str], round: int, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write a checkpoint after `round` rounds, and remove all others except the one before it.

    Raises:
        ValueError: `path` is a file, or lies under one.
    """
    write(path, meta, tensors, name=f"round-{round:06d}.safetensors")
    files = _rounds(Path(path))
    later = [file for file in files if round_of(file) > round]
    for file in later + [file for file in files if file not in later][KEPT:]:  # later ones were damaged: the run resumed before them
        file.unlink(missing_ok=True)


def claim(path: str | os.PathLike[str], *, resumed: bool) -> None:
    """Prepare the folder `path` for the checkpoints of one run, and remove temporary files that a killed process has left.

    Args:
        path: The folder, made if it does not exist.
        resumed: Whether the run continues from the checkpoints in it.

    Raises:
        ValueError: `path` is a file or lies under one, or the folder holds a saved result or another run.
    """
    claimed = _folder(path)
    remove_leftovers(claimed, ".safetensors")
    if held(claimed) and not resumed:
        raise ValueError(
            f"checkpoint folder {str(path)!r} holds a run already; pass resume=True to go on from its newest checkpoint, or another folder"
        )
    if (claimed / STATE).is_file():
        raise ValueError(f"checkpoint folder {str(path)!r} holds a saved result, {STATE}; keep checkpoints in a folder of their own")


def held(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files of saved runs in the folder `path`, the one to be read first."""
    state = Path(path) / STATE
    return [state] if state.is_file() else _rounds(Path(path))


def round_of(file: Path) -> int:
    """Return the round in a checkpoint's file name.

    Raises:
        ValueError: The file's name is not that of a checkpoint.
    """
    if (match := ROUND.fullmatch(file.name)) is None:
        raise ValueError(f"{file.name!r} is no checkpoint's name")
    return int(match[1])


def newest(path: str | os.PathLike[str]) -> int:
    """Return the round of the newest checkpoint in a folder, damaged or not; 0 where there is none."""
    found = _rounds(Path(path))
    match = ROUND.fullmatch(found[0].name) if found else None
    return int(match[1]) if match else 0


def read(path: str | os.PathLike[str], kind: str, device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata and the nest of tensors that `write` put into the folder `path`, from its newest undamaged file.

    A warning is issued where a newer file is damaged.

    Args:
        path: The folder.
        kind: What it is to hold, one of `KINDS`.
        device: The device for the tensors.

    Raises:
        TypeError: `path` is neither text nor a path.
        ValueError: `path` is empty.
        CheckpointError: The folder holds nothing of this kind, or every file is damaged or of another format.
    """
    files, damage = held(folder("path", path)), []
    if not files:
        raise CheckpointError(
            f"{str(path)!r} holds no saved run: neither {STATE} nor a checkpoint round-*.safetensors is there{_other(path)}"
        )
    for file in files:
        try:
            meta, tensors = read_file(file, device)
        except CheckpointError as error:
            damage.append(str(error))
            continue
        if (found := DEPLOYMENT if "sessions" in meta else RUN) != kind:
            raise CheckpointError(f"{str(path)!r} holds {KINDS[found][0]}, not {KINDS[kind][0]}: {KINDS[found][1]}")
        if damage:
            warnings.warn(f"{'; '.join(damage)}; taking {file.name} instead", stacklevel=2)
        return meta, tensors
    raise CheckpointError("; ".join(damage))


def read_file(file: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata and the nest of tensors of one file, checked against its digest.

    Raises:
        CheckpointError: The file is damaged, or of another format.
    """
    from safetensors import safe_open

    try:
        with safe_open(str(file), "pt") as opened:
            header = opened.metadata() or {}
            flat = {name: opened.get_tensor(name) for name in list(opened.keys())}
        text = header.get("bayesfl", "")
        whole = header.get("digest") == digest.of_tensors(text, flat)
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(f"{str(file)!r} is damaged: {error}") from error
    if not whole:
        raise CheckpointError(f"{str(file)!r} is damaged, or not a saved run: its digest does not match")
    try:
        meta = json.loads(text)
        found = meta["format"]
        # Copies lie at aligned places, as those of the run did: sums over others may be grouped otherwise.
        tensors = nest({name: t.to(device, copy=True) for name, t in flat.items()})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{str(file)!r} is not a saved run: {error}") from error
    if found not in (FORMAT, CALIBRATED):
        raise CheckpointError(
            f"{str(file)!r} has format {found}; this version of bayesfl reads {FORMAT} and {CALIBRATED}: take the version that "
            "wrote it, or run again"
        )
    return meta, tensors


def _other(path: str | os.PathLike[str]) -> str:
    """Say what else a folder without a run holds, and what reads it; empty for nothing known."""
    if next(Path(path).glob("client.safetensors"), None):
        return "; it holds a client's own model, which bf.load_client(path, algorithm) reads"
    if any(next(Path(path).glob(f"{above}state-*.safetensors"), None) for above in ("", "*/", "*/*/")):
        return "; it holds states that clients keep on a node of a deployment over Flower: pass the server's folder of checkpoints"
    return ""


def _folder(path: str | os.PathLike[str]) -> Path:
    made = folder("path", path)
    try:
        made.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"path must name a folder, but {str(path)!r} is a file, or lies under one; pass another") from error
    return made


def _rounds(path: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    found = {int(match[1]): file for file in path.glob("round-*") if (match := ROUND.fullmatch(file.name))}
    return [found[round] for round in sorted(found, reverse=True)]
