"""The grid of options of a study: the options of each method, all combinations, and values on the
edge of a grid.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

from bayesfl.base.options import nearest
from bayesfl.composition.algorithm import Algorithm
from bayesfl.optim import rate_at

Make: TypeAlias = Callable[..., Algorithm]
"""(model, options by name) -> algorithm: a function of `bf.algorithms`, a partial of one, or a
function of one's own."""
Grid: TypeAlias = Mapping[str, Sequence[Any]]
"""{option: the values among which it is chosen}."""

EVERY = "*"
"""The name for options of every method that has them."""


def grids(
    methods: Mapping[str, Make], options: Mapping[str, Grid]
) -> tuple[dict[str, Grid], tuple[str, ...]]:
    """Return the grid of each method, and in words which methods lack an option of all.

    Args:
        methods: {name: what makes the method}.
        options: {name of a method: its grid}; the grid under `*` goes to the methods that have the
            option, and a method's own entry comes before it.

    Raises:
        ValueError: Options are named for a method that is not there, or one that no method has, or
            values are no list, or an empty one.
    """
    if strangers := sorted(options.keys() - methods.keys() - {EVERY}):
        raise ValueError(
            f"options name the method {strangers[0]!r}, which is not among the methods; the "
            f"nearest are {nearest(strangers[0], list(methods), 3)}"
        )
    found: dict[str, Grid] = {}
    for name, grid in options.items():
        for option, values in grid.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise ValueError(
                    f"options[{name!r}][{option!r}] must be a list of the values to choose among, "
                    f"got {values!r}"
                )
    for name, make in methods.items():
        own = options.get(name, {})
        for option in own:
            if not _has(make, option):
                _refuse(option, f"{name} has not", [make])
        shared = {
            option: values
            for option, values in options.get(EVERY, {}).items()
            if _has(make, option)
        }
        found[name] = {**shared, **own}
    notes = []
    for option in options.get(EVERY, {}):
        without = [name for name, make in methods.items() if not _has(make, option)]
        if len(without) == len(methods):
            _refuse(option, "no method has", list(methods.values()))
        if told := [
            _told(name, methods[name], option) for name in without if option not in found[name]
        ]:
            notes.append(f"{option} is no option of {', '.join(told)}")
    return found, tuple(notes)


def combinations(grid: Grid) -> list[dict[str, Any]]:
    """Return all combinations of the values of a grid; one without options for an empty grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def edges(grid: Grid, chosen: Mapping[str, Any], rounds: int) -> dict[str, str]:
    """Return the options whose chosen value is the `smallest` or the `largest` of its grid; numbers
    have an order, and optimisers that of their rates.

    Args:
        grid: The grid of a method.
        chosen: The values of its options.
        rounds: Number of rounds, on which schedules depend.
    """
    found = {}
    for option, values in grid.items():
        sizes: list[Any] = [_size(value, rounds) for value in values]
        size = _size(chosen[option], rounds)
        if None not in sizes and len({*sizes}) > 1 and size in (min(sizes), max(sizes)):
            found[option] = "smallest" if size == min(sizes) else "largest"
    return found


def _has(make: Make, option: str) -> bool:
    parameters = inspect.signature(make).parameters
    return option in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )


def _told(name: str, make: Make, option: str) -> str:
    """Return a method's name, with its options that end in the name of another one."""
    own = [one for one in inspect.signature(make).parameters if one.endswith(f"_{option}")]
    return f"{name} (it has {', '.join(own)})" if own else name


def _refuse(option: str, who: str, makers: Sequence[Make]) -> None:
    known = dict.fromkeys(name for make in makers for name in inspect.signature(make).parameters)
    near = nearest(option, list(known), 3)
    raise ValueError(f"{who} an option {option!r}; the nearest are {near}")


def _size(value: Any, rounds: int) -> float | None:
    """Return a number, or an optimiser's first rate; None for what has no order."""
    if hasattr(value, "rate"):
        return rate_at(value.rate, 1, rounds)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
