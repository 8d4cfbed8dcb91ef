"""A federation's data: named splits of every client, as places in tensors that all clients share."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bayesfl.base.checks import whole
from bayesfl.base.random import Purpose, generator
from bayesfl.data.partitions import NOVEL, SHARES, stratified
from bayesfl.data.sources import SourceInfo, Task, label_remedy

_CHUNK = 1024  # rows looked at together, so that a check or a hash of images needs little memory

_digests = WeakTensorKeyDictionary()
_finite = WeakTensorKeyDictionary()


@dataclass(frozen=True, eq=False)
class Split:
    """One named part (train, test, ...) of every client's data, as places in shared tensors: nothing is copied per client.

    Args:
        x: Inputs [N, ...], floating point; shared between splits and clients.
        y: Class labels [N] int64, or targets [N] or [N, O], floating point.
        index: Rows of `x` and `y`, client after client, [sum of counts] int64.
        counts: Number of examples of each client, [J] int64.
        environment: Which of its client's environments each row is from, [N] int64, numbered from 0 within each client; None where the
            data have none.

    Raises:
        ValueError: They don't fit each other.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    counts: np.ndarray
    environment: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", np.asarray(self.counts, dtype=np.int64))
        if not self.x.is_floating_point():
            raise ValueError(f"x must hold floating-point numbers, got {self.x.dtype}; convert it with x.float()")
        if not (self.y.is_floating_point() or self.y.dtype == torch.int64):
            raise ValueError(f"y must hold int64 class labels or floating-point targets, got {self.y.dtype}; convert it with y.long()")
        if len(self.x) != len(self.y):
            raise ValueError(f"x and y must have as many rows, got {len(self.x)} and {len(self.y)}")
        if self.y.dim() not in (1, 2) or (self.y.dim() == 2 and not self.y.is_floating_point()):
            raise ValueError(f"y must be class labels [N] or targets [N] or [N, O], got {self.y.dtype} of shape {list(self.y.shape)}")
        if self.index.dtype != torch.int64 or self.index.dim() != 1:
            raise ValueError(f"index must be a vector of int64, got {self.index.dtype} of shape {list(self.index.shape)}")
        if self.counts.ndim != 1 or (self.counts < 0).any() or int(self.counts.sum()) != len(self.index):
            raise ValueError(f"counts must be >= 0 and add up to the {len(self.index)} entries of index, got a sum of {self.counts.sum()}")
        if len(self.index) and not 0 <= int(self.index.min()) <= int(self.index.max()) < len(self.x):
            raise ValueError(f"index must lie within [0, {len(self.x)}), got {int(self.index.min())} to {int(self.index.max())}")
        if self.environment is not None:
            found = self.environment
            if found.dtype != torch.int64 or found.shape != self.y.shape[:1]:
                raise ValueError(f"environment must be int64 of shape [{len(self.y)}], got {found.dtype} of shape {list(found.shape)}")
            if len(found) and found.min() < 0:
                raise ValueError(f"environment must hold whole numbers from 0 up, got {int(found.min())}")

    @property
    def clients(self) -> int:
        """Number of clients J."""
        return len(self.counts)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each client starts in `index`, [J] int64."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def environments(self) -> int:
        """The largest number of environments that a client has; 0 where the data have none."""
        return 0 if self.environment is None or not len(self.index) else int(self.environment[self.index].max()) + 1

    def rows(self, j: int) -> Tensor:
        """Client j's places in `x` and `y`, [n_j] int64."""
        return self.index.narrow(0, int(self.offsets[j]), int(self.counts[j]))

    def client(self, j: int) -> tuple[Tensor, Tensor]:
        """Client j's inputs [n_j, ...] and labels or targets [n_j, ...], copied out of the shared tensors."""
        rows = self.rows(j)
        return self.x[rows], self.y[rows]

    def select(self, ids: Iterable[int]) -> "Split":
        """Only the clients `ids`, in that order, numbered from 0."""
        chosen = list(ids)
        index = torch.cat([self.rows(j) for j in chosen]) if chosen else self.index[:0]
        return replace(self, index=index, counts=self.counts[chosen])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Split":
        """On `device`, with floating-point `x` and `y` in `dtype`; itself when nothing changes."""
        x = self.x.to(device=device, dtype=dtype)
        y = self.y.to(device=device, dtype=dtype if self.y.is_floating_point() else None)
        index = self.index.to(device=device)
        if x is self.x and y is self.y and index is self.index:
            return self
        return replace(self, x=x, y=y, index=index, environment=None if self.environment is None else self.environment.to(device=device))

    def padded_labels(self) -> tuple[Tensor, Tensor]:
        """Labels or targets [J, max n] (or [J, max n, O]) and their mask [J, max n] bool; padded rows are 0."""
        width = int(self.counts.max(initial=0))
        mask = torch.arange(width) < torch.from_numpy(self.counts)[:, None]
        mask = mask.to(self.y.device)
        y = self.y.new_zeros(self.clients, width, *self.y.shape[1:])
        y[mask] = self.y[self.index]
        return y, mask


