"""Properties of whole tensors that are computed once and kept while the tensor exists: its digest,
and which rows are not finite.
"""

import hashlib
import sys

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bayesfl.base.inputs import Inputs, named, pieces

_PIECE = 2**22  # bytes read at once, so that a check or a hash needs little memory

_digests = WeakTensorKeyDictionary()
_finite = WeakTensorKeyDictionary()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type, as `float32`."""
    return str(dtype).removeprefix("torch.")


def digest_of_array(tensor: Tensor) -> str:
    """Return the SHA-256 digest of a tensor's shape and numbers, floats as float32, whatever its
    device and its floats' precision.

    Whole numbers and bools are taken as they are stored, and the name of their type is part of it,
    but for int64.
    """
    known = _digests.get(tensor)
    if known is None or known[0] != tensor._version:
        digest = hashlib.sha256(repr(tuple(tensor.shape)).encode())
        if not tensor.is_floating_point() and tensor.dtype != torch.int64:
            digest.update(str(tensor.dtype).encode())
        for rows in pieces(tensor.detach(), _PIECE):
            numbers = (
                (rows.float() if rows.is_floating_point() else rows).cpu().contiguous().numpy()
            )
            digest.update((numbers if sys.byteorder == "little" else numbers.byteswap()).data)
        known = _digests[tensor] = (tensor._version, digest.hexdigest())
    return known[1]


def digest_of_inputs(x: Inputs) -> str:
    """Return the digest of a tensor, or one of the names and digests of a tree's tensors."""
    if isinstance(x, Tensor):
        return digest_of_array(x)
    return hashlib.sha256(
        " ".join(f"{name} {digest_of_array(t)}" for name, t in sorted(named(x))).encode()
    ).hexdigest()


def not_finite(tensor: Tensor) -> Tensor | None:
    """Return which rows hold a NaN or an infinity, [N] bool; None if no row does."""
    if not tensor.is_floating_point() or not len(tensor):
        return None
    known = _finite.get(tensor)
    if known is None or known[0] != tensor._version:
        bad = torch.cat(
            [
                ~rows.flatten(1).isfinite().all(1) if rows.dim() > 1 else ~rows.isfinite()
                for rows in pieces(tensor, _PIECE)
                if isinstance(rows, Tensor)
            ]
        )
        known = _finite[tensor] = (tensor._version, bad if bad.any() else None)
    return known[1]
