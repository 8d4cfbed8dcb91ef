"""SHA-256 over tensors, with which files are told from damaged ones."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def of_tensor(t: Tensor) -> str:
    """Over the bytes of a tensor, in the order of its entries."""
    return hashlib.sha256(_bytes(t.detach().cpu())).hexdigest()


def of_tensors(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Over `text`, and name, dtype, shape and bytes of tensors on the CPU, in the order of their names."""
    sums = hashlib.sha256(text.encode())
    for name, t in sorted(tensors.items()):
        sums.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        sums.update(_bytes(t))
    return sums.hexdigest()


def _bytes(t: Tensor) -> memoryview:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().data
