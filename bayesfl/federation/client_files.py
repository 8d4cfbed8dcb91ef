"""Where clients' own models lie: folders of their names, and the file that is meant by a folder that holds several."""

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bayesfl.federation import checkpoint
from bayesfl.federation.errors import CheckpointError

FILE = "client.safetensors"
SAFE = re.compile(r"[^/\\\0]+")
LONGEST = 255  # bytes of a folder's name


def check_file_names(names: Sequence[str]) -> None:
    """Check that clients' names can be names of folders, none of which lies outside the folder that holds them.

    Raises:
        ValueError: A name is empty, `.` or `..`, or holds a slash or another character that no folder may have, or is too long; or two are
            alike.
    """
    bad = [f"{name!r} cannot be one" for name in names if not SAFE.fullmatch(name) or name in (".", "..")]
    for name in names:
        if (size := len(os.fsencode(name))) > LONGEST:
            bad.append(f"{name[:40]!r}... has {size} bytes, more than the {LONGEST} of a folder's name")
    firsts: dict[str, int] = {}
    for place, name in enumerate(names):
        if (first := firsts.setdefault(name.casefold(), place)) != place:
            how = "are the same one" if names[first] == name else "are the same one where case does not count"
            bad.append(f"{names[first]!r} (client {first}) and {name!r} (client {place}) {how}")
    if bad:
        raise ValueError(f"clients' names become folders, and {bad[0]}; save single clients by result.client(...).save(path)")


def now() -> str:
    """Return the time, of which the later one is the greater text; a file's own time is lost where it is copied."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def only_file(path: Path) -> Path:
    """Return the file of the only client's model in a folder or below it; of one client's several, that written last.

    Files that do not say when they were written, as earlier versions left them, count as older than those that do.

    Raises:
        CheckpointError: There is none, or there are models of several clients, or several of one of which none was written last; or `path`
            is a file.
    """
    if path.is_file():
        raise CheckpointError(f"path must name a folder, but {str(path)!r} is a file; pass the folder that holds it, {str(path.parent)!r}")
    found = [path / FILE] if (path / FILE).is_file() else sorted(path.rglob(FILE))
    if not found:
        raise CheckpointError(f"{str(path)!r} holds no model of a client, no {FILE}")
    if len(found) == 1:
        return found[0]
    told = {file: checkpoint.read_file(file)[0] for file in found}
    experiments = {file.parent.parent.name for file in found}  # a client has another folder in each, and perhaps another number
    if len(experiments) < len(found) or len({meta.get("name") for meta in told.values()}) > 1:
        several = ", ".join(str(file.parent) for file in found[:3])
        raise CheckpointError(f"{str(path)!r} holds models of several clients, {len(found)} of them: {several}; pass one of these folders")
    times = {file: str(meta.get("written", "")) for file, meta in told.items()}
    last = [file for file in found if times[file] == max(times.values())]
    if len(last) > 1:
        several = ", ".join(f"{file.parent} (round {told[file].get('round')})" for file in last)
        raise CheckpointError(
            f"{str(path)!r} holds {len(last)} models of one client that do not say which was written last, as an earlier version left "
            f"them: {several}; pass one of these folders"
        )
    return last[0]
