"""Folders given by users, and writing files so that they are complete or absent."""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from bayesfl.base.processes.ranks import current

LEFT = 600
"""Seconds after which a temporary file without new writes belongs to a process that has ended."""


def folder(name: str, path: object) -> Path:
    """Return the path of the folder that a user passes as the argument `name`; it need not exist.

    Raises:
        TypeError: `path` is neither text nor a path.
        ValueError: `path` is empty, or contains a null character.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(
            f"{name} must name a folder, as text or a path, got {path!r}; pass one, such as "
            "'models'"
        )
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise ValueError(
            f"{name} must name a folder, got {path!r}; pass one, such as 'models', or '.' for the "
            "current one"
        )
    return Path(path)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` only if the block ends without an error, so
    that `path` is never half-written.

    It is for writers that take a path, as in `with atomic_path("figure.png") as temporary:
    figure.savefig(temporary)`. The temporary file is hidden, in the same folder, with the same
    suffix; the folder is created if it does not exist. With several ranks, the file of rank 0 is
    kept. If the block raises, the temporary file is removed and an earlier `path` stays unchanged.
    Temporary files of a killed process are removed when `path` is next written, ten minutes later
    at the earliest, because another process may still be writing.

    Yields:
        The temporary path.

    Raises:
        FileNotFoundError: The block wrote nothing to the temporary path, for example because the
            writer changes its suffix.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.suffix, stem=path.stem, untouched=LEFT)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    try:
        yield temporary
        if current().rank:
            return
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def atomic_write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, completely or not at all, see `atomic_path`."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def remove_leftovers(
    folder: Path, suffix: str, *, stem: str | None = None, untouched: float = 0
) -> None:
    """Remove temporary files with this suffix that `atomic_path` left in a folder when its process
    was killed, if they are unchanged for `untouched` seconds; those of one file's stem, or all.
    """
    of = ".+" if stem is None else re.escape(stem)
    for file in folder.glob(".*"):
        if re.fullmatch(rf"\.{of}\.[0-9a-f]{{16}}{re.escape(suffix)}", file.name):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if time.time() - file.stat().st_mtime >= untouched:
                    file.unlink()
