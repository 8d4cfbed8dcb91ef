"""Federations of your own arrays and tensors."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.inputs import join
from bayesfl.base.options import instance, suggests
from bayesfl.base.random import Purpose, generator
from bayesfl.base.targets import IGNORE, Task
from bayesfl.data.assembly import assemble, check_shares
from bayesfl.data.federated import FederatedData
from bayesfl.data.names import named_clients
from bayesfl.data.own.parts import Part, by_client, environments_of, per_client
from bayesfl.data.partitions import TEST, stratified
from bayesfl.data.sources import SourceInfo
from bayesfl.data.tables.frames import check_columns, check_rows, names_of

FEW_VALUES = 20
"""Float targets with at most this many distinct whole numbers are ambiguous: classes or numbers?"""

Array: TypeAlias = np.ndarray | Tensor | Sequence[Any]
"""Numbers of one client, or of all: an array, a tensor, or nested lists."""

Arrays: TypeAlias = Array | tuple[Any, ...] | Mapping[str, Any]
"""Inputs of one client, or of all: an array, with which a model is called as `model(x)`; a tuple of
arrays, `model(*x)`; or a mapping of arrays by name, `model(**x)`."""


@suggests
def from_arrays(
    x: Arrays | Iterable[Arrays],
    y: Array | Iterable[Array],
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
    environments: Array | Sequence[Array] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Make federated data from your own arrays or tensors.

    Either a list with one array per client, `from_arrays([x_0, x_1], [y_0, y_1])`, or pooled arrays
    and the client of each row, `from_arrays(x, y, client_ids=hospital)`. A network of several
    inputs gets a tuple of arrays, or a mapping of arrays by the names of its forward's arguments,
    in place of each array of inputs.

    Numbers keep their type: tokens and stored images stay whole numbers, so pass
    `x.astype("float32")` where they are quantities. Only float64 and the columns of frames
    become float32, and uint16, uint32 and uint64 int64. Standardise inputs first, or by
    `data.transformed`.

    Pooled arrays in mapped files (`numpy.memmap`, `numpy.load(mmap_mode="r")`,
    `torch.load(mmap=True)`) stay in their files, and rows are read when they are needed. All other
    arrays are copied.

    Args:
        x: Inputs [n_j, ...] of each client, or [N, ...] of all.
        y: Integer labels, [n_j] or [N], for classification, or [., T] where each example has
            several, -100 where one is not known; floats, also [., O], for regression.
        client_ids: The client of each row of pooled arrays; clients are numbered in the order of
            their sorted ids, of texts H2 before H10.
        test: Test data in the same form, `(xs, ys)` or `(x, y, client_ids)`; None takes
            `test_share` of each client's examples.
        test_share: Share of each client's examples for the test, stratified by class, at least one;
            0 for no test split.
        validation: Share of each client's training examples for tuning, at least one; 0 for no such
            split.
        calibration: The same for temperatures and conformal thresholds, disjoint from `validation`.
        outputs: Number of classes or targets; None for one more than the largest label, or the
            number of targets.
        task: `classification` or `regression`; None for regression if `y` holds floats, else
            classification.
        names: A list with one name for each client: in the order of the *sorted* ids where
            `client_ids` is given, not of their first rows, otherwise in the order of `x`; by
            default a client's id, or `client 0` and so on. With names {id: name}, pass
            `client_ids=[names[i] for i in client_ids]` instead.
        class_names: A list with one name for each class, in the order of their numbers; None for
            classes without names.
        source: Name, licence and citation of the data.
        environments: Environment (instrument, day, site) from which each row of the training data
            comes, in the form of `y`: whole numbers from 0 within each client, no gaps. Environment
            0 of one client is unrelated to that of another. Invariant methods use them; if every
            client is one environment, call `as_environments()` on the data instead.
        seed: Seed of the splits.

    Raises:
        ValueError: Arrays do not fit each other, or a client has too few examples for its splits.
        RuntimeError: Rows have different shapes.
        KeyError: A client lacks an input of another.
        TypeError: `names` are no list, or `test` no pair of arrays.

    Example:
        >>> x, y = torch.rand(20, 3), torch.arange(20) % 2
        >>> bf.data.from_arrays(x, y, client_ids=["north", "south"] * 10)
        FederatedData(arrays, 2 clients; train 16, test 4)
        >>> clients = bf.data.from_arrays([x[:5], x[5:]], [y[:5], y[5:]], names=["north", "south"])
        >>> clients.client_names
        ('north', 'south')
    """
    pooled = client_ids is not None
    instance("test", test or (), Sequence, "pass arrays (x, y), or a share of rows as test_share=")
    if not pooled:
        x, test = list(x), test and (list(test[0]), test[1])
    check_columns("x", x, test and test[0], pooled=pooled)
    check_columns("y", y, test and test[1], pooled=pooled)
    check_rows(x, y, client_ids, environments, test, pooled=pooled)
    train, held, order = _parts(x, y, client_ids, test)
    named = named_clients(names, order, pooled=pooled)
    targets = [*train.ys, *(held.ys if held else ())]
    task = _task_of(targets) if task is None else task
    if task == "classification" and (bad := sum(int((y != y.long()).sum()) for y in targets)):
        raise ValueError(
            f"task 'classification' needs whole numbers as labels, y holds {bad} that are NaN, "
            "infinite or fractions: leave out the rows of examples without a label, put -100 in "
            "place of one of several labels of an example, or pass task='regression'"
        )
    if outputs is None:
        outputs = _classes(targets) if task == "classification" else math.prod(targets[0].shape[1:])
    kind = torch.int64 if task == "classification" else torch.float32
    train, held = train.as_type(kind), held and held.as_type(kind)
    environment = (
        None
        if environments is None
        else train.placed(environments_of(environments, train, pooled=pooled))
    )
    check_shares(test_share=test_share)
    inputs, placed, rows = train.x, train.placed(train.ys), {"train": list(train.rows)}
    apart = None
    if held is None and test_share > 0:
        rows = _drawn(train, named, test_share, seed, by_class=task == "classification")
    elif held is not None and (train.mapped or held.mapped):
        apart = (held.x, held.placed(held.ys))
        rows["test"] = held.rows
    elif held is not None:  # in memory, one after the other
        rows["test"] = [mine + len(placed) for mine in held.rows]
        inputs, placed = join([train.x, held.x]), torch.cat([placed, held.placed(held.ys)])
        if environment is not None:
            environment = torch.cat(
                [environment, environment.new_zeros(len(placed) - len(environment))]
            )
    return assemble(
        inputs,
        placed,
        rows,
        apart=apart,
        outputs=outputs,
        task=task,
        names=named,
        class_names=class_names,
        source=source or SourceInfo(name="arrays"),
        recipe={"recipe": "from_arrays", "test": "given" if test is not None else test_share},
        validation=validation,
        calibration=calibration,
        seed=seed,
        environment=environment,
        columns=names_of(x, pooled=pooled),
    ).to(dtype=torch.float32)


