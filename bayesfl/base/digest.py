"""SHA-256 digests of tensors, which reveal damaged files."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def of_tensor(t: Tensor) -> str:
    """Compute the digest of a tensor's bytes, in the order of its entries."""
    return hashlib.sha256(_bytes(t.detach().cpu())).hexdigest()


def of_tensors(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Compute the digest of `text` and of the name, dtype, shape and bytes of CPU tensors, in the
    order of their names.
    """
    sums = hashlib.sha256(text.encode())
    for name, t in sorted(tensors.items()):
        sums.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        sums.update(_bytes(t))
    return sums.hexdigest()


def _bytes(t: Tensor) -> memoryview:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().data
