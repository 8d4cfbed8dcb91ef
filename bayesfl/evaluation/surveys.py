"""A client's own predictions after training, about which surveys ask.

A step of calibration is a survey (`bayesfl.base.surveys`) with `settle(state, local)`, the client's
own parameters, which never leave it, and `apply`.
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
    """Describe what is predicted, as a survey receives it before it asks.

    Args:
        task: `classification` or `regression`.
        count: Number of classes or of targets.
    """

    task: Task
    count: int


@dataclass(frozen=True)
class LocalPredictions:
    """Hold what clients know of themselves when they are asked: predictions on the survey's split,
    one client's rows after the other's, so that nothing is padded.

    Args:
        predictions: Predictions and labels of R rows, [R, ...], on the CPU.
        clients: Whose the rows are: `clients.sum(values)` adds values [R, ...] up by client, [J,
            ...], and `clients.owner` is the place of each row's client, [R]. A node has J = 1.
        ids: The clients' numbers in the federation, [J].
        seed: The run's seed.
        round: Number of rounds done.
        rows: A hash of the inputs of every row, [R] uint64, where a step draws a number for each;
            None otherwise.
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
        """Return the part of one client.

        Args:
            client: Its number.
            own: Its predictions, {name: [n, ...]}.
            about: What `Predictions` holds beside tensors that are predicted.
            known: What this holds beside predictions.
        """
        n = len(own["epistemic"])
        given: dict[str, Any] = {**about, **{name: t.cpu() for name, t in own.items()}}
        made = Predictions(mask=torch.ones(n, dtype=torch.bool), **given)
        return cls(made, Segments(torch.tensor([n])), np.array([client]), **known)

    @cached_property
    def logits(self) -> Tensor:
        """Return log probabilities in float64 [R, O], or [R, T, O]: NaN where a prediction is not
        finite.

        Probabilities below the smallest normal number of their type count as that number.
        """
        probs = present(self.predictions.probs)
        return probs.double().clamp_min(torch.finfo(probs.dtype).tiny).log().log_softmax(-1)

    @property
    def labels(self) -> Tensor:
        """Return the labels [R] or targets [R, ...].

        Raises:
            ValueError: They are not known.
        """
        if self.predictions.labels is None:
            raise ValueError(
                "the labels of these predictions are not known; predict a split of the federation, "
                "as result.predict(...) does"
            )
        return self.predictions.labels

    @cached_property
    def places(self) -> "LocalPredictions":
        """Return this with each known label of a row as a row; as it is where rows have one label,
        or labels are not known.
        """
        probs, labels = self.predictions.probs, self.predictions.labels
        if probs is None or probs.dim() == 2 or labels is None:
            return self
        found, clients, row = by_place(self.predictions, self.clients)
        rows = None if self.rows is None else self.rows[row.numpy()]
        return replace(self, predictions=found, clients=clients, rows=rows)

    @cached_property
    def labelled(self) -> tuple[Tensor, Tensor, Segments]:
        """Return logits [M, O] and labels [M] of all known labels of rows, and whose they are.

        Raises:
            ValueError: A prediction is not finite, or as by `labels` and `logits`.
        """
        self.refuse_broken(self.logits)
        return self.places.logits, self.places.labels.long(), self.places.clients

    def refuse_broken(self, found: Tensor) -> None:
        """Raise ValueError, naming client and row, if what was found of rows, [R, ...], is not
        finite somewhere.
        """
        bad = broken({"found": found})
        if bad.any():
            row = int(bad.nonzero()[0])
            place, names = int(self.clients.owner[row]), self.predictions.names
            who = f"client {int(self.ids[place])}" if names is None else repr(names[place])
            raise ValueError(
                f"predictions, or targets, of {int(bad.sum())} rows are not finite, the first of "
                f"row {row - int(self.clients.starts[place])} of {who}: the run diverged, so lower "
                "its learning rate, or look at these inputs"
            )

    def uniform(self, phase: int) -> Tensor:
        """Return a number within (0, 1) for every row, [R] in float64: by the row's inputs, the
        same whichever rows stand beside it.

        Args:
            phase: 0 for rows on which a survey is made, 1 for those to which its result is applied.
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
        """Return clients' own numbers [J, K] for every row, with the axes of `logits`: [R, K], or
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
            MemoryError: They need more bytes than there are.
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
