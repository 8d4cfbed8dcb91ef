"""Federations of data frames: rows are split first, and columns are learnt from training rows
alone.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bayesfl.base.options import number, suggests
from bayesfl.base.random import Purpose, generator
from bayesfl.base.targets import Task
from bayesfl.base.warning import warn
from bayesfl.data.assembly import check_shares, take_share
from bayesfl.data.federated import FederatedData
from bayesfl.data.names import ordered, places_of
from bayesfl.data.own.arrays import FEW_VALUES, from_arrays
from bayesfl.data.partitions import FRAME
from bayesfl.data.sources import SourceInfo
from bayesfl.data.tables.columns import Columns, statistics_of
from bayesfl.data.tables.frame_warnings import few
from bayesfl.data.tables.table import Table, Values
from bayesfl.data.tables.texts import check_levels, check_text, in_order, tidied


@suggests
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
    """Make federated data from a data frame with a row for each example, and the columns that turn
    later rows into inputs.

    Rows are split first. Means, standard deviations and levels are then learnt from the training
    rows alone, without validation and calibration rows. Numbers are standardised; a missing number
    becomes the mean, and an indicator column marks it. A level that no training row has, and a
    missing one, is 0 in all columns of its category. Hospitals that may not pool rows get the same
    columns from `frame_statistics` and `Columns.of`.

    All columns but `client`, `target` and `group` are inputs; drop others first. Numbers and truth
    values are numbers, text is a category. In all text, surrounding and double blanks are removed
    and Unicode is composed (NFC); blank text is missing. A table on the page about your own data
    lists every kind of column.

    Args:
        frame: A data frame of pandas, or of polars and others by Arrow's capsule interface, which
            is read by pyarrow.
        client: Name of the column with the client of each row.
        target: Name of the column to predict, or of several numbers: whole numbers, truth values
            and text are classes, floats are numbers.
        group: Name of a column, such as a patient's id; rows of one group are always in one split,
            also across clients and machines, because the group's name and the seed determine it.
            None for independent rows.
        categories: Names of columns of numbers that are codes of categories.
        columns: Columns learnt elsewhere, for a node of a network; None to learn them here.
        test_share: Share of each client's rows for the test, stratified by class, at least one row,
            drawn by the client's name from its rows in their order; with `group` the probability
            of a group, so that a client with few groups may have none.
        validation: Share of each client's training rows for tuning; 0 for no such split.
        calibration: The same for temperatures and conformal thresholds.
        outputs: Number of classes or targets; None for those found.
        task: `classification` or `regression`; None by the target's type.
        class_names: One name for each class, in the order of their numbers; None for the target's
            texts, sorted, or none.
        source: Name, licence and citation of the data.
        seed: Seed of the splits.

    Returns:
        The federation, and its columns, also available as `data.prepared`: a client's model applies
        them to frames.

    Raises:
        ImportError: A frame of another library than pandas needs pyarrow.
        ValueError: A column is absent, or holds dates, several types, numbers as text, also with a
            unit, infinite numbers or too many levels; clients, groups or targets are missing or of
            the wrong kind; or `from_arrays` refuses a client or a share.

    Warns:
        UserWarning: A client's mean of a column is as in another unit, or levels differ by case
            alone, all in one warning; or a client has no rows in a split.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"site": list("aabb") * 5, "age": range(20)})
        >>> frame["sex"], frame["ill"] = list("mf") * 10, [0, 1] * 10
        >>> clients, columns = bf.data.from_frame(frame, client="site", target="ill")
        >>> clients
        FederatedData(frame, 2 clients; train 16, test 4)
    """
    table, names = _opened(frame, client, target, group, categories)
    given = columns
    if columns is not None:
        task = task or ("regression" if columns.outputs is None else None)
        table.need([part.name for part in columns.parts], "columns=")
        if roles := [part.name for part in columns.parts if part.name not in names]:
            raise ValueError(
                f"columns= has the inputs {roles}, which are client, target or group here; learn "
                "columns for these roles"
            )
    targets = _targets(table, target, class_names, columns, task)
    if (
        outputs is None
        and columns is not None
        and (task == "classification" or (task is None and targets.y.dtype.kind == "i"))
    ):
        outputs = columns.outputs  # classes that do not occur here count, too
    shares = {"test": test_share, "validation": validation, "calibration": calibration}
    data = _split(
        table,
        client,
        targets,
        group,
        shares,
        outputs=outputs,
        task=task,
        seed=seed,
        source=source or SourceInfo(name="frame"),
    )
    if columns is None:
        columns = Columns.of([_statistics(table, data, targets, names, categories)])
    about = {
        "client": client,
        "target": target if isinstance(target, str) else list(target),
        "group": group,
        **shares,
        "categories": list(categories),
        "task": data.task,
    }
    x = columns.applied(table)[0] if given is None else columns.apply(table)
    rows: Any = data.train.x  # one tensor of the rows' numbers, which all splits share
    made: dict[str, Any] = {
        "x": torch.from_numpy(x)[rows[:, 0]],
        "columns": columns.names,
        "dtype": torch.float32,
    }
    data = replace(
        data,
        splits={name: replace(split, **made) for name, split in data.splits.items()},
        inputs=(x.shape[1],),
        columns=columns.names,
        prepared=columns,
        recipe={**data.recipe, "recipe": "from_frame", **about},
    )
    return data, columns


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
    class_names: Sequence[str] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Return statistics of the training rows of a frame's clients, for `Columns.of`, which learns
    columns without rows.

    For each client and column these are the number of rows and of missing values, and the mean and
    the sum of squared deviations, or the levels. They can be written as JSON. They contain the name
    of every level, even if a single patient has it: rename such levels first.

    The options are those of `from_frame`; the same values give the same training rows.

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
        class_names: As for `from_frame`.
        seed: As for `from_frame`.

    Raises:
        ValueError: As by `from_frame`.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"site": ["a"] * 10, "age": range(10), "ill": [0, 1] * 5})
        >>> found = bf.data.frame_statistics(frame, client="site", target="ill", test_share=0.0)
        >>> list(found), len(found["clients"])
        (['classes', 'ordered', 'outputs', 'clients'], 1)
    """
    table, names = _opened(frame, client, target, group, categories)
    targets = _targets(table, target, class_names, None, task)
    shares = {"test": test_share, "validation": validation, "calibration": calibration}
    labels = targets.names is None and (
        task == "classification" or (task is None and targets.y.dtype.kind == "i")
    )
    outputs = int(targets.y.max()) + 1 if labels else None  # class 0 may be at other clients only
    data = _split(
        table,
        client,
        targets,
        group,
        shares,
        outputs=outputs,
        task=task,
        seed=seed,
        source=SourceInfo(name="frame"),
    )
    return _statistics(table, data, targets, names, categories)


