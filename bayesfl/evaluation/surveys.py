"""What surveys of predictions ask about: a client's own predictions, after training.

A step of calibration is a survey (`bayesfl.base.surveys`) with `settle(state, local)`, the client's
own parameters, which never leave it, and `apply`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.random import Purpose, key, mixed
from bayesfl.base.targets import Task
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
