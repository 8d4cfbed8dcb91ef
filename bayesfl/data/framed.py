"""Federations of data frames: rows are split first, and what is learnt of columns comes from training rows alone."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bayesfl.base.checks import number
from bayesfl.base.random import Purpose, generator
from bayesfl.base.targets import Task
from bayesfl.data.arrays import from_arrays
from bayesfl.data.assembly import check_shares
from bayesfl.data.columns import Columns, statistics_of
from bayesfl.data.federated import FederatedData
from bayesfl.data.sources import SourceInfo
from bayesfl.data.tables import Table, Values

GROUPS = 90
"""Address of the draw that puts groups into splits."""


def from_frame(
    frame: Any,
    *,
    client: str,
    target: str | Sequence[str],
    group: str | None = None,
    categories: Sequence[str] = (),
    columns: Columns | None = None,
    test_share: float = 0.2,
    validation: float = 0.0,
    calibration: float = 0.0,
    outputs: int | None = None,
    task: Task | None = None,
    class_names: Sequence[str] | None = None,
    source: SourceInfo | None = None,
    seed: int = 0,
) -> tuple[FederatedData, Columns]:
    """Make federated data of a data frame with a row for each example, and what turns later rows into inputs.

    Rows are split first. Of the training rows alone, validation and calibration rows left out, come the means and deviations by which
    numbers are standardised, the means that stand where numbers are missing, beside an indicator, and the levels of categories. A level
    that no training row has, and a missing one, is 0 in all columns of its category. These statistics are sums over clients of what
    `frame_statistics` makes of each, so hospitals that may not pool rows get the same by `Columns.of`.

    Columns other than `client`, `target` and `group` are inputs; leave others out of the frame before. Numbers and truth values are
    numbers, text is a category.

    Args:
        frame: A data frame of pandas, or of polars and others by Arrow's capsule interface, which is read by pyarrow.
        client: Name of the column that says whose a row is.
        target: Name of the column to predict, or of several numbers: whole numbers, truth values and text are classes, floats are numbers.
        group: Name of a column, such as a patient's id, whose rows never stand in two splits, also where clients share it; None for rows
            that are independent.
        categories: Names of columns of numbers that are codes of categories.
        columns: Columns that were learnt elsewhere, as on a node of a network; None to learn them here.
        test_share: Share of each client's rows for the test, stratified by class, at least one row; with `group` about as many, in whole
            groups.
        validation: Share of each client's training rows for tuning; 0 for no such split.
        calibration: The same for temperatures and conformal thresholds.
        outputs: Number of classes or targets; None for those found.
        task: `classification` or `regression`; None by the target's type.
        class_names: One name for each class, in the order of their numbers; None for the target's texts, sorted, or none.
        source: Name, licence and citation of the data.
        seed: Seed of the splits.

    Returns:
        The federation, and its columns, which it also holds as `data.prepared`: a client's model applies them to frames.

    Raises:
        TypeError: `frame` is no data frame.
        ImportError: A frame of another library than pandas needs pyarrow.
        ValueError: A column is absent, or holds dates, several types, numbers as text, infinite numbers or too many levels; clients, groups
            or targets are missing or of the wrong kind; an index repeats; or `from_arrays` refuses a client or a share.

    Warns:
        UserWarning: A column is constant, or has no value at some client; or a client has no rows in a split.
    """
    table, names = _opened(frame, client, target, group, categories)
    data = _split(
        table,
        client,
        target,
        group,
        test_share,
        validation,
        calibration,
        outputs=outputs,
        task=task,
        class_names=class_names,
        seed=seed,
        source=source or SourceInfo(name="frame"),
    )
    for name, split in data.splits.items():
        if empty := [who for who, n in zip(data.client_names, split.counts, strict=True) if not n]:
            warnings.warn(
                f"clients {empty[:5]} ({len(empty)} in all) have no {name} rows, as their groups are few: measures leave them out",
                stacklevel=2,
            )
    if columns is None:
        found = _statistics(table, data, names, categories)
        _warn(found)
        columns = Columns.of([found])
    else:
        table.need([part.name for part in columns.parts], "columns=")
    return _with_inputs(data, torch.from_numpy(columns.apply(table)), columns, client, target, group), columns


def frame_statistics(
    frame: Any,
    *,
    client: str,
    target: str | Sequence[str],
    group: str | None = None,
    categories: Sequence[str] = (),
    test_share: float = 0.2,
    validation: float = 0.0,
    calibration: float = 0.0,
    task: Task | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the statistics of the training rows of a frame's clients, of which `Columns.of` learns columns without anybody's rows.

    For each client and column these are the number of rows and of missing values, and the mean and the sum of squared deviations, or the
    levels. They can be written as JSON. A level that a single patient has is told by its name: rename such levels before.

    The options are those of `from_frame`, and must be the same there for the same training rows.

    Args:
        frame: The frame of one client or several.
        client: As for `from_frame`.
        target: As for `from_frame`.
        group: As for `from_frame`.
        categories: As for `from_frame`.
        test_share: As for `from_frame`.
        validation: As for `from_frame`.
        calibration: As for `from_frame`.
        task: As for `from_frame`.
        seed: As for `from_frame`.

    Raises:
        TypeError: As by `from_frame`.
        ValueError: As by `from_frame`.
    """
    table, names = _opened(frame, client, target, group, categories)
    data = _split(table, client, target, group, test_share, validation, calibration, task=task, seed=seed)
    return _statistics(table, data, names, categories)


