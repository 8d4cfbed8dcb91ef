"""Federations of your own data: arrays, tensors, or torch data sets."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bayesfl.base.random import Purpose, generator
from bayesfl.data.assembly import assemble, check_shares
from bayesfl.data.federated import FederatedData
from bayesfl.data.frames import check_columns, check_rows, names_of, numbers_of
from bayesfl.data.names import named_clients
from bayesfl.data.partitions import TEST, stratified
from bayesfl.data.sources import SourceInfo, Task

FEW_VALUES = 20
"""So many different whole numbers as floats, or fewer, may be classes as well as targets."""

MISSING = ("", "nan", "NaN", "None", "<NA>", "NaT")
"""Texts that stand for a missing client id, as `astype(str)` makes them."""

Array: TypeAlias = np.ndarray | Tensor | Sequence[Any]
"""Numbers of one client, or of all: an array, a tensor, or nested lists."""


def to_tensor(values: Any, name: str) -> Tensor:
    """Make a tensor of any numbers: int64 of integers, float32 of floats."""
    if values is None or isinstance(values, Dataset | DataLoader):
        raise TypeError(
            f"{name} must be an array, a tensor or nested lists of numbers, got {_kind(values)}; torch data sets go to from_datasets, one "
            "per client"
        )
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    else:
        if np.ma.is_masked(values):
            raise ValueError(f"{name} has masked values, below which there may be any numbers; fill them in, as values.filled(...) does")
        try:
            array = np.asarray(values)
            if (
                array.dtype == object and array.ndim == 2 and hasattr(values, "dtypes")
            ):  # a frame of several types, bools beside floats for instance
                array = numbers_of(values, name)
            if array.dtype.kind in "OUST" and array.ndim == 1 and any(isinstance(value, str) for value in array):
                raise ValueError(f"{name} holds text: make numbers of it, as codes, class_names = pandas.factorize(values, sort=True) does")
            if array.dtype.kind not in "fiub":
                raise TypeError(f"got {array.dtype}; make real numbers of it, as values.astype(float) does of numbers kept as text")
        except (TypeError, ValueError) as error:
            if str(error).startswith(name):
                raise
            raise ValueError(f"{name} must be an array of numbers, all rows of one shape: {error}") from None
        kind = np.int64 if array.dtype.kind == "u" else np.float64 if array.dtype.char == "g" else array.dtype.newbyteorder("=")
        tensor = torch.from_numpy(array.astype(kind, order="C"))
    if tensor.is_complex():
        raise ValueError(f"{name} must be real numbers, got {tensor.dtype}; pass real and imaginary parts as columns of their own")
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _kind(value: Any) -> str:
    """Describe a value's type for an error message."""
    name = "None" if value is None else type(value).__name__
    return f"{name} of length {len(value)}" if isinstance(value, tuple | list) else name


def _list(values: Any, name: str, of: str) -> list[Any]:
    """Return a list with one thing per client."""
    if isinstance(values, Dataset | DataLoader):
        raise TypeError(f"{name} must be a list with one {of} per client, got one {_kind(values)}: pass a list of them to from_datasets")
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list with one {of} per client, got {_kind(values)}")
    return list(values)


def _per_client(x: Any, y: Any, part: str = "") -> tuple[list[Tensor], list[Tensor]]:
    """Return lists of one tensor per client; an error names the first client that does not fit. `part` is '' or 'test '."""
    xs = [to_tensor(value, f"{part}x of client {j}").float() for j, value in enumerate(_list(x, f"{part}x", "array of inputs"))]
    if not xs:
        raise ValueError(f"{part}x is empty: pass one array of inputs per client")
    ys = [to_tensor(value, f"{part}y of client {j}") for j, value in enumerate(_list(y, f"{part}y", "array of labels or targets"))]
    if len(xs) != len(ys):
        raise ValueError(f"{part}x has {len(xs)} clients, {part}y has {len(ys)}; pass as many arrays of labels or targets as of inputs")
    for j, (xj, yj) in enumerate(zip(xs, ys, strict=True)):
        if xj.dim() < 1 or yj.dim() < 1 or len(xj) != len(yj):
            raise ValueError(
                f"client {j} has {part}x of shape {list(xj.shape)} and {part}y of shape {list(yj.shape)}; they must have as many rows. "
                "Are these pooled arrays? Then pass client_ids, one per row"
            )
        for name, own, first in (("x", xj, xs[0]), ("y", yj, ys[0])):
            if own.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"{part}{name} must have rows of one shape: client {j} has {list(own.shape[1:])}, client 0 {list(first.shape[1:])}; "
                    "reshape, crop or pad them alike"
                )
    return xs, ys


