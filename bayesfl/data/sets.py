"""Federations of map-style data sets: torch's, rows of Hugging Face's by the names of their columns, partitions of Flower's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from bayesfl.base.inputs import Inputs, each, join, named, shape_of
from bayesfl.base.targets import IGNORE
from bayesfl.data.arrays import from_arrays
from bayesfl.data.conversion import as_list, kind_of
from bayesfl.data.federated import FederatedData

AGAIN = 8
"""Items of a data set that are read twice, to see whether it draws."""


def from_datasets(
    datasets: Sequence[Dataset],
    *,
    inputs: str | Sequence[str] | None = None,
    target: str | None = None,
    mask: str = "attention_mask",
    test: Sequence[Dataset] | None = None,
    **options: Any,
) -> FederatedData:
    """Make federated data of one map-style data set per client; all are read into memory once.

    Items are pairs (x, y), or, with `inputs` and `target`, rows by name as those of Hugging Face's `datasets` and of a partition that
    Flower Datasets loads. `x` is a tensor or an array, or a tuple or a mapping of several, see `from_arrays`.

    Lists whose lengths differ between rows, as texts are, are filled up with 0 to the longest of all clients, and labels [T] with -100.
    Then an input `mask`, bool, is added that says which places are the row's own, unless the rows have one of that name.

    Args:
        datasets: One data set for each client.
        inputs: Name of the column that is the input, or of several, by which the model is called, `model(**x)`; None for pairs.
        target: Name of the column to predict, with `inputs`.
        mask: Name of the input that says which places of filled-up lists are none, by the name of the model's argument.
        test: Test data sets, one for each client; None takes a share of each client's examples.
        **options: Those of `from_arrays` but `client_ids`.

    Raises:
        ValueError: A data set does not give pairs of numbers or lacks a column, or draws at random; lists of one row have different
            lengths; only one of `inputs` and `target` is given; or `from_arrays` refuses them.
        TypeError: `datasets` is no list of map-style data sets, or `client_ids` is given.
    """
    if "client_ids" in options:
        raise TypeError("client_ids is for the pooled arrays of from_arrays; from_datasets takes one data set per client, see names=")
    if (inputs is None) != (target is None):
        raise ValueError("inputs= and target= name columns of rows together; leave both out for data sets of pairs (x, y)")
    given = [(f"datasets[{j}]", one) for j, one in enumerate(as_list(datasets, "datasets", "data set"))]
    if not given:
        raise ValueError("datasets is empty: pass one data set per client")
    held = [(f"test[{j}]", one) for j, one in enumerate(as_list(test, "test", "data set"))] if test is not None else []
    if inputs is None or target is None:
        pairs = [_examples(one, name) for name, one in given]
        nothing = each(lambda t: t[:0], pairs[0][0]), pairs[0][1][:0]  # a client without test data has an empty data set
        tests = [_examples(one, name) if len(one) else nothing for name, one in held]
    else:
        every = [_rows(one, name, inputs, target) for name, one in given]
        every += [_rows(one, name, inputs, target) if len(one) else [] for name, one in held]  # a client may have no test data
        joined = _filled(every, inputs, target, mask)
        pairs, tests = joined[: len(given)], joined[len(given) :]
    parts = ([x for x, _ in tests], [y for _, y in tests]) if test is not None else None
    return from_arrays([x for x, _ in pairs], [y for _, y in pairs], test=parts, **options)


def _check_map_style(dataset: Any, name: str) -> None:
    """Raise TypeError if a data set has no length or is not read by number, ValueError if it is empty."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, Mapping):
        raise TypeError(
            f"{name} must be a map-style data set, one with len() and [i], got {kind_of(dataset)}: of a data loader pass loader.dataset, "
            "of anything that can be iterated list(...)"
        )
    if not len(dataset):
        raise ValueError(f"{name} is empty: leave that client out")


def _rows(dataset: Any, name: str, inputs: str | Sequence[str], target: str) -> list[dict[str, Tensor]]:
    """Read the named columns of all rows, each a tensor of its own.

    Raises:
        ValueError: A row lacks a column, or holds text or nothing, or gives other numbers when it is read again.
        TypeError: The data set is no map-style one.
    """
    _check_map_style(dataset, name)
    names = [*([inputs] if isinstance(inputs, str) else inputs), target]

    def row(i: int) -> dict[str, Tensor]:
        item = dataset[i]
        if not isinstance(item, Mapping) or any(key not in item for key in names):
            has = list(item) if isinstance(item, Mapping) else kind_of(item)
            raise ValueError(f"{name} must give rows with the columns {names}, got {has} as item {i}; inputs= and target= name them")
        found = {}
        for key in names:
            try:
                found[key] = _tensor(item[key])
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{name} must hold numbers in column {key!r}, its item {i} does not: {error}. Text needs a tokeniser, images of "
                    "different sizes one size"
                ) from error
        return found

    read = [row(i) for i in range(len(dataset))]
    for i, one in enumerate(read[:AGAIN]):
        again = row(i)
        if any(one[key].shape != t.shape or not torch.allclose(one[key], t, rtol=0, atol=0, equal_nan=True) for key, t in again.items()):
            raise ValueError(_DRAWS.format(name=name, i=i))
    return read


