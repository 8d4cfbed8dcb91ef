"""Rows of data sets as arrays in NumPy's format, written a row at a time: in memory, or in a folder
of `.npy` files, written once and mapped from then on.
"""

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.files import folder as as_folder
from bayesfl.base.inputs import WIDE, pieces
from bayesfl.base.targets import IGNORE

INDEX = "index.json"
"""Name of the file that says whose rows the others hold."""

BYTES_AT_ONCE = 2**24
"""Bytes that are written at once."""

StoredRows = dict[str, Tensor]
"""Some rows of a data set: what is in each column, [b, ...]."""


def stored(
    folder: str | os.PathLike[str] | None,
    signature: Callable[[], Mapping[str, Any]],
    sets: Iterable[Iterable[StoredRows]],
    *,
    rows: int,
    target: str,
    mask: str | None,
) -> dict[str, np.ndarray]:
    """Return the columns of data sets as arrays, one data set's rows after the other's: in memory,
    or in mapped files of a folder.

    Args:
        folder: Where the files are; they are written if there is no such folder, or an empty one.
            None for memory.
        signature: Makes what identifies the data sets in a folder, JSON-able.
        sets: The rows of each, read only if they are to be written.
        rows: Number of rows of all.
        target: Name of the column to predict.
        mask: Name of the column to add where lists are filled up; None if lists must not differ in
            length.

    Raises:
        ValueError: The folder holds other files or the rows of other data sets, a file is cut
            short, or rows do not fit each other.
        TypeError: `folder` is no path.
    """
    if folder is None:
        written = _write(BytesIO, sets, rows, target, mask)
        return {key: np.load(file) for key, file in written.items()}
    path, wanted = as_folder("folder", folder), json.loads(json.dumps(signature()))
    if not (path / INDEX).is_file():
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(
                f"folder {str(path)!r} holds other files: pass the name of a new folder, or of an "
                "empty one"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
            made, numbers = Path(temporary) / path.name, itertools.count()
            made.mkdir()
            with contextlib.ExitStack() as opened:

                def new() -> IO[bytes]:
                    return opened.enter_context((made / f"{next(numbers)}.npy").open("w+b"))

                files = {
                    key: Path(file.name).name
                    for key, file in _write(new, sets, rows, target, mask).items()
                }
            for left in {one.name for one in made.iterdir()} - {*files.values()}:
                (made / left).unlink()
            (made / INDEX).write_text(json.dumps({"signature": wanted, "files": files}, indent=1))
            os.replace(made, path)
    index = json.loads((path / INDEX).read_text())
    known, files = index["signature"], index["files"]
    columns = {key: np.load(path / name, mmap_mode="r") for key, name in files.items()}
    if known != wanted:
        other = [key for key in wanted if known.get(key) != wanted[key]]
        raise ValueError(
            f"folder {str(path)!r} holds the rows of other data sets, which differ in "
            f"{', '.join(other)}: pass another folder, or delete this one, so that the data are "
            "written again"
        )
    return columns


def _write(
    new: Callable[[], IO[bytes]],
    sets: Iterable[Iterable[StoredRows]],
    rows: int,
    target: str,
    mask: str | None,
) -> dict[str, IO[bytes]]:
    """Write all rows into new files, and return each column's, at its start."""
    columns: dict[str, _Column] = {}
    for piece in itertools.chain.from_iterable(sets):
        columns = columns or {key: _Column(new, key, rows, t) for key, t in piece.items()}
        for key, column in columns.items():
            column.add(piece[key])
    lists, lengths = ragged({key: column.shapes for key, column in columns.items()}, mask)
    width = max(lengths, default=0)
    for key in lists:
        columns[key].fill_up(lengths, width, IGNORE if key == target else 0)
    if mask is not None and mask not in columns and any(key != target for key in lists):
        own = columns[mask] = _Column(new, mask, rows, torch.zeros(1, width, dtype=torch.bool))
        for n in lengths:
            own.add((torch.arange(width) < n)[None])
    return {key: column.whole() for key, column in columns.items()}


def ragged(
    shapes: Mapping[str, list[tuple[int, ...]]], mask: str | None
) -> tuple[list[str], list[int]]:
    """Find the columns that are lists of different lengths.

    Args:
        shapes: The shape of each row, by column.
        mask: Name of the mask of such lists; None if there must be none.

    Returns:
        Their names, and the length of every row.

    Raises:
        ValueError: StoredRows have other shapes that are no lengths of lists, or lists of one row
            have different lengths.
    """
    found = [key for key, own in shapes.items() if len(set(own)) > 1]
    if wrong := [
        key for key in found if mask is None or any(len(shape) != 1 for shape in shapes[key])
    ]:
        raise ValueError(
            f"column {wrong[0]!r} has rows of shapes {sorted(set(shapes[wrong[0]]))[:5]}; make "
            "them alike"
        )
    lengths: list[int] = []
    for own in zip(*(shapes[key] for key in found), strict=True):
        if len(set(own)) > 1:
            raise ValueError(
                f"columns {found} have different lengths in one row, {[n for (n,) in own]}: fill "
                "them up before, each with a mask of its own"
            )
        lengths.append(own[0][0])
    return found, lengths


class _Column:
    """A file of numbers in NumPy's format, written from its first row to its last.

    Args:
        new: Makes a new file.
        name: The column's name, for error messages.
        rows: Number of rows.
        like: The first rows, [b, ...].
    """

    def __init__(self, new: Callable[[], IO[bytes]], name: str, rows: int, like: Tensor) -> None:
        self.new, self.name, self.rows = new, name, rows
        self.type, self.filled = as_kept(like[:0]).dtype, False
        self.shapes: list[tuple[int, ...]] = []
        self._open(tuple(like.shape[1:]))

    def _open(self, shape: tuple[int, ...]) -> None:
        self.file = self.new()
        described = np.lib.format.dtype_to_descr(torch.zeros(0, dtype=self.type).numpy().dtype)
        np.lib.format.write_array_header_1_0(
            self.file, {"descr": described, "fortran_order": False, "shape": (self.rows, *shape)}
        )
        self.start = self.file.tell()

    def add(self, piece: Tensor) -> None:
        """Write rows, [b, ...]."""
        self.shapes += [tuple(piece.shape[1:])] * len(piece)
        if not piece.numel():
            return  # an empty list has no type of its own
        if not self.filled:
            self.type, self.filled = as_kept(piece[:0]).dtype, True
        if as_kept(piece[:0]).dtype != self.type:
            raise ValueError(
                f"column {self.name!r} must hold numbers of one type, got {piece.dtype} after "
                f"{self.type}: convert them alike"
            )
        for some in pieces(piece, BYTES_AT_ONCE):
            self.file.write(as_kept(some).contiguous().numpy().tobytes())

    def whole(self) -> IO[bytes]:
        """Return the file at its start, after a file on the disk has all of it."""
        self.file.flush()
        if not isinstance(self.file, BytesIO):
            os.fsync(self.file.fileno())
        self.file.seek(0)
        return self.file

    def fill_up(self, lengths: list[int], width: int, value: int) -> None:
        """Write lists [n] of different lengths again as [N, width], with `value` behind each."""
        flat, start = self.file, self.start
        self._open((width,))
        flat.seek(start)
        for n in lengths:
            row = torch.full((width,), value, dtype=self.type).numpy()
            row[:n] = np.frombuffer(flat.read(n * row.itemsize), row.dtype)
            self.file.write(row.tobytes())


def as_kept(t: Tensor) -> Tensor:
    """Return numbers in the type in which they are kept: floats that NumPy or inputs lack in 32
    bits, numbers of `WIDE` types as int64.
    """
    return (
        t.float()
        if t.dtype in (torch.float64, torch.bfloat16)
        else t.long()
        if t.dtype in WIDE
        else t
    )