def _opened(frame: Any, client: str, target: str | Sequence[str], group: str | None, categories: Sequence[str]) -> tuple[Table, list[str]]:
    """Return the frame as a table, and the names of the inputs.

    Raises:
        ValueError: A column is absent, stands in two roles, or no column is left.
    """
    table = Table(frame)
    if isinstance(categories, str):
        raise ValueError(f"categories must be a list of names, got {categories!r}; pass [{categories!r}]")
    targets = [target] if isinstance(target, str) else list(target)
    for role, given in (("client", [client]), ("target", targets), ("group", [] if group is None else [group]), ("categories", categories)):
        table.need(list(given), role)
    taken = [client, *targets, *([] if group is None else [group])]
    if len(set(taken)) < len(taken) or set(taken) & set(categories):
        raise ValueError(f"a column has one role, got client={client!r}, target={target!r}, group={group!r}, categories={list(categories)}")
    names = [name for name in table.columns if name not in taken]
    if not names:
        raise ValueError(f"no column is left for inputs beside {taken}")
    return table, names


def _split(
    table: Table,
    client: str,
    target: str | Sequence[str],
    group: str | None,
    test_share: float,
    validation: float,
    calibration: float,
    *,
    outputs: int | None = None,
    task: Task | None = None,
    class_names: Sequence[str] | None = None,
    seed: int,
    source: SourceInfo | None = None,
) -> FederatedData:
    """Return the federation with the rows' numbers in the frame as inputs, [N, 1] int64."""
    ids = _ids(table.values(client), "client")
    y, names = _targets(table, target)
    if class_names is None and names is not None and task != "regression":
        class_names = names
    x = np.arange(table.rows)[:, None]
    about: dict[str, Any] = {"outputs": outputs, "task": task, "class_names": class_names, "seed": seed, "source": source}
    if group is None:
        return from_arrays(x, y, client_ids=ids, test_share=test_share, validation=validation, calibration=calibration, **about)
    shares = {"test": test_share, "validation": validation, "calibration": calibration}
    of = _by_group(ids, _ids(table.values(group), "group"), shares, seed)
    if lacking := sorted(set(ids.tolist()) - set(ids[of == "train"].tolist())):
        raise ValueError(
            f"client {lacking[0]!r} has no training rows left, as its groups are few and large: use smaller shares, or leave it out"
        )
    test = of == "test"
    held = (x[test], y[test], ids[test]) if test.any() else None
    data = from_arrays(x[~test], y[~test], client_ids=ids[~test], test=held, test_share=0.0, **about)
    splits = dict(data.splits)
    rows = _rows(data, "train")
    for name in ("train", *(name for name in ("validation", "calibration") if shares[name])):
        mine = of[rows] == name
        owner = np.repeat(np.arange(data.clients), data.train.counts)
        counts = np.bincount(owner[mine], minlength=data.clients)
        splits[name] = replace(data.train, index=data.train.index[torch.from_numpy(mine)], counts=counts)
    return replace(data, splits=splits)


def _by_group(ids: np.ndarray, groups: np.ndarray, shares: dict[str, float], seed: int) -> np.ndarray:
    """Return the split of each row, [N] text: of a client's groups, drawn one after another, until a split has its share of rows."""
    check_shares(**{"test_share" if name == "test" else name: number(name, share) for name, share in shares.items() if share})
    chosen: dict[str, str] = {}
    for j, owner in enumerate(sorted(set(ids.tolist()))):
        mine = groups[ids == owner]
        names, sizes = np.unique(mine, return_counts=True)
        size = dict(zip(names.tolist(), sizes.tolist(), strict=True))
        free = [name for name in names.tolist() if name not in chosen]
        rng = generator(seed, Purpose.SPLIT, client=j, phase=GROUPS)
        order = [free[k] for k in rng.permutation(len(free))]
        left = sum(size.values())
        for split, share in shares.items():
            wanted = share * (sum(size.values()) if split == "test" else left)
            got = sum(n for name, n in size.items() if chosen.get(name) == split)
            while share and order[1:] and got < wanted:
                name = order.pop()
                chosen[name], got = split, got + size[name]
            left -= got if split == "test" else 0
        chosen |= dict.fromkeys(order, "train")
    return np.array([chosen[name] for name in groups.tolist()])