def _plain(ids: Any, name: str) -> list[Hashable]:
    """Convert client ids to Python values, which compare and print as expected."""
    if isinstance(ids, np.ndarray | Tensor) and ids.ndim == 1:
        return ids.tolist()
    if isinstance(ids, np.ndarray | Tensor) or not isinstance(ids, Iterable):
        what = f"shape {list(ids.shape)}" if isinstance(ids, np.ndarray | Tensor) else _kind(ids)
        raise ValueError(f"{name} must be a list or a vector with the client of each row, got {what}")
    return [v.item() if isinstance(v, np.generic | Tensor) else v for v in ids]


def _missing(owner: Any) -> bool:
    """Say whether a client id is none: None, NaN or a missing value of pandas, or what these become as text."""
    if isinstance(owner, str):
        return owner.strip() in MISSING
    return owner is None or type(owner).__name__ in ("NAType", "NaTType") or (isinstance(owner, float) and math.isnan(owner))


def _by_client(x: Any, y: Any, ids: Any, known: Sequence[Hashable] | None) -> tuple[list[Tensor], list[Tensor], list[Hashable]]:
    """Divide pooled rows into one tensor per client, clients in the order of their sorted ids (or as in `known`, for test data)."""
    part = "" if known is None else "test "
    xs, ys = to_tensor(x, f"{part}x").float(), to_tensor(y, f"{part}y")
    if xs.dim() < 1 or ys.dim() < 1 or len(xs) != len(ys):
        raise ValueError(f"{part}x and {part}y must have as many rows, got shapes {list(xs.shape)} and {list(ys.shape)}")
    if not len(xs) and known is None:
        raise ValueError("x is empty: pass one row of inputs for each example, and the client of each row as client_ids")
    owners = _plain(ids, f"{part}client_ids")
    if len(owners) != len(xs):
        raise ValueError(f"{part}client_ids must name a client for each of the {len(xs)} rows, got {len(owners)}")
    if missing := [row for row, owner in enumerate(owners) if _missing(owner)]:
        raise ValueError(
            f"{part}client_ids names no client for {len(missing)} of {len(owners)} rows, the first is row {missing[0]} "
            f"({owners[missing[0]]!r}); leave these rows out, or give them the id of their client"
        )
    places: dict[Hashable, list[int]] = {}
    for row, owner in enumerate(owners):
        places.setdefault(owner, []).append(row)
    if known is None:
        texts: dict[str, Hashable] = {}
        for owner in places:
            if (other := texts.setdefault(str(owner), owner)) is not owner:
                raise ValueError(
                    f"client_ids {other!r} and {owner!r} would be two clients of one name: give one client's rows one id, as "
                    "[str(i) for i in client_ids] does"
                )
        try:
            order: list[Hashable] = sorted(places)  # pyright: ignore[reportArgumentType]
        except TypeError:
            order = sorted(places, key=lambda owner: (type(owner).__name__, str(owner)))
    else:
        order, trained = list(known), set(known)
        if strangers := [owner for owner in places if owner not in trained]:
            raise ValueError(
                f"{part}client_ids name client {strangers[0]!r}, who has no training data: leave its rows out; known are {order[:10]}"
            )
    rows = [torch.tensor(places.get(owner, []), dtype=torch.int64) for owner in order]
    return [xs[r] for r in rows], [ys[r] for r in rows], order


