"""Tensors and settings as Flower's records, and back again from a stranger's.

All tensors of a message are one safetensors blob, whose SHA-256 stands beside it. Flower's own arrays are never parsed: their headers can
ask for any amount of memory. What arrives is looked at in the order of what it costs: how many bytes, their digest, names and shapes.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from bayesfl.base.trees import detached
from bayesfl.federation.admission import Declared

BLOB, STYPE = "tensors", "bayesfl.safetensors"
HEADER = 2**16
"""Bytes that a blob may have beyond its tensors, at least; twice what names and shapes take where that is more."""
MEASURES = ("accuracy", "nll", "ece", "mce", "brier", "macro_f1", "auroc", "rmse", "coverage_50", "coverage_90")
"""What clients report of their predictions, by the names of `bayesfl.metrics`; of other numbers the server takes no notice."""
T = TypeVar("T", bool, int, float, str, list)


class RecordError(ValueError):
    """A record that is not what it says, or not what was declared."""


def pack(tensors: Mapping[str, Any]) -> tuple[ArrayRecord, str]:
    """A nest of tensors as one record, and its digest."""
    from safetensors.torch import save

    blob = save(detached(tensors))
    record = ArrayRecord({BLOB: Array(dtype="uint8", shape=(len(blob),), stype=STYPE, data=blob)})
    return record, hashlib.sha256(blob).hexdigest()


def unpack(content: RecordDict, name: str, digest: str, *, most: int | None = None) -> dict[str, Tensor]:
    """The tensors of the record `name` by their dotted names.

    Args:
        content: What came.
        name: The record's.
        digest: That was sent with it.
        most: Bytes that it may have; None for any number.

    Raises:
        RecordError: There is no such record, it has more bytes, they are not those of the digest, or no tensors.
    """
    from safetensors.torch import load

    record = content.get(name)
    if not isinstance(record, ArrayRecord) or list(record) != [BLOB] or record[BLOB].stype != STYPE:
        raise RecordError(f"record {name!r} is not one blob of tensors")
    blob = record[BLOB].data
    if most is not None and len(blob) > most:
        raise RecordError(f"record {name!r} has {len(blob)} bytes, more than the {most} that were declared")
    if hashlib.sha256(blob).hexdigest() != digest:
        raise RecordError(f"record {name!r} was damaged on its way: its digest does not match")
    try:
        return load(blob)
    except Exception as error:  # whatever a reader makes of bytes that are no tensors
        raise RecordError(f"record {name!r} holds no tensors: {error}") from error


def most_bytes(declared: Declared) -> int:
    """Bytes that a record of declared tensors may have."""
    tensors = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in declared.values())
    return tensors + max(HEADER, 2 * sum(len(name) + 8 * (len(shape) + 8) for name, (shape, _) in declared.items()))


def config(content: RecordDict) -> ConfigRecord:
    """A message's settings.

    Raises:
        RecordError: It has none.
    """
    found = content.get("config")
    if not isinstance(found, ConfigRecord):
        raise RecordError("the message has no settings")
    return found


def setting(content: RecordDict, key: str, kind: type[T]) -> T:
    """One setting of a message, of a certain type.

    Raises:
        RecordError: It is not there, or is something else.
    """
    found: Any = config(content).get(key)
    if type(found) is not kind:
        raise RecordError(f"setting {key!r} must be of type {kind.__name__}, got {found!r}"[:200])
    return found