def _opened(
    frame: Any,
    client: str,
    target: str | Sequence[str],
    group: str | None,
    categories: Sequence[str],
) -> tuple[Table, list[str]]:
    """Return the frame as a table, and the names of the inputs.

    Raises:
        ValueError: A column is absent.
    """
    table = Table(frame)
    targets = [target] if isinstance(target, str) else list(target)
    for role, given in (
        ("client", [client]),
        ("target", targets),
        ("group", [] if group is None else [group]),
        ("categories", categories),
    ):
        table.need(list(given), role)
    taken = [client, *targets, *([] if group is None else [group])]
    return table, [name for name in table.columns if name not in taken]


@dataclass(frozen=True)
class _Targets:
    """Hold the targets.

    Args:
        y: Numbers of classes [N], or targets [N] or [N, O].
        names: Names of the classes, in the order of their numbers; None where none are known.
        text: Whether the column holds these names as text.
        ordered: Whether the names have an order of their own, and not the alphabet's.
    """

    y: np.ndarray
    names: tuple[str, ...] | None = None
    text: bool = False
    ordered: bool = False


def _split(
    table: Table,
    client: str,
    targets: _Targets,
    group: str | None,
    shares: Mapping[str, float],
    *,
    outputs: int | None,
    task: Task | None,
    seed: int,
    source: SourceInfo,
) -> FederatedData:
    """Return the federation with the rows' numbers in the frame as inputs, [N, 1] int64."""
    check_shares(
        **{
            "test_share" if name == "test" else name: number(name, share)
            for name, share in shares.items()
            if share
        }
    )
    ids = _ids(table.values(client), "client")
    y, x = targets.y, np.arange(table.rows)[:, None]
    of = (
        _by_row(ids, y, shares, seed)
        if group is None
        else _by_group(ids, _ids(table.values(group), "group"), shares, seed)
    )
    outputs = len(targets.names) if targets.names is not None and outputs is None else outputs
    test = of == "test"
    held = (x[test], y[test], ids[test]) if test.any() else None
    data = from_arrays(
        x[~test],
        y[~test],
        client_ids=ids[~test],
        test=held,
        test_share=0.0,
        outputs=outputs,
        task=task,
        class_names=targets.names,
        seed=seed,
        source=source,
    )
    splits, rows = dict(data.splits), _rows(data, "train")
    owner = np.repeat(np.arange(data.clients), data.train.counts)
    for name in ("train", "validation", "calibration"):
        if shares.get(name, 1):
            mine = of[rows] == name
            splits[name] = replace(
                data.train,
                index=data.train.index[torch.from_numpy(mine)],
                counts=np.bincount(owner[mine], minlength=data.clients),
            )
    for name in [name for name, share in shares.items() if share]:
        counts = splits[name].counts if name in splits else np.zeros(data.clients)
        if empty := [who for who, n in zip(data.client_names, counts, strict=True) if not n]:
            warn(f"clients {few(empty)} have no {name} rows: measures leave them out")
    return replace(data, splits=splits)


