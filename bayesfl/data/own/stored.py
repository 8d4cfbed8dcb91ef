"""Rows of data sets in a folder of `.npy` files: written once, a row at a time, and mapped from
then on.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
    folder: str | os.PathLike[str],
    signature: Mapping[str, Any],
    sets: Iterable[Iterable[StoredRows]],
    *,
    rows: int,
    target: str,
    mask: str | None,
) -> dict[str, np.ndarray]:
    """Return the columns of data sets as arrays in mapped files, one data set's rows after the
    other's.

    Args:
        folder: Where the files are; they are written if there is no such folder, or an empty one.
        signature: What the data sets are known by, JSON-able.
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
    path = as_folder("folder", folder)
    if not (path / INDEX).is_file():
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(
                f"folder {str(path)!r} holds other files: pass the name of a new folder, or of an "
                "empty one"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
            made = Path(temporary) / path.name
            made.mkdir()
            files = _write(made, sets, rows, target, mask)
            (made / INDEX).write_text(
                json.dumps({"signature": dict(signature), "files": files}, indent=1)
            )
            os.replace(made, path)
    index = json.loads((path / INDEX).read_text())
    known, files = index["signature"], index["files"]
    columns = {key: np.load(path / name, mmap_mode="r") for key, name in files.items()}
    if known != json.loads(json.dumps(signature)):
        other = [
            key for key in signature if known.get(key) != json.loads(json.dumps(signature[key]))
        ]
        raise ValueError(
            f"folder {str(path)!r} holds the rows of other data sets, which differ in "
            f"{', '.join(other)}: pass another folder, or delete this one, so that the data are "
            "written again"
        )
    return columns


def _write(
    folder: Path, sets: Iterable[Iterable[StoredRows]], rows: int, target: str, mask: str | None
) -> dict[str, str]:
    """Write all rows, and return the name of each column's file."""
    columns: dict[str, _Column] = {}
    try:
        for one in sets:
            for piece in one:
                if not columns:
                    columns = {
                        key: _Column(folder / f"{place}.npy", key, rows, t)
                        for place, (key, t) in enumerate(piece.items())
                    }
                if piece.keys() != columns.keys():
                    raise ValueError(
                        f"all data sets must give the same inputs, got {list(piece)} after "
                        f"{list(columns)}"
                    )
                for key, column in columns.items():
                    column.add(piece[key])
    finally:
        for column in columns.values():
            column.close()
    lists, lengths = ragged({key: column.shapes for key, column in columns.items()}, mask)
    width = max(lengths, default=0)
    for key in lists:
        columns[key].fill_up(lengths, width, IGNORE if key == target else 0)
    files = {key: column.path.name for key, column in columns.items()}
    if mask is not None and mask not in files and any(key != target for key in lists):
        own = _Column(
            folder / f"{len(files)}.npy", mask, rows, torch.zeros(1, width, dtype=torch.bool)
        )
        for n in lengths:
            own.add((torch.arange(width) < n)[None])
        own.close()
        files[mask] = own.path.name
    return files


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
    if void := [key for key, own in shapes.items() if all(0 in shape for shape in own)]:
        raise ValueError(f"column {void[0]!r} holds nothing but empty lists; leave it out")
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
        path: The file.
        name: The column's name, for error messages.
        rows: Number of rows.
        like: The first rows, [b, ...].
    """

    def __init__(self, path: Path, name: str, rows: int, like: Tensor) -> None:
        self.path, self.name, self.rows = path, name, rows
        self.type, self.filled = as_kept(like[:0]).dtype, False
        self.shapes: list[tuple[int, ...]] = []
        self._open(tuple(like.shape[1:]))

    def _open(self, shape: tuple[int, ...]) -> None:
        self.file = self.path.open("wb")
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
            assert isinstance(some, Tensor)  # as `piece` is
            self.file.write(as_kept(some).contiguous().numpy().tobytes())

    def close(self) -> None:
        """Make sure that all is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def fill_up(self, lengths: list[int], width: int, value: int) -> None:
        """Write lists [n] of different lengths again as [N, width], with `value` behind each."""
        flat = self.path.rename(self.path.with_suffix(".flat"))
        start = self.start
        self._open((width,))
        with flat.open("rb") as file:
            file.seek(start)
            for n in lengths:
                row = torch.full((width,), value, dtype=self.type)
                row[:n] = (
                    torch.frombuffer(bytearray(file.read(n * self.type.itemsize)), dtype=self.type)
                    if n
                    else row[:0]
                )
                self.file.write(row.numpy().tobytes())
        self.close()
        flat.unlink()


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
