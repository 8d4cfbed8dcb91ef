"""The file format of bayesfl: tensors and plain values, protected by a digest.

A file is safetensors. Its metadata have two entries. `bayesfl` is JSON of everything that is not a
tensor, in the order of its keys, with the file's kind, format and version. `digest` is the SHA-256
of that JSON and of the name, dtype, shape and bytes of every tensor in the order of names. A file
is written under a temporary name, flushed and renamed. Nothing is pickled: loading executes no
code.

An object in a file or a message is stored as the name of its class and the options that differ
from their defaults, see `plain`.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bayesfl.base.files import atomic_path
from bayesfl.base.processes.packing import flat_bytes

FORMAT = 6


class CheckpointError(RuntimeError):
    """Raised when a saved run, or another file of bayesfl, is absent, damaged, of another format,
    or does not match the method or the data.

    Example:
        >>> try:
        ...     bf.load("nowhere", bf.algorithms.fedavg(bf.models.mlp(64, outputs=10)))
        ... except RuntimeError as error:
        ...     print(type(error).__name__)
        CheckpointError
    """


class OtherFileError(CheckpointError):
    """Raised when an undamaged file is of another kind or format."""


def write(
    path: str | os.PathLike[str], kind: str, said: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file, completely or not at all.

    Args:
        path: The file.
        kind: The kind of content, in one word.
        said: Plain values that JSON can represent.
        tensors: Tensors by name; they are copied to the CPU.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    flat = {name: t.detach().cpu().clone().contiguous() for name, t in sorted(tensors.items())}
    text = json.dumps({"kind": kind, "format": FORMAT, "version": version("bayesfl"), **said})
    header = {"bayesfl": text, "digest": digest_of_tensors(text, flat)}
    try:
        with atomic_path(path) as temporary:
            save_file(flat, str(temporary), metadata=header)
    except (OSError, SafetensorError) as error:  # such as a full disk
        raise OSError(
            f"{str(Path(path))!r} could not be written: {error}. Earlier files in "
            f"{str(Path(path).parent)!r} are undamaged; free some space there and write again: a "
            "run with checkpoints continues from its last one"
        ) from error


def read(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return the kind, the plain values and the tensors of a file, after verifying its digest.

    Raises:
        CheckpointError: The file is absent or damaged, or was not written by bayesfl.
        OtherFileError: The file has another format.
    """
    from safetensors import safe_open

    name = repr(str(Path(path)))
    try:
        with safe_open(str(path), "pt") as opened:
            header = opened.metadata() or {}
            flat = {key: opened.get_tensor(key) for key in list(opened.keys())}
        text = header.get("bayesfl", "")
        whole = header.get("digest") == digest_of_tensors(text, flat)
        said = json.loads(text)
        kind, written, by = (said.pop(key, None) for key in ("kind", "format", "version"))
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(f"{name} is damaged: {error}") from error
    if not whole:
        raise CheckpointError(
            f"{name} is damaged, or not a file of bayesfl: its digest does not match"
        )
    if written != FORMAT:
        raise OtherFileError(
            f"{name} has format {written}, which bayesfl {by if isinstance(by, str) else '0.2'} "
            "wrote and can read; this version cannot"
        )
    return kind, said, flat


def said_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the plain values of a file, including kind, format and version, without reading its
    tensors or verifying its digest; {} if it is not a file of bayesfl.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as opened:
            return dict(json.loads((opened.metadata() or {}).get("bayesfl", "{}")))
    except (OSError, SafetensorError, ValueError):
        return {}


def read_kind(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the plain values and the tensors of a file of one kind.

    Raises:
        CheckpointError: See `read`.
        OtherFileError: See `read`; or the file is of another kind.
    """
    found, said, tensors = read(path)
    if found != kind:
        raise OtherFileError(f"{str(Path(path))!r} holds a {found}, not a {kind}")
    return said, tensors


class UnknownError(TypeError):
    """Raised for a value whose class a file or a message cannot represent."""


def plain(value: Any, known: Mapping[str, type]) -> Any:
    """Convert a value to one that JSON can represent; a tuple becomes a list.

    Args:
        value: A plain value, an object of a known data class, or tuples of these.
        known: The classes that a reader can construct, by name.

    Raises:
        UnknownError: A value is none of these; the message is its name or the name of its class.

    Example:
        >>> from bayesfl.base.archive import made, plain
        >>> from bayesfl.optim import SGD
        >>> plain(SGD(0.1), {"SGD": SGD})
        {'class': 'SGD', 'options': {'rate': 0.1}}
        >>> made({"class": "SGD", "options": {"rate": 0.1}}, {"SGD": SGD}) == SGD(0.1)
        True
    """
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [plain(one, known) for one in value]
    kind = type(value)
    if known.get(kind.__name__) is not kind:
        raise UnknownError(getattr(value, "__qualname__", kind.__qualname__))
    options = {}
    for one in fields(value):
        part = getattr(value, one.name)
        same = type(part) is type(one.default) and repr(part) == repr(one.default)
        if one.init and one.compare and not same:
            options[one.name] = plain(part, known)
    return {"class": kind.__name__, "options": options}


def made(found: Any, known: Mapping[str, type]) -> Any:
    """Convert the output of `plain` back to the value.

    Raises:
        ValueError: The class is unknown, or has other options.
    """
    if isinstance(found, list | tuple):
        return tuple(made(one, known) for one in found)
    if not isinstance(found, Mapping):
        return found
    try:
        given = {key: made(one, known) for key, one in found["options"].items()}
        return known[found["class"]](**given)
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"there is no {found.get('class')!r} of these options ({error}): install the same "
            "version of bayesfl, or register the class"
        ) from error


def digest_of_tensor(t: Tensor) -> str:
    """Compute the digest of a tensor's bytes, in the order of its entries."""
    return hashlib.sha256(flat_bytes(t.detach().cpu()).numpy().data).hexdigest()


def digest_of_tensors(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Compute the digest of `text` and of the name, dtype, shape and bytes of CPU tensors, in the
    order of their names.
    """
    sums = hashlib.sha256(text.encode())
    for name, t in sorted(tensors.items()):
        sums.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        sums.update(flat_bytes(t).numpy().data)
    return sums.hexdigest()
