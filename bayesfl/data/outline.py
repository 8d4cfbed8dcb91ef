"""The outline of a federation's data: its clients, without their rows."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from bayesfl.base.described import differences
from bayesfl.base.options import nearest
from bayesfl.data.schema import Schema
from bayesfl.data.tables.texts import is_number


@dataclass(frozen=True, kw_only=True)
class Outline(Schema):
    """Describe a federation's data without their rows, as a saved run does: the schema of the rows,
    and each client's name and number of rows.

    Args:
        client_names: One name for each client.
        counts: Number of training examples of each client.
        source: Name of the data.
        hash: SHA-256 over recipe, partition and data, see `FederatedData.hash`.
        rows: The same hash without transform and augmentation.
        augment: Description of the augmentation, see `bayesfl.base.described`; None for none.
    """

    client_names: tuple[str, ...]
    counts: tuple[int, ...]
    source: str
    hash: str
    rows: str
    augment: Any

    @property
    def clients(self) -> int:
        """Return the number of clients J."""
        return len(self.client_names)

    @property
    def outline(self) -> "Outline":
        """Return the outline, as of `FederatedData`."""
        return self

    @property
    def schema(self) -> Schema:
        """Return the schema alone, without the clients."""
        return Schema(**{field.name: getattr(self, field.name) for field in fields(Schema)})

    def differences(self, other: Schema) -> dict[str, tuple[Any, Any]]:
        """Return where other data differ from these: in the clients and their order, or in the
        rows, the transform or the augmentation of a split.
        """
        one, two = (
            {name: getattr(of, name, None) for name in ("client_names", "rows", "augment", "hash")}
            for of in (self, other)
        )
        found = super().differences(other) | differences(one, two)
        if len(found) > 1:
            found.pop("hash", None)  # the hash covers the others
        return found


def known_names(names: Sequence[str] | None, clients: int) -> Sequence[str]:
    """Return the clients' names for `place`; their numbers where there are no names."""
    return [str(j) for j in range(clients)] if names is None else names


def place(client: int | str, names: Sequence[str]) -> int:
    """Return a client's number, given that number or the client's name.

    A number is an index, from 0. It raises an error if there is no such index, or if it is also
    another client's name: among clients called 1, 2 and 3, only 0 is accepted. Names such as `01`
    or `1.0` count as 1.

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
    """Return the names that are numbers, by their value."""
    found: dict[float, tuple[str, ...]] = {}
    for name in filter(is_number, names):
        found[float(name)] = (*found.get(float(name), ()), name)
    return found
