"""Assembly of federated data from shared tensors and the rows of each client, with shares taken out
for tuning and calibration.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.inputs import Inputs
from bayesfl.base.random import Purpose, generator
from bayesfl.base.targets import Task
from bayesfl.data.federated import FederatedData
from bayesfl.data.names import named_classes
from bayesfl.data.partitions import SHARES, stratified
from bayesfl.data.sources import SourceInfo
from bayesfl.data.split import ClientData


def check_shares(**shares: float) -> None:
    """Refuse shares outside [0, 1).

    Raises:
        ValueError: A share is out of range; the message names it.
    """
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise ValueError(
                f"{name} is a share of each client's examples and must lie within [0, 1), got "
                f"{share}"
            )


def take_share(
    labels: np.ndarray | None, rows: np.ndarray, share: float, of: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw `share` of `of` examples, at least one, from `rows`; return the remaining rows, which
    may be none, and those drawn.
    """
    number = min(max(1, round(share * of)), len(rows))
    return stratified(None if labels is None else labels[rows], rows, number, rng)


def assemble(
    x: Inputs,
    y: Tensor,
    rows: Mapping[str, Sequence[np.ndarray]],
    *,
    outputs: int,
    task: Task,
    names: Sequence[str],
    class_names: Sequence[str] | None,
    source: SourceInfo,
    recipe: Mapping[str, Any],
    validation: float,
    calibration: float,
    seed: int,
    environment: Tensor | None = None,
    columns: tuple[str, ...] | None = None,
    apart: tuple[Inputs, Tensor] | None = None,
) -> FederatedData:
    """Make federated data of shared tensors and the rows of each client, with validation and
    calibration taken out of its training rows.

    Args:
        x: Inputs [N, ...].
        y: Labels or targets [N, ...].
        rows: For `train` and, if there is one, `test`: the rows of each client.
        outputs: Number of classes or targets.
        task: `classification` or `regression`.
        names: One name for each client.
        class_names: One name for each class; None for classes without names.
        source: Name, licence and citation of the data.
        recipe: The partition's name and options; the two shares and the seed are added to them.
        validation: Share of each client's training rows, 0 for no such split.
        calibration: The same, disjoint from `validation`.
        seed: Seed of the two draws.
        environment: Environment of each row, [N] int64, from 0 within each client; None for no
            environments.
        columns: Names of the inputs' columns; None for inputs without names.
        apart: Inputs, and labels or targets, of test data in tensors of their own, which
            `rows["test"]` numbers; where the training data have environments, all of these rows are
            of environment 0.

    Raises:
        ValueError: A share is out of range, a client would have no training rows left, or there is
            not one name for each class.
        TypeError: `class_names` is no list.
    """
    check_shares(validation=validation, calibration=calibration)
    parts = {name: [np.asarray(r, dtype=np.int64) for r in own] for name, own in rows.items()}
    shares = {
        name: share
        for name, share in (("validation", validation), ("calibration", calibration))
        if share > 0
    }
    labels = y.numpy() if task == "classification" and y.dim() == 1 else None
    parts |= {name: [] for name in shares}
    for j, given in enumerate(parts["train"]):
        rng = generator(seed, Purpose.SPLIT, client=j, phase=SHARES)
        left = given
        for name, share in shares.items():
            left, taken = take_share(labels, left, share, len(given), rng)
            parts[name].append(taken)
        parts["train"][j] = left
    tensors = dict.fromkeys(parts, (x, y, environment))
    if apart is not None:
        none = None if environment is None else environment.new_zeros(len(apart[1]))
        tensors["test"] = (*apart, none)
    splits = {
        name: ClientData(
            tensors[name][0],
            tensors[name][1],
            torch.from_numpy(np.concatenate([*lists, np.empty(0, np.int64)])),
            np.array([len(r) for r in lists], np.int64),
            tensors[name][2],
            columns,
        )
        for name, lists in parts.items()
    }
    return FederatedData(
        splits=splits,
        outputs=outputs,
        task=task,
        inputs=splits["train"].inputs,
        client_names=tuple(names),
        source=source,
        # In Python's own numbers, so that `seed=numpy.int64(3)` makes the same recipe as `seed=3`.
        recipe=json.loads(
            json.dumps(
                {**recipe, "validation": validation, "calibration": calibration, "seed": seed},
                default=lambda value: value.item(),
            )
        ),
        class_names=None if class_names is None else named_classes(class_names, outputs),
        columns=columns,
    )