def _address(name: Any) -> int:
    """Return a number for a name, the same on every machine."""
    return int.from_bytes(hashlib.sha256(str(name).encode()).digest()[:4])


def _by_row(ids: np.ndarray, y: np.ndarray, shares: Mapping[str, float], seed: int) -> np.ndarray:
    """Return the split of each row, [N] text: drawn for each client by its name, stratified by
    class, at least one row in each split except the last if there are too few.
    """
    of = np.full(len(ids), "train", dtype=object)
    labels = y if y.ndim == 1 and y.dtype.kind == "i" else None
    for owner, places in places_of(ids.tolist()).items():
        left = np.array(places, dtype=np.int64)
        rng = generator(seed, Purpose.SPLIT, client=_address(owner), phase=FRAME)
        total = len(left)
        for name, share in shares.items():
            if share:
                left, taken = take_share(labels, left, share, total, rng)
                of[taken] = name
                total = len(left) if name == "test" else total
    return of


def _by_group(
    ids: np.ndarray, groups: np.ndarray, shares: Mapping[str, float], seed: int
) -> np.ndarray:
    """Return the split of each row, [N] text: that of its group, by a number computed from the
    group's name.
    """
    chosen = {}
    for name in dict.fromkeys(groups.tolist()):
        u = _address(f"{seed} {name}") / 2**32
        rest = (u - shares["test"]) / (1 - shares["test"])
        held = "validation" if rest < shares["validation"] else "calibration"
        first = held if rest < shares["validation"] + shares["calibration"] else "train"
        chosen[name] = "test" if u < shares["test"] else first
    return np.array([chosen[name] for name in groups.tolist()], dtype=object)


def _rows(data: FederatedData, split: str) -> np.ndarray:
    """Return the frame's rows of a split of the federation that `_split` makes, client after
    client.
    """
    found: Any = data.splits[split]
    return found.x[found.index, 0].numpy()


def _statistics(
    table: Table,
    data: FederatedData,
    targets: _Targets,
    names: Sequence[str],
    categories: Sequence[str],
) -> dict[str, Any]:
    """Return the statistics of the classes and of each client's training rows that other machines
    need, as values that JSON can hold.
    """
    parts = np.split(_rows(data, "train"), np.cumsum(data.train.counts)[:-1])
    clients = dict(zip(data.client_names, parts, strict=True))
    return {
        "classes": list(targets.names) if targets.text and targets.names is not None else None,
        "ordered": targets.ordered,
        "outputs": data.outputs if data.task == "classification" else None,
        "clients": statistics_of(table, clients, names, categories),
    }


