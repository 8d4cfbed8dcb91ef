"""Data frames among your own arrays: their columns have names, and become numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._pytree import keystr, tree_flatten_with_path


def check_columns(name: str, train: Any, test: Any, *, pooled: bool) -> None:
    """Check that all frames have the columns of the first one, in its order; arrays, and frames
    without names, are not checked.

    Args:
        name: Name of the argument, `x` or `y`.
        train: Values of the training, pooled or one for each client.
        test: Values of the test, in the same form; None for none.
        pooled: Whether the values are pooled.

    Raises:
        ValueError: A frame has other columns, or the same in another order; the message names them.
    """
    given = [("", "", train), ("test ", "", test)]
    if not pooled:
        given = [
            (part, f" of client {j}", own)
            for part, _, values in given
            if isinstance(values, Sequence)
            for j, own in enumerate(values)
        ]
    frames: dict[str, list[tuple[str, list[Any]]]] = {}
    for part, whose, value in given:
        for leaf, one in _leaves(name, value):
            if columns := columns_of(one):
                frames.setdefault(leaf, []).append((f"{part}{leaf}{whose}", columns))
    for found in frames.values():
        _check_alike(*found)


def _check_alike(first: tuple[str, list[Any]], *others: tuple[str, list[Any]]) -> None:
    """Check that frames have the columns of the first one, given the name and the columns
    of each.
    """
    for part, columns in others:
        first_name, known = first
        lacks, more = [c for c in known if c not in columns], [c for c in columns if c not in known]
        if columns == known or ((lacks or more) and list(range(len(columns))) in (columns, known)):
            continue  # the columns 0 to n - 1 of one of them are numbers, no names
        if lacks or more:
            what = f"lacks columns {lacks[:10]} of {first_name} and has {more[:10]} besides"
        else:
            apart = [(a, b) for a, b in zip(columns, known, strict=False) if a != b][:10]
            what = (
                f"has the columns of {first_name} in another order, {[a for a, _ in apart]} where "
                f"that has {[b for _, b in apart]}"
            )
        raise ValueError(
            f"{part} {what}: columns are taken by their places, so select the same in one order, "
            "as test[train.columns] does"
        )


def check_rows(x: Any, y: Any, ids: Any, environments: Any, test: Any, *, pooled: bool) -> None:
    """Check by `check_index` what `from_arrays` joins row by row: of the training and of the test,
    pooled or client by client.

    Raises:
        ValueError: Two pandas objects of as many rows have other indices.
    """
    if pooled:
        check_index(**dict(_leaves("x", x)), y=y, client_ids=ids, environments=environments)
        if test is not None:
            inputs = {f"test {name}": v for name, v in _leaves("x", test[0])}
            check_index(
                **inputs, **dict(zip(("test y", "test client_ids"), test[1:], strict=False))
            )
        return
    for part, (xs, ys) in {"": (x, y), "test ": test or ([], [])}.items():
        # What is no list is refused elsewhere.
        both = (xs, ys) if isinstance(xs, Sequence) and isinstance(ys, Sequence) else ((), ())
        for j, (one, other) in enumerate(zip(*both, strict=False)):
            own = {f"{part}{name} of client {j}": v for name, v in _leaves("x", one)}
            check_index(**own, **{f"{part}y of client {j}": other})


def check_index(**parts: Any) -> None:
    """Check that pandas objects which are joined row by row have the same index; shuffling one
    of them breaks this.

    Raises:
        ValueError: Two of as many rows have other indices; the message names them.
    """
    found = [(name, value.index) for name, value in parts.items() if hasattr(value, "iloc")]
    for name, index in found[1:]:
        first, known = found[0]
        if len(index) == len(known) and not index.equals(known):
            raise ValueError(
                f"{name} and {first} have the same number of rows and other indices: they are "
                f"joined by place, so bring them into one order, as {name}.loc[{first}.index] "
                "does, or call reset_index(drop=True) on both if their places are right"
            )


def names_of(x: Any, *, pooled: bool) -> tuple[str, ...] | None:
    """Return the names of the columns of a frame, or of the first of several that has some; None
    where none has.
    """
    for one in [x] if pooled or not isinstance(x, Sequence) else x:
        columns = columns_of(one)
        if columns and columns != list(range(len(columns))):
            return tuple(map(str, columns))
    return None


def columns_of(value: Any) -> list[Any]:
    """Return the names of a frame's columns; none of anything else."""
    columns = getattr(value, "columns", None)
    return [] if columns is None or callable(columns) else list(columns)


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a tuple or a mapping of inputs, each with the expression that selects
    it; any other value is its own part.
    """
    parts, _ = tree_flatten_with_path(value, lambda one: not isinstance(one, Mapping | tuple))
    return [(f"{name}{keystr(path)}", part) for path, part in parts]
