"""The one form of files that bayesfl writes: tensors and plain values that know their digest.

A file is safetensors. Its metadata have two entries: `bayesfl`, JSON of everything that is no
tensor, whose keys keep their order, with the file's kind, the format and the version that wrote it;
and `digest`, the SHA-256 over that JSON and over name, dtype, shape and bytes of every tensor in
the order of names. It is written under a temporary name, flushed and renamed. Nothing is pickled:
loading executes no code.

An object in a file or a message is its class by name and the options that are not at their
defaults, see `plain`.
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
    """Raised when a saved run, or another file of bayesfl, is absent, damaged or of another format,
    or belongs to another method or other data.

    Example:
        >>> try:
        ...     bf.load("nowhere", bf.algorithms.fedavg(bf.models.mlp(64, outputs=10)))
        ... except RuntimeError as error:
        ...     print(type(error).__name__)
        CheckpointError
    """


class OtherFileError(CheckpointError):
    """An error raised when a file that is whole is of another kind or format."""


def write(
    path: str | os.PathLike[str], kind: str, said: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file, completely or not at all.

    Args:
        path: The file.
        kind: What it holds, in a word.
        said: Plain values, JSON-able.
        tensors: Tensors by their names, which are copied to the CPU.

    Raises:
        OSError: It cannot be written, as on a full disk.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    flat = {name: t.detach().cpu().clone().contiguous() for name, t in sorted(tensors.items())}
    text = json.dumps({"kind": kind, "format": FORMAT, "version": version("bayesfl"), **said})
    header = {"bayesfl": text, "digest": digest_of_tensors(text, flat)}
    try:
        with atomic_path(path) as temporary:
            save_file(flat, str(temporary), metadata=header)
    except (OSError, SafetensorError) as error:  # as of a full disk
        raise OSError(
            f"{str(Path(path))!r} could not be written: {error}. Files that were in "
            f"{str(Path(path).parent)!r} before are whole; make room there, and write again: a run "
            "with checkpoints goes on from its last one"
        ) from error


def read(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return the kind, the plain values and the tensors of a file, whose bytes its digest vouches
    for.

    Raises:
        CheckpointError: The file is absent, damaged, or no file of bayesfl's.
        OtherFileError: It has another format.
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
            "wrote and reads, and this version does not"
        )
    return kind, said, flat


def said_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the plain values of a file, kind, format and version among them, without its tensors
    and without a look at its digest; {} where there is no file of bayesfl's.
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
        OtherFileError: See `read`; or it is of another kind.
    """
    found, said, tensors = read(path)
    if found != kind:
        raise OtherFileError(f"{str(Path(path))!r} holds a {found}, not a {kind}")
    return said, tensors


class UnknownError(TypeError):
    """An error raised for a value whose class a file or a message cannot hold."""


def plain(value: Any, known: Mapping[str, type]) -> Any:
    """Return a value as JSON can write it; a tuple becomes a list.

    Args:
        value: A plain value, an object of a known data class, or tuples of these.
        known: The classes that a reader makes, by name.

    Raises:
        UnknownError: A value is none of these; the message is its name or that of its class.

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
    """Return what `plain` made JSON of.

    Raises:
        ValueError: There is no such class, or it has other options.
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
