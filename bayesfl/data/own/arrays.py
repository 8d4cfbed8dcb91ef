"""Federations of your own arrays and tensors."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.inputs import join
from bayesfl.base.random import Purpose, generator
from bayesfl.base.targets import IGNORE, Task
from bayesfl.data.assembly import assemble, check_shares
from bayesfl.data.federated import FederatedData
from bayesfl.data.names import named_clients
from bayesfl.data.own.conversion import as_list, kind_of
from bayesfl.data.own.parts import by_client, check_test, environments_of, per_client
from bayesfl.data.partitions import TEST, stratified
from bayesfl.data.sources import SourceInfo
from bayesfl.data.tables.frames import check_columns, check_rows, names_of

FEW_VALUES = 20
"""So many different whole numbers as floats, or fewer, may be classes as well as targets."""

Array: TypeAlias = np.ndarray | Tensor | Sequence[Any]
"""Numbers of one client, or of all: an array, a tensor, or nested lists."""

Arrays: TypeAlias = Array | tuple[Any, ...] | Mapping[str, Any]
"""Inputs of one client, or of all: an array, with which a model is called as `model(x)`; a tuple of
arrays, `model(*x)`; or a mapping of arrays by name, `model(**x)`."""


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
    """Make federated data of your own arrays or tensors.

    Either a list with one array per client, `from_arrays([x_0, x_1], [y_0, y_1])`, or pooled arrays
    and the client of each row, `from_arrays(x, y, client_ids=hospital)`. A network of several
    inputs gets a tuple of arrays, or a mapping of arrays by the names of its forward's arguments,
    in place of each array of inputs.

    Numbers stay what they are: whole numbers are not made floats, as tokens and stored images need
    it; give `x.astype("float32")` where they are quantities. Only float64 and the columns of frames
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
            their sorted ids.
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
            default a client's id, or `client 0` and so on. `[names[i] for i in
            sorted(set(client_ids))]` makes it of {id: name}.
        class_names: A list with one name for each class, in the order of their numbers; None for
            classes without names.
        source: Name, licence and citation of the data.
        environments: Environment (instrument, day, site) from which each row of the training data
            comes, in the form of `y`: whole numbers from 0 within each client, no gaps. Environment
            0 of one client is unrelated to that of another. They serve methods that learn what
            holds in all of them; if every client is one environment, call `as_environments()` on
            the data instead.
        seed: Seed of the splits.

    Raises:
        ValueError: Arrays do not fit each other, or a client has too few examples for its splits.
        TypeError: An argument is no array, such as a torch data set: pass those to `from_datasets`;
            or names are no list.
    """
    pooled = client_ids is not None
    if test is not None and (
        not isinstance(test, tuple | list) or len(test) != (3 if pooled else 2)
    ):
        form = "(x, y, client_ids)" if pooled else "(xs, ys)"
        raise ValueError(
            f"test must be {form}, in the form of the training data, got {kind_of(test)}"
        )
    if not pooled and isinstance(x, np.ndarray | Tensor):
        raise ValueError(
            f"x is one array of shape {list(x.shape)}: pass client_ids, one per row, or a list "
            "with one array per client"
        )
    listed = []
    if not pooled:
        x = listed = as_list(x, "x", "array of inputs")
        test = None if test is None else (as_list(test[0], "test x", "array of inputs"), test[1])
    for name, own, others in (("x", x, test and test[0]), ("y", y, test and test[1])):
        check_columns(name, own, others, pooled=pooled)
    check_rows(x, y, client_ids, environments, test, pooled=pooled)
    called = names if isinstance(names, list | tuple) else None
    if pooled:
        train, order = by_client(x, y, client_ids)
    else:
        train = per_client(listed, y, called)
        order = list(range(len(train.ys)))
    clients, named = len(order), named_clients(names, order, pooled=pooled)
    empty = [name for name, yj in zip(named, train.ys, strict=True) if not len(yj)]
    if empty:
        raise ValueError(f"client {empty[0]!r} has no training example: leave it out")

    held = None
    if test is not None:
        held = (
            by_client(test[0], test[1], test[2], order)[0]
            if pooled
            else per_client(test[0], test[1], called, train)
        )
        if len(held.ys) != clients:
            raise ValueError(
                f"test has {len(held.ys)} clients, the training data {clients}; a client without "
                "test data has arrays of length 0"
            )
        held = check_test(held, train)
    every = [*train.ys, *(held.ys if held else ())]
    if task is None:
        floats = [yj.is_floating_point() for yj in every if len(yj)]
        if len(set(floats)) > 1:
            raise ValueError(
                f"y must be integers for all clients or floats for all, got {sum(floats)} arrays "
                f"of floats among {len(floats)} (test data "
                "counted): say which they are by task='classification' or task='regression'"
            )
        values = torch.cat([yj.flatten() for yj in every]).unique()
        some, values = " or NaN" if values.isnan().any() else "", values[~values.isnan()]
        if floats[0] and 0 < len(values) <= FEW_VALUES and bool((values == values.round()).all()):
            shown = ", ".join(f"{value:g}" for value in values.tolist())
            raise ValueError(
                f"y holds floats, all of them whole numbers ({shown}){some}, which may be classes "
                "or targets: pass "
                "task='classification' or task='regression'"
            )
        task = "regression" if floats[0] else "classification"
    if task == "classification":
        if bad := sum(int((~yj.isfinite()).sum()) for yj in every):
            known = (
                ", or, of several labels of an example, put -100 in place of those that are not "
                "known"
                if every[0].dim() > 1
                else ""
            )
            raise ValueError(
                f"y holds {bad} labels that are NaN or infinite: leave out the rows of examples "
                f"without a label{known}"
            )
        for yj in every:
            if yj.is_floating_point() and not (yj == yj.round()).all():
                raise ValueError(
                    "task 'classification' needs whole numbers as labels, y holds fractions; pass "
                    "task='regression'"
                )
            if yj.dim() not in (1, 2) or yj.shape[1:] == (1,):
                remedy = "; a column becomes labels by y.ravel()" if yj.shape[1:] == (1,) else ""
                raise ValueError(
                    "labels must be [n], or [n, T] for several of each example, got "
                    f"{list(yj.shape)}{remedy}"
                )
        labels = torch.cat([yj.long() for yj in every])
        if (
            labels.dim() == 2
            and outputs is None
            and bool(((labels == 0) | (labels == 1)).all() & (labels.sum(1) == 1).all())
        ):
            raise ValueError(
                f"y {list(labels.shape)} holds a single 1 in each row: one-hot labels become "
                "classes by y.argmax(1); pass outputs=2 if "
                "they are labels of which one applies to each example"
            )
        if labels.dim() == 2 and not len(labels[labels != IGNORE]):
            raise ValueError(
                f"y {list(labels.shape)} holds no label that is known, as all are -100; leave such "
                "examples out"
            )
        labels = labels[labels != IGNORE] if labels.dim() == 2 else labels
        if outputs is None and len(labels) and int(labels.min()) > 0:
            raise ValueError(
                f"classes are counted from 0, and the smallest label is {int(labels.min())}: "
                "subtract it, pass outputs= if class 0 is "
                "empty, or task='regression' if these are counts or measurements"
            )
        outputs = max(int(labels.max()) + 1, 1) if outputs is None else outputs
    else:
        outputs = math.prod(every[0].shape[1:]) if outputs is None else outputs
    dtype = torch.int64 if task == "classification" else torch.float32
    train = train._replace(ys=[yj.to(dtype) for yj in train.ys])
    held = held and held._replace(ys=[yj.to(dtype) for yj in held.ys])
    found_in = (
        None if environments is None else train.placed(environments_of(environments, train, order))
    )

    check_shares(test_share=test_share)
    rows, pooled_y = {"train": list(train.rows)}, train.placed(train.ys)
    if held is None and test_share > 0:
        rows["test"] = []
        for j, given in enumerate(train.rows):
            if len(given) < 2:
                raise ValueError(
                    f"client {named[j]!r} has 1 example, too few for training and test: leave it "
                    "out, pass test=, or "
                    "test_share=0 for no test split"
                )
            number = min(max(1, round(test_share * len(given))), len(given) - 1)
            rng = generator(seed, Purpose.SPLIT, client=j, phase=TEST)
            kinds = (
                pooled_y[torch.from_numpy(given)].numpy()
                if task == "classification" and pooled_y.dim() == 1
                else None
            )
            rows["train"][j], drawn = stratified(kinds, given, number, rng)
            rows["test"].append(drawn)
    inputs, apart = train.x, None
    if held is not None and (train.mapped or held.mapped):
        apart = (held.x, held.placed(held.ys), held.rows)
    elif held is not None:  # in memory, one after the other
        inputs, start = join([train.x, held.x]), len(pooled_y)
        pooled_y = torch.cat([pooled_y, held.placed(held.ys)])
        rows["test"] = [mine + start for mine in held.rows]
        found_in = (
            None
            if found_in is None
            else torch.cat([found_in, found_in.new_zeros(len(pooled_y) - start)])
        )
    return assemble(
        inputs,
        pooled_y,
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
        environment=found_in,
        columns=names_of(x, pooled=pooled),
    ).to(dtype=torch.float32)
