"""Federations of map-style data sets: torch's, rows of Hugging Face's by the names of their
columns, partitions of Flower's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bayesfl.base.display.progress import progress_bar
from bayesfl.base.inputs import at, unnamed
from bayesfl.base.options import refuse_unknown
from bayesfl.data.federated import FederatedData
from bayesfl.data.names import generated
from bayesfl.data.own.arrays import from_arrays
from bayesfl.data.own.items import class_names, items
from bayesfl.data.own.joined import joined


def from_datasets(
    datasets: Sequence[Any],
    *,
    inputs: str | Sequence[str] | None = None,
    target: str | None = None,
    mask: str = "attention_mask",
    test: Sequence[Any] | None = None,
    **options: Any,
) -> FederatedData:
    """Make federated data from one map-style data set for each client; every item is read once, a
    few of them again.

    Items are pairs (x, y), or, with `inputs` and `target`, rows by name as those of Hugging Face's
    `datasets` and of a partition that Flower Datasets loads. `x` is a tensor or an array, or a
    tuple or a mapping of several, see `from_arrays`. Classes that such a data set names by its
    `features` have these names.

    Lists whose lengths differ between rows, as texts are, are filled up with 0 to the longest of
    all clients, and labels [T] with -100. Then an input `mask`, bool, marks the row's own places,
    unless the rows have one of that name.

    Args:
        datasets: One data set for each client.
        inputs: Name of the input's column, or names of several for a model that is called as
            `model(**x)`; None for pairs.
        target: Name of the column to predict, with `inputs`.
        mask: Name of the added input: the model's argument for the mask of filled-up lists.
        test: Test data sets, one for each client; None takes a share of each client's examples.
        **options: Those of `from_arrays` but `client_ids`.

    Raises:
        ValueError: A data set does not give pairs of numbers, or draws at random; lists of one row
            have different lengths; data sets name classes differently; or `from_arrays` refuses
            them.
        KeyError: A row lacks a column.
        TypeError: `client_ids` is given, or an option that `from_arrays` has not.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> sets = [TensorDataset(torch.rand(10, 3), torch.arange(10) % 2) for _ in range(3)]
        >>> bf.data.from_datasets(sets)
        FederatedData(arrays, 3 clients; train 24, test 6)
    """
    # Options that are none are refused now, not after all items were read.
    refuse_unknown(from_arrays, options)
    given = [(f"datasets[{j}]", one) for j, one in enumerate(datasets)]
    held = [(f"test[{j}]", one) for j, one in enumerate(test)] if test is not None else []
    if test is not None and len(held) != len(given):
        raise ValueError(
            f"test must have one data set for each of {len(given)} clients, got {len(held)}"
        )
    columns = (
        None
        if inputs is None
        else [*([inputs] if isinstance(inputs, str) else inputs), str(target)]
    )
    if columns and columns[-1] in columns[:-1]:
        raise ValueError(f"target {target!r} is among inputs= {columns[:-1]}: leave it out there")
    asked = options.get("class_names") is None and options.get("task") != "regression"
    if (
        asked
        and columns
        and (classes := _classes([*given, *held], columns[-1]))
        and options.get("outputs") in (None, len(classes))
    ):
        options |= {"class_names": classes, "outputs": len(classes)}
    sizes = [len(one) for _, one in given]
    with progress_bar(
        total=sum(len(one) for _, one in given + held), unit="row", disable=None, leave=False
    ) as bar:
        read = [items(one, name, columns, bar.update) for name, one in given + held]
        rows = joined(read, target=target or "y", mask=mask if columns else None)
    x, y = _tree(rows, inputs, target)
    owners, n = np.repeat(np.arange(len(sizes)), sizes), sum(sizes)
    tested = np.repeat(np.arange(len(held)), [len(one) for _, one in held])
    return from_arrays(
        at(x, slice(n)),
        y[:n],
        client_ids=owners,
        test=None if test is None else (at(x, slice(n, None)), y[n:], tested),
        **{"names": generated(len(sizes)), **options},
    )


def _tree(
    columns: Mapping[str, Any], inputs: str | Sequence[str] | None, target: str | None
) -> tuple[Any, Any]:
    """Return inputs and targets of joined columns."""
    if inputs is None or target is None:
        return unnamed({key: t for key, t in columns.items() if key != "y"}), columns["y"]
    own = [inputs] if isinstance(inputs, str) else inputs
    added = [key for key in columns if key not in (*own, target)]
    if isinstance(inputs, str) and not added:
        return columns[inputs], columns[target]
    return {key: columns[key] for key in (*own, *added)}, columns[target]


def _classes(sets: Sequence[tuple[str, Any]], target: str) -> list[str] | None:
    """Return the names of the classes that data sets of Hugging Face's give.

    Raises:
        ValueError: They give others, or another order.
    """
    named = {name: class_names(one, target) for name, one in sets}
    first = next(iter(named.values()))
    if other := [name for name, found in named.items() if found != first and len(dict(sets)[name])]:
        raise ValueError(
            f"{other[0]} has the classes {named[other[0]]}, {sets[0][0]} has {first}: labels may "
            "mean different things; give all the same features, as data.cast_column does, or pass "
            "class_names= if they mean the same"
        )
    return first
