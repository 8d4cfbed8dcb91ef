"""The outline of a federation's data: what is known of its clients without their rows."""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bayesfl.base.inputs import Shapes, as_tuples
from bayesfl.base.options import nearest
from bayesfl.base.targets import Task


@dataclass(frozen=True)
class Outline:
    """Hold what is known of a federation's data without their rows, as a saved run holds it.

    Args:
        client_names: One name for each client.
        counts: Number of training examples of each client.
        inputs: Shape of one example; for a tuple or a mapping of tensors, that of each.
        outputs: Number of outputs that a network needs: of classes, or of targets.
        task: `classification` or `regression`.
        class_names: One name for each class; None for classes without names.
        columns: Names of the inputs' columns; None for inputs without names.
        source: Name of the data.
        hash: SHA-256 over recipe, partition and data, see `FederatedData.hash`.
        tensors: Type and shape of one example of every tensor as it is stored, by the expression
            that finds it.
        transform: Description of what is done to inputs whenever they are read, see
            `bayesfl.base.described`; None for nothing.
        augment: The same of what is done to them in training alone.
        prepared: What makes the inputs of the columns of a frame, as JSON; None for other inputs.
        rows: As `hash`, without what is done to the inputs.
    """

    client_names: tuple[str, ...]
    counts: tuple[int, ...]
    inputs: Shapes
    outputs: int
    task: Task
    class_names: tuple[str, ...] | None
    columns: tuple[str, ...] | None
    source: str
    hash: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    transform: Any
    augment: Any
    prepared: str | None
    rows: str

    @property
    def clients(self) -> int:
        """Return the number of clients J."""
        return len(self.client_names)

    @property
    def outline(self) -> "Outline":
        """Return the outline, as of `FederatedData`."""
        return self

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "Outline":
        """Make an outline of what JSON gives back."""
        return cls(
            **{
                **as_tuples(found),
                "transform": found["transform"],
                "augment": found["augment"],
                "client_names": tuple(map(str, found["client_names"])),
            }
        )


def known_names(names: Sequence[str] | None, clients: int) -> Sequence[str]:
    """Return the names by which `place` finds clients: their numbers, where there are no names."""
    return [str(j) for j in range(clients)] if names is None else names


def place(client: int | str, names: Sequence[str]) -> int:
    """Return a client's number, given that number or the client's name.

    A number is a place, counted from 0. So of clients called 1, 2 and 3, 0 is the first; 1 and 2
    are refused, which are also other clients' names, and 3, at which there is none. Names that read
    as numbers, `01` or `1.0`, are like 1 in this.

    Raises:
        TypeError: `client` is neither text nor a whole number.
        ValueError: There is no such client, or several have this name, or a number is the name of
            another client; the message offers the nearest names.
    """
    if not isinstance(client, str):
        if isinstance(client, bool | np.bool_):
            raise TypeError(
                f"client must be a name or a number, got {client}; numpy.flatnonzero(mask) gives "
                "the numbers of a mask"
            )
        client = operator.index(client)
        called = _numbers(tuple(names)).get(float(client), ())
        if 0 <= client < len(names):
            if called and names[client] not in called:
                raise ValueError(
                    f"client {client} is ambiguous: number {client} is {names[client]!r}, and "
                    f"{called[0]!r} is the name of another; pass a name, as text"
                )
            return client
        also = f"; {called[0]!r} is the name of one: pass it as text" if called else ""
        raise ValueError(
            f"client must be a name or a number from 0 to {len(names) - 1}, got {client}{also}"
        )
    found = [j for j, name in enumerate(names) if name == client]
    if len(found) != 1:
        told = f"clients {found} are all called" if found else "there is no client"
        raise ValueError(
            f"{told} {client!r}; pass a number, or a name: the nearest of {len(names)} names are "
            f"{nearest(client, names, 3)}"
        )
    return found[0]


@functools.lru_cache(maxsize=8)
def _numbers(names: tuple[str, ...]) -> dict[float, tuple[str, ...]]:
    """Return the names that read as numbers, by these."""
    found: dict[float, tuple[str, ...]] = {}
    for name in names:
        try:
            value = float(name)
        except ValueError:
            continue
        found[value] = (*found.get(value, ()), name)
    return found
