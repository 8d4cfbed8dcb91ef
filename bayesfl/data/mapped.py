"""Tensors that lie in mapped files, such as larger data than memory holds."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_mapped = WeakTensorKeyDictionary()


def mark_mapped(t: Tensor) -> None:
    """Note that a tensor lies in a mapped file, where `mapped` cannot find out by itself."""
    _mapped[t] = True


def mapped(t: Tensor) -> bool:
    """Return whether a tensor lies in a mapped file, so that it stays there: it is neither copied
    as a whole nor moved to another device.

    It recognises `numpy.memmap` arrays that were passed through `bayesfl.data.from_arrays`, and
    `torch.from_file(shared=True)`, and treats others as tensors in memory.
    """
    known = _mapped.get(t)
    if known is None:
        known = _mapped[t] = (
            t.device.type == "cpu"
            and t.layout == torch.strided
            and t.untyped_storage().filename is not None
        )
    return known
