"""Names of clients and of classes: lists in the order of the clients or classes."""

import re
import reprlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

from bayesfl.base.warning import warn


def natural(name: str) -> tuple[list[Any], str]:
    """Return a key that sorts H2 before H10."""
    return [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", name)], name


def ordered(name: str, values: object, remedy: str) -> None:
    """Check that `values` is a list or the like: a set has no order, and a mapping is in the order
    of its entries.

    Raises:
        TypeError: It is a mapping, a set, one text or nothing that can be iterated; the message
            ends with `remedy`.
    """
    if isinstance(values, Mapping | Set | str) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be a list, as names are taken by their places; got "
            f"{reprlib.repr(values)}; {remedy}"
        )


def check_names(names: Sequence[str] | None, clients: int) -> None:
    """Check that there are no names, or a list with one for each client.

    Raises:
        TypeError: `names` is no list.
        ValueError: There is another number of names.
    """
    if names is None:
        return
    ordered("names", names, "pass a list in the order of the clients, such as clients.client_names")
    if len(names) != clients:
        raise ValueError(f"names must name each of the {clients} clients, got {len(names)}")


def named_clients(
    given: Sequence[str] | None, order: Sequence[Hashable], *, pooled: bool
) -> list[str]:
    """Return one name for each client, with a warning where some differ only by case or surrounding
    space.

    Args:
        given: A list of names in the clients' order; None for the ids of pooled data, otherwise
            `client 0` and so on.
        order: The clients' ids in their order; their numbers where data are not pooled.
        pooled: Whether `order` has ids.

    Raises:
        TypeError: `given` is no list.
        ValueError: There is another number of names, two are alike, or they are the ids, or have
            them as index, in another order.
    """
    if given is None:
        named = [str(owner) for owner in order] if pooled else generated(len(order))
    else:
        remedy = "pass a list in the order of x"
        if pooled:
            remedy = (
                f"pass a list in the order of the sorted client_ids, {reprlib.repr(list(order))}, "
                "or of {id: name} client_ids=[names[i] for i in client_ids] without names"
            )
        ordered("names", given, remedy)
        named = [str(name) for name in given]
        check_names(named, len(order))
        ids = [str(owner) for owner in order]
        index = getattr(given, "index", None)
        said = [] if index is None or callable(index) else [list(map(str, index))]  # of pandas
        for called in [*said, *([named] if pooled else [])]:
            if called != ids and Counter(called) == Counter(ids):
                raise ValueError(
                    f"names has the clients in the order {reprlib.repr(called)}, which is another "
                    f"than theirs: leave them out, or {remedy}"
                )
    if twice := [name for name, count in Counter(named).items() if count > 1]:
        raise ValueError(
            f"names must differ, {twice[:10]} are of several clients each: add a number to them, "
            "or give one client's rows one id, as [str(i) for i in client_ids] does"
        )
    for places in places_of(name.strip().casefold() for name in named).values():
        if len(places) > 1:
            warn(
                f"clients {[named[j] for j in places]} differ only by case or surrounding space, "
                f"and are {len(places)} clients; if they are one, give all its rows one id, as "
                "[str(i).strip().lower() for i in client_ids] does",
            )
    return named


def places_of(owners: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """Return the rows of each client, in the order of the clients' first ones."""
    places: dict[Hashable, list[int]] = {}
    for row, owner in enumerate(owners):
        places.setdefault(owner, []).append(row)
    return places


def generated(clients: int) -> list[str]:
    """Return the default names of clients, made of their places."""
    return [f"client {j}" for j in range(clients)]


def named_classes(given: Iterable[object], outputs: int) -> tuple[str, ...]:
    """Return one name for each class.

    Raises:
        TypeError: `given` is no list.
        ValueError: There is another number of names.
    """
    ordered(
        "class_names",
        given,
        f"pass a list in the order of the classes' numbers, 0 to {outputs - 1}, as sorted("
        "class_names, key=class_names.get) makes of {name: number}, and [class_names[k] for k in "
        "sorted(class_names)] of {number: name}",
    )
    named = tuple(str(name) for name in given)
    if len(named) != outputs:
        raise ValueError(
            f"class_names must name each of the {outputs} classes, got {len(named)} names"
        )
    return named
