"""Recipes: one call from the name of a data set to a federation, as papers make them.

Here are the steps that recipes share, and those without skew of labels: by chance, or in the order of a feature. These, those
of concept shift, and those of label skew but `label_groups` keep the data's own division into training and test rows; all share one copy
of the data between clients. The same arguments give the same partition on every machine; `FederatedData.hash` tells whether two are the
same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from bayesfl.base.checks import whole
from bayesfl.base.random import Purpose, generator
from bayesfl.data import partitions
from bayesfl.data.assembly import assemble
from bayesfl.data.federated import FederatedData
from bayesfl.data.readers import load
from bayesfl.data.sources import Source


def open_source(source: str | Source, root: str | Path | None, download: bool) -> Source:
    """The data set itself, to be shared out.

    Raises:
        ValueError: It belongs to clients already.
    """
    opened = source if isinstance(source, Source) else load(source, root=root, download=download)
    if opened.owners is not None:
        own = "shakespeare()" if opened.info.name == "shakespeare" else "heart_disease()"
        raise ValueError(f"{opened.info.name!r} belongs to its own clients already and has no test part to share out; use {own}")
    return opened


def classes(source: Source, recipe: str) -> tuple[np.ndarray, np.ndarray]:
    """Class of each training row and of each test row.

    Raises:
        ValueError: It is a regression.
    """
    if source.task != "classification":
        raise ValueError(f"{recipe} shares data out by class, {source.info.name!r} is a regression: use iid, or diabetes(by=...)")
    return source.y_train.numpy(), source.y_test.numpy()


def check_clients(clients: int, most: int, what: str) -> None:
    """That `clients` is a whole number of at least 1 and at most `most`.

    Raises:
        ValueError: It is not; the message says that there are so many of `what`.
    """
    if whole("clients", clients, least=1) > most:
        raise ValueError(f"clients must be at most {most}, as many as there are {what}, got {clients}")


def federate(
    source: Source,
    train: Sequence[np.ndarray],
    test: Sequence[np.ndarray],
    *,
    recipe: dict[str, Any],
    seed: int,
    validation: float,
    calibration: float,
    y: Tensor | None = None,
    outputs: int | None = None,
    class_names: Sequence[str] | None = None,
) -> FederatedData:
    """Federated data of rows of the source's training part and rows of its test part, each numbered from 0."""
    return assemble(
        source.x,
        source.y if y is None else y,
        {"train": train, "test": [rows + source.train for rows in test]},
        outputs=source.outputs if outputs is None else outputs,
        task=source.task,
        names=[f"client {j}" for j in range(len(train))],
        class_names=source.class_names if class_names is None else class_names,
        source=source.info,
        recipe=recipe,
        validation=validation,
        calibration=calibration,
        seed=seed,
    )


def superclass_groups(opened: Source, given: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """The classes of each superclass: those given, else the source's own, else classes in pairs.

    Raises:
        ValueError: There are no groups of one size of different classes.
    """
    given = given if given is not None else opened.superclasses
    if given is None:
        if opened.outputs % 2:
            raise ValueError(
                f"{opened.info.name!r} has {opened.outputs} classes, which don't make pairs: pass superclasses=, groups of one size"
            )
        given = [(k, k + 1) for k in range(0, opened.outputs, 2)]
    groups = [[int(k) for k in group] for group in given]
    flat = [k for group in groups for k in group]
    if not flat or len({len(group) for group in groups}) > 1 or len(set(flat)) < len(flat) or not set(flat) <= set(range(opened.outputs)):
        raise ValueError(f"superclasses must be groups of one size of different classes within [0, {opened.outputs}), got {groups}")
    return groups


def deal_evenly(source: Source, clients: int, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Shuffled training and test rows in equal parts, to within one."""
    parts = [np.array_split(rng.permutation(rows), clients) for rows in (source.train, len(source.x) - source.train)]
    return partitions.join([[part] for part in parts[0]]), partitions.join([[part] for part in parts[1]])


def iid(
    source: str | Source = "digits",
    *,
    clients: int = 20,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
    download: bool = False,
) -> FederatedData:
    """No skew: shuffled rows in equal parts, to within one; for classification and regression.

    Args:
        source: Name of a data set, or a source of your own.
        clients: Number of clients.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: More clients than training or test rows.
    """
    opened = open_source(source, root, download)
    check_clients(clients, min(opened.train, len(opened.x) - opened.train), "test examples")
    train, test = deal_evenly(opened, clients, generator(seed, Purpose.PARTITION))
    return federate(
        opened,
        train,
        test,
        recipe={"recipe": "iid", "source": opened.info.name, "clients": clients, **_scale(opened)},
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def diabetes(
    *,
    clients: int = 10,
    by: Literal["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"] | None = None,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
) -> FederatedData:
    """Regression: disease progression of 442 patients from ten features, 354 of them for training; ships with scikit-learn.

    Features and target are standardised by the training rows; `recipe["target_mean"]` and `recipe["target_scale"]` give the
    target's units back.

    Args:
        clients: Number of clients.
        by: Skew: clients are equal parts of the patients in the order of this feature, ties at random. None for no skew.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for conformal thresholds.

    Raises:
        ValueError: Too many clients, or an unknown feature.
    """
    if by is None:
        return iid("diabetes", clients=clients, seed=seed, validation=validation, calibration=calibration)
    features = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
    if by not in features:
        raise ValueError(f"by must be one of {', '.join(features)}, or None, got {by!r}")
    source = load("diabetes")
    check_clients(clients, len(source.x) - source.train, "test examples")
    rng = generator(seed, Purpose.PARTITION)
    parts = []
    for x in (source.x_train, source.x_test):
        shuffled = rng.permutation(len(x))
        order = shuffled[np.argsort(x[shuffled, features.index(by)].numpy(), kind="stable")]
        parts.append(partitions.join([[part] for part in np.array_split(order, clients)]))
    return federate(
        source,
        *parts,
        recipe={"recipe": "diabetes", "by": by, "clients": clients, **_scale(source)},
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def _scale(source: Source) -> dict[str, float]:
    return {} if source.scale is None else {"target_mean": round(source.scale[0], 9), "target_scale": round(source.scale[1], 9)}
