"""What surveys of predictions ask about: a client's own predictions, after training.

A step of calibration is a survey (`bayesfl.base.surveys`) with `settle(state, local)`, the client's
own parameters, which never leave it, and `apply`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.random import Purpose, key, mixed
from bayesfl.base.targets import Task
from bayesfl.curvature.batches import available_memory, require
from bayesfl.evaluation.metrics.measured import Measured
from bayesfl.evaluation.predictions import Predictions, per_place


@dataclass(frozen=True)
class Outputs:
    """Describe what is predicted, as a survey knows it before it asks.

    Args:
        task: `classification` or `regression`.
        count: Number of classes or of targets.
    """

    task: Task
    count: int


@dataclass(frozen=True)
class LocalPredictions:
    """Hold what clients know of themselves when they are asked: predictions on the survey's split.

    Args:
        predictions: Predictions and labels of J clients, [J, N, ...], on the CPU; a node has J = 1.
        ids: The clients' numbers in the federation, [J].
        seed: The run's seed.
        round: Number of rounds done.
        shared: Predictions of the same rows by the server's model, where a step compares them with
            the clients' own; None otherwise.
        rows: A hash of the inputs of every row, [J, N] uint64, where a step draws a number for
            each; None otherwise.
    """

    predictions: Predictions
    ids: np.ndarray
    seed: int = 0
    round: int = 0
    shared: Predictions | None = None
    rows: np.ndarray | None = None

    @cached_property
    def logits(self) -> Tensor:
        """Return log probabilities in float64 [J, N, O], or [J, N, T, O]: 0 in rows that pad, NaN
        where a prediction is not finite.

        Probabilities below the smallest normal number of their type count as that number.

        Raises:
            ValueError: What is predicted has no classes.
        """
        probs, mask = self.predictions.probs, self.predictions.mask
        if probs is None:
            raise ValueError(
                "this step changes probabilities of classes, and the predictions are of numbers; "
                "for regression, Conformal gives intervals"
            )
        inside = mask.reshape(*mask.shape, *[1] * (probs.dim() - 2)).cpu()
        probs = probs.detach().cpu()
        logs = probs.double().clamp_min(torch.finfo(probs.dtype).tiny).log()
        return torch.where(inside, logs.log_softmax(-1), 0.0)

    @property
    def labels(self) -> Tensor:
        """Return the labels [J, N] or targets [J, N, ...] on the CPU.

        Raises:
            ValueError: They are not known.
        """
        if self.predictions.labels is None:
            raise ValueError(
                "the labels of these predictions are not known; predict a split of the federation, "
                "as result.predict(...) does"
            )
        return self.predictions.labels.cpu()

    @cached_property
    def labelled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [J, N, O], labels [J, N] and the mask of examples, each place with a label
        of its own an example.

        Raises:
            ValueError: The labels are not known, a prediction for an example is not finite, or as
                by `logits`.
        """
        self.refuse_broken(self.logits)
        logits, labels, mask = per_place(
            self.logits, self.labels.long(), self.predictions.mask.cpu()
        )
        return torch.where(mask.unsqueeze(-1), logits, 0.0), labels.masked_fill(~mask, 0), mask

    def refuse_broken(self, found: Tensor) -> None:
        """Raise ValueError, naming client and row, if what was found of examples, [J, N, ...], is
        not finite somewhere.
        """
        finite = found.isfinite()
        bad = self.predictions.mask.cpu() & ~(
            finite if finite.dim() == 2 else finite.flatten(2).all(-1)
        )
        if bad.any():
            place, row = (int(i) for i in bad.nonzero()[0])
            names = self.predictions.names
            who = (
                f"client {int(self.ids[place])}"
                if names is None or len(names) != len(bad)
                else repr(names[place])
            )
            raise ValueError(
                f"predictions, or targets, of {int(bad.sum())} rows are not finite, the first of "
                f"row {row} of {who}: the run diverged, so lower its learning rate, or look at "
                "these inputs"
            )

    def uniform(self, phase: int) -> Tensor:
        """Return a number within (0, 1) for every row, [J, N] in float64: by the row's inputs, the
        same whichever rows stand beside it.

        Args:
            phase: 0 for rows on which a survey is made, 1 for those to which its result is applied.

        Raises:
            ValueError: The inputs of the rows are not known.
        """
        if self.rows is None:
            raise ValueError(
                "a score with a random term draws by the rows' inputs, which these predictions do "
                "not have; take score='lac'"
            )
        keys = np.array(
            [
                key(self.seed, Purpose.SURVEY, round=self.round, client=client, phase=phase)
                for client in self.ids.tolist()
            ],
            np.uint64,
        )
        return torch.from_numpy(
            ((mixed(self.rows ^ keys[:, None]) >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52
        )


class Parts(tuple[LocalPredictions, ...]):
    """What clients know of themselves, in parts of clients with similar numbers of rows, so that
    little is padded.
    """

    @cached_property
    def ids(self) -> np.ndarray:
        """Return the clients' numbers in the federation, [J], part after part."""
        return np.concatenate([part.ids for part in self])

    @cached_property
    def order(self) -> Tensor:
        """Return the places in `ids` of the clients in the order of their numbers, [J]."""
        return torch.from_numpy(np.argsort(self.ids, kind="stable"))

    def measured(self) -> Measured:
        """Compute every measure of every client, in the order of their numbers."""
        return Measured.joined(self.order, [part.predictions.measured() for part in self])

    def only(self, ids: Sequence[int]) -> "Parts":
        """Return what some clients know of themselves, by their numbers."""
        found = []
        for part in self:
            places = np.flatnonzero(np.isin(part.ids, ids))
            given, names = part.predictions, part.predictions.names
            own = {name: t[places] for name, t in vars(given).items() if isinstance(t, Tensor)}
            called = names and tuple(names[place] for place in places.tolist())
            some = replace(given, names=called, **own)
            found += [LocalPredictions(some, part.ids[places])] if len(places) else []
        return Parts(found)

    @property
    def rows(self) -> Predictions:
        """Return the predictions of all clients' rows as of one client, [1, R, ...]."""
        parts = [part.predictions for part in self]
        held = [name for name, t in vars(parts[0]).items() if isinstance(t, Tensor)]
        found: dict[str, Any] = {
            name: torch.cat([getattr(part, name)[part.mask] for part in parts])[None]
            for name in held
        }
        return replace(parts[0], names=None, **found)

    @property
    def predictions(self) -> Predictions:
        """Return the predictions of all clients in the order of their numbers, padded to the
        longest, [J, N, ...].

        Raises:
            MemoryError: They need more bytes than there are.
        """
        first, *others = [part.predictions for part in self]
        if not others:
            return first
        width = max(part.mask.shape[1] for part in (first, *others))
        held = {name: t for name, t in vars(first).items() if isinstance(t, Tensor)}
        rows = len(self.ids) * width
        require(
            rows * sum(t[:1, :1].numel() * t.element_size() for t in held.values()),
            available_memory(first.mask),
            f"the predictions of {len(self.ids)} clients, of whom the longest has {width} rows,",
            "result.table(), result.audit() and result.client(name).predict(x) pad nothing",
        )
        found: dict[str, Any] = {}
        places = self.order.argsort().split([len(part.ids) for part in self])
        for name, t in held.items():
            fill = torch.nan if t.is_floating_point() and name != "labels" else 0
            found[name] = t.new_full((len(self.ids), width, *t.shape[2:]), fill)
            for place, part in zip(places, self, strict=True):
                own = getattr(part.predictions, name)
                found[name][place, : own.shape[1]] = own
        names = [name for part in self for name in part.predictions.names or ()]
        ordered = tuple(names[place] for place in self.order.tolist()) if names else None
        return replace(first, names=ordered, **found)


def parts_of(local: LocalPredictions | Parts) -> Sequence[LocalPredictions]:
    """Return the parts of what clients know, one where there are none."""
    return local if isinstance(local, Parts) else (local,)