def _rows(data: FederatedData, split: str) -> np.ndarray:
    """Return the frame's rows of a split of the federation that `_split` makes, client after client."""
    found = data.splits[split]
    x = found.x
    assert isinstance(x, torch.Tensor)
    return x[found.index, 0].numpy()


def _statistics(table: Table, data: FederatedData, names: Sequence[str], categories: Sequence[str]) -> dict[str, Any]:
    parts = np.split(_rows(data, "train"), np.cumsum(data.train.counts)[:-1])
    return statistics_of(table, dict(zip(data.client_names, parts, strict=True)), names, categories)


def _with_inputs(
    data: FederatedData, x: torch.Tensor, columns: Columns, client: str, target: str | Sequence[str], group: str | None
) -> FederatedData:
    """Return the federation with these inputs [N, D] of the frame's rows in place of the rows' numbers."""
    made: dict[int, torch.Tensor] = {}
    splits = {}
    for name, split in data.splits.items():
        assert isinstance(split.x, torch.Tensor)
        if id(split.x) not in made:
            made[id(split.x)] = x[split.x[:, 0]]
        splits[name] = replace(split, x=made[id(split.x)], columns=columns.names, dtype=torch.float32)
    roles = {"client": client, "target": target if isinstance(target, str) else list(target), "group": group}
    recipe = {**data.recipe, "recipe": "from_frame", **roles, "columns": columns.to_json()}
    return replace(data, splits=splits, inputs=(x.shape[1],), columns=columns.names, prepared=columns, recipe=recipe)


def _ids(values: Values, role: str) -> np.ndarray:
    """Return clients or groups [N], as text or whole numbers.

    Raises:
        ValueError: Some are missing, or floats.
    """
    if (missing := values.missing).any():
        raise ValueError(
            f"column {values.name!r} has no {role} in {int(missing.sum())} rows, first row {int(missing.argmax())}: find out whose they "
            f"are, or leave them out, as frame.dropna(subset=[{values.name!r}]) does"
        )
    if values.numbers is not None and not values.whole:
        raise ValueError(
            f"column {values.name!r} holds floats, and a {role} is a name or a whole number: frame[{values.name!r}].astype('int64') makes "
            "these of ids that became floats when one was missing"
        )
    return values.levels() if values.numbers is None else values.numbers.astype(np.int64)


def _targets(table: Table, target: str | Sequence[str]) -> tuple[np.ndarray, list[str] | None]:
    """Return the targets [N] or [N, O], and the names of the classes where they are text.

    Raises:
        ValueError: Some are missing, or several of them hold text.
    """
    found = [table.values(name) for name in ([target] if isinstance(target, str) else target)]
    for values in found:
        if (missing := values.missing).any():
            raise ValueError(
                f"target {values.name!r} is missing in {int(missing.sum())} rows, first row {int(missing.argmax())}: leave these rows out, "
                f"as frame.dropna(subset=[{values.name!r}]) does"
            )
    if len(found) == 1 and found[0].texts is not None:
        names, codes = np.unique(found[0].texts.astype(str), return_inverse=True)
        return codes, names.tolist()
    if any(values.numbers is None for values in found):
        raise ValueError(f"several targets must be numbers, {[values.name for values in found if values.numbers is None]} hold text")
    y = np.stack(
        [values.numbers.astype(np.int64) if values.whole else values.numbers for values in found if values.numbers is not None], -1
    )
    return (y[:, 0] if isinstance(target, str) else y), None


def _warn(statistics: dict[str, Any]) -> None:
    """Warn of columns that are constant, or without a value at some client."""
    absent: dict[str, list[str]] = {}
    constant: dict[str, list[str]] = {}
    for client, columns in statistics["clients"].items():
        for column in columns:
            if column["rows"] == column["missing"]:
                absent.setdefault(column["name"], []).append(client)
            elif column.get("squares", 1.0) == 0 and column["rows"] > 1:
                constant.setdefault(column["name"], []).append(client)
    everyone = len(statistics["clients"])
    told = [f"{name!r} has no value in the training rows of {clients[:5]}" for name, clients in absent.items()]
    told += [f"{name!r} is constant in those of {'all clients' if len(on) == everyone else on[:5]}" for name, on in constant.items()]
    if told:
        warnings.warn(
            f"columns say nothing at some clients, and may tell these from others: {'; '.join(told[:10])}"
            f"{f'; and {len(told) - 10} more' if len(told) > 10 else ''}. Leave them out, if that is not meant",
            stacklevel=3,
        )