def _ids(values: Values, role: str) -> np.ndarray:
    """Return clients or groups [N], as text or whole numbers.

    Raises:
        ValueError: Some are missing, or floats.
    """
    if (missing := values.missing).any():
        raise ValueError(
            f"column {values.name!r} has no {role} in {int(missing.sum())} rows, first row "
            f"{int(missing.argmax())}: find out whose they are, or leave them out, as "
            f"frame.dropna(subset=[{values.name!r}]) does where they are not text of blanks"
        )
    if values.numbers is not None and values.exact is None:
        raise ValueError(
            f"column {values.name!r} holds floats, and a {role} is a name or a whole number: "
            f"frame[{values.name!r}].astype('int64') makes these of ids that became floats when "
            "one was missing"
        )
    return (
        values.texts
        if values.texts is not None
        else values.exact
        if values.exact is not None
        else np.empty(0)
    )


def _targets(
    table: Table,
    target: str | Sequence[str],
    class_names: Sequence[str] | None,
    columns: Columns | None,
    task: Task | None,
) -> _Targets:
    """Return the targets; text is coded by the names that are given, by those of `columns`, by the
    type's order, or by the alphabet.

    Raises:
        ValueError: Some are missing, a text is no class that is known, or several targets hold
            text.
    """
    found = [table.values(name) for name in ([target] if isinstance(target, str) else target)]
    for values in found:
        if (missing := values.missing).any():
            raise ValueError(
                f"target {values.name!r} is missing in {int(missing.sum())} rows, first row "
                f"{int(missing.argmax())}: leave these rows out"
                + (", or put -100 in place of labels that are not known" if len(found) > 1 else "")
            )
    if class_names is not None:
        ordered("class_names", class_names, "pass a list in the order of the classes")
    given = None if class_names is None else tuple(tidied(str(name)) or "" for name in class_names)
    if len(found) == 1 and found[0].texts is not None:
        if task == "regression":
            raise ValueError(
                f"target {found[0].name!r} holds text, which is no number; leave out "
                "task='regression', or make numbers of it"
            )
        learnt = columns.classes if columns is not None else None
        if given and learnt and given != learnt:
            raise ValueError(
                f"class_names are {list(given)}, and columns= has the classes {list(learnt)}; "
                "leave class_names out"
            )
        present = set(found[0].texts.tolist())
        known = given or learnt or found[0].order
        if known is None and not found[0].declared:
            check_text(found[0].name, sorted(present), "pass class_names= if they are codes")
            check_levels(found[0].name, sorted(present))
        names = known or in_order(present)
        if strange := sorted(present - set(names)):
            raise ValueError(
                f"target {found[0].name!r} holds {strange[:5]}, which are none of the classes "
                f"{list(names)}; name all, as they are written"
            )
        place = {name: k for k, name in enumerate(names)}
        y = np.array([place[text] for text in found[0].texts.tolist()], dtype=np.int64)
        return _Targets(
            y, tuple(names), text=True, ordered=given is not None or found[0].order is not None
        )
    if any(values.numbers is None for values in found):
        raise ValueError(
            "several targets must be numbers, "
            f"{[values.name for values in found if values.numbers is None]} hold text"
        )
    whole = all(values.exact is not None for values in found)
    if (
        task is None
        and len(found) == 1
        and found[0].exact is not None
        and given is None
        and columns is None
        and (many := len(set(found[0].exact.tolist()))) > FEW_VALUES
    ):
        raise ValueError(
            f"target {found[0].name!r} holds {many} different whole numbers, which may be classes "
            "or counts and measurements: pass task='classification' or task='regression'"
        )
    parts = [
        values.exact.astype(np.int64) if whole and values.exact is not None else values.numbers
        for values in found
    ]
    y = np.stack([part for part in parts if part is not None], -1)
    return _Targets(y[:, 0] if len(found) == 1 else y, given)
