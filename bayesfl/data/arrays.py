"""Federations of your own data: arrays, tensors, or torch data sets."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from bayesfl.data.federated import TEST, FederatedData, SourceInfo, Task, assemble, check_shares
from bayesfl.data.partitions import stratified
from bayesfl.random import Purpose, generator

Array: TypeAlias = np.ndarray | Tensor | Sequence[Any]
"""Numbers of one client, or of all: an array, a tensor, or nested lists."""


def _tensor(values: Array, what: str) -> Tensor:
    """Any numbers as a tensor; integers and floats stay what they are, in int64 and float32."""
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    else:
        try:
            array = np.asarray(values)
            if array.dtype.kind not in "fiub":
                raise TypeError(f"numbers of type {array.dtype}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what} must be an array of numbers, all rows of one shape: {error}") from None
        native = array.dtype.newbyteorder("=")
        tensor = torch.from_numpy(np.array(array, dtype=np.int64 if array.dtype.kind == "u" else native, order="C"))
    if tensor.is_complex():
        raise ValueError(f"{what} must be real numbers, got {tensor.dtype}")
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _per_client(x: Any, y: Any, what: str) -> tuple[list[Tensor], list[Tensor]]:
    """Lists of one tensor per client; the first client that does not fit is named by its place."""
    if len(x) != len(y):
        raise ValueError(f"{what}: x has {len(x)} clients, y has {len(y)}; pass as many arrays of labels as of inputs")
    if not len(x):
        raise ValueError(f"{what}: there is no client; pass one array for each")
    xs = [_tensor(value, f"{what}: x of client {j}").float() for j, value in enumerate(x)]
    ys = [_tensor(value, f"{what}: y of client {j}") for j, value in enumerate(y)]
    for j, (xj, yj) in enumerate(zip(xs, ys, strict=True)):
        if xj.dim() < 1 or yj.dim() < 1 or len(xj) != len(yj):
            raise ValueError(
                f"{what}: client {j} has x of shape {list(xj.shape)} and y of shape {list(yj.shape)}; they must have as many rows. "
                "Are these pooled arrays? Then pass client_ids, one per row"
            )
        if xj.shape[1:] != xs[0].shape[1:] or yj.shape[1:] != ys[0].shape[1:]:
            raise ValueError(
                f"{what}: client {j} has examples of shape {list(xj.shape[1:])} and labels of shape {list(yj.shape[1:])}, "
                f"client 0 has {list(xs[0].shape[1:])} and {list(ys[0].shape[1:])}; bring all clients to one shape"
            )
    return xs, ys


def _plain(values: Any) -> list[Hashable]:
    """Client ids as Python values that compare and print as one expects."""
    return (
        values.tolist()
        if isinstance(values, np.ndarray | Tensor)
        else [v.item() if isinstance(v, np.generic | Tensor) else v for v in values]
    )


def _by_client(x: Any, y: Any, ids: Any, known: Sequence[Hashable] | None, what: str) -> tuple[list[Tensor], list[Tensor], list[Hashable]]:
    """Pooled rows as one tensor per client, clients in the order of their sorted ids (or as in `known`)."""
    xs, ys = _per_client([x], [y], what)
    owners = _plain(ids)
    if len(owners) != len(xs[0]):
        raise ValueError(f"{what}: client_ids must name a client for each of the {len(xs[0])} rows, got {len(owners)}")
    places: dict[Hashable, list[int]] = {}
    for row, owner in enumerate(owners):
        places.setdefault(owner, []).append(row)
    if known is None:
        try:
            order: list[Hashable] = sorted(places)  # pyright: ignore[reportArgumentType]
        except TypeError:
            order = sorted(places, key=lambda owner: (type(owner).__name__, str(owner)))
    else:
        order = list(known)
        if strangers := [owner for owner in places if owner not in set(order)]:
            raise ValueError(f"{what}: client {strangers[0]!r} has no training data; known clients are {order[:10]}")
    rows = [torch.tensor(places.get(owner, []), dtype=torch.int64) for owner in order]
    return [xs[0][r] for r in rows], [ys[0][r] for r in rows], order


def from_arrays(
    x: Array | Sequence[Array],
    y: Array | Sequence[Array],
    *,
    client_ids: Sequence[Hashable] | np.ndarray | Tensor | None = None,
    test: tuple[Any, ...] | None = None,
    test_share: float = 0.2,
    validation: float = 0.0,
    calibration: float = 0.0,
    outputs: int | None = None,
    task: Task | None = None,
    names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    source: SourceInfo | None = None,
    seed: int = 0,
) -> FederatedData:
    """Federated data from your own arrays or tensors.

    Either one array per client, `from_arrays([x_0, x_1], [y_0, y_1])`, or pooled arrays and the client of each row,
    `from_arrays(x, y, client_ids=hospital)`. Numbers are used as they are (in float32): standardise them first.

    Args:
        x: Inputs [n_j, ...] of each client, or [N, ...] of all.
        y: Integer labels, [n_j] or [N], for classification; floats, also [., O], for regression.
        client_ids: The client of each row of pooled arrays; clients are numbered in the order of their sorted ids.
        test: Test data in the same form, `(xs, ys)` or `(x, y, client_ids)`; without it, `test_share` of each client's examples.
        test_share: Share of each client's examples, stratified by class, at least one; 0 for no test split.
        validation: Share of each client's training examples for tuning; 0 for no such split.
        calibration: Likewise, for temperatures and conformal thresholds.
        outputs: Number of classes; one more than the largest label unless given.
        task: `classification` or `regression`; read from the type of `y` unless given.
        names: Name of each client.
        class_names: Name of each class.
        source: Name, terms and citation of the data.
        seed: Seed of the splits.

    Raises:
        ValueError: Arrays that don't fit each other, or a client with too few examples for the splits asked for.
    """
    pooled = client_ids is not None
    if pooled:
        xs, ys, order = _by_client(x, y, client_ids, None, "from_arrays")
        found = [str(owner) for owner in order]
    else:
        if isinstance(x, np.ndarray | Tensor):
            raise ValueError(f"x is one array of shape {list(x.shape)}: pass client_ids, one per row, or a list with one array per client")
        xs, ys = _per_client(x, y, "from_arrays")
        order, found = list(range(len(xs))), [f"client {j}" for j in range(len(xs))]
    clients = len(xs)
    named = found if names is None else [str(name) for name in names]
    if len(named) != clients:
        raise ValueError(f"names must name each of the {clients} clients, got {len(named)}")
    empty = [name for name, yj in zip(named, ys, strict=True) if not len(yj)]
    if empty:
        raise ValueError(f"client {empty[0]!r} has no training example: leave it out")

    tests: tuple[list[Tensor], list[Tensor]] = ([], [])
    if test is not None:
        if len(test) != (3 if pooled else 2):
            raise ValueError(
                f"test must be {'(x, y, client_ids)' if pooled else '(xs, ys)'}, in the form of the training data, got {len(test)} parts"
            )
        tests = _by_client(test[0], test[1], test[2], order, "test")[:2] if pooled else _per_client(test[0], test[1], "test")
        if len(tests[0]) != clients:
            raise ValueError(
                f"test has {len(tests[0])} clients, the training data {clients}; a client without test data has arrays of length 0"
            )
        if tests[0][0].shape[1:] != xs[0].shape[1:] or tests[1][0].shape[1:] != ys[0].shape[1:]:
            raise ValueError(f"test examples have shape {list(tests[0][0].shape[1:])}, training examples {list(xs[0].shape[1:])}")

    every = [*ys, *tests[1]]
    if task is None:
        task = "regression" if any(yj.is_floating_point() for yj in ys) else "classification"
    if task == "classification":
        for yj in every:
            if yj.is_floating_point() and not (yj == yj.round()).all():
                raise ValueError("task 'classification' needs whole numbers as labels, y holds fractions; pass task='regression'")
            if yj.dim() != 1:
                raise ValueError(f"labels must be [n], got {list(yj.shape)}; one-hot labels become classes by y.argmax(1)")
        pooled_y = torch.cat([yj.long() for yj in every])
        outputs = int(pooled_y.max()) + 1 if outputs is None else outputs
    else:
        pooled_y = torch.cat([yj.float() for yj in every])
        outputs = math.prod(pooled_y.shape[1:]) if outputs is None else outputs
    pooled_x = torch.cat([*xs, *tests[0]])

    ends = np.cumsum([len(yj) for yj in every])
    places = [np.arange(end - len(yj), end, dtype=np.int64) for end, yj in zip(ends, every, strict=True)]
    rows = {"train": places[:clients]}
    check_shares(test_share=test_share)
    if test is not None:
        rows["test"] = places[clients:]
    elif test_share > 0:
        labels = pooled_y.numpy() if task == "classification" else None
        rows["test"] = []
        for j, given in enumerate(places):
            if len(given) < 2:
                raise ValueError(
                    f"client {named[j]!r} has 1 example, too few for training and test: leave it out, pass test=, or "
                    "test_share=0 for no test split"
                )
            number = min(max(1, round(test_share * len(given))), len(given) - 1)
            rng = generator(seed, Purpose.SPLIT, client=j, phase=TEST)
            rows["train"][j], held = stratified(None if labels is None else labels[given], given, number, rng)
            rows["test"].append(held)
    return assemble(
        pooled_x,
        pooled_y,
        rows,
        outputs=outputs,
        task=task,
        names=named,
        class_names=class_names,
        source=source or SourceInfo(name="arrays"),
        recipe={"recipe": "from_arrays", "test": "given" if test is not None else test_share},
        validation=validation,
        calibration=calibration,
        seed=seed,
    )


def _materialise(dataset: Dataset, what: str) -> tuple[Tensor, Tensor]:
    """All examples of a map-style data set, as x [n, ...] and y [n, ...]."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    xs, ys = [], []
    try:
        for i in range(len(dataset)):  # pyright: ignore[reportArgumentType]
            example, label = dataset[i]
            xs.append(torch.as_tensor(example))
            ys.append(torch.as_tensor(label))
        if not xs:
            raise ValueError("it is empty")
        return torch.stack(xs), torch.stack(ys)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} must be a map-style data set of pairs (numbers of one shape, label): {error}. "
            "Images need a transform that makes them tensors, such as torchvision's ToTensor()"
        ) from error


def from_datasets(datasets: Sequence[Dataset], *, test: Sequence[Dataset] | None = None, **options: Any) -> FederatedData:
    """Federated data from one map-style torch data set per client, each giving pairs (x, y); all are read into memory once.

    Args:
        datasets: One per client.
        test: Test data sets, one per client; without them a share of each client's examples.
        **options: Those of `from_arrays`.

    Raises:
        ValueError: A data set that does not give pairs of numbers.
    """
    pairs = [_materialise(dataset, f"data set of client {j}") for j, dataset in enumerate(datasets)]
    held = None
    if test is not None:
        tests = [_materialise(dataset, f"test data set of client {j}") for j, dataset in enumerate(test)]
        held = ([x for x, _ in tests], [y for _, y in tests])
    return from_arrays([x for x, _ in pairs], [y for _, y in pairs], test=held, **options)
