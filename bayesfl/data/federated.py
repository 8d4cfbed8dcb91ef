"""The data of a federation: the named splits of all clients, checked for consistency."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.described import described
from bayesfl.base.display.sheet import Sheet
from bayesfl.base.inputs import Shapes, first, named
from bayesfl.base.options import Count, declared, suggests
from bayesfl.base.random import Purpose, generator
from bayesfl.base.targets import IGNORE, Targets, Task
from bayesfl.data.changes import check_change
from bayesfl.data.names import named_classes, ordered
from bayesfl.data.outline import Outline, place
from bayesfl.data.partitions import NOVEL
from bayesfl.data.schema import Schema
from bayesfl.data.sources import LABEL_REMEDY, SourceInfo
from bayesfl.data.split import Change, ClientData
from bayesfl.data.tables.columns import Columns
from bayesfl.data.tensors import digest_of_array, digest_of_inputs, not_finite


@dataclass(frozen=True, eq=False, kw_only=True)
@declared
class FederatedData:
    """The data of a federation: every client's splits, and their origin.

    Args:
        splits: `train`, and optionally `test`, `validation`, `calibration`; each has the same
            clients.
        outputs: Number of outputs that a network needs: of classes, or of targets.
        task: `classification` or `regression`.
        inputs: Shape of one example as a model receives it; for a tuple or a mapping of tensors,
            that of each.
        client_names: One name for each client.
        source: Name, licence and citation of the data.
        recipe: The call that made this partition, JSON-able: its name, every argument and the seed.
        class_names: One name for each class; None for classes without names.
        columns: Names of the inputs' columns, as of a data frame; None for inputs without names.
        prepared: The columns that turned a frame into these inputs, see `from_frame`; None for
            other inputs.

    Raises:
        ValueError: Labels or inputs are invalid, a client has no training data, the splits do not
            fit each other, or they share examples.
        TypeError: `client_names` or `class_names` is no list.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> clients
        FederatedData(digits, 2 clients; train 1438, test 359)
        >>> clients.counts["train"].tolist(), clients.inputs, clients.classes
        ([719, 719], (64,), 10)
    """

    splits: Mapping[str, ClientData]
    outputs: Count
    task: Task
    inputs: Shapes
    client_names: tuple[str, ...]
    source: SourceInfo
    recipe: Mapping[str, Any]
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    prepared: Columns | None = None

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {split.counts.sum()}" for name, split in self.splits.items())
        return f"FederatedData({self.source.name}, {self.clients} clients; {counts})"

    def __post_init__(self) -> None:
        ordered("client_names", self.client_names, "pass a list in the order of the clients")
        if self.class_names is not None:
            object.__setattr__(self, "class_names", named_classes(self.class_names, self.outputs))
        for name, split in self.splits.items():
            if split.clients != len(self.client_names):
                raise ValueError(
                    f"split {name!r} has {split.clients} clients, client_names has "
                    f"{len(self.client_names)}: every split holds the same clients, in the same "
                    "order; a client without data there has a count of 0"
                )
            if (found := split.inputs) != self.inputs:
                raise ValueError(
                    f"split {name!r} has examples of shape {found}, inputs is {self.inputs}"
                )
            self._check_targets(name, split)
            self._check_finite(name, split)
        empty = np.flatnonzero(self.splits["train"].counts == 0)
        if len(empty):
            raise ValueError(
                f"client {self.client_names[empty[0]]!r} has no training example ({len(empty)} of "
                f"{self.clients} clients have none): leave such clients out, or use smaller shares "
                "for the other splits, a larger min_size or fewer clients"
            )
        self._check_overlap()

    def _first_client(self, split: ClientData, places: Tensor) -> str:
        """Return the name of the first client that has an entry of `index` marked in `places` [sum
        n_j] bool.
        """
        entry = int(places.nonzero()[0, 0])
        return self.client_names[int(np.searchsorted(np.cumsum(split.counts), entry, side="right"))]

    def _check_targets(self, name: str, split: ClientData) -> None:
        shape, trained = list(split.y.shape[1:]), list(self.splits["train"].y.shape[1:])
        if shape != trained or (self.task == "regression" and math.prod(shape) != self.outputs):
            raise ValueError(
                f"outputs is {self.outputs}, but split {name!r} has targets of shape {shape}, "
                f"'train' of {trained}"
            )
        if self.task == "regression":
            return
        y = split.y[split.index]
        wrong = (y < 0) | (y >= self.outputs)
        if y.dim() > 1:
            wrong &= y != IGNORE
        if wrong.any():
            raise ValueError(
                f"labels must lie within [0, {self.outputs}), client "
                f"{self._first_client(split, wrong)!r} has {int(y[wrong][0])} in split {name!r}: "
                f"{LABEL_REMEDY}"
            )

    def _check_finite(self, name: str, split: ClientData) -> None:
        for what, values in (*named(split.x), ("y", split.y)):
            bad = not_finite(values)
            if bad is not None and (places := bad[split.index]).any():
                raise ValueError(
                    f"{what} holds NaN or infinite numbers: first in client "
                    f"{self._first_client(split, places)!r}, split {name!r}; drop those examples "
                    "or fill them in"
                )

    def _check_overlap(self) -> None:
        train = self.splits["train"]
        for name, split in self.splits.items():
            if name == "train" or first(split.x) is not first(train.x):
                continue
            used = torch.zeros(len(train.y), dtype=torch.bool, device=train.index.device)
            used[train.index] = True
            both = used[split.index]
            if both.any():
                raise ValueError(
                    f"splits 'train' and {name!r} share {int(both.sum())} examples, first in "
                    f"client {self._first_client(split, both)!r}: what is measured there must not "
                    "have been trained on"
                )

    def _split(self, name: str, remedy: str) -> ClientData:
        if name not in self.splits:
            raise ValueError(
                f"this federation has no {name!r} split, only {list(self.splits)}; {remedy}"
            )
        return self.splits[name]

    @property
    def train(self) -> ClientData:
        """Return the split for training."""
        return self.splits["train"]

    @property
    def test(self) -> ClientData:
        """Return the split for measuring results.

        Raises:
            ValueError: The data have no such split.
        """
        return self._split("test", "pass test= or test_share= when you make it")

    @property
    def validation(self) -> ClientData:
        """Return the split for tuning options.

        Raises:
            ValueError: The data have no such split.
        """
        return self._split("validation", "pass validation=0.1 to the recipe that makes it")

    @property
    def calibration(self) -> ClientData:
        """Return the split for fitting temperatures and conformal thresholds.

        Raises:
            ValueError: The data have no such split.
        """
        return self._split("calibration", "pass calibration=0.1 to the recipe that makes it")

    @property
    def clients(self) -> int:
        """Return the number of clients J."""
        return len(self.client_names)

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.outputs

    @property
    def targets(self) -> Targets:
        """Return the targets of all splits, from which a likelihood computes the number of outputs
        that a network needs.
        """
        return Targets(
            self.task,
            self.outputs,
            torch.cat([split.y[split.index] for split in self.splits.values()]),
        )

    @property
    def counts(self) -> dict[str, np.ndarray]:
        """Return the number of examples of each client in each split, [J] int64 each."""
        return {name: split.counts for name, split in self.splits.items()}

    @property
    def balanced_weights(self) -> tuple[float, ...]:
        """Return N / (O N_c) for each class c with N_c of all N training labels, scikit-learn's
        "balanced" weights, which give all classes the same part in a loss; 1 for a class without a
        label.

        For `likelihood=Bernoulli(weights=clients.balanced_weights)`, or `Categorical`'s.

        Raises:
            ValueError: The task is a regression.
        """
        classes, labels = self.classes, self.train.y[self.train.index].cpu()
        counts = torch.bincount(labels[labels >= 0], minlength=classes).double()
        return tuple(torch.where(counts > 0, counts.sum() / (classes * counts), 1.0).tolist())

    @cached_property
    def hash(self) -> str:
        """Return the SHA-256 over the recipe, the partition and the data, the same on every
        platform, device and precision.

        It covers the name, the source text and the values of a transform or an augmentation, see
        `bayesfl.base.described`.
        """
        changes = {
            (name, kind): getattr(split, kind)
            for name, split in sorted(self.splits.items())
            for kind in ("transform", "augment")
        }
        known = {id(change): described(change) for change in changes.values()}
        done = [[*key, known[id(change)]] for key, change in changes.items() if change is not None]
        return (
            hashlib.sha256((self.rows_hash + json.dumps(done, sort_keys=True)).encode()).hexdigest()
            if done
            else self.rows_hash
        )

    @cached_property
    def rows_hash(self) -> str:
        """Return the hash of the same data without transform and augmentation."""
        recipe = {
            "recipe": dict(self.recipe),
            "outputs": self.outputs,
            "task": self.task,
            "splits": sorted(self.splits),
        }
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
        for _, split in sorted(self.splits.items()):
            digest.update(split.counts.astype("<i8").tobytes())
            digest.update(split.index.cpu().numpy().astype("<i8").tobytes())
            digest.update(digest_of_array(split.y).encode())
            digest.update(digest_of_inputs(split.x).encode())
            if split.environment is not None:
                digest.update(digest_of_array(split.environment).encode())
        return digest.hexdigest()

    @cached_property
    def schema(self) -> Schema:
        """Return the form of the rows, and their transform."""
        return Schema.of(
            self.train,
            outputs=self.outputs,
            task=self.task,
            class_names=self.class_names,
            columns=self.columns,
            prepared=self.prepared,
        )

    @cached_property
    def outline(self) -> Outline:
        """Return the description of the clients without their rows."""
        return Outline(
            **vars(self.schema),
            client_names=self.client_names,
            counts=tuple(self.train.counts.tolist()),
            source=self.source.name,
            hash=self.hash,
            rows=self.rows_hash,
            augment=described(self.train.augment),
        )

    def select(self, ids: Iterable[int | str]) -> "FederatedData":
        """Return a federation of some clients only, in that order, numbered from 0.

        Args:
            ids: Their names, or their numbers. A number is a place in `client_names`, counted from
                0, also where names are numbers: of clients called 1, 2 and 3, `[0]` selects the one
                called 1, `["1"]` too, and `[1]` is refused, as it could be either of two.

        Raises:
            TypeError: An entry is neither a name nor a number.
            ValueError: A client does not exist or is given twice, a number is the name of another
                client, or `ids` is empty.
        """
        return self._places(
            [
                place(j, self.client_names)
                for j in (ids.tolist() if isinstance(ids, Tensor) else ids)
            ]
        )

    def _places(self, chosen: list[int]) -> "FederatedData":
        if not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"ids must be one or more different clients, got {chosen}")
        return replace(
            self,
            splits={name: split.select(chosen) for name, split in self.splits.items()},
            client_names=tuple(self.client_names[j] for j in chosen),
            recipe={"recipe": "select", "ids": chosen, "of": dict(self.recipe)},
        )

    def as_environments(self) -> "FederatedData":
        """Mark every client's examples as one environment, for invariant methods."""
        made: dict[int, Tensor] = {}
        splits = {
            name: replace(
                split,
                environment=made.setdefault(
                    id(split.y), torch.zeros(len(split.y), dtype=torch.int64, device=split.y.device)
                ),
            )
            for name, split in self.splits.items()
        }
        return replace(
            self, splits=splits, recipe={"recipe": "as_environments", "of": dict(self.recipe)}
        )

    def transformed(self, transform: Change) -> "FederatedData":
        """Return the same data with a transform, a function applied to inputs whenever they are
        read, in training and in predictions.

        With `clients.transformed(lambda x: x.float() / 255)` images stay bytes in memory or in
        their file.

        Args:
            transform: Function of the inputs of some rows, [B, ...], to the model's inputs,
                [B, ...]: row by row, without draws. Floats come in the run's precision, and are
                converted to it afterwards.

        Raises:
            ValueError: There is a transform or an augmentation already, or a trial on a few
                training rows shows that it returns another number of rows or numbers that are not
                finite, writes into its input, draws, or mixes rows.
            TypeError: It is no function, or does not return tensors.
        """
        if self.train.transform is not None or self.train.augment is not None:
            raise ValueError(
                "transform comes once, and before augment: pass one function that does both, as "
                "lambda x: second(first(x)), in data.transformed(transform).augmented(augment)"
            )
        check_change("transform", self.train, transform)
        splits = {name: replace(split, transform=transform) for name, split in self.splits.items()}
        return replace(self, splits=splits, inputs=splits["train"].inputs)

    def augmented(self, augment: Change) -> "FederatedData":
        """Return the same data with an augmentation, a function applied to inputs in every step of
        training, and in no prediction.

        Args:
            augment: Function of the model's inputs for a client's rows, [B, ...], to others of
                their shape. It is plain torch code; its draws by torch, such as
                `torch.rand(len(x))`, follow from the run's seed. Labels stay.

        Raises:
            ValueError: There is one already, or a trial on a few training rows shows that it
                returns other shapes, writes into its input, or draws by NumPy or `random`.
            TypeError: It is no function, or does not return tensors.
        """
        if self.train.augment is not None:
            raise ValueError(
                "augment is given a second time: pass one function that does both, as lambda x: "
                "second(first(x))"
            )
        check_change("augment", self.train, augment)
        return replace(self, splits={**self.splits, "train": replace(self.train, augment=augment)})

    @suggests
    def hold_out(
        self, clients: int | float, *, seed: int = 0
    ) -> tuple["FederatedData", "FederatedData"]:
        """Split the federation at random into two: clients for training, and novel ones, not seen
        in training.

        Args:
            clients: Number of clients to hold out, or their share as a float within (0, 1).
            seed: Seed of the draw.

        Returns:
            The federation of the clients that remain, and that of those held out.

        Raises:
            ValueError: `clients` is out of range, or one of the two federations would be empty.
        """
        number = max(1, round(clients * self.clients if isinstance(clients, float) else clients))
        order = generator(seed, Purpose.SPLIT, phase=NOVEL).permutation(self.clients)
        return self._places(np.sort(order[number:]).tolist()), self._places(
            np.sort(order[:number]).tolist()
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "FederatedData":
        """Move the data to `device`, see `ClientData.to`; tensors that splits share stay shared."""
        moved: dict[int, Tensor] = {}

        def move(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(device=device, dtype=dtype)
            return moved[id(tensor)]

        splits = {name: split.moved(move, dtype) for name, split in self.splits.items()}
        return (
            self
            if all(splits[name] is split for name, split in self.splits.items())
            else replace(self, splits=splits)
        )

    @property
    def label_counts(self) -> np.ndarray | None:
        """Return how many training rows of each class each client has, [J, O]; None for numbers,
        and where a row has several labels.
        """
        if self.task != "classification" or self.train.y.dim() > 1:
            return None
        owner = np.repeat(np.arange(self.clients), self.train.counts)
        label = self.train.y[self.train.index].cpu().numpy()
        counts = np.bincount(owner * self.outputs + label, minlength=self.clients * self.outputs)
        return counts.reshape(self.clients, self.outputs)

    def most_frequent(self, split: str) -> np.ndarray | None:
        """Return the accuracy on a split, [J], of always answering the class that is most frequent
        among a client's training rows; None as of `label_counts`, NaN for a client without rows.

        Example:
            >>> bf.data.iid("digits", clients=2).most_frequent("test").round(2).tolist()
            [0.09, 0.11]
        """
        if (counts := self.label_counts) is None:
            return None
        y, mask = self.splits[split].padded_labels()
        common = torch.from_numpy(counts.argmax(1)).to(y.device)
        return (((y == common[:, None]) & mask).sum(1).double() / mask.sum(1)).cpu().numpy()

    def table(self) -> str:
        """Return a table with a row per client: its examples in each split, and in each class of
        the training data if it has at most 20.
        """
        about = f"{self.source.name}, {self.task}, {self.clients} clients, hash {self.hash[:12]}"
        columns: dict[str, Any] = {"client": self.client_names} | self.counts
        if (labels := self.label_counts) is not None and self.outputs <= 20:
            names = self.class_names or range(self.outputs)
            columns |= {f"label {name}": n for name, n in zip(names, labels.T, strict=True)}
        return str(Sheet(columns, notes=(about,)))