def _filled(sets: Sequence[list[dict[str, Tensor]]], inputs: str | Sequence[str], target: str, mask: str) -> list[tuple[Inputs, Tensor]]:
    """Join the rows of every data set, lists filled up to the longest of all.

    Raises:
        ValueError: Rows have other shapes that are no lengths of lists, or lists of one row have different lengths.
    """
    rows = [row for one in sets for row in one]
    ragged = [key for key in rows[0] if len({row[key].shape for row in rows}) > 1]
    if wrong := [key for key in ragged if any(row[key].dim() != 1 for row in rows)]:
        raise ValueError(
            f"column {wrong[0]!r} has rows of shapes {sorted({tuple(row[wrong[0]].shape) for row in rows})[:5]}; make them alike"
        )
    if apart := [row for row in rows if len({len(row[key]) for key in ragged}) > 1]:
        lengths = [len(apart[0][key]) for key in ragged]
        raise ValueError(f"columns {ragged} have different lengths in one row, {lengths}: fill them up before, each with a mask of its own")
    width = max((len(row[ragged[0]]) for row in rows), default=0) if ragged else 0

    def column(one: list[dict[str, Tensor]], key: str) -> Tensor:
        if key not in ragged:
            return torch.stack([row[key] for row in one]) if one else rows[0][key][None][:0]
        fill = IGNORE if key == target else 0
        return (
            torch.stack([F.pad(row[key], (0, width - len(row[key])), value=fill) for row in one])
            if one
            else rows[0][key].new_zeros(0, width)
        )

    names = [inputs] if isinstance(inputs, str) else list(inputs)
    masked = mask not in names and any(key in ragged for key in names)
    out: list[tuple[Inputs, Tensor]] = []
    for one in sets:
        x: dict[str, Tensor] = {key: column(one, key) for key in names}
        if masked:
            lengths = torch.tensor([len(row[ragged[0]]) for row in one], dtype=torch.int64)
            x[mask] = torch.arange(width) < lengths[:, None]
        out.append((x[inputs] if isinstance(inputs, str) and not masked else x, column(one, target)))
    return out


_DRAWS = (
    "{name} gives other numbers when item {i} is read again, as random transforms do, and every item is read once: leave them out, and "
    "pass them to clients.augmented(...), which draws anew in every step of training"
)


def _examples(dataset: Any, name: str) -> tuple[Inputs, Tensor]:
    """Read all examples of a map-style data set, as x [n, ...] and y [n, ...]."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    _check_map_style(dataset, name)
    xs, ys = [], []
    for i in range(len(dataset)):
        item = dataset[i]
        if not (isinstance(item, tuple | list) and len(item) == 2):
            keys = [repr(key) for key in item] if isinstance(item, Mapping) else ["0", "1"]
            chosen = ", ".join(f"item[{key}]" for key in (keys * 2)[:2])
            raise ValueError(
                f"{name} must give pairs (x, y), got {kind_of(item)} as item {i}: choose the two, as in [({chosen}) for item in data]"
                + ", or name columns by inputs= and target=" * isinstance(item, Mapping)
            )
        try:
            x, y = _example(item[0]), torch.as_tensor(item[1])[None]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{name} must hold numbers, its item {i} does not: {error}. Images need a transform that makes them tensors, such as "
                "torchvision's ToTensor()"
            ) from error
        xs.append(x)
        ys.append(y)
        if (shape_of(x), y.shape) != (shape_of(xs[0]), ys[0].shape):
            raise ValueError(
                f"{name} must have items of one shape: item {i} has x {_shown(x)} and y {_shown(y)}, item 0 has x {_shown(xs[0])} and y "
                f"{_shown(ys[0])}; reshape, crop or pad them alike"
            )
    for i, (x, y) in enumerate(zip(xs[:AGAIN], ys, strict=False)):
        item = dataset[i]
        again = dict(named(_example(item[0]))) | {"y": torch.as_tensor(item[1])[None]}
        if any(not torch.allclose(one, again[key], rtol=0, atol=0, equal_nan=True) for key, one in (*named(x), ("y", y))):
            raise ValueError(_DRAWS.format(name=name, i=i))
    return join(xs), torch.cat(ys)


def _example(x: Any) -> Inputs:
    """Return one example's inputs as a row; a tuple of numbers is a vector, one of anything else several inputs."""
    if isinstance(x, Mapping) or (isinstance(x, tuple) and any(np.ndim(part) or isinstance(part, Tensor | Mapping) for part in x)):
        return {key: _example(part) for key, part in x.items()} if isinstance(x, Mapping) else tuple(map(_example, x))
    return _tensor(x)[None]


def _tensor(value: Any) -> Tensor:
    """Return a tensor of numbers, of an image of PIL, too."""
    return torch.as_tensor(np.asarray(value) if hasattr(value, "__array_interface__") and not isinstance(value, Tensor) else value)


def _shown(x: Inputs) -> Any:
    return list(x.shape[1:]) if isinstance(x, Tensor) else shape_of(x)