@dataclass(frozen=True, eq=False, kw_only=True)
class FederatedData:
    """Every client's splits, and where they come from.

    Args:
        splits: `train`, and optionally `test`, `validation`, `calibration`; each has the same clients.
        outputs: Outputs that a network needs: the number of classes, or of targets.
        task: `classification` or `regression`.
        inputs: Shape of one example.
        client_names: One per client.
        source: Name, terms and citation of the data.
        recipe: What made this partition, JSON-able: its name, every argument and the seed.
        class_names: One per class, where classes have names.

    Raises:
        ValueError: Labels or inputs that cannot be right, a client without training data, or splits that don't fit each other.
    """

    splits: Mapping[str, Split]
    outputs: int
    task: Task
    inputs: tuple[int, ...]
    client_names: tuple[str, ...]
    source: SourceInfo
    recipe: Mapping[str, Any]
    class_names: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {split.counts.sum()}" for name, split in self.splits.items())
        most = self.splits["train"].environments
        environments = f", up to {most} environments each" if most > 1 else ", one environment each" if most else ""
        return f"FederatedData({self.source.name}, {self.clients} clients{environments}; {counts})"

    def __post_init__(self) -> None:
        if "train" not in self.splits:
            raise ValueError(f"splits must hold 'train', got {list(self.splits)}")
        if self.task not in ("classification", "regression"):
            raise ValueError(f"task must be 'classification' or 'regression', got {self.task!r}")
        object.__setattr__(self, "outputs", whole("outputs", self.outputs, least=1))
        if self.class_names is not None and len(self.class_names) != self.outputs:
            raise ValueError(f"class_names must name each of the {self.outputs} classes, got {len(self.class_names)} names")
        try:
            json.dumps(dict(self.recipe))
        except TypeError as error:
            raise ValueError(f"recipe must hold only what JSON can write (numbers, text, lists, dicts): {error}") from None
        for name, split in self.splits.items():
            if split.clients != len(self.client_names):
                raise ValueError(
                    f"split {name!r} has {split.clients} clients, client_names has {len(self.client_names)}: every split holds the same "
                    "clients, in the same order; a client without data there has a count of 0"
                )
            if tuple(split.x.shape[1:]) != self.inputs:
                raise ValueError(f"split {name!r} has examples of shape {tuple(split.x.shape[1:])}, inputs says {self.inputs}")
            self._check_targets(name, split)
            self._check_finite(name, split)
        empty = np.flatnonzero(self.splits["train"].counts == 0)
        if len(empty):
            raise ValueError(
                f"client {self.client_names[empty[0]]!r} has no training example ({len(empty)} of {self.clients} clients have none): "
                "leave such clients out, or use fewer clients"
            )
        self._check_environments()
        self._check_overlap()

    def _first_client(self, split: Split, places: Tensor) -> str:
        """Name of the first client one of whose entries of `index` is marked in `places` [sum n_j] bool."""
        entry = int(places.nonzero()[0, 0])
        return self.client_names[int(np.searchsorted(np.cumsum(split.counts), entry, side="right"))]

    def _check_targets(self, name: str, split: Split) -> None:
        if self.task == "regression":
            if not split.y.is_floating_point():
                raise ValueError(f"task 'regression' needs floating-point targets, split {name!r} has {split.y.dtype}; use y.float()")
            if (outputs := math.prod(split.y.shape[1:])) != self.outputs:
                raise ValueError(f"outputs is {self.outputs}, but split {name!r} has {outputs} targets per example")
            return
        if split.y.is_floating_point():
            raise ValueError(f"task 'classification' needs integer labels, split {name!r} has {split.y.dtype}; use y.long()")
        y = split.y[split.index]
        wrong = (y < 0) | (y >= self.outputs)
        if wrong.any():
            raise ValueError(
                f"labels must lie within [0, {self.outputs}), client {self._first_client(split, wrong)!r} has {int(y[wrong][0])} in split "
                f"{name!r}: {label_remedy(y)}"
            )

    def _check_finite(self, name: str, split: Split) -> None:
        for what, values in (("x", split.x), ("y", split.y)):
            bad = _not_finite(values)
            if bad is not None and (places := bad[split.index]).any():
                raise ValueError(
                    f"{what} holds NaN or infinite numbers: first in client {self._first_client(split, places)!r}, split {name!r}; "
                    "drop those examples or fill them in"
                )

    def _check_environments(self) -> None:
        train = self.splits["train"]
        with_some = [split for split in self.splits.values() if split.environments]
        if train.environment is None:
            if with_some:
                raise ValueError("splits have environments but 'train' has none; give it some, or leave those of the others out")
            return
        most = max(split.environments for split in with_some)

        def counted(split: Split) -> np.ndarray:
            assert split.environment is not None
            client = np.repeat(np.arange(split.clients), split.counts)
            flat = client * most + split.environment[split.index].cpu().numpy()
            return np.bincount(flat, minlength=split.clients * most).reshape(-1, most)

        anywhere = np.stack([counted(split) > 0 for split in with_some]).any(0)
        known = np.where(anywhere, np.arange(1, most + 1), 0).max(1, keepdims=True)
        missing = np.argwhere((counted(train) == 0) & (np.arange(most) < known))
        if len(missing):
            client, environment = missing[0]
            raise ValueError(
                f"client {self.client_names[client]!r} has no training example of its environment {environment}, of {known[client, 0]}: "
                "number each client's environments from 0 without gaps, as np.unique(values, return_inverse=True)[1] does, leave out those "
                "with too few examples, or use smaller shares for the other splits"
            )

    def _check_overlap(self) -> None:
        train = self.splits["train"]
        for name, split in self.splits.items():
            if name == "train" or split.x is not train.x:
                continue
            used = torch.zeros(len(train.x), dtype=torch.bool, device=train.index.device)
            used[train.index] = True
            both = used[split.index]
            if both.any():
                raise ValueError(
                    f"splits 'train' and {name!r} share {int(both.sum())} examples, first in client {self._first_client(split, both)!r}: "
                    "what is measured there must not have been trained on"
                )

    def _split(self, name: str, remedy: str) -> Split:
        if name not in self.splits:
            raise ValueError(f"this federation has no {name!r} split, only {list(self.splits)}; {remedy}")
        return self.splits[name]

    @property
    def train(self) -> Split:
        """What clients learn from."""
        return self.splits["train"]

    @property
    def test(self) -> Split:
        """What results are measured on."""
        return self._split("test", "pass test= or test_share= when you make it")

    @property
    def validation(self) -> Split:
        """What options are tuned on."""
        return self._split("validation", "pass validation=0.1 to the recipe that makes it")

    @property
    def calibration(self) -> Split:
        """What a temperature or a conformal threshold is fitted to."""
        return self._split("calibration", "pass calibration=0.1 to the recipe that makes it")

    @property
    def clients(self) -> int:
        """Number of clients J."""
        return len(self.client_names)

    @property
    def classes(self) -> int:
        """Number of classes.

        Raises:
            ValueError: The task is a regression.
        """
        if self.task != "classification":
            raise ValueError("a regression has no classes; data.outputs is the number of targets")
        return self.outputs

    @property
    def counts(self) -> dict[str, np.ndarray]:
        """Number of examples of each client in each split, [J] int64 each."""
        return {name: split.counts for name, split in self.splits.items()}

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the recipe, the partition and the data, the same on every platform, device and precision."""
        recipe = {"recipe": dict(self.recipe), "outputs": self.outputs, "task": self.task, "splits": sorted(self.splits)}
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
        for _, split in sorted(self.splits.items()):
            digest.update(split.counts.astype("<i8").tobytes())
            digest.update(split.index.cpu().numpy().astype("<i8").tobytes())
            digest.update(_digest(split.y).encode())
            digest.update(_digest(split.x).encode())
            if split.environment is not None:
                digest.update(_digest(split.environment).encode())
        return digest.hexdigest()

    def select(self, ids: Iterable[int]) -> "FederatedData":
        """Only the clients `ids`, in that order, numbered from 0.

        Raises:
            ValueError: An id that does not exist, is given twice, or no id at all.
        """
        chosen = [int(j) for j in ids]
        if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= j < self.clients for j in chosen):
            raise ValueError(f"ids must be one or more different clients within [0, {self.clients}), got {chosen}")
        return replace(
            self,
            splits={name: split.select(chosen) for name, split in self.splits.items()},
            client_names=tuple(self.client_names[j] for j in chosen),
            recipe={"recipe": "select", "ids": chosen, "of": dict(self.recipe)},
        )

    def as_environments(self) -> "FederatedData":
        """The same data, all of a client's examples from one environment: what invariant methods take the clients for."""
        made: dict[int, Tensor] = {}
        splits = {
            name: replace(
                split, environment=made.setdefault(id(split.x), torch.zeros(len(split.x), dtype=torch.int64, device=split.x.device))
            )
            for name, split in self.splits.items()
        }
        return replace(self, splits=splits, recipe={"recipe": "as_environments", "of": dict(self.recipe)})

    def hold_out(self, clients: int | float, *, seed: int = 0) -> tuple["FederatedData", "FederatedData"]:
        """The federation without some clients drawn at random, and those clients: novel ones, never seen in training.

        Args:
            clients: How many to hold out, or which share of them, within (0, 1).
            seed: Seed of the draw.

        Raises:
            ValueError: Nobody would be left on one of the two sides.
        """
        number = max(1, round(clients * self.clients)) if isinstance(clients, float) else clients
        if isinstance(clients, bool) or (isinstance(clients, float) and not 0 < clients < 1) or not 0 < number < self.clients:
            raise ValueError(f"clients to hold out must be a number within [1, {self.clients - 1}] or a share within (0, 1), got {clients}")
        order = generator(seed, Purpose.SPLIT, phase=NOVEL).permutation(self.clients)
        return self.select(np.sort(order[number:]).tolist()), self.select(np.sort(order[:number]).tolist())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "FederatedData":
        """On `device`, with floating-point inputs and targets in `dtype`; tensors that splits share stay shared."""
        moved: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            return moved[id(tensor)]

        splits = {
            name: replace(split, **{key: move(t) for key in ("x", "y", "index", "environment") if (t := getattr(split, key)) is not None})
            for name, split in self.splits.items()
        }
        if all(move(t) is t for split in self.splits.values() for t in (split.x, split.y, split.index)):
            return self
        return replace(self, splits=splits)

    def table(self) -> str:
        """One row per client: its examples in each split, and in each class of the training data where there are at most 20."""
        head = ["client", *self.splits]
        columns = [list(self.client_names), *([str(n) for n in split.counts] for split in self.splits.values())]
        if self.task == "classification" and self.outputs <= 20:
            owner = np.repeat(np.arange(self.clients), self.train.counts)
            label = self.train.y[self.train.index].cpu().numpy()
            counts = np.bincount(owner * self.outputs + label, minlength=self.clients * self.outputs).reshape(self.clients, self.outputs)
            head += [str(name)[:12] for name in (self.class_names or range(self.outputs))]
            columns += [[str(n) for n in column] for column in counts.T]
        widths = [max(len(title), *map(len, column)) for title, column in zip(head, columns, strict=True)]
        lines = [head, *map(list, zip(*columns, strict=True))]
        text = ["  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]) for line in lines]
        return "\n".join([*text, f"{self.source.name}, {self.task}, {self.clients} clients, hash {self.hash[:12]}"])


def _digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's shape and numbers, as int64 or float32 whatever its device and precision; kept while the tensor lives."""
    known = _digests.get(tensor)
    if known is None or known[0] != tensor._version:
        digest = hashlib.sha256(repr(tuple(tensor.shape)).encode())
        for rows in tensor.detach().split(_CHUNK):
            numbers = (rows.float() if rows.is_floating_point() else rows.long()).cpu().contiguous().numpy()
            digest.update(numbers.astype(numbers.dtype.newbyteorder("<")).tobytes())
        known = _digests[tensor] = (tensor._version, digest.hexdigest())
    return known[1]


def _not_finite(tensor: Tensor) -> Tensor | None:
    """Which rows [N] bool hold a NaN or an infinity; None where no row does. Kept while the tensor lives."""
    if not tensor.is_floating_point() or not len(tensor):
        return None
    known = _finite.get(tensor)
    if known is None or known[0] != tensor._version:
        bad = torch.cat([~rows.flatten(1).isfinite().all(1) if rows.dim() > 1 else ~rows.isfinite() for rows in tensor.split(_CHUNK)])
        known = _finite[tensor] = (tensor._version, bad if bad.any() else None)
    return known[1]


def _plain_numbers(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe whose numbers are Python's own, so that `seed=numpy.int64(3)` makes what `seed=3` makes."""
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
    """Federated data of shared tensors and the rows of each client, validation and calibration taken out of its training rows.

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
        name: Split(
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