def _parts(
    x: Any, y: Any, client_ids: Any, test: Any
) -> tuple[Part, Part | None, Sequence[Hashable]]:
    """Return the training data, the test data if they are given, and the clients in their order,
    by id or by number.
    """
    held = None
    if client_ids is not None:
        train, order = by_client(x, y, client_ids)
        if test is not None:
            test_x, test_y, test_ids = test
            held, _ = by_client(test_x, test_y, test_ids, order)
    else:
        train = per_client(x, y)
        order = list(range(len(train.ys)))
        if test is not None:
            test_x, test_y = test
            held = per_client(test_x, test_y, train)
    return train, held and held.like(train), order


def _task_of(targets: Sequence[Tensor]) -> Task:
    """Return the task for the type of the clients' targets.

    Raises:
        ValueError: Both tasks are possible.
    """
    floats = [y.is_floating_point() for y in targets if len(y)]
    if len(set(floats)) > 1:
        raise ValueError(
            f"y must be integers for all clients or floats for all, got {sum(floats)} arrays of "
            f"floats among {len(floats)} (test data counted): say which they are by "
            "task='classification' or task='regression'"
        )
    if not any(floats):
        return "classification"
    values = torch.cat([y.flatten() for y in targets]).unique()
    some, values = " or NaN" if values.isnan().any() else "", values[~values.isnan()]
    if 0 < len(values) <= FEW_VALUES and bool((values == values.round()).all()):
        shown = ", ".join(f"{value:g}" for value in values.tolist())
        raise ValueError(
            f"y holds floats, all of them whole numbers ({shown}){some}, which may be classes or "
            "targets: pass task='classification' or task='regression'"
        )
    return "regression"


def _classes(targets: Sequence[Tensor]) -> int:
    """Return the number of classes, one more than the largest label of all clients.

    Raises:
        ValueError: Class 0 does not occur.
        RuntimeError: No label is known.
    """
    labels = torch.cat([y.long() for y in targets])
    if labels.dim() == 2:
        labels = labels[labels != IGNORE]
    if int(labels.min()) > 0:
        raise ValueError(
            f"classes are counted from 0, and the smallest label is {int(labels.min())}: subtract "
            "it, pass outputs= if class 0 is empty, or task='regression' if these are counts or "
            "measurements"
        )
    return max(int(labels.max()) + 1, 1)


def _drawn(
    train: Part, named: Sequence[str], share: float, seed: int, *, by_class: bool
) -> dict[str, list[np.ndarray]]:
    """Return each client's rows of training and of test, a share of its examples.

    Raises:
        ValueError: A client has too few examples.
    """
    rows: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    for j, given in enumerate(train.rows):
        if len(given) < 2:
            raise ValueError(
                f"client {named[j]!r} has too few examples for training and test, {len(given)}: "
                "leave it out, pass test=, or test_share=0 for no test split"
            )
        number = min(max(1, round(share * len(given))), len(given) - 1)
        rng = generator(seed, Purpose.SPLIT, client=j, phase=TEST)
        labels = train.ys[j].numpy() if by_class and train.ys[j].dim() == 1 else None
        kept, drawn = stratified(labels, given, number, rng)
        rows["train"].append(kept)
        rows["test"].append(drawn)
    return rows
