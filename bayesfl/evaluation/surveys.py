"""Clients' predictions after training, which surveys read.

A step of calibration is a survey (`bayesfl.base.surveys`) with `apply` and `settle(state, local)`,
which returns a client's own parameters; they never leave the client.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.random import Purpose, key, mixed
from bayesfl.base.targets import Task
from bayesfl.curvature.batches import available_memory, require
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.metrics.measured import Measured
from bayesfl.evaluation.predictions import Predictions, broken, by_place, measured, padded, present


@dataclass(frozen=True)
class Outputs:
    """Describe the predictions for a survey's start.

    Args:
        task: `classification` or `regression`.
        count: Number of classes or of targets.
    """

    task: Task
    count: int


@dataclass(frozen=True)
class LocalPredictions:
    """Hold the predictions from which clients answer a survey: those on its split, one client's
    rows after another's, without padding.

    Args:
        predictions: Predictions and labels of R rows, [R, ...], on the CPU.
        clients: The rows' clients: `clients.sum(values)` sums values [R, ...] by client, [J, ...],
            and `clients.owner` is the index of each row's client, [R]. A node has J = 1.
        ids: The clients' numbers in the federation, [J].
        seed: The run's seed.
        round: Number of rounds done.
        rows: Hash of the inputs of every row, [R] uint64, if a step draws a number for each;
            otherwise None.
    """

    predictions: Predictions
    clients: Segments
    ids: np.ndarray
    seed: int = 0
    round: int = 0
    rows: Any = None

    @classmethod
    def of_one(
        cls,
        client: int,
        own: Mapping[str, Any],
        about: Mapping[str, Any],
        **known: Any,
    ) -> "LocalPredictions":
        """Return the predictions of one client.

        Args:
            client: Its number.
            own: Its predictions, {name: [n, ...]}.
            about: Arguments of `Predictions` that are not predicted tensors.
            known: The other arguments.
        """
        n = len(own["epistemic"])
        given: dict[str, Any] = {**about, **{name: t.cpu() for name, t in own.items()}}
        made = Predictions(mask=torch.ones(n, dtype=torch.bool), **given)
        return cls(made, Segments(torch.tensor([n])), np.array([client]), **known)

    @cached_property
    def logits(self) -> Tensor:
        """Return log probabilities in float64, [R, O] or [R, T, O]; NaN where a prediction is not
        finite.

        Probabilities below the smallest normal number of their type count as that number.
        """
        probs = present(self.predictions.probs)
        return probs.double().clamp_min(torch.finfo(probs.dtype).tiny).log().log_softmax(-1)

    @property
    def labels(self) -> Tensor:
        """Return the labels [R] or targets [R, ...].

        Raises:
            ValueError: The labels are unknown.
        """
        if self.predictions.labels is None:
            raise ValueError(
                "the labels of these predictions are not known; predict a split of the federation, "
                "as result.predict(...) does"
            )
        return self.predictions.labels

    @cached_property
    def places(self) -> "LocalPredictions":
        """Return the same with one row for each known label; unchanged if rows have one label, or
        labels are unknown.
        """
        probs, labels = self.predictions.probs, self.predictions.labels
        if probs is None or probs.dim() == 2 or labels is None:
            return self
        found, clients, row = by_place(self.predictions, self.clients)
        rows = None if self.rows is None else self.rows[row.numpy()]
        return replace(self, predictions=found, clients=clients, rows=rows)

    @cached_property
    def labelled(self) -> tuple[Tensor, Tensor, Segments]:
        """Return logits [M, O] and labels [M] of all known labels of rows, and their clients.

        Raises:
            ValueError: A prediction is not finite; or see `labels`.
        """
        self.refuse_broken(self.logits)
        return self.places.logits, self.places.labels.long(), self.places.clients

    def refuse_broken(self, found: Tensor) -> None:
        """Raise ValueError with client and row if values of rows, [R, ...], are not all finite."""
        bad = broken({"found": found})
        if bad.any():
            row = int(bad.nonzero()[0])
            place, names = int(self.clients.owner[row]), self.predictions.names
            who = f"client {int(self.ids[place])}" if names is None else repr(names[place])
            raise ValueError(
                f"predictions, or targets, of {int(bad.sum())} rows are not finite, the first of "
                f"row {row - int(self.clients.starts[place])} of {who}: the run diverged, so lower "
                "its learning rate, or check these inputs"
            )

    def uniform(self, phase: int) -> Tensor:
        """Return a random number within (0, 1) for every row, [R] in float64; it depends on the
        row's inputs and not on other rows.

        Args:
            phase: 0 for rows of a survey, 1 for rows to which its result is applied.
        """
        keys = np.array(
            [
                key(self.seed, Purpose.SURVEY, round=self.round, client=client, phase=phase)
                for client in self.ids.tolist()
            ],
            np.uint64,
        )
        drawn = mixed(self.rows ^ keys[self.clients.owner.numpy()]) >> np.uint64(12)
        return torch.from_numpy((drawn.astype(np.float64) + 0.5) / 2**52)

    def of_rows(self, own: Tensor) -> Tensor:
        """Repeat clients' own numbers [J, K] for every row, with the axes of `logits`: [R, K], or
        [R, 1, K].
        """
        found = own[self.clients.owner]
        return found if self.logits.dim() == 2 else found.unsqueeze(1)

    def measured(self) -> Measured:
        """Compute every measure of every client."""
        return measured(self.predictions, self.clients)

    def padded(self) -> Predictions:
        """Return the predictions with an axis of clients, padded to the longest, [J, N, ...].

        Raises:
            MemoryError: They exceed the free memory.
        """
        width = int(self.clients.counts.max())
        tensors = self.predictions.tensors.values()
        require(
            len(self.ids) * width * sum(t[:1].nbytes for t in tensors),
            available_memory(self.predictions.mask),
            f"the predictions of {len(self.ids)} clients, of whom the longest has {width} rows,",
            "result.table(), result.audit() and result.client(name).predict(x) pad nothing",
        )
        return padded(self.predictions, self.clients)