def _environments(values: Any, xs: list[Tensor], ids: Any, order: Sequence[Hashable], held: int) -> Tensor:
    """Return the environment of every training row, client after client, then 0 for `held` rows of test data."""
    if ids is not None:
        pooled = to_tensor(values, "environments")
        owners = _plain(ids, "client_ids")
        if pooled.shape != (len(owners),):
            raise ValueError(f"environments must have one number for each of the {len(owners)} rows, got shape {list(pooled.shape)}")
        places: dict[Hashable, list[int]] = {owner: [] for owner in order}
        for row, owner in enumerate(owners):
            places[owner].append(row)
        parts = [pooled[torch.tensor(places[owner], dtype=torch.int64)] for owner in order]
    else:
        parts = [to_tensor(value, f"environments of client {j}") for j, value in enumerate(_list(values, "environments", "array"))]
    if len(parts) != len(xs):
        raise ValueError(f"environments must be one array for each of the {len(xs)} clients, got {len(parts)}")
    for j, (part, xj) in enumerate(zip(parts, xs, strict=True)):
        if part.shape != (len(xj),) or part.is_floating_point():
            raise ValueError(
                f"environments of client {j} must be whole numbers, one for each of its {len(xj)} rows, got {part.dtype} of shape "
                f"{list(part.shape)}"
            )
    return torch.cat([*parts, torch.zeros(held, dtype=torch.int64)])


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
    environments: Array | Sequence[Array] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Make federated data of your own arrays or tensors.

    Either one array per client, `from_arrays([x_0, x_1], [y_0, y_1])`, or pooled arrays and the client of each row,
    `from_arrays(x, y, client_ids=hospital)`. Numbers are used as they are (in float32): standardise them first.

    Args:
        x: Inputs [n_j, ...] of each client, or [N, ...] of all.
        y: Integer labels, [n_j] or [N], for classification; floats, also [., O], for regression.
        client_ids: The client of each row of pooled arrays; clients are numbered in the order of their sorted ids.
        test: Test data in the same form, `(xs, ys)` or `(x, y, client_ids)`; None takes `test_share` of each client's examples.
        test_share: Share of each client's examples for the test, stratified by class, at least one; 0 for no test split.
        validation: Share of each client's training examples for tuning, at least one; 0 for no such split.
        calibration: The same for temperatures and conformal thresholds, disjoint from `validation`.
        outputs: Number of classes or targets; None for one more than the largest label, or the number of targets.
        task: `classification` or `regression`; None for regression if `y` holds floats, else classification.
        names: A list with one name for each client: in the order of the *sorted* ids where `client_ids` is given, not of their first
            rows, otherwise in the order of `x`; by default a client's id, or `client 0` and so on. `[names[i] for i in
            sorted(set(client_ids))]` makes it of {id: name}.
        class_names: A list with one name for each class, in the order of their numbers; None for classes without names.
        source: Name, licence and citation of the data.
        environments: Environment (instrument, day, site) from which each row of the training data comes, in the form of `y`: whole numbers
            from 0 within each client, no gaps. Environment 0 of one client is unrelated to that of another. They serve methods that
            learn what holds in all of them; if every client is one environment, call `as_environments()` on the data instead.
        seed: Seed of the splits.

    Raises:
        ValueError: Arrays do not fit each other, or a client has too few examples for its splits.
        TypeError: An argument is no array, such as a torch data set: pass those to `from_datasets`; or names are no list.
    """
    pooled = client_ids is not None
    if test is not None and (not isinstance(test, tuple | list) or len(test) != (3 if pooled else 2)):
        form = "(x, y, client_ids)" if pooled else "(xs, ys)"
        raise ValueError(f"test must be {form}, in the form of the training data, got {_kind(test)}")
    if not pooled and isinstance(x, np.ndarray | Tensor):
        raise ValueError(f"x is one array of shape {list(x.shape)}: pass client_ids, one per row, or a list with one array per client")
    for name, own, others in (("x", x, test and test[0]), ("y", y, test and test[1])):
        check_columns(name, own, others, pooled=pooled)
    check_rows(x, y, client_ids, environments, test, pooled=pooled)
    if pooled:
        xs, ys, order = _by_client(x, y, client_ids, None)
    else:
        xs, ys = _per_client(x, y)
        order = list(range(len(xs)))
    clients, named = len(xs), named_clients(names, order, pooled=pooled)
    empty = [name for name, yj in zip(named, ys, strict=True) if not len(yj)]
    if empty:
        raise ValueError(f"client {empty[0]!r} has no training example: leave it out")

    tests: tuple[list[Tensor], list[Tensor]] = ([], [])
    if test is not None:
        tests = _by_client(test[0], test[1], test[2], order)[:2] if pooled else _per_client(test[0], test[1], "test ")
        if len(tests[0]) != clients:
            raise ValueError(
                f"test has {len(tests[0])} clients, the training data {clients}; a client without test data has arrays of length 0"
            )
        for name, held, trained in (("x", tests[0][0], xs[0]), ("y", tests[1][0], ys[0])):
            if held.shape[1:] != trained.shape[1:]:
                raise ValueError(
                    f"test {name} must have rows of the training data's shape {list(trained.shape[1:])}, got {list(held.shape[1:])}"
                )

    every = [*ys, *tests[1]]
    if task is None:
        floats = [yj.is_floating_point() for yj in every if len(yj)]
        if len(set(floats)) > 1:
            raise ValueError(
                f"y must be integers for all clients or floats for all, got {sum(floats)} arrays of floats among {len(floats)} (test data "
                "counted): say which they are by task='classification' or task='regression'"
            )
        values = torch.cat([yj.flatten() for yj in every]).unique()
        values = values[~values.isnan()]
        if floats[0] and 0 < len(values) <= FEW_VALUES and bool((values == values.round()).all()):
            shown = ", ".join(f"{value:g}" for value in values.tolist())
            raise ValueError(
                f"y holds floats, all of them whole numbers ({shown}), which may be classes or targets: pass task='classification' or "
                "task='regression'"
            )
        task = "regression" if floats[0] else "classification"
    if task == "classification":
        if bad := sum(int((~yj.isfinite()).sum()) for yj in every):
            raise ValueError(f"y holds {bad} labels that are NaN or infinite: leave out the rows of examples without a label")
        for yj in every:
            if yj.is_floating_point() and not (yj == yj.round()).all():
                raise ValueError("task 'classification' needs whole numbers as labels, y holds fractions; pass task='regression'")
            if yj.dim() != 1:
                remedy = "a column becomes labels by y.ravel()" if yj.shape[1:] == (1,) else "one-hot labels become classes by y.argmax(1)"
                raise ValueError(f"labels must be [n], got {list(yj.shape)}; {remedy}")
        pooled_y = torch.cat([yj.long() for yj in every])
        if outputs is None and len(pooled_y) and int(pooled_y.min()) > 0:
            raise ValueError(
                f"classes are counted from 0, and the smallest label is {int(pooled_y.min())}: subtract it, or pass outputs= if class 0 is "
                "empty"
            )
        outputs = max(int(pooled_y.max()) + 1, 1) if outputs is None else outputs
    else:
        pooled_y = torch.cat([yj.float() for yj in every])
        outputs = math.prod(pooled_y.shape[1:]) if outputs is None else outputs
    pooled_x = torch.cat([*xs, *tests[0]])
    found_in = None
    if environments is not None:
        found_in = _environments(environments, xs, client_ids if pooled else None, order, len(pooled_x) - sum(map(len, xs)))

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
        environment=found_in,
        columns=names_of(x, pooled=pooled),
    )


def _examples(dataset: Any, name: str) -> tuple[Tensor, Tensor]:
    """Read all examples of a map-style data set, as x [n, ...] and y [n, ...]."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, Mapping):
        raise TypeError(
            f"{name} must be a map-style data set, one with len() and [i], got {_kind(dataset)}: of a data loader pass loader.dataset, of "
            "anything that can be iterated list(...)"
        )
    if not len(dataset):
        raise ValueError(f"{name} is empty: leave that client out")
    xs, ys = [], []
    for i in range(len(dataset)):
        item = dataset[i]
        if not (isinstance(item, tuple | list) and len(item) == 2):
            keys = [repr(key) for key in item] if isinstance(item, Mapping) else ["0", "1"]
            chosen = ", ".join(f"item[{key}]" for key in (keys * 2)[:2])
            raise ValueError(
                f"{name} must give pairs (x, y), got {_kind(item)} as item {i}: choose the two, as in [({chosen}) for item in data]"
            )
        try:
            x, y = (torch.as_tensor(part) for part in item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{name} must hold numbers, its item {i} does not: {error}. Images need a transform that makes them tensors, such as "
                "torchvision's ToTensor()"
            ) from error
        xs.append(x)
        ys.append(y)
        if (x.shape, y.shape) != (xs[0].shape, ys[0].shape):
            raise ValueError(
                f"{name} must have items of one shape: item {i} has x {list(x.shape)} and y {list(y.shape)}, item 0 has x "
                f"{list(xs[0].shape)} and y {list(ys[0].shape)}; reshape, crop or pad them alike"
            )
    return torch.stack(xs), torch.stack(ys)


def from_datasets(datasets: Sequence[Dataset], *, test: Sequence[Dataset] | None = None, **options: Any) -> FederatedData:
    """Make federated data of one map-style torch data set per client, each giving pairs (x, y); all are read into memory once.

    Args:
        datasets: One data set for each client.
        test: Test data sets, one for each client; None takes a share of each client's examples.
        **options: Those of `from_arrays` but `client_ids`.

    Raises:
        ValueError: A data set does not give pairs of numbers, or `from_arrays` refuses them.
        TypeError: `datasets` is no list of map-style data sets, or `client_ids` is given.
    """
    if "client_ids" in options:
        raise TypeError("client_ids is for the pooled arrays of from_arrays; from_datasets takes one data set per client, see names=")
    pairs = [_examples(dataset, f"datasets[{j}]") for j, dataset in enumerate(_list(datasets, "datasets", "data set"))]
    if not pairs:
        raise ValueError("datasets is empty: pass one data set per client")
    held = None
    if test is not None:
        nothing = pairs[0][0][:0], pairs[0][1][:0]  # a client without test data has an empty data set
        tests = [_examples(dataset, f"test[{j}]") if len(dataset) else nothing for j, dataset in enumerate(_list(test, "test", "data set"))]
        held = ([x for x, _ in tests], [y for _, y in tests])
    return from_arrays([x for x, _ in pairs], [y for _, y in pairs], test=held, **options)
