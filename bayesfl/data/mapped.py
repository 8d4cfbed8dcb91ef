"""Tensors that lie in mapped files, such as larger data than memory holds."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

MAPPINGS = Path("/proc/self/maps")
"""Where Linux lists what a process has mapped into its memory."""

_mapped = WeakTensorKeyDictionary()


def mark_mapped(t: Tensor) -> None:
    """Note that a tensor lies in a mapped file, where `mapped` cannot find out by itself."""
    _mapped[t] = True


def mapped(t: Tensor) -> bool:
    """Return whether a tensor lies in a mapped file, so that it stays there: it is neither copied
    as a whole nor moved to another device.

    Known everywhere are arrays of `numpy.memmap` that came by `bayesfl.data.from_arrays`, and
    `torch.from_file(shared=True)`. On Linux, which lists a process's mappings, all others are too:
    `torch.load(mmap=True)`, `torch.from_numpy` of a mapped array. Elsewhere those are taken for
    tensors in memory. Memory that processes share is no file.
    """
    known = _mapped.get(t)
    if known is None:
        known = _mapped[t] = (
            t.device.type == "cpu"
            and t.layout == torch.strided
            and (t.untyped_storage().filename is not None or _listed(t.data_ptr()))
        )
    return known


def _listed(address: int) -> bool:
    """Return whether Linux lists an address as part of a file."""
    if not address or not MAPPINGS.exists():
        return False
    for line in MAPPINGS.read_text().splitlines():
        place, _, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in place.split("-"))
        if start <= address < end:
            return inode != "0" and not "".join(name).startswith(
                ("/dev/shm", "/memfd:", "/dev/zero", "/SYSV")
            )
    return False
