"""Recipes: one call from the name of a data set to a federation, as papers make them.

Here is what they have in common: `Options`, which all of them take, and the steps that several take. Recipes of equal parts, of label skew
and of concept shift keep the data's own division into training and test rows, all but `label_groups`; all recipes share one copy of the
data between clients. The same arguments give the same partition on every machine; `FederatedData.hash` tells whether two are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bayesfl.base.checks import whole
from bayesfl.data.assembly import assemble
from bayesfl.data.federated import FederatedData
from bayesfl.data.readers import load
from bayesfl.data.sources import Source


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every recipe, by these names, and with these defaults unless its docstring says otherwise.

    Recipes of one data set have no `source`, and those that need no files no `root` and no `download`.

    Args:
        source: Name of a data set, or a source of your own.
        seed: Seed of all that is drawn: the partition, and the two shares below.
        validation: Share of each client's training rows for tuning, at least one; 0 for no such split.
        calibration: Likewise, disjoint from it, for temperatures and conformal thresholds.
        root: Folder of the data's files; by default the one that `bayesfl.data.load` looks in.
        download: Let torchvision fetch images that are not there.
    """

    source: str | Source = "digits"
    seed: int = 0
    validation: float = 0.0
    calibration: float = 0.0
    root: str | Path | None = None
    download: bool = False

    def load(self) -> Source:
        """Reads the data set that is named, or takes the one that is given."""
        return self.source if isinstance(self.source, Source) else load(self.source, root=self.root, download=self.download)

    def open(self) -> Source:
        """Reads or takes a data set that is to be shared out.

        Raises:
            ValueError: It belongs to clients already.
        """
        opened = self.load()
        if opened.owners is not None:
            own = "shakespeare()" if opened.info.name == "shakespeare" else "heart_disease()"
            raise ValueError(f"{opened.info.name!r} belongs to its own clients already and has no test part to share out; use {own}")
        return opened

    def federate(
        self,
        source: Source,
        train: Sequence[np.ndarray],
        test: Sequence[np.ndarray],
        recipe: Mapping[str, Any],
        *,
        pooled: bool = False,
        x: Tensor | None = None,
        y: Tensor | None = None,
        outputs: int | None = None,
        names: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
        environment: Tensor | None = None,
    ) -> FederatedData:
        """Gives each client its rows of a data set, the shares for tuning and calibration taken out of the training rows.

        Args:
            source: The data set.
            train: Training rows of each client.
            test: Test rows of each client, numbered from 0 within the source's test part.
            recipe: What made the partition: its name and its own options, to which these are added.
            pooled: Whether test rows are numbered as training rows are, through all of the source, whose own division is not kept.
            x: Inputs in place of the source's.
            y: Labels in place of the source's.
            outputs: Number of classes in place of the source's.
            names: One per client; by default `client 0` and so on.
            class_names: One per class, in place of the source's.
            environment: Which of its client's environments each row is from, [N] int64.

        Raises:
            ValueError: A share out of range, or a client that would have nothing left to train on.
        """
        return assemble(
            source.x if x is None else x,
            source.y if y is None else y,
            {"train": train, "test": test if pooled else [rows + source.train for rows in test]},
            outputs=source.outputs if outputs is None else outputs,
            task=source.task,
            names=[f"client {j}" for j in range(len(train))] if names is None else names,
            class_names=source.class_names if class_names is None else class_names,
            source=source.info,
            recipe=recipe,
            validation=self.validation,
            calibration=self.calibration,
            seed=self.seed,
            environment=environment,
        )


def classes(source: Source, recipe: str) -> tuple[np.ndarray, np.ndarray]:
    """Gives the class of each training row and of each test row.

    Raises:
        ValueError: It is a regression.
    """
    if source.task != "classification":
        raise ValueError(f"{recipe} shares data out by class, {source.info.name!r} is a regression: use iid, or diabetes(by=...)")
    return source.y_train.numpy(), source.y_test.numpy()


def check_clients(clients: int, most: int, what: str) -> None:
    """Checks that `clients` is a whole number of at least 1 and at most `most`.

    Raises:
        ValueError: It is not; the message says that there are so many of `what`.
    """
    if whole("clients", clients, least=1) > most:
        raise ValueError(f"clients must be at most {most}, as many as there are {what}, got {clients}")


def check_labels(labels: int, source: Source) -> int:
    """Checks the number of classes of each client.

    Raises:
        ValueError: It is no whole number of at least 1, or there are not so many classes.
    """
    labels = whole("labels", labels, least=1)
    if labels > source.outputs:
        raise ValueError(f"labels must lie within [1, {source.outputs}], the number of classes of {source.info.name!r}, got {labels}")
    return labels


def superclass_groups(opened: Source, given: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Finds the classes of each superclass: those given, else the source's own, else classes in pairs.

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
