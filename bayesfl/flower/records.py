"""Conversion of tensors and settings to Flower's records, and reading of received records.

All tensors of a message form one safetensors blob, sent with its SHA-256. Flower's own arrays are
never parsed: their headers can request any amount of memory. A record is checked in the order of
cost: number of bytes, digest, names and shapes.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from bayesfl.base.options import AT_LEAST_0, Range
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import PerClient, checked
from bayesfl.base.trees import detached
from bayesfl.evaluation.own_measures import NAME
from bayesfl.federation.rounds.admission import PROTOCOL, Declared

BLOB, STYPE = "tensors", "bayesfl.safetensors"
HEADER = 2**16
"""Number of bytes that a blob may have in addition to its tensors, or twice the size of names and
shapes if that is more.
"""
ANY, SHARE = Range(-math.inf), Range(0, 1, "[]")
ENDLESS = Range(0, math.inf, "[]")  # conformal intervals are infinite for clients with few rows
MEASURES = {
    # of classes
    "accuracy": SHARE,
    "nll": ANY,
    "ece": SHARE,
    "mce": SHARE,
    "brier": Range(0, 2, "[]"),
    "macro_f1": SHARE,
    "auroc": SHARE,
    "set_size": AT_LEAST_0,
    "answered": SHARE,
    "answered_accuracy": SHARE,
    # of numbers
    "rmse": AT_LEAST_0,
    "crps": AT_LEAST_0,
    "coverage_50": SHARE,
    "coverage_90": SHARE,
    "pinball": ENDLESS,
    "coverage": SHARE,
    "width": ENDLESS,
    "interval_score": ENDLESS,
}
"""Measures that clients report on their predictions, by the names of `bayesfl.metrics`, and their
ranges.
"""
OWN = 20  # maximum number of a user's own measures that a client may send
T = TypeVar("T", bool, int, float, str, list)


class RecordError(ValueError):
    """Raised when a received record is malformed, or not as declared."""


def pack(tensors: Mapping[str, Any]) -> tuple[ArrayRecord, str]:
    """Return a nest of tensors as one record, and its digest."""
    from safetensors.torch import save

    blob = save(detached(tensors))
    record = ArrayRecord({BLOB: Array(dtype="uint8", shape=(len(blob),), stype=STYPE, data=blob)})
    return record, hashlib.sha256(blob).hexdigest()


def unpack(
    content: RecordDict, name: str, digest: str, *, most: int | None = None
) -> dict[str, Tensor]:
    """Return the tensors of the record `name` by their dotted names.

    Args:
        content: The received message's records.
        name: The record's name.
        digest: The digest that was sent with it.
        most: Maximum number of bytes; None for no limit.

    Raises:
        RecordError: The record is absent, has too many bytes, does not match its digest, or
            contains no tensors.
    """
    from safetensors.torch import load

    record = content.get(name)
    if not isinstance(record, ArrayRecord) or list(record) != [BLOB] or record[BLOB].stype != STYPE:
        raise RecordError(f"record {name!r} is not one blob of tensors")
    blob = record[BLOB].data
    if most is not None and len(blob) > most:
        raise RecordError(
            f"record {name!r} has {len(blob)} bytes, more than the {most} that were declared"
        )
    if hashlib.sha256(blob).hexdigest() != digest:
        raise RecordError(f"record {name!r} was damaged in transit: its digest does not match")
    try:
        return {name: t.clone() for name, t in load(blob).items()}  # aligned, as in a simulation
    except Exception as error:  # invalid bytes may raise anything
        raise RecordError(f"record {name!r} contains no tensors: {error}") from error


def message(parts: Mapping[str, Any], **settings: Any) -> RecordDict:
    """Return records with settings, including the protocol."""
    return RecordDict({**parts, "config": ConfigRecord({"protocol": PROTOCOL, **settings})})


def of_answer(found: Tensors, **settings: Any) -> RecordDict:
    """Convert an answer to a question of a survey to a message, with settings."""
    record, digest = pack(found)
    return message({"answer": record}, digest=digest, **settings)


def answer(
    content: RecordDict, shapes: Mapping[str, tuple[int, ...]], client: int
) -> dict[str, Tensor]:
    """Return a client's answer to a question of a survey, with the requested shapes; of numbers
    that each client has separately, only those at its own place.

    Raises:
        ValueError: The answer is malformed, or has another form.
    """
    most = most_bytes({name: (shape, torch.float64) for name, shape in shapes.items()})
    found = unpack(content, "answer", setting(content, "digest", str), most=most)
    return {
        name: shape.own(t, client) if isinstance(shape := shapes[name], PerClient) else t
        for name, t in checked(found, shapes, "its answer").items()
    }


def most_bytes(declared: Declared) -> int:
    """Return the maximum number of bytes of a record of declared tensors."""
    tensors = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in declared.values())
    return tensors + max(
        HEADER, 2 * sum(len(name) + 8 * (len(shape) + 8) for name, (shape, _) in declared.items())
    )


def config(content: RecordDict) -> ConfigRecord:
    """Return a message's settings.

    Raises:
        RecordError: The message has no settings.
    """
    found = content.get("config")
    if not isinstance(found, ConfigRecord):
        raise RecordError("the message has no settings")
    return found


def measures(content: RecordDict, split: str) -> dict[str, float]:
    """Return a client's measures on a split: the library's own, and at most `OWN` others."""
    found = content.get(split)
    other = (
        sorted(name for name in found if name not in MEASURES and NAME.fullmatch(name))
        if isinstance(found, MetricRecord)
        else []
    )
    return {
        name: value
        for name in (*MEASURES, *other[:OWN])
        if (value := measure(content, split, name)) is not None
    }


def measure(content: RecordDict, record: str, name: str) -> float | None:
    """Return a number that a client measured; None if absent or out of range."""
    found = content.get(record)
    value = found.get(name) if isinstance(found, MetricRecord) else None
    return value if isinstance(value, float) and value in MEASURES.get(name, ANY) else None


def same_protocol(content: RecordDict) -> None:
    """Check the protocol of a message.

    Raises:
        RecordError: It differs from that of this code.
    """
    if (theirs := setting(content, "protocol", int)) != PROTOCOL:
        raise RecordError(
            f"the message has protocol {theirs}, but this code uses protocol {PROTOCOL}; "
            "install the same version of bayesfl on the server and all nodes"
        )


def setting(content: RecordDict, key: str, kind: type[T]) -> T:
    """Return one setting of a message, of type `kind`.

    Raises:
        RecordError: The message has no such setting, or one of another type.
    """
    found: Any = config(content).get(key)
    if type(found) is not kind:
        raise RecordError(f"setting {key!r} must be of type {kind.__name__}, got {found!r}"[:200])
    return found
