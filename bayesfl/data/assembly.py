"""How federated data are put together of shared tensors and the rows of each client, shares for tuning and calibration taken out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.random import Purpose, generator
from bayesfl.data.federated import FederatedData
from bayesfl.data.partitions import SHARES, stratified
from bayesfl.data.sources import SourceInfo, Task
from bayesfl.data.split import ClientData


def _plain_numbers(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a recipe's numbers Python's own, so that `seed=numpy.int64(3)` makes what `seed=3` makes."""
    return json.loads(json.dumps(recipe, default=lambda value: value.item()))


def check_shares(**shares: float) -> None:
    """Refuses shares outside [0, 1) and shares that leave nothing to train on.

    Raises:
        ValueError: Names the share.
    """
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise ValueError(f"{name} is a share of each client's examples and must lie within [0, 1), got {share}")
    if sum(shares.values()) >= 1:
        raise ValueError(f"{' and '.join(shares)} must leave something to train on, got {sum(shares.values())} together")


def _take(labels: np.ndarray | None, rows: np.ndarray, share: float, of: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Takes `share` of `of` examples, at least one, out of `rows`; where that leaves none, what is left comes back empty."""
    number = min(max(1, round(share * of)), len(rows))
    return stratified(None if labels is None else labels[rows], rows, number, rng)


def assemble(
    x: Tensor,
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
) -> FederatedData:
    """Puts shared tensors and the rows of each client together, validation and calibration taken out of its training rows.

    Args:
        x: Inputs [N, ...].
        y: Labels or targets [N, ...].
        rows: For `train` and, where there is one, `test`: the rows of each client.
        outputs: Classes or targets.
        task: `classification` or `regression`.
        names: One per client.
        class_names: One per class.
        source: Where the data come from.
        recipe: What made the partition; the two shares and the seed are added to it.
        validation: Share of each client's training rows, 0 for no such split.
        calibration: Likewise, disjoint from it.
        seed: Seed of the two draws.
        environment: Which of its client's environments each row is from, [N] int64, from 0 within each client; None where there are none.

    Raises:
        ValueError: A share out of range, or a client that would have nothing left to train on.
    """
    check_shares(validation=validation, calibration=calibration)
    parts = {"train": [np.asarray(r, dtype=np.int64) for r in rows["train"]]}
    if "test" in rows:
        parts["test"] = [np.asarray(r, dtype=np.int64) for r in rows["test"]]
    shares = {name: share for name, share in (("validation", validation), ("calibration", calibration)) if share > 0}
    labels = y.numpy() if task == "classification" else None
    parts |= {name: [] for name in shares}
    for j, given in enumerate(parts["train"]):
        rng = generator(seed, Purpose.SPLIT, client=j, phase=SHARES)
        left = given
        for name, share in shares.items():
            left, taken = _take(labels, left, share, len(given), rng)
            parts[name].append(taken)
        if len(given) and not len(left):
            asked = " and ".join(f"{name}={share}" for name, share in shares.items())
            raise ValueError(
                f"client {names[j]!r} has {len(given)} training examples, and {asked} (at least one example each) would leave none to "
                "train on: use smaller shares, a larger min_size or fewer clients"
            )
        parts["train"][j] = left
    splits = {
        name: ClientData(
            x,
            y,
            torch.from_numpy(np.concatenate([*lists, np.empty(0, np.int64)])),
            np.array([len(r) for r in lists], np.int64),
            environment,
        )
        for name, lists in parts.items()
    }
    return FederatedData(
        splits=splits,
        outputs=outputs,
        task=task,
        inputs=tuple(x.shape[1:]),
        client_names=tuple(names),
        source=source,
        recipe=_plain_numbers({**recipe, "validation": validation, "calibration": calibration, "seed": seed}),
        class_names=None if class_names is None else tuple(class_names),
    )
